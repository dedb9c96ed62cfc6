// PAT: AllGather and ReduceScatter of ranks that are alone on their nodes (PatAGAlgorithm, PatRSAlgorithm of src/include/collectives.h).
//
// A block that is s ranks away comes by as many hops as s has bits: the hop of dimension k is 2^k ranks long, and 2^k is the lowest bit
// of the distance. Blocks that take the same hop may share a step. NCCL's proxies count steps by the same rules, so these decide which
// blocks share one; in which order steps of different dimensions come is each side's own affair, as long as all ranks keep it.
#include <string.h>

#include <algorithm>

#include "log.h"
#include "ring.h"

namespace standin {

namespace {

constexpr Slicing kSlicing{1, 1};

// One step of a connection, and the distances of the blocks in it: for AllGather those that they have behind the hop.
struct Hop {
  int dimension;
  std::vector<int> distances;
};

// How many blocks NCCL aggregates, and how many of them share a step.
struct Aggregation {
  int blocks = 1, in_a_step = 1;
};

Aggregation aggregation_of(int ranks, ssize_t chunk, ssize_t count) {
  Aggregation result;
  while (chunk / (count * result.blocks) >= 2 && result.blocks < ranks / 2) result.blocks *= 2;
  result.in_a_step = result.blocks;
  for (int depth = kStepsPerBuffer; depth > 1 && result.blocks < ranks / 2; depth /= 2) result.blocks *= 2;
  return result;
}

// Blocks `first`, `first + apart`, … below `ranks`, as hops.
void add_hops(std::vector<Hop>& hops, int ranks, int first, int apart, int blocks, int in_a_step) {
  const int dimension = __builtin_ctz(first);
  for (int block = 0; block < blocks && first + block * apart < ranks; block++) {
    if (block % in_a_step == 0) hops.push_back({dimension, {}});
    hops.back().distances.push_back(first + block * apart);
  }
}

// In the order of AllGather: a rank has a block before it hands it on. Backwards it is that of ReduceScatter: a rank has all parts of a
// sum before it hands that on. (Among ranks that are more than eight and no power of two ReduceScatter cuts its steps in another way.)
std::vector<Hop> all_hops(int ranks, const Aggregation& aggregation) {
  if (ranks > 8 && (ranks & (ranks - 1)) != 0) unsupported("PAT among %d ranks (up to 8, or a power of two)", ranks);
  std::vector<Hop> hops;
  int whole = 1;
  while (whole < ranks) whole *= 2;
  const int near = whole / aggregation.blocks;
  for (int scale = aggregation.blocks / 2; scale > 0; scale /= 2)
    add_hops(hops, ranks, scale * near, 2 * scale * near, aggregation.blocks / (2 * scale), aggregation.in_a_step);
  for (int bit = near / 2; bit > 0; bit /= 2)
    for (int distance = bit; distance < near; distance += 2 * bit)
      add_hops(hops, ranks, distance, near, aggregation.blocks, aggregation.in_a_step);
  return hops;
}

class Pat {
 public:
  Pat(const Communicator& comm, ncclDevChannel* channel, const CollectiveWork& work)
      : comm_(comm), work_(work), gathers_(work.function.collective == Collective::kAllGather), element_(size_of(work.function.type)),
        reduction_{work.function.reduction, work.function.type, work.argument} {
    for (int length = 1; length < comm.ranks; length *= 2) {
      ncclDevChannelPeer* above = channel->peers[at(length)];
      ncclDevChannelPeer* below = channel->peers[at(comm.ranks - length)];
      send_.push_back(make_simple(comm, {}, {&(gathers_ ? below : above)->send[0]}, kSlicing, reduction_, comm.step(Protocol::kSimple)));
      receive_.push_back(make_simple(comm, {&(gathers_ ? above : below)->recv[0]}, {}, kSlicing, reduction_, comm.step(Protocol::kSimple)));
    }
  }

  void run() {
    if (work_.pieces.empty()) return;
    const Piece &first = work_.pieces.front(), &last = work_.pieces.back();
    std::vector<Hop> hops = all_hops(comm_.ranks, aggregation_of(comm_.ranks, first.chunk, last.end - first.offset));
    if (!gathers_) std::reverse(hops.begin(), hops.end());
    for (const Piece& piece : work_.pieces) {
      offset_ = piece.offset;
      count_ = std::min(piece.chunk, piece.end - piece.offset);
      gathers_ ? gather(hops) : scatter(hops);
    }
  }

 private:
  int at(int distance) const { return (comm_.rank + distance) % comm_.ranks; }
  size_t bytes() const { return static_cast<size_t>(count_) * element_; }
  template <class Pointer>
  Pointer block(Pointer of_all, int distance) const {
    return of_all + (at(distance) * work_.total + offset_) * static_cast<ssize_t>(element_);
  }

  // Sends what `from` gives of each block of a hop, and gives what comes to `take`.
  template <class From, class Take>
  void pass(const Hop& hop, const From& from, const Take& take) {
    std::vector<char> step(hop.distances.size() * bytes());
    const auto each = [&](const auto& act) {
      for (size_t i = 0; i < hop.distances.size(); i++) act(hop.distances[i], &step[i * bytes()]);
    };
    each([&](int distance, char* part) { memcpy(part, from(distance), bytes()); });
    send_[hop.dimension]->send(step.data(), static_cast<ssize_t>(hop.distances.size()) * count_);
    receive_[hop.dimension]->recv(step.data(), static_cast<ssize_t>(hop.distances.size()) * count_);
    each([&](int distance, const char* part) { take(distance, part); });
  }

  void gather(const std::vector<Hop>& hops) {
    const char* own = work_.input + offset_ * static_cast<ssize_t>(element_);
    if (own != block(work_.output, 0)) memcpy(block(work_.output, 0), own, bytes());
    for (const Hop& hop : hops)
      pass(hop, [&](int distance) { return block(work_.output, distance - (1 << hop.dimension)); },
           [&](int distance, const char* part) { memcpy(block(work_.output, distance), part, bytes()); });
  }

  void scatter(const std::vector<Hop>& hops) {
    std::vector<char> sums(static_cast<size_t>(comm_.ranks) * bytes());
    const auto sum = [&](int distance) { return &sums[static_cast<size_t>(distance) * bytes()]; };
    for (int distance = 0; distance < comm_.ranks; distance++) memcpy(sum(distance), block(work_.input, distance), bytes());
    for (const Hop& hop : hops)
      pass(hop, sum, [&](int distance, const char* part) {
        char* to = sum(distance - (1 << hop.dimension));
        reduce(reduction_, to, to, part, static_cast<size_t>(count_), false);
      });
    memcpy(work_.output + offset_ * static_cast<ssize_t>(element_), sum(0), bytes());
  }

  const Communicator& comm_;
  const CollectiveWork& work_;
  const bool gathers_;
  const size_t element_;
  const Reduction reduction_;
  std::vector<std::unique_ptr<Primitives>> send_, receive_;  // by dimension
  ssize_t offset_ = 0, count_ = 0;
};

}  // namespace

void run_pat(const Communicator& comm, ncclDevChannel* channel, const CollectiveWork& work) { Pat(comm, channel, work).run(); }

}  // namespace standin
