#include "ring.h"

#include <algorithm>

#include "log.h"

namespace standin {

namespace {

// ALLREDUCE_CHUNKSTEPS / ALLREDUCE_SLICESTEPS and their siblings of src/include/collectives.h: half and a quarter of the buffer.
Slicing slicing_of(Collective collective) {
  const bool large = collective == Collective::kAllReduce || collective == Collective::kAllGather || collective == Collective::kReduceScatter;
  return large ? Slicing{2, 2} : Slicing{1, 1};
}

struct Ring {
  const Communicator& comm;
  const CollectiveWork& work;
  const int* ranks;  // of the ring, beginning with this one
  int index;         // of this rank in the ring
  Primitives& prims;
  size_t element;

  const char* in(ssize_t at) const { return work.input + at * static_cast<ssize_t>(element); }
  char* out(ssize_t at) const { return work.output + at * static_cast<ssize_t>(element); }

  void all_reduce(const Piece& piece) const {
    const int n = comm.ranks;
    const auto offset = [&](int chunk) { return piece.offset + chunk % n * piece.stride; };
    const auto count = [&](int chunk) { return std::min(piece.chunk, piece.end - offset(chunk)); };
    int chunk = index + n - 1;
    prims.send(in(offset(chunk)), count(chunk), out(offset(chunk)));
    for (int step = 2; step < n; step++) {
      chunk = index + n - step;
      prims.recv_reduce_send(in(offset(chunk)), count(chunk), out(offset(chunk)));
    }
    prims.recv_reduce_copy_send(in(offset(index)), out(offset(index)), count(index));
    for (int step = 1; step < n - 1; step++) {
      chunk = index + n - step;
      prims.recv_copy_send(out(offset(chunk)), count(chunk));
    }
    chunk = index + 1;
    prims.recv(out(offset(chunk)), count(chunk));
  }

  void all_gather(const Piece& piece) const {
    const int n = comm.ranks;
    const ssize_t count = std::min(piece.chunk, piece.end - piece.offset);
    const auto block = [&](int position) { return piece.offset + ranks[position] * work.total; };
    if (in(piece.offset) == out(block(0))) {
      prims.send(in(piece.offset), count, in(piece.offset));
    } else {
      prims.copy_send(in(piece.offset), out(block(0)), count);
    }
    for (int step = 1; step < n - 1; step++) prims.recv_copy_send(out(block(n - step)), count);
    prims.recv(out(block(1)), count);
  }

  void reduce_scatter(const Piece& piece) const {
    const int n = comm.ranks;
    const ssize_t count = std::min(piece.chunk, piece.end - piece.offset);
    const auto block = [&](int position) { return piece.offset + ranks[position] * work.total; };
    prims.send(in(block(n - 1)), count);
    for (int step = 2; step < n; step++) prims.recv_reduce_send(in(block(n - step)), count);
    prims.recv_reduce_copy(in(block(0)), out(piece.offset), count);
  }

  void broadcast(const Piece& piece) const {
    const ssize_t count = std::min(piece.chunk, piece.end - piece.offset);
    if (comm.rank == work.root) {
      if (work.input == work.output) {
        prims.send(in(piece.offset), count, in(piece.offset));
      } else {
        prims.copy_send(in(piece.offset), out(piece.offset), count);
      }
    } else if (ranks[1] == work.root) {
      prims.recv(out(piece.offset), count);
    } else {
      prims.recv_copy_send(out(piece.offset), count);
    }
  }

