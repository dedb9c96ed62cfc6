// The Ring algorithms of NCCL's collectives, and point-to-point transfers, on one channel.
#pragma once

#include <vector>

#include "primitives.h"

namespace standin {

// A part of a collective that a channel works through at once. AllReduce cuts it into one chunk per rank, the others take it whole.
struct Piece {
  ssize_t offset;  // first element, in the rank's buffer
  ssize_t chunk;   // elements per chunk
  ssize_t end;     // elements at and beyond this one belong to somebody else
};

struct RingWork {
  Function function;
  const char* input;
  char* output;
  int root;
  uint64_t argument;    // of the reduction
  ssize_t total;        // elements per rank: the distance between ranks' blocks in AllGather and ReduceScatter
  std::vector<Piece> pieces;
};

void run_ring(const Communicator& comm, ncclDevChannel* channel, const RingWork& work);

void run_send(const Communicator& comm, ncclDevChannel* channel, int peer, const char* from, size_t bytes, size_t chunk_bytes);
void run_recv(const Communicator& comm, ncclDevChannel* channel, int peer, char* to, size_t bytes, size_t chunk_bytes);

}  // namespace standin
