#include "primitives.h"

#include <string.h>

#include <algorithm>

#include "backoff.h"
#include "control.h"
#include "log.h"

namespace standin {

namespace {

constexpr int kSimple = 2;       // NCCL_PROTO_SIMPLE
constexpr int kModeOffset = 1;   // NCCL_MODE_OFFSET: the proxy says where in the shared buffer the slot is
// Up to 2.21.5 receivers also write the size FIFO; later only senders do (src/device/prims_simple.h).
constexpr bool kReceiverPostsSize = !NCCL_HAS_ncclDevWorkBatch && NCCL_HAS_ncclConnInfo_connFifo;
// Connection flags for transfers this stand-in does not play: all but NCCL_DIRECT_NIC (src/include/device.h).
constexpr int kDirectFlags = ~0x04;

uint64_t load(const uint64_t* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
void store(uint64_t* counter, uint64_t value) { __atomic_store_n(counter, value, __ATOMIC_RELEASE); }
uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

}  // namespace

Primitives::Primitives(const Communicator& comm, ncclConnInfo* receive, ncclConnInfo* send, Slicing slicing, const Reduction& reduction,
                       size_t step_bytes)
    : comm_(comm),
      receive_(receive),
      send_(send),
      slicing_(slicing),
      reduction_(reduction),
      element_(size_of(reduction.type)),
      step_elements_(step_bytes / element_) {
  const uint64_t steps_per_chunk = static_cast<uint64_t>(slicing.slices) * slicing.steps;
  for (ncclConnInfo* connection : {receive, send})
    if (connection && (connection->flags & kDirectFlags))
      unsupported("direct access to a peer's memory (connection flags %#x); set NCCL_P2P_DISABLE=1", connection->flags);
  if (receive_) {
    receive_step_ = round_up(receive_->step, steps_per_chunk);
    store(receive_->head, receive_step_);  // hands back credit for the steps skipped by rounding
  }
  if (send_) send_step_ = round_up(send_->step, steps_per_chunk);
}

Primitives::~Primitives() {
  if (receive_) receive_->step = receive_step_;
  if (send_) send_->step = send_step_;
}

void Primitives::wait(const uint64_t* counter, uint64_t credit, uint64_t wanted) {
  Backoff backoff;
  while (!aborted_ && load(counter) + credit < wanted) {
    backoff.pause();
    aborted_ = *comm_.abort_flag != 0;
  }
}

size_t Primitives::slot_bytes(const ncclConnInfo* connection) const {
#if NCCL_HAS_ncclConnInfo_stepSize
  return connection->stepSize;
#else
  return step_elements_ * element_;
#endif
}

char* Primitives::slot(ncclConnInfo* connection, uint64_t step) const {
  char* buffer = connection->buffs[kSimple];
  const uint64_t index = step % kStepsPerBuffer;
#if NCCL_HAS_ncclConnInfo_connFifo
  if (ncclConnFifo* fifo = connection->connFifo; fifo && __atomic_load_n(&fifo[index].mode, __ATOMIC_RELAXED) == kModeOffset)
    return buffer + __atomic_load_n(&fifo[index].offset, __ATOMIC_RELAXED);
#else
  if (connection->offsFifo) return buffer + __atomic_load_n(&connection->offsFifo[index], __ATOMIC_RELAXED);
#endif
  return buffer + index * slot_bytes(connection);
}

void Primitives::post_size(ncclConnInfo* connection, uint64_t step, size_t bytes) {
  const uint64_t index = step % kStepsPerBuffer;
#if NCCL_HAS_ncclConnInfo_connFifo
  if (connection->connFifo) __atomic_store_n(&connection->connFifo[index].size, bytes, __ATOMIC_RELAXED);
#else
  if (connection->sizesFifo) __atomic_store_n(&connection->sizesFifo[index], bytes, __ATOMIC_RELAXED);
#endif
}

void Primitives::move(bool receive, bool send, const char* own, char* to, ssize_t count, bool last) {
  count = std::max<ssize_t>(count, 0);
  const size_t per_slice = static_cast<size_t>(count + 16 * slicing_.slices - 1) / (16 * slicing_.slices) * 16;
  const size_t slice = std::max(per_slice, step_elements_ * slicing_.steps / 32);
  size_t done = 0;
  for (int i = 0; i < slicing_.slices; i++) {
    const size_t now = std::min(slice, count - done);
    char *received = nullptr, *outgoing = nullptr;
    stall_point(comm_.abort_flag);
    if (receive) {
      wait(receive_->tail, 0, receive_step_ + slicing_.steps);
      if (kReceiverPostsSize) post_size(receive_, receive_step_, now * element_);
      received = slot(receive_, receive_step_);
    }
    if (send) {
      wait(send_->head, kStepsPerBuffer, send_step_ + slicing_.steps);
      post_size(send_, send_step_, now * element_);
      outgoing = slot(send_, send_step_);
    }
    if (aborted_) return;
    if (now) {
      slice_delay();
      const size_t at = done * element_;
      move_slice(own ? own + at : nullptr, to ? to + at : nullptr, received, outgoing, now, last);
    }
    if (receive) store(receive_->head, receive_step_ += slicing_.steps);
    if (send) store(send_->tail, send_step_ += slicing_.steps);
    done += now;
    note_moved();
  }
}

void Primitives::move_slice(const char* own, char* to, const char* received, char* outgoing, size_t count, bool last) {
  const size_t bytes = count * element_;
  char* const first = to ? to : outgoing;
  if (own && (received || reduction_.op == Operator::kPreMulSum)) {
    reduce(reduction_, first, own, received, count, last);
  } else if (const char* from = own ? own : received; from != first) {
    memcpy(first, from, bytes);
  }
  if (to && outgoing) memcpy(outgoing, to, bytes);
}

}  // namespace standin
