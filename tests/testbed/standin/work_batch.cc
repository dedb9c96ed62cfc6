// Work descriptors from NCCL 2.22 on: batches of descriptors of one kind, in the kernel's arguments or in a FIFO
// (src/include/device.h, loadWorkBatchToShmem() in src/device/common.h).
#include "nccl_layout.h"
#if NCCL_HAS_ncclDevWorkBatch

#include <string.h>
#include <time.h>

#include <algorithm>

#include "kernel.h"
#include "log.h"
#include "profile.h"
#include "ring.h"
#include "workers.h"

namespace standin {

namespace {

constexpr ssize_t kGrainBytes[] = {16, 1920, 512};  // ncclProtoGrainSize(), by protocol

const ncclDevKernelArgs* header(const Arguments& arguments) { return reinterpret_cast<const ncclDevKernelArgs*>(arguments.buffer.data()); }

// All works of a batch and of those that extend it.
struct Batch {
  int type;
  unsigned function;
  std::vector<std::vector<char>> works;
  int next;  // index of the channel's next batch, or -1
};

size_t work_size(int type) {
  switch (type) {
    case ncclDevWorkTypeP2p: return sizeof(ncclDevWorkP2p);
    case ncclDevWorkTypeColl: return sizeof(ncclDevWorkColl);
    case ncclDevWorkTypeCollReg: return sizeof(ncclDevWorkCollReg);
#if NCCL_HAS_ncclDevWorkBcast
    case ncclDevWorkTypeBcast: return sizeof(ncclDevWorkBcast);
#endif
    default: unsupported("work of type %d", type);
  }
}

std::vector<char> load_work(const Arguments& arguments, size_t offset, size_t size) {
  const ncclDevKernelArgs* args = header(arguments);
  std::vector<char> work(size);
  constexpr size_t kUnit = 16;  // the FIFO wraps at multiples of this
  for (size_t at = 0; at < size; at += kUnit) {
    const char* from = args->workStorageType == ncclDevWorkStorageTypeArgs
                           ? arguments.buffer.data() + offset + at
                           : static_cast<const char*>(args->workBuf) + ((offset + at) & args->workMask);
    memcpy(&work[at], from, kUnit);
  }
  return work;
}

Batch load_batch(const Arguments& arguments, int index) {
  const auto* batches = reinterpret_cast<const ncclDevWorkBatch*>(header(arguments) + 1);
  Batch batch{};
  for (;;) {
    const ncclDevWorkBatch& part = batches[index];
    batch.type = part.workType;
    batch.function = part.funcId;
    const size_t size = work_size(part.workType);
    for (int bit = 0; bit < 64; bit++)
      if (part.offsetBitset >> bit & 1) batch.works.push_back(load_work(arguments, part.offsetBase + bit * size, size));
    batch.next = part.nextJump ? index + static_cast<int>(part.nextJump) : -1;
    if (!part.nextExtends) return batch;
    index += part.nextJump;
  }
}

// Buffers registered with the network came with 2.24.
bool on_registered_network_buffer([[maybe_unused]] const ncclDevWorkColl& work) {
#if NCCL_HAS_ncclDevWorkColl_netRegUsed
  return work.netRegUsed;
#else
  return false;
#endif
}

bool on_registered_network_buffer([[maybe_unused]] const ncclDevWorkP2p& work, [[maybe_unused]] bool sends, [[maybe_unused]] bool receives) {
#if NCCL_HAS_ncclDevWorkP2p_sendNetReg
  return (sends && work.sendNetReg) || (receives && work.recvNetReg);
#else
  return false;
#endif
}

// The channels from lo to hi share the elements; the first and the last may get more or less than those in between.
std::vector<Piece> pieces_of(const Communicator& comm, const ncclDevWorkColl& work, const Function& function, int channel) {
  const ssize_t grain = kGrainBytes[static_cast<int>(function.protocol)] / static_cast<ssize_t>(size_of(function.type));
  const auto& cut = work.cbd;
  ssize_t offset, count, chunk;
  if (channel == static_cast<int>(work.channelLo)) {
    offset = 0, count = cut.countLo, chunk = cut.chunkGrainsLo * grain;
  } else if (channel == static_cast<int>(work.channelHi)) {
    offset = cut.countLo + (work.channelHi - work.channelLo - 1) * cut.countMid, count = cut.countHi, chunk = cut.chunkGrainsHi * grain;
  } else {
    offset = cut.countLo + (channel - work.channelLo - 1) * cut.countMid, count = cut.countMid, chunk = cut.chunkGrainsMid * grain;
  }
  std::vector<Piece> pieces;
  const bool by_rank = function.collective == Collective::kAllReduce && function.algorithm == Algorithm::kRing;
  const ssize_t chunks = by_rank ? comm.ranks : 1;
  for (ssize_t at = 0; at < count; at += chunks * chunk) {
    ssize_t now = chunk;
    const ssize_t left = count - at;
    if (by_rank && left < chunks * chunk) {
      // The rest is spread evenly over the ranks, in units of 16 bytes.
      const ssize_t unit = 16 / static_cast<ssize_t>(size_of(function.type));
      now = ((left + chunks - 1) / chunks + unit - 1) / unit * unit;
    }
    pieces.push_back({offset + at, now, offset + count, now});
  }
  return pieces;
}

// The output, where the program registered it and the ring's peers may write into it. Which collectives may is the host's rule
// (ncclRegisterCollBuffers, src/register/coll_reg.cc): neither Reduce, ReduceScatter nor AllReduce in place.
Registered registered_output([[maybe_unused]] const KernelComm& comm, [[maybe_unused]] const ncclDevChannel* channel, const ncclDevWorkColl& work,
                             const Function& function) {
  if (!work.regUsed) return {};
#if NCCL_HAS_ncclDevWorkColl_recvbuffRmtAddrs
  if (function.algorithm == Algorithm::kRing) {
    log(1, "a collective writes into registered buffers");
    const int writer = channel->ring.prev;  // on another node it reaches nothing
    const bool near = channel->peers[writer]->recv[0].flags & (kWrites | kReads);
    const uintptr_t base = near ? work.recvbuffRmtAddrs[comm.rankToLocalRank[writer]] : 0;
    return {Registered::Way::kWritten, static_cast<const char*>(work.recvbuff), reinterpret_cast<char*>(base + work.recvbuffOffset)};
  }
#endif
  unsupported("collectives on registered buffers by another algorithm than Ring");
}

void run_one(const Communicator& comm, const KernelComm& kernel_comm, ncclDevChannel* channel, int channel_id, const ncclDevWorkColl& work,
             const Function& function) {
  if (on_registered_network_buffer(work)) unsupported("collectives on buffers registered with the network");
  const auto& cut = work.cbd;
  const ssize_t middle = work.channelHi > work.channelLo ? work.channelHi - work.channelLo - 1 : 0;
  const bool one = work.channelHi == work.channelLo;
  CollectiveWork whole{function, static_cast<const char*>(work.sendbuff), static_cast<char*>(work.recvbuff), static_cast<int>(work.root),
                work.redOpArg, static_cast<ssize_t>(cut.countLo + (one ? 0 : middle * cut.countMid + cut.countHi)),
                pieces_of(comm, work, function, channel_id), registered_output(kernel_comm, channel, work, function)};
  if (work.redOpArgIsPtr) whole.argument = *reinterpret_cast<const uint64_t*>(work.redOpArg);
  run_collective(comm, channel, whole);
}

// Which part of a transfer this channel moves (ncclP2pChannelToPart). The layout does not tell the two rules apart; the change
// came with 2.28, like ncclKernelComm.
int part_of(const ncclDevWorkP2p& work, int channel) {
  const int delta = (channel - work.channelBase) & (work.nP2pChannels - 1);
#if NCCL_HAS_ncclKernelComm
  return delta;
#else
  int reversed = 0;
  for (int bit = 1, rest = delta; bit < work.nP2pChannels; bit <<= 1, rest >>= 1) reversed = reversed << 1 | (rest & 1);
  return reversed;
#endif
}

// Narrows a transfer to this channel's part of it; false when the channel has none.
template <class Address>
bool narrow(int part, int parts, Address& address, uint64_t& bytes) {
  if (part >= parts) return false;
  constexpr uint64_t kAlign = 4096;
  const uint64_t share = ((bytes + parts - 1) / parts + kAlign - 1) / kAlign * kAlign;
  const uint64_t begin = std::min<uint64_t>(part * share, bytes), end = std::min<uint64_t>((part + 1) * share, bytes);
  address = static_cast<char*>(address) + begin;
  bytes = end - begin;
  return true;
}

// u32fp8Decode() of src/include/bitops.h: five bits of exponent, three of mantissa.
size_t chunk_bytes(uint8_t encoded) {
  const size_t exponent = encoded >> 3;
  const size_t mantissa = (encoded & 7) | (exponent ? 8 : 0);
  return mantissa << (exponent ? exponent - 1 : 0);
}

Protocol protocol_of(bool low_latency) { return low_latency ? Protocol::kLL : Protocol::kSimple; }

void run_transfers(const Communicator& comm, ncclDevChannel* channel, int channel_id, const Batch& batch) {
  std::vector<std::function<void()>> tasks;
  for (const auto& bytes : batch.works) {
    ncclDevWorkP2p work;
    memcpy(&work, bytes.data(), sizeof work);
    const int part = part_of(work, channel_id);
    const bool sends = narrow(part, work.nSendChannels, work.sendAddr, work.sendBytes);
    const bool receives = narrow(part, work.nRecvChannels, work.recvAddr, work.recvBytes);
    if (work.sendRank == comm.rank) {
      if (sends && work.sendAddr != work.recvAddr) memmove(work.recvAddr, work.sendAddr, work.sendBytes);
      continue;
    }
    if (on_registered_network_buffer(work, sends, receives)) unsupported("Send/Recv on buffers registered with the network");
    if (sends)
      tasks.push_back([&comm, channel, work] {
        run_send(comm, channel,
                 {work.sendRank, work.sendBytes, chunk_bytes(work.sendChunkSize_u32fp8), protocol_of(work.sendProtoLL), work.sendIpcReg != 0},
                 static_cast<const char*>(work.sendAddr));
      });
    if (receives)
      tasks.push_back([&comm, channel, work] {
        run_recv(comm, channel,
                 {work.recvRank, work.recvBytes, chunk_bytes(work.recvChunkSize_u32fp8), protocol_of(work.recvProtoLL), work.recvIpcReg != 0},
                 static_cast<char*>(work.recvAddr));
      });
  }
  run_together(std::move(tasks));
}

// Batched broadcasts came with 2.29.
void run_others([[maybe_unused]] const Communicator& comm, [[maybe_unused]] ncclDevChannel* channel, [[maybe_unused]] Protocol protocol,
                [[maybe_unused]] const Batch& batch) {
#if NCCL_HAS_ncclDevWorkBcast
  if (batch.type == ncclDevWorkTypeBcast) {
    std::vector<Broadcast> broadcasts;
    for (const auto& bytes : batch.works) {
      ncclDevWorkBcast work;
      memcpy(&work, bytes.data(), sizeof work);
      broadcasts.push_back({work.ringDepth, static_cast<size_t>(work.chunkSize), work.bytes, static_cast<const char*>(work.sendbuff),
                            static_cast<char*>(work.recvbuff)});
    }
    return run_broadcasts(comm, channel, protocol, std::move(broadcasts));
  }
#endif
  unsupported("collectives on registered buffers over NVLS");
}

// Which works of a batch NCCL's profiler wants to hear about.
std::vector<bool> wanted_by_profiler(const Batch& batch) {
  std::vector<bool> wanted;
  for (const auto& bytes : batch.works) {
#if NCCL_HAS_ncclDevWorkColl_profilerEnabled
    if (batch.type == ncclDevWorkTypeP2p) {
      ncclDevWorkP2p work;
      memcpy(&work, bytes.data(), sizeof work);
      wanted.push_back(work.profilerEnabled);
    } else if (batch.type != ncclDevWorkTypeColl && batch.type != ncclDevWorkTypeCollReg) {
      wanted.push_back(false);  // batched broadcasts say nothing to it (proxyOp.eActivationMask, src/scheduler/allgatherv_sched.cc)
    } else {
      ncclDevWorkColl work;
      memcpy(&work, bytes.data(), std::min(sizeof work, bytes.size()));
      wanted.push_back(work.profilerEnabled);
    }
#else
    wanted.push_back(!bytes.empty());
#endif
  }
  return wanted;
}

}  // namespace

uint64_t channel_mask(const Arguments& arguments) { return header(arguments)->channelMask; }

void run_block(const Arguments& arguments, int channel_id, int block) {
  auto* both = reinterpret_cast<KernelCommAndChannels*>(header(arguments)->comm);
  ncclDevChannel* channel = &both->channels[channel_id];
  const KernelComm& kernel_comm = both->comm;
  const Communicator comm = communicator_of(kernel_comm);
  for (int index = block; index >= 0 && !*comm.abort_flag;) {
    const Batch batch = load_batch(arguments, index);
    const Function function = find_function(batch.function);
    const std::vector<bool> profiled = wanted_by_profiler(batch);
    say_started(kernel_comm, *channel, channel_id, profiled);
    if (batch.type == ncclDevWorkTypeP2p) {
      run_transfers(comm, channel, channel_id, batch);
    } else if (batch.type == ncclDevWorkTypeColl) {
      for (const auto& bytes : batch.works) {
        ncclDevWorkColl work;
        memcpy(&work, bytes.data(), sizeof work);
        run_one(comm, kernel_comm, channel, channel_id, work, function);
      }
    } else {
      run_others(comm, channel, function.protocol, batch);
    }
    say_completed(kernel_comm, *channel, channel_id, profiled);
#if NCCL_HAS_ncclDevChannel_workCounter
    channel->workCounter += batch.works.size();
#endif
    index = batch.next;
  }
}

}  // namespace standin

#endif  // NCCL_HAS_ncclDevWorkBatch
