#include "primitives.h"

#include <string.h>

#include "log.h"

namespace standin {

namespace {

// Connection flags for transfers this stand-in does not play: all but NCCL_DIRECT_NIC, and those that say on which side of a
// connection between processes its buffers lie (NCCL_P2P_WRITE and _READ, before NCCL_IPC_WRITE and _READ; src/include/device.h).
#if NCCL_HAS_ncclDevWorkBatch
constexpr int kDirectFlags = ~0x07;
#else
constexpr int kDirectFlags = ~0x1c;
#endif

}  // namespace

Communicator communicator_of(const KernelComm& comm) {
  Communicator result{comm.rank, comm.nRanks, {}, static_cast<size_t>(comm.p2pChunkSize),
                      static_cast<const volatile uint32_t*>(comm.abortFlag)};
  for (int protocol = 0; protocol < kProtocols; protocol++)
    result.step_bytes[protocol] = static_cast<size_t>(comm.buffSizes[protocol]) / kStepsPerBuffer;
  return result;
}

Primitives::Primitives(const Communicator& comm, const Connections& receive, const Connections& send, const Reduction& reduction)
    : comm_(comm), reduction_(reduction), element_(size_of(reduction.type)) {
  for (ncclConnInfo* connection : receive) receive_.push_back({connection, connection->step});
  for (ncclConnInfo* connection : send) send_.push_back({connection, connection->step});
  for (const auto* ends : {&receive_, &send_})
    for (const End& end : *ends)
      if (end.connection->flags & kDirectFlags)
        unsupported("direct access to a peer's memory (connection flags %#x); set NCCL_P2P_DISABLE=1", end.connection->flags);
}

Primitives::~Primitives() {
  for (const auto* ends : {&receive_, &send_})
    for (const End& end : *ends) end.connection->step = end.step;
}

void Primitives::wait_credit(const End& end, int steps) {
  wait([&] { return load(end.connection->head) + kStepsPerBuffer >= end.step + steps; });
}

bool Primitives::has_proxy(const ncclConnInfo* connection) {
#if NCCL_HAS_ncclConnInfo_connFifo
  return connection->connFifo;
#else
  return connection->sizesFifo;
#endif
}

void Primitives::post_size(const End& end, size_t bytes) {
  if (!has_proxy(end.connection)) return;
  const uint64_t index = end.step % kStepsPerBuffer;
#if NCCL_HAS_ncclConnInfo_connFifo
  __atomic_store_n(&end.connection->connFifo[index].size, bytes, __ATOMIC_RELAXED);
#else
  __atomic_store_n(&end.connection->sizesFifo[index], bytes, __ATOMIC_RELAXED);
#endif
}

void Primitives::combine(const char* own, const std::vector<const char*>& received, char* to, const std::vector<char*>& outgoing,
                         size_t count, bool last) const {
  const size_t bytes = count * element_;
  char* const first = to ? to : outgoing[0];
  if (own && (!received.empty() || reduction_.op == Operator::kPreMulSum)) {
    reduce(reduction_, first, own, received.empty() ? nullptr : received[0], count, last && received.size() <= 1);
    Reduction further = reduction_;  // the factor of PreMulSum is for the rank's own elements
    if (further.op == Operator::kPreMulSum) further.op = Operator::kSum;
    for (size_t i = 1; i < received.size(); i++) reduce(further, first, received[i], first, count, last && i + 1 == received.size());
  } else if (const char* from = own ? own : received[0]; from != first) {
    memcpy(first, from, bytes);
  }
  for (char* other : outgoing)
    if (other != first) memcpy(other, first, bytes);
}

std::unique_ptr<Primitives> make_primitives(Protocol protocol, const Communicator& comm, const Connections& receive,
                                            const Connections& send, Slicing slicing, const Reduction& reduction,
                                            const Registered& registered) {
  if (protocol == Protocol::kSimple) return make_simple(comm, receive, send, slicing, reduction, comm.step(Protocol::kSimple), registered);
  if (registered.way != Registered::Way::kNot) unsupported("registered buffers by another protocol than Simple");
  return make_lines(protocol, comm, receive, send, reduction);
}

}  // namespace standin
