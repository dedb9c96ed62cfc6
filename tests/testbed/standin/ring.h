// The Ring, Tree and PAT algorithms of NCCL's collectives, and point-to-point transfers, on one channel.
#pragma once

#include <vector>

#include "primitives.h"

namespace standin {

// A part of a collective that a channel works through at once. AllReduce on a ring cuts it into one chunk per rank, the others take it
// whole.
struct Piece {
  ssize_t offset;  // first element, in the rank's buffer
  ssize_t chunk;   // elements per chunk
  ssize_t end;     // elements at and beyond this one belong to somebody else
  ssize_t stride;  // from one rank's chunk to the next's
};

struct CollectiveWork {
  Function function;
  const char* input;
  char* output;
  int root;
  uint64_t argument;    // of the reduction
  ssize_t total;        // elements per rank: the distance between ranks' blocks in AllGather and ReduceScatter
  std::vector<Piece> pieces;
  Registered registered;  // the output, where the peers on the ring write into it
};

void run_collective(const Communicator& comm, ncclDevChannel* channel, const CollectiveWork& work);
void run_tree(const Communicator& comm, ncclDevChannel* channel, const CollectiveWork& work);
void run_pat(const Communicator& comm, ncclDevChannel* channel, const CollectiveWork& work);

// One broadcast of several that a channel moves together. `depth` is how many ranks of the ring lie between its root and this rank.
struct Broadcast {
  int depth;
  size_t chunk, bytes;
  const char* input;  // of the root alone
  char* output;
};
void run_broadcasts(const Communicator& comm, ncclDevChannel* channel, Protocol protocol, std::vector<Broadcast> broadcasts);

// What one channel moves between this rank and a peer, in chunks of so many bytes of data.
struct Transfer {
  int peer;
  size_t bytes, chunk_bytes;
  Protocol protocol;
  bool registered = false;  // the buffers at both ends
};
void run_send(const Communicator& comm, ncclDevChannel* channel, const Transfer& transfer, const char* from);
void run_recv(const Communicator& comm, ncclDevChannel* channel, const Transfer& transfer, char* to);

}  // namespace standin
