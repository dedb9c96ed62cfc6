// NCCL's Simple-protocol primitives (src/device/prims_simple.h): data moves through a ring of kStepsPerBuffer slots per connection,
// head counts the steps the receiver has consumed, tail those the sender has produced. One host thread plays a whole thread block.
#pragma once

#include <stdint.h>
#include <sys/types.h>

#include "nccl_layout.h"
#include "reduce.h"

namespace standin {

// What the primitives need to know of the communicator, the same in all releases.
struct Communicator {
  int rank, ranks;
  size_t step_bytes;  // size of one step of the Simple buffer
  size_t p2p_step_bytes;
  const volatile uint32_t* abort_flag;
};

// How a chunk is cut: slices per chunk, and steps each slice takes.
struct Slicing {
  int slices, steps;
};

class Primitives {
 public:
  // Either connection may be null when there is nothing to receive or to send.
  Primitives(const Communicator& comm, ncclConnInfo* receive, ncclConnInfo* send, Slicing slicing, const Reduction& reduction,
             size_t step_bytes);
  ~Primitives();
  Primitives(const Primitives&) = delete;
  Primitives& operator=(const Primitives&) = delete;

  // Counts are in elements; a count of 0 or less still takes its steps.
  void send(const char* from, ssize_t count) { move(false, true, from, nullptr, count, false); }
  void copy_send(const char* from, char* to, ssize_t count) { move(false, true, from, to, count, false); }
  void recv(char* to, ssize_t count) { move(true, false, nullptr, to, count, false); }
  void recv_copy_send(char* to, ssize_t count) { move(true, true, nullptr, to, count, false); }
  void recv_reduce_send(const char* own, ssize_t count) { move(true, true, own, nullptr, count, false); }
  void recv_reduce_copy(const char* own, char* to, ssize_t count) { move(true, false, own, to, count, true); }
  void recv_reduce_copy_send(const char* own, char* to, ssize_t count) { move(true, true, own, to, count, true); }

 private:
  void move(bool receive, bool send, const char* own, char* to, ssize_t count, bool last);
  void move_slice(const char* own, char* to, const char* received, char* outgoing, size_t count, bool last);
  void wait(const uint64_t* counter, uint64_t credit, uint64_t wanted);
  char* slot(ncclConnInfo* connection, uint64_t step) const;
  size_t slot_bytes(const ncclConnInfo* connection) const;
  static void post_size(ncclConnInfo* connection, uint64_t step, size_t bytes);

  const Communicator& comm_;
  ncclConnInfo* const receive_;
  ncclConnInfo* const send_;
  const Slicing slicing_;
  const Reduction reduction_;
  const size_t element_;
  const size_t step_elements_;
  uint64_t receive_step_ = 0, send_step_ = 0;
  bool aborted_ = false;
};

}  // namespace standin
