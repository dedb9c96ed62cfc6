// AllReduce on a tree (runTreeSplit() of src/device/all_reduce.h): what comes from the children is reduced with the rank's own elements
// and goes up, the result comes down. Between nodes the tree is binary; within a node it is a chain, one more child.
#include <algorithm>

#include "log.h"
#include "ring.h"
#include "workers.h"

namespace standin {

namespace {

constexpr Slicing kTreeSlicing{1, 1};

struct Tree {
  const CollectiveWork& work;
  const ssize_t element = static_cast<ssize_t>(size_of(work.function.type));

  template <class Step>
  void each_piece(const Step& step) const {
    for (const Piece& piece : work.pieces) {
      const ssize_t at = piece.offset * element;
      step(work.input + at, work.output + at, std::min(piece.chunk, piece.end - piece.offset));
    }
  }

  void root(Primitives& prims) const {
    each_piece([&](const char* in, char* out, ssize_t count) { prims.recv_reduce_copy_send(in, out, count); });
  }
  void up(Primitives& prims, bool leaf) const {
    each_piece([&](const char* in, char*, ssize_t count) { leaf ? prims.send(in, count) : prims.recv_reduce_send(in, count); });
  }
  void down(Primitives& prims, bool leaf) const {
    each_piece([&](const char*, char* out, ssize_t count) { leaf ? prims.recv(out, count) : prims.recv_copy_send(out, count); });
  }
};

}  // namespace

void run_tree(const Communicator& comm, ncclDevChannel* channel, const CollectiveWork& work) {
  if (work.function.collective != Collective::kAllReduce) unsupported("a collective other than AllReduce on a tree");
  const Reduction reduction{work.function.reduction, work.function.type, work.argument};
  Connections from_children, to_children;
  for (int child : channel->tree.down) {
    if (child < 0) break;
    from_children.push_back(&channel->peers[child]->recv[0]);
    to_children.push_back(&channel->peers[child]->send[0]);
  }
  const auto make = [&](const Connections& receive, const Connections& send) {
    return make_primitives(work.function.protocol, comm, receive, send, kTreeSlicing, reduction);
  };
  const Tree self{work};
  if (channel->tree.up < 0) {
    self.root(*make(from_children, to_children));
    return;
  }
  ncclDevChannelPeer* parent = channel->peers[channel->tree.up];
  const bool leaf = from_children.empty();
  run_together({[&] { self.up(*make(from_children, {&parent->send[0]}), leaf); },
                [&] { self.down(*make({&parent->recv[0]}, to_children), leaf); }});
}

}  // namespace standin
