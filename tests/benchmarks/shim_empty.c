// A profiler plugin that wants everything and does nothing: what the interface itself costs.
#include "profiler_abi.h"

static int object;

static nccl_result init(void** context, uint64_t hash, int* mask, const char* name, int nodes, int ranks, int rank, void* log) {
  (void)hash, (void)name, (void)nodes, (void)ranks, (void)rank, (void)log;
  *context = &object;
  *mask = NCCL_EVENT_COLL | NCCL_EVENT_P2P | NCCL_EVENT_PROXY_OP | NCCL_EVENT_PROXY_STEP | NCCL_EVENT_KERNEL_CH;
  return 0;
}
static nccl_result start(void* context, void** handle, struct nccl_event* event) { return (void)context, (void)event, *handle = &object, 0; }
static nccl_result stop(void* handle) { return (void)handle, 0; }
static nccl_result record(void* handle, int state, union nccl_state_arguments* arguments) { return (void)handle, (void)state, (void)arguments, 0; }
static nccl_result finalize(void* context) { return (void)context, 0; }

struct nccl_profiler_v5 ncclProfiler_v5 = {"empty", init, start, stop, record, finalize};

static nccl_result init_v4(void** context, int* mask, const char* name, uint64_t hash, int nodes, int ranks, int rank, void* log) {
  return init(context, hash, mask, name, nodes, ranks, rank, log);
}
struct nccl_profiler_v4 ncclProfiler_v4 = {"empty", init_v4, start, stop, record, finalize};
