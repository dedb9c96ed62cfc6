// NCCL's primitives: data moves through a ring of kStepsPerBuffer slots per connection and protocol; head counts the steps the
// receiver has consumed. How a slot is known to be full is the protocol's: simple.cc, lines.cc. One host thread plays a whole thread
// block, or the part of a block that NCCL gives to one direction of a tree.
#pragma once

#include <stdint.h>
#include <sys/types.h>

#include <memory>
#include <vector>

#include "backoff.h"
#include "nccl_layout.h"
#include "reduce.h"

namespace standin {

// What the primitives need to know of the communicator, the same in all releases.
struct Communicator {
  int rank, ranks;
  size_t step_bytes[kProtocols];  // size of one step of each protocol's buffer
  size_t p2p_step_bytes;          // of Simple in point-to-point transfers
  const volatile uint32_t* abort_flag;

  size_t step(Protocol protocol) const { return step_bytes[static_cast<int>(protocol)]; }
};

Communicator communicator_of(const KernelComm& comm);

// How a chunk is cut: slices per chunk, and steps each slice takes.
struct Slicing {
  int slices, steps;
};

using Connections = std::vector<ncclConnInfo*>;

// NCCL_P2P_WRITE and NCCL_P2P_READ: a connection over P2P, to buffers that the sender writes or the receiver reads.
constexpr int kWrites = 1, kReads = 2;

// A buffer that the program registered with NCCL (ncclCommRegister), and that peers reach directly over P2P: written by whoever sends to
// this rank, or read by whoever receives from it. Nothing then goes through the buffers of those connections.
struct Registered {
  enum class Way { kNot, kWritten, kRead };
  Way way = Way::kNot;
  const char* own = nullptr;  // where it begins
  char* for_peer = nullptr;   // the same in the peer's addresses
};

class Primitives {
 public:
  // Writes the steps back to the connections.
  virtual ~Primitives();
  Primitives(const Primitives&) = delete;
  Primitives& operator=(const Primitives&) = delete;

  // Counts are in elements; a count of 0 or less still takes its steps. What is received from several peers is reduced together. `at` is
  // where in this rank's output the elements belong, where no `to` says so: registered buffers of all ranks have them at the same place.
  void send(const char* from, ssize_t count, const char* at = nullptr) { move(false, true, from, nullptr, count, false, at); }
  void copy_send(const char* from, char* to, ssize_t count) { move(false, true, from, to, count, false, to); }
  void recv(char* to, ssize_t count) { move(true, false, nullptr, to, count, false, to); }
  void recv_copy_send(char* to, ssize_t count) { move(true, true, nullptr, to, count, false, to); }
  void recv_reduce_send(const char* own, ssize_t count, const char* at = nullptr) { move(true, true, own, nullptr, count, false, at); }
  void recv_reduce_copy(const char* own, char* to, ssize_t count) { move(true, false, own, to, count, true, to); }
  void recv_reduce_copy_send(const char* own, char* to, ssize_t count) { move(true, true, own, to, count, true, to); }

 protected:
  // A connection and the step this end of it has come to.
  struct End {
    ncclConnInfo* connection;
    uint64_t step;
  };

  Primitives(const Communicator& comm, const Connections& receive, const Connections& send, const Reduction& reduction);

  virtual void move(bool receive, bool send, const char* own, char* to, ssize_t count, bool last, const char* at) = 0;

  // One result from the rank's own elements (may be null) and those received, put into `to` (may be null) and all of `outgoing`.
  void combine(const char* own, const std::vector<const char*>& received, char* to, const std::vector<char*>& outgoing, size_t count,
               bool last) const;
  // Until the condition holds or the communicator is aborted.
  template <class Condition>
  void wait(const Condition& holds) {
    Backoff backoff;
    while (!aborted_ && !holds()) {
      backoff.pause();
      aborted_ = *comm_.abort_flag != 0;
    }
  }
  // Credit to fill that many more steps.
  void wait_credit(const End& end, int steps);
  // Tells the proxy how much lies in a slot, where there is a proxy.
  static void post_size(const End& end, size_t bytes);
  static bool has_proxy(const ncclConnInfo* connection);
  static uint64_t load(const uint64_t* counter) { return __atomic_load_n(counter, __ATOMIC_ACQUIRE); }
  static void store(uint64_t* counter, uint64_t value) { __atomic_store_n(counter, value, __ATOMIC_RELEASE); }

  const Communicator& comm_;
  const Reduction reduction_;
  const size_t element_;
  std::vector<End> receive_, send_;
  bool aborted_ = false;
};

// src/device/prims_simple.h.
std::unique_ptr<Primitives> make_simple(const Communicator& comm, const Connections& receive, const Connections& send, Slicing slicing,
                                        const Reduction& reduction, size_t step_bytes, const Registered& registered = {});
// src/device/prims_ll.h and prims_ll128.h; every chunk is one step.
std::unique_ptr<Primitives> make_lines(Protocol protocol, const Communicator& comm, const Connections& receive, const Connections& send,
                                       const Reduction& reduction);
// The protocol's primitives for a collective; `slicing` is Simple's.
std::unique_ptr<Primitives> make_primitives(Protocol protocol, const Communicator& comm, const Connections& receive,
                                            const Connections& send, Slicing slicing, const Reduction& reduction,
                                            const Registered& registered = {});

}  // namespace standin
