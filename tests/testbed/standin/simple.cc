// The Simple protocol (src/device/prims_simple.h): tail counts the steps the sender has filled. With registered buffers the steps are the
// same, but the data goes from buffer to buffer: as each operation begins, one end tells the other its buffer's address (ptrExchange).
#include <algorithm>

#include "control.h"
#include "log.h"
#include "primitives.h"

namespace standin {

namespace {

constexpr int kSimple = static_cast<int>(Protocol::kSimple);
constexpr int kModeOffset = 1;  // NCCL_MODE_OFFSET: the proxy says where in the shared buffer the slot is
// Up to 2.21.5 receivers also write the size FIFO; later only senders do.
constexpr bool kReceiverPostsSize = !NCCL_HAS_ncclDevWorkBatch && NCCL_HAS_ncclConnInfo_connFifo;

uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

class Simple : public Primitives {
 public:
  Simple(const Communicator& comm, const Connections& receive, const Connections& send, Slicing slicing, const Reduction& reduction,
         size_t step_bytes, const Registered& registered)
      : Primitives(comm, receive, send, reduction), slicing_(slicing), step_elements_(step_bytes / element_), registered_(registered) {
    const uint64_t steps_per_chunk = static_cast<uint64_t>(slicing.slices) * slicing.steps;
    for (End& end : receive_) {
      end.step = round_up(end.step, steps_per_chunk);
      store(end.connection->head, end.step);  // hands back credit for the steps skipped by rounding
    }
    for (End& end : send_) end.step = round_up(end.step, steps_per_chunk);
    exchange();
  }
  // What a peer still reads must not change under it.
  ~Simple() override {
    if (registered_.way != Registered::Way::kRead) return;
    for (const End& end : send_)
      if (direct(end)) wait([&] { return load(end.connection->head) >= end.step; });
  }

 private:
  void move(bool receive, bool send, const char* own, char* to, ssize_t count, bool last, const char* at) override;
  void move_slice(bool receive, bool send, const char* own, char* to, size_t count, bool last, const char* at);
  char* slot(const End& end) const;
  void exchange();
  // Whether registered buffers are reached over this connection: all but those through the network.
  bool direct(const End& end) const { return registered_.way != Registered::Way::kNot && end.connection->flags & (kWrites | kReads); }
  char* theirs(const char* at) const { return theirs_ + (at - registered_.own); }

  const Slicing slicing_;
  const size_t step_elements_;
  const Registered registered_;
  char* theirs_ = nullptr;  // the peer's registered buffer, in this rank's addresses
};

// Whose buffer is written or read gives its address; the other end waits for it and clears the word, which is where the next may go.
void Simple::exchange() {
  if (registered_.way == Registered::Way::kNot) return;
  const bool written = registered_.way == Registered::Way::kWritten;
  const auto word = [](const End& end) { return reinterpret_cast<uint64_t*>(end.connection->ptrExchange); };
  for (const End& end : written ? receive_ : send_) {
    if (!direct(end)) continue;
    wait([&] { return load(word(end)) == 0; });
    if (!aborted_) store(word(end), reinterpret_cast<uint64_t>(registered_.for_peer));
  }
  for (const End& end : written ? send_ : receive_) {
    if (!direct(end)) continue;
    wait([&] { return load(word(end)) != 0; });
    theirs_ = reinterpret_cast<char*>(load(word(end)));
    if (!aborted_) store(word(end), 0);
  }
}

char* Simple::slot(const End& end) const {
  const ncclConnInfo* connection = end.connection;
  char* buffer = connection->buffs[kSimple];
  const uint64_t index = end.step % kStepsPerBuffer;
#if NCCL_HAS_ncclConnInfo_connFifo
  if (ncclConnFifo* fifo = connection->connFifo; fifo && __atomic_load_n(&fifo[index].mode, __ATOMIC_RELAXED) == kModeOffset)
    return buffer + __atomic_load_n(&fifo[index].offset, __ATOMIC_RELAXED);
#else
  if (connection->offsFifo) return buffer + __atomic_load_n(&connection->offsFifo[index], __ATOMIC_RELAXED);
#endif
#if NCCL_HAS_ncclConnInfo_stepSize
  return buffer + index * connection->stepSize;
#else
  return buffer + index * step_elements_ * element_;
#endif
}

void Simple::move(bool receive, bool send, const char* own, char* to, ssize_t count, bool last, const char* at) {
  if (registered_.way != Registered::Way::kNot && !at) unsupported("this collective on registered buffers");
  count = std::max<ssize_t>(count, 0);
  const size_t per_slice = static_cast<size_t>(count + 16 * slicing_.slices - 1) / (16 * slicing_.slices) * 16;
  const size_t slice = std::max(per_slice, step_elements_ * slicing_.steps / 32);
  size_t done = 0;
  for (int i = 0; i < slicing_.slices; i++) {
    const size_t now = std::min(slice, count - done), begin = done * element_;
    const auto from = [begin](auto* pointer) { return pointer ? pointer + begin : nullptr; };
    move_slice(receive, send, from(own), from(to), now, last, from(at));
    if (aborted_) return;
    done += now;
  }
}

void Simple::move_slice(bool receive, bool send, const char* own, char* to, size_t count, bool last, const char* at) {
  using Way = Registered::Way;
  std::vector<const char*> received;
  std::vector<char*> outgoing;
  stall_point(comm_.abort_flag);
  if (receive)
    for (const End& end : receive_) {
      wait([&] { return load(end.connection->tail) >= end.step + slicing_.steps; });
      if (kReceiverPostsSize) post_size(end, count * element_);
      received.push_back(!direct(end) ? slot(end) : registered_.way == Way::kWritten ? at : theirs(at));
    }
  if (send)
    for (const End& end : send_) {
      wait_credit(end, slicing_.steps);
      post_size(end, count * element_);
      if (!direct(end) || registered_.way == Way::kWritten) outgoing.push_back(direct(end) ? theirs(at) : slot(end));
    }
  if (aborted_) return;
  if (count) {
    slice_delay();
    if (to || !outgoing.empty()) combine(own, received, to, outgoing, count, last);
  }
  if (receive)
    for (End& end : receive_) store(end.connection->head, end.step += slicing_.steps);
  if (send)
    for (End& end : send_) store(end.connection->tail, end.step += slicing_.steps);
  note_moved();
}

}  // namespace

std::unique_ptr<Primitives> make_simple(const Communicator& comm, const Connections& receive, const Connections& send, Slicing slicing,
                                        const Reduction& reduction, size_t step_bytes, const Registered& registered) {
  return std::make_unique<Simple>(comm, receive, send, slicing, reduction, step_bytes, registered);
}

}  // namespace standin