  void reduce(const Piece& piece) const {
    const ssize_t count = std::min(piece.chunk, piece.end - piece.offset);
    if (ranks[comm.ranks - 1] == work.root) {
      prims.send(in(piece.offset), count);
    } else if (comm.rank == work.root) {
      prims.recv_reduce_copy(in(piece.offset), out(piece.offset), count);
    } else {
      prims.recv_reduce_send(in(piece.offset), count);
    }
  }
};

constexpr int kP2pConnection = 1;  // index of the connection that point-to-point uses; collectives use 0

// Bytes are moved as one-byte elements.
constexpr Reduction kBytes{Operator::kSum, Type::kUint8, 0};

void run_ring(const Communicator& comm, ncclDevChannel* channel, const CollectiveWork& work) {
  const auto& ring = channel->ring;
  const Reduction reduction{work.function.reduction, work.function.type, work.argument};
  const auto prims = make_primitives(work.function.protocol, comm, {&channel->peers[ring.prev]->recv[0]}, {&channel->peers[ring.next]->send[0]},
                                     slicing_of(work.function.collective), reduction, work.registered);
  const Ring self{comm, work, ring.userRanks, ring.index, *prims, size_of(work.function.type)};
  for (const Piece& piece : work.pieces) {
    switch (work.function.collective) {
      case Collective::kAllReduce: self.all_reduce(piece); break;
      case Collective::kAllGather: self.all_gather(piece); break;
      case Collective::kReduceScatter: self.reduce_scatter(piece); break;
      case Collective::kBroadcast: self.broadcast(piece); break;
      case Collective::kReduce: self.reduce(piece); break;
      default: unsupported("a collective that is not a ring");
    }
  }
}

void move_chunk(Primitives& prims, const Broadcast& broadcast, ssize_t count, bool last) {
  if (broadcast.depth > 0) {
    last ? prims.recv(broadcast.output, count) : prims.recv_copy_send(broadcast.output, count);
  } else if (broadcast.input == broadcast.output) {
    prims.send(broadcast.input, count);
  } else {
    prims.copy_send(broadcast.input, broadcast.output, count);
  }
}

std::unique_ptr<Primitives> transfer_primitives(const Communicator& comm, const Transfer& transfer, const Connections& receive,
                                                const Connections& send, const char* buffer) {
  Registered registered;
  if (transfer.registered) {
    // Of the buffer that is reached into, the host has put the peer's address into the work.
    const bool read = (receive.empty() ? send : receive)[0]->flags & kReads;
    log(1, "Send/Recv %s registered buffers", read ? "reads" : "writes into");
    registered = {read ? Registered::Way::kRead : Registered::Way::kWritten, buffer, const_cast<char*>(buffer)};
  }
  if (transfer.protocol == Protocol::kSimple) return make_simple(comm, receive, send, {1, 1}, kBytes, comm.p2p_step_bytes, registered);
  return make_lines(transfer.protocol, comm, receive, send, kBytes);
}

}  // namespace

void run_collective(const Communicator& comm, ncclDevChannel* channel, const CollectiveWork& work) {
  switch (work.function.algorithm) {
    case Algorithm::kTree: return run_tree(comm, channel, work);
    case Algorithm::kPat: return run_pat(comm, channel, work);
    case Algorithm::kRing: return run_ring(comm, channel, work);
  }
}

// A chunk of each in turn, until none has any left (src/device/all_gather_v.h).
void run_broadcasts(const Communicator& comm, ncclDevChannel* channel, Protocol protocol, std::vector<Broadcast> broadcasts) {
  const auto& ring = channel->ring;
  const auto prims = make_primitives(protocol, comm, {&channel->peers[ring.prev]->recv[0]}, {&channel->peers[ring.next]->send[0]}, {1, 1}, kBytes);
  for (bool some = true; some;) {
    some = false;
    for (Broadcast& broadcast : broadcasts) {
      const size_t now = std::min(broadcast.chunk, broadcast.bytes);
      if (now == 0) continue;
      move_chunk(*prims, broadcast, static_cast<ssize_t>(now), broadcast.depth == comm.ranks - 1);
      if (broadcast.depth == 0) broadcast.input += now;
      broadcast.output += now;
      broadcast.bytes -= now;
      some = true;
    }
  }
}

void run_send(const Communicator& comm, ncclDevChannel* channel, const Transfer& transfer, const char* from) {
  const auto prims = transfer_primitives(comm, transfer, {}, {&channel->peers[transfer.peer]->send[kP2pConnection]}, from);
  size_t done = 0;
  do {  // an empty transfer still takes a step
    const size_t now = std::min(transfer.chunk_bytes, transfer.bytes - done);
    prims->send(from + done, static_cast<ssize_t>(now), from + done);
    done += now;
  } while (done < transfer.bytes);
}

void run_recv(const Communicator& comm, ncclDevChannel* channel, const Transfer& transfer, char* to) {
  const auto prims = transfer_primitives(comm, transfer, {&channel->peers[transfer.peer]->recv[kP2pConnection]}, {}, to);
  size_t done = 0;
  do {
    const size_t now = std::min(transfer.chunk_bytes, transfer.bytes - done);
    prims->recv(to + done, static_cast<ssize_t>(now));
    done += now;
  } while (done < transfer.bytes);
}

}  // namespace standin
