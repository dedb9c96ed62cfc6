// Work descriptors up to NCCL 2.21: a chain of 512-byte ncclWork for each channel (src/include/device.h, ncclKernel() in
// src/device/common.h).
#include "nccl_layout.h"
#if NCCL_HAS_ncclWork

#include <algorithm>

#include "kernel.h"
#include "log.h"
#include "ring.h"
#include "workers.h"

namespace standin {

namespace {

constexpr int kSimple = 2;        // NCCL_PROTO_SIMPLE
constexpr ssize_t kWarpSize = 32;

KernelCommAndChannels* communicator(const Arguments& arguments) { return reinterpret_cast<KernelCommAndChannels*>(arguments.values[0]); }

#if NCCL_HAS_ncclWorkElem_chunkCount
bool registered(const ncclWorkElem& element) { return element.regUsed; }

// 2.20 and 2.21: the host gives each channel a range and a chunk size.
std::vector<Piece> pieces_of(const Communicator& comm, const ncclWorkElem& element, const Function& function) {
  std::vector<Piece> pieces;
  const ssize_t offset = element.workOffset, count = element.workCount;
  const int chunks = function.collective == Collective::kAllReduce ? comm.ranks : 1;
  const ssize_t loop = static_cast<ssize_t>(element.chunkCount) * chunks;
  for (ssize_t at = 0; at < count; at += loop) {
    ssize_t chunk = element.chunkCount;
    if (chunks > 1 && count - at < loop) chunk = element.lastChunkCount;
    pieces.push_back({offset + at, chunk, offset + count});
  }
  return pieces;
}
#else
bool registered(const ncclWorkElem& element) { return element.regUsed; }

// Up to 2.19 the kernel cuts the buffer itself: all channels take a chunk in turn.
std::vector<Piece> pieces_of(const Communicator& comm, const ncclWorkElem& element, const Function& function) {
  std::vector<Piece> pieces;
  const ssize_t type = size_of(function.type), total = element.count, channels = element.nChannels;
  const bool large = function.collective != Collective::kBroadcast && function.collective != Collective::kReduce;
  const ssize_t chunk = static_cast<ssize_t>(comm.step_bytes) / type * (large ? kStepsPerBuffer / 2 : 1);
  const ssize_t chunks = function.collective == Collective::kAllReduce ? comm.ranks : 1;
  const ssize_t grain = (element.nWarps - 1) * kWarpSize * 8 / type;
  for (ssize_t at = 0; at < total; at += channels * chunks * chunk) {
    const ssize_t share = (total - at + channels * chunks - 1) / (channels * chunks);
    const ssize_t now = (std::min(chunk, share) + grain - 1) / grain * grain;
    pieces.push_back({at + element.bid * chunks * now, now, total});
  }
  return pieces;
}
#endif

void run_collective(const Communicator& comm, ncclDevChannel* channel, const ncclWorkElem& element, const Function& function) {
  if (registered(element)) unsupported("collectives on registered buffers");
  RingWork work{function, static_cast<const char*>(element.sendbuff), static_cast<char*>(element.recvbuff), static_cast<int>(element.root),
                element.redOpArg, static_cast<ssize_t>(element.count), pieces_of(comm, element, function)};
  if (element.redOpArgIsPtr) work.argument = *reinterpret_cast<const uint64_t*>(element.redOpArg);
  run_ring(comm, channel, work);
}

char* buffer_of(const ncclWorkElemP2p& element) {
  return reinterpret_cast<char*>(uintptr_t{element.buffHi32} << 32 | element.buffLo32);
}

void run_transfer(const Communicator& comm, ncclDevChannel* channel, const ncclWorkElemP2p* element) {
  const size_t bytes = size_t{element->countHi32} << 32 | element->countLo32;
  const bool sends = element->p2pType == ncclWorkP2pTypeSend;
  char* buffer = buffer_of(*element);
  if (element->peer == comm.rank) {
    // A transfer to oneself: the receive stands right before the send.
    char* to = sends ? buffer_of(element[-1]) : buffer;
    if (sends && to != buffer) std::copy(buffer, buffer + bytes, to);
    return;
  }
  if ((element->proto & 3) != kSimple)  // two bits, signed
    unsupported("Send/Recv with protocol LL (NCCL_P2P_LL_THRESHOLD=0 keeps to Simple)");
  if (sends) {
    run_send(comm, channel, element->peer, buffer, bytes, element->chunkSize);
  } else {
    run_recv(comm, channel, element->peer, buffer, bytes, element->chunkSize);
  }
}

void run_transfers(const Communicator& comm, ncclDevChannel* channel, const ncclWork& work) {
  std::vector<std::function<void()>> tasks;
  const size_t limit = sizeof work.p2pElems / sizeof *work.p2pElems;
  for (size_t i = 0; i < std::min<size_t>(work.p2pElems[0].ngroups, limit); i++) {
    const ncclWorkElemP2p* element = &work.p2pElems[i];
    if (element->p2pType == ncclWorkP2pTypeUnused || element->peer == -1) continue;
    tasks.push_back([&comm, channel, element] { run_transfer(comm, channel, element); });
  }
  run_together(std::move(tasks));
}

}  // namespace

uint64_t channel_mask(const Arguments& arguments) { return arguments.values[1]; }

void run_block(const Arguments& arguments, int channel_id, int block) {
  KernelCommAndChannels* both = communicator(arguments);
  ncclDevChannel* channel = &both->channels[channel_id];
  const KernelComm& kernel_comm = both->comm;
  const Communicator comm{kernel_comm.rank, kernel_comm.nRanks, static_cast<size_t>(kernel_comm.buffSizes[kSimple] / kStepsPerBuffer),
                          static_cast<size_t>(kernel_comm.p2pChunkSize), static_cast<const volatile uint32_t*>(kernel_comm.abortFlag)};
  const auto* head = reinterpret_cast<const ncclWork*>(arguments.values[2]);
  for (const ncclWork* next = head + block;;) {
    const ncclWork work = *next;
    const auto& header = work.header;
    if (header.isLast && header.inFifo)  // hands the FIFO slots back to the host
      __atomic_store_n(channel->workFifoDone, header.doneAcks, __ATOMIC_RELEASE);
    const Function function = find_function(header.funcIndex);
    if (header.type == ncclWorkTypeColl) {
      for (const ncclWorkElem& element : work.elems)
        if (element.isUsed) run_collective(comm, channel, element, function);
    } else if (header.type == ncclWorkTypeP2p) {
      run_transfers(comm, channel, work);
    } else {
      unsupported("work of type %d (collectives on registered buffers)", header.type);
    }
    if (header.isLast || *comm.abort_flag) return;
    next = head + header.workNext;
  }
}

}  // namespace standin

#endif  // NCCL_HAS_ncclWork
