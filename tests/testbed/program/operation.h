// One communication operation: preparing its input, enqueueing it, and checking every element of its result.
#pragma once

#include <string>

#include "group.h"
#include "values.h"

namespace job {

enum class Kind { kAllReduce, kAllGather, kReduceScatter, kBroadcast, kReduce, kSendRecv, kAllToAll, kGroupedAllReduce, kAllGatherV };

const char* kind_name(Kind kind);

struct Operation {
  Kind kind = Kind::kAllReduce;
  ncclDataType_t type = ncclFloat32;
  ReductionKind reduction{ncclSum};
  size_t count = 0;   // per rank: elements sent (AllGather, AllToAll: to each; AllGatherV: at most) or kept (ReduceScatter)
  int root = 0;       // of Broadcast and Reduce
  int distance = 1;   // of SendRecv: to rank + distance, from rank - distance
  long salt = 0;      // of the values

  std::string text() const;
};

// Bytes each of the two buffers needs.
size_t buffer_bytes(const Operation& operation, int ranks);
void prepare(const Operation& operation, Group& group);
void enqueue(const Operation& operation, Group& group);
// How many collectives, sends and receives this rank has called; whoever calls NCCL without `enqueue` says so.
void count_calls(long calls);
long calls_made();
// Empty if all is as expected, else what is wrong. The stream must have been synchronized.
std::string verify(const Operation& operation, const Group& group);

}  // namespace job
