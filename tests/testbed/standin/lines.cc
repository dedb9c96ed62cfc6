// The LL and LL128 protocols (src/device/prims_ll.h, prims_ll128.h): data and flags share lines, and a line is full when its flags are
// the step plus one, so a receiver needs no tail. LL: 16 bytes of which 8 are data, a flag behind every 4. LL128: 128 bytes with one flag
// of 8 bytes at the end. Senders count steps in tail only with LL128 and only for a proxy, which then looks at the flags as well.
//
// Within a line of LL128 the warps of a GPU permute the data; here it stands in order. Nobody but the two ends looks at it.
// LL's rewriting of all flags every 2^31 steps, before they wrap, is left out: no job here gets there.
#include <string.h>

#include <algorithm>

#include "control.h"
#include "primitives.h"

namespace standin {

namespace {

constexpr size_t kLlData = 8, kLlLine = 16;
constexpr size_t kLl128Data = 120, kLl128Line = 128;
constexpr size_t kLl128Lines = 16;                         // a warp writes whole groups of so many lines
constexpr size_t kBlockData = kLl128Lines * kLl128Data;    // data handled at once; a multiple of both protocols' lines and of every type

size_t divide_up(size_t value, size_t by) { return (value + by - 1) / by; }

class Lines : public Primitives {
 public:
  Lines(Protocol protocol, const Communicator& comm, const Connections& receive, const Connections& send, const Reduction& reduction)
      : Primitives(comm, receive, send, reduction), ll128_(protocol == Protocol::kLL128), protocol_(protocol) {
    for (size_t i = 0; i < receive.size(); i++) scratch_.emplace_back(kBlockData);
  }

 private:
  void move(bool receive, bool send, const char* own, char* to, ssize_t count, bool last, const char* at) override;
  void move_block(bool receive, bool send, const char* own, char* to, size_t at, size_t bytes, bool last);
  // What data takes up with its flags. LL128 comes in whole groups of lines.
  size_t wire_bytes(size_t data) const {
    return ll128_ ? divide_up(data, kBlockData) * kLl128Lines * kLl128Line : divide_up(data, kLlData) * kLlLine;
  }
  uint64_t* line(const End& end, size_t data_before) const {
    char* buffer = end.connection->buffs[static_cast<int>(protocol_)] + end.step % kStepsPerBuffer * comm_.step(protocol_);
    return reinterpret_cast<uint64_t*>(buffer + (ll128_ ? data_before / kLl128Data * kLl128Line : data_before / kLlData * kLlLine));
  }
  void read(const End& end, size_t at, size_t bytes, char* data);
  void write(const End& end, size_t at, size_t bytes, const char* data) const;

  const bool ll128_;
  const Protocol protocol_;
  std::vector<std::vector<char>> scratch_;  // by peer: the block just received, without its flags
  std::vector<char> result_ = std::vector<char>(kBlockData);
};

void Lines::read(const End& end, size_t at, size_t bytes, char* data) {
  uint64_t* words = line(end, at);
  if (ll128_) {
    for (size_t i = 0; i < kLl128Lines && !aborted_; i++, words += kLl128Line / 8, data += kLl128Data) {
      wait([&] { return load(words + kLl128Data / 8) == end.step + 1; });
      memcpy(data, words, kLl128Data);
    }
    return;
  }
  const auto flag = static_cast<uint32_t>(end.step + 1);
  for (size_t done = 0; done < bytes && !aborted_; done += kLlData, words += 2) {
    uint64_t low = 0, high = 0;
    wait([&] {
      low = load(words), high = load(words + 1);
      return low >> 32 == flag && high >> 32 == flag;
    });
    const uint64_t both = (low & 0xffffffff) | high << 32;
    memcpy(data + done, &both, kLlData);
  }
}

void Lines::write(const End& end, size_t at, size_t bytes, const char* data) const {
  uint64_t* words = line(end, at);
  if (ll128_) {
    for (size_t i = 0; i < kLl128Lines; i++, words += kLl128Line / 8, data += kLl128Data) {
      memcpy(words, data, kLl128Data);
      store(words + kLl128Data / 8, end.step + 1);
    }
    return;
  }
  const uint64_t flag = (end.step + 1) << 32;
  for (size_t done = 0; done < bytes; done += kLlData, words += 2) {
    uint64_t both;
    memcpy(&both, data + done, kLlData);
    store(words, (both & 0xffffffff) | flag);
    store(words + 1, both >> 32 | flag);
  }
}

void Lines::move(bool receive, bool send, const char* own, char* to, ssize_t count, bool last, const char*) {
  const size_t bytes = static_cast<size_t>(std::max<ssize_t>(count, 0)) * element_;
  stall_point(comm_.abort_flag);
  if (send)
    for (const End& end : send_) {
      wait_credit(end, 1);
      if (!aborted_) post_size(end, wire_bytes(bytes));
    }
  if (aborted_) return;
  if (bytes) slice_delay();
  for (size_t at = 0; at < bytes; at += kBlockData) {
    const size_t now = std::min(kBlockData, bytes - at);
    move_block(receive, send, own ? own + at : nullptr, to ? to + at : nullptr, at, now, last);
    if (aborted_) return;
  }
  if (send)
    for (End& end : send_) {
      end.step++;
      if (ll128_ && has_proxy(end.connection)) store(end.connection->tail, end.step);
    }
  if (receive)
    for (End& end : receive_) store(end.connection->head, ++end.step);
  note_moved();
}

void Lines::move_block(bool receive, bool send, const char* own, char* to, size_t at, size_t bytes, bool last) {
  std::vector<const char*> received;
  if (receive)
    for (size_t i = 0; i < receive_.size(); i++) {
      read(receive_[i], at, bytes, scratch_[i].data());
      received.push_back(scratch_[i].data());
    }
  if (aborted_) return;
  combine(own, received, result_.data(), {}, bytes / element_, last);
  if (send)
    for (const End& end : send_) write(end, at, bytes, result_.data());
  if (to) memcpy(to, result_.data(), bytes);
}

}  // namespace

std::unique_ptr<Primitives> make_lines(Protocol protocol, const Communicator& comm, const Connections& receive, const Connections& send,
                                       const Reduction& reduction) {
  return std::make_unique<Lines>(protocol, comm, receive, send, reduction);
}

}  // namespace standin
