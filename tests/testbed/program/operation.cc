#include "operation.h"

#include <string.h>

#include <algorithm>
#include <atomic>

#include "check.h"
#include "options.h"

namespace job {

namespace {

constexpr int kGroupedCalls = 5;

std::atomic<long> g_calls{0};

size_t input_elements(const Operation& operation, int ranks) {
  const bool per_rank = operation.kind == Kind::kReduceScatter || operation.kind == Kind::kAllToAll;
  return per_rank ? operation.count * ranks : operation.count;
}

size_t output_elements(const Operation& operation, int ranks) {
  const bool per_rank = operation.kind == Kind::kAllGather || operation.kind == Kind::kAllToAll || operation.kind == Kind::kAllGatherV;
  return per_rank ? operation.count * ranks : operation.count;
}

// What a rank gives to AllGatherV: each another part of what there is room for.
size_t share_of(const Operation& operation, int root, int ranks) { return operation.count - operation.count * root / (2 * ranks); }

double input_value(const Operation& operation, int rank, size_t index) {
  return value_of(operation.type, operation.reduction, rank, index, operation.salt);
}

void enqueue_grouped(const Operation& operation, Group& group) {
  const size_t share = operation.count / kGroupedCalls, element = bytes_of(operation.type);
  NCCL(ncclGroupStart());
  for (int i = 0; i < kGroupedCalls; i++) {
    const size_t begin = share * i, count = i + 1 < kGroupedCalls ? share : operation.count - begin;
    NCCL(ncclAllReduce(group.input + begin * element, group.output + begin * element, count, operation.type, operation.reduction.op, group.comm,
                       group.stream));
  }
  NCCL(ncclGroupEnd());
}

void enqueue_all_gather_v(const Operation& operation, Group& group) {
  const size_t bytes = operation.count * bytes_of(operation.type);
  NCCL(ncclGroupStart());
  for (int root = 0; root < group.ranks; root++)
    NCCL(ncclBroadcast(group.input, group.output + root * bytes, share_of(operation, root, group.ranks), operation.type, root, group.comm,
                       group.stream));
  NCCL(ncclGroupEnd());
}

void enqueue_all_to_all(const Operation& operation, Group& group) {
  const size_t bytes = operation.count * bytes_of(operation.type);
  NCCL(ncclGroupStart());
  for (int peer = 0; peer < group.ranks; peer++) {
    NCCL(ncclSend(group.input + peer * bytes, operation.count, operation.type, peer, group.comm, group.stream));
    NCCL(ncclRecv(group.output + peer * bytes, operation.count, operation.type, peer, group.comm, group.stream));
  }
  NCCL(ncclGroupEnd());
}

long calls_of(const Operation& operation, int ranks) {
  switch (operation.kind) {
    case Kind::kAllToAll: return 2 * ranks;
    case Kind::kAllGatherV: return ranks;
    case Kind::kGroupedAllReduce: return kGroupedCalls;
    case Kind::kSendRecv: return 2;
    default: return 1;
  }
}

int wrap(int rank, int ranks) { return (rank % ranks + ranks) % ranks; }

void enqueue_send_recv(const Operation& operation, Group& group) {
  NCCL(ncclGroupStart());
  const int to = wrap(group.rank + operation.distance, group.ranks), from = wrap(group.rank - operation.distance, group.ranks);
  NCCL(ncclSend(group.input, operation.count, operation.type, to, group.comm, group.stream));
  NCCL(ncclRecv(group.output, operation.count, operation.type, from, group.comm, group.stream));
  NCCL(ncclGroupEnd());
}

// Checks `count` elements from `block` of the output on.
std::string check(const Operation& operation, const Group& group, size_t begin, size_t count, const std::function<double(size_t)>& expected) {
  size_t first = 0;
  const bool exact = operation.reduction.premul || operation.reduction.op != ncclAvg;
  const char* data = group.output + begin * bytes_of(operation.type);
  const size_t wrong = count_wrong(operation.type, data, count, expected, exact, &first);
  if (wrong == 0) return "";
  char text[200];
  snprintf(text, sizeof text, "%s on %s: %zu of %zu elements, the first at %zu: %g instead of %g", operation.text().c_str(), group.name.c_str(),
           wrong, count, begin + first, read_element(operation.type, data, first), expected(first % kPeriod));
  return text;
}

}  // namespace

const char* kind_name(Kind kind) {
  static constexpr const char* kNames[] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "SendRecv", "AllToAll", "GroupedAllReduce", "AllGatherV"};
  return kNames[static_cast<int>(kind)];
}

