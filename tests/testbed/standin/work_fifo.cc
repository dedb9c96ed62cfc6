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

constexpr ssize_t kWarpSize = 32;

KernelCommAndChannels* communicator(const Arguments& arguments) { return reinterpret_cast<KernelCommAndChannels*>(arguments.values[0]); }

#if NCCL_HAS_ncclWorkElem_chunkCount
bool registered(const ncclWorkElem& element) { return element.regUsed; }

// 2.20 and 2.21: the host gives each channel a range and a chunk size.
std::vector<Piece> pieces_of(const Communicator& comm, const ncclWorkElem& element, const Function& function) {
  std::vector<Piece> pieces;
  const ssize_t offset = element.workOffset, count = element.workCount;
  const int chunks = function.collective == Collective::kAllReduce && function.algorithm == Algorithm::kRing ? comm.ranks : 1;
  const ssize_t loop = static_cast<ssize_t>(element.chunkCount) * chunks;
  for (ssize_t at = 0; at < count; at += loop) {
    ssize_t chunk = element.chunkCount;
    if (chunks > 1 && count - at < loop) chunk = element.lastChunkCount;
    pieces.push_back({offset + at, chunk, offset + count, chunk});
  }
  return pieces;
}
#else
bool registered(const ncclWorkElem& element) { return element.regUsed; }

// Up to 2.19 the kernel cuts the buffer itself: all channels take a chunk in turn.
struct Cutter {
  const Communicator& comm;
  const ncclWorkElem& element;
  const Function& function;
  const ssize_t type = size_of(function.type), total = element.count, channels = element.nChannels;
  const ssize_t threads = element.nWarps * kWarpSize;
  const bool ll = function.protocol == Protocol::kLL, ll128 = function.protocol == Protocol::kLL128;

  // Elements without the flags: half of LL's lines is data, 15 of 16 words with LL128.
  ssize_t step_elements() const {
    const auto bytes = static_cast<ssize_t>(comm.step(function.protocol));
    return (ll ? bytes / 2 : ll128 ? bytes * 15 / 16 : bytes) / type;
  }
  // What all threads move at once (calcBytePerGrain() of src/device/primitives.h).
  ssize_t threads_grain() const { return threads * ((ll128 ? 60 : 8) / type); }

  std::vector<Piece> tree() const {
    const ssize_t grain = ll ? threads_grain() : ll128 ? threads_grain() / 8 : (threads - 2 * kWarpSize) * 8 * (8 / type);
    ssize_t chunk = ll ? step_elements() : static_cast<ssize_t>(element.lastChunkSize);
    const ssize_t loop = channels * chunk;
    if (loop > total) chunk = (total + channels * grain - 1) / (channels * grain) * grain;
    std::vector<Piece> pieces;
    for (ssize_t at = 0; at < total; at += loop) pieces.push_back({at + element.bid * chunk, chunk, total, chunk});
    return pieces;
  }

  std::vector<Piece> ring() const {
    const bool whole_grain = function.collective == Collective::kBroadcast || function.collective == Collective::kReduce;
    const bool all_reduce = function.collective == Collective::kAllReduce, simple = !ll && !ll128;
    const ssize_t chunks = all_reduce ? comm.ranks : 1;
    const ssize_t chunk = step_elements() * (simple && !whole_grain ? kStepsPerBuffer / 2 : 1), loop = channels * chunks * chunk;
    const ssize_t grain = simple ? (threads - kWarpSize) * 8 / type : ll128 && !whole_grain ? threads_grain() / 2 : threads_grain();
    std::vector<Piece> pieces;
    for (ssize_t at = 0; at < total; at += loop) {
      const ssize_t left = total - at, share = channels * chunks;
      ssize_t now;
      if (simple) {
        now = (std::min(chunk, (left + share - 1) / share) + grain - 1) / grain * grain;
      } else if (ll && !all_reduce) {
        now = left < loop ? static_cast<ssize_t>(element.lastChunkSize) : chunk;
      } else {
        now = std::min(chunk, (left + share * grain - 1) / (share * grain) * grain);
      }
      const bool interleaved = all_reduce && !simple;  // the channels' chunks for one rank lie together
      pieces.push_back({at + element.bid * (interleaved ? 1 : chunks) * now, now, total, interleaved ? channels * now : now});
    }
    return pieces;
  }
};

std::vector<Piece> pieces_of(const Communicator& comm, const ncclWorkElem& element, const Function& function) {
  const Cutter cutter{comm, element, function};
  return function.algorithm == Algorithm::kTree ? cutter.tree() : cutter.ring();
}
#endif

void run_one(const Communicator& comm, ncclDevChannel* channel, const ncclWorkElem& element, const Function& function) {
  if (registered(element)) unsupported("collectives on registered buffers");
  CollectiveWork work{function, static_cast<const char*>(element.sendbuff), static_cast<char*>(element.recvbuff), static_cast<int>(element.root),
                element.redOpArg, static_cast<ssize_t>(element.count), pieces_of(comm, element, function), {}};
  if (element.redOpArgIsPtr) work.argument = *reinterpret_cast<const uint64_t*>(element.redOpArg);
  run_collective(comm, channel, work);
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
  const auto protocol = static_cast<Protocol>(element->proto & 3);  // two bits, signed
  const size_t chunk = protocol == Protocol::kLL ? element->chunkSize / 2 : element->chunkSize;  // half of the lines is flags
  const Transfer transfer{element->peer, bytes, chunk, protocol};
  if (sends) {
    run_send(comm, channel, transfer, buffer);
  } else {
    run_recv(comm, channel, transfer, buffer);
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
  const Communicator comm = communicator_of(kernel_comm);
  const auto* head = reinterpret_cast<const ncclWork*>(arguments.values[2]);
  for (const ncclWork* next = head + block;;) {
    const ncclWork work = *next;
    const auto& header = work.header;
    if (header.isLast && header.inFifo)  // hands the FIFO slots back to the host
      __atomic_store_n(channel->workFifoDone, header.doneAcks, __ATOMIC_RELEASE);
    const Function function = find_function(header.funcIndex);
    if (header.type == ncclWorkTypeColl) {
      for (const ncclWorkElem& element : work.elems)
        if (element.isUsed) run_one(comm, channel, element, function);
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