std::string Operation::text() const {
  return std::string(kind_name(kind)) + " " + type_name(type) + " " + (reduction.premul ? "premul" : reduction_name(reduction.op)) + " of " +
         std::to_string(count);
}

size_t buffer_bytes(const Operation& operation, int ranks) {
  return std::max(input_elements(operation, ranks), output_elements(operation, ranks)) * bytes_of(operation.type);
}

void prepare(const Operation& operation, Group& group) {
  group.reserve(buffer_bytes(operation, group.ranks));
  const size_t elements = input_elements(operation, group.ranks), element = bytes_of(operation.type);
  std::vector<char> staging(elements * element);
  fill(operation.type, staging.data(), elements, [&](size_t i) { return input_value(operation, group.rank, i); });
  CUDA(cudaMemcpyAsync(group.input, staging.data(), staging.size(), cudaMemcpyHostToDevice, group.stream));
  constexpr int kStale = 0xee;
  CUDA(cudaMemsetAsync(group.output, kStale, output_elements(operation, group.ranks) * element, group.stream));
}

void count_calls(long calls) { g_calls += calls; }
long calls_made() { return g_calls; }

void enqueue(const Operation& operation, Group& group) {
  const Operation& o = operation;
  count_calls(calls_of(o, group.ranks));
  switch (o.kind) {
    case Kind::kAllReduce: NCCL(ncclAllReduce(group.input, group.output, o.count, o.type, o.reduction.op, group.comm, group.stream)); return;
    case Kind::kAllGather: NCCL(ncclAllGather(group.input, group.output, o.count, o.type, group.comm, group.stream)); return;
    case Kind::kReduceScatter:
      NCCL(ncclReduceScatter(group.input, group.output, o.count, o.type, o.reduction.op, group.comm, group.stream));
      return;
    case Kind::kBroadcast: NCCL(ncclBroadcast(group.input, group.output, o.count, o.type, o.root, group.comm, group.stream)); return;
    case Kind::kReduce: NCCL(ncclReduce(group.input, group.output, o.count, o.type, o.reduction.op, o.root, group.comm, group.stream)); return;
    case Kind::kSendRecv: enqueue_send_recv(o, group); return;
    case Kind::kAllToAll: enqueue_all_to_all(o, group); return;
    case Kind::kGroupedAllReduce: enqueue_grouped(o, group); return;
    case Kind::kAllGatherV: enqueue_all_gather_v(o, group); return;
  }
}

std::string verify(const Operation& operation, const Group& group) {
  const Operation& o = operation;
  const size_t count = o.count;
  const int ranks = group.ranks;
  const auto reduced = [&](size_t base) {
    return [&o, ranks, base](size_t i) { return reduced_value(o.type, o.reduction, ranks, base + i, o.salt); };
  };
  switch (o.kind) {
    case Kind::kAllReduce:
    case Kind::kGroupedAllReduce: return check(o, group, 0, count, reduced(0));
    case Kind::kReduce: return group.rank == o.root ? check(o, group, 0, count, reduced(0)) : "";
    case Kind::kReduceScatter: return check(o, group, 0, count, reduced(group.rank * count));
    case Kind::kBroadcast: return check(o, group, 0, count, [&](size_t i) { return input_value(o, o.root, i); });
    case Kind::kSendRecv: {
      const int from = wrap(group.rank - o.distance, ranks);
      return check(o, group, 0, count, [&](size_t i) { return input_value(o, from, i); });
    }
    case Kind::kAllGather:
    case Kind::kAllGatherV:
    case Kind::kAllToAll:
      for (int peer = 0; peer < ranks; peer++) {
        const size_t base = o.kind == Kind::kAllToAll ? group.rank * count : 0;
        const size_t given = o.kind == Kind::kAllGatherV ? share_of(o, peer, ranks) : count;
        const std::string problem = check(o, group, peer * count, given, [&](size_t i) { return input_value(o, peer, base + i); });
        if (!problem.empty()) return problem;
      }
      return "";
  }
  return "";
}

}  // namespace job
