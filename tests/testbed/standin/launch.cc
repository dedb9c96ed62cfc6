#include "launch.h"

#include <string.h>

#include <memory>

#include "control.h"
#include "kernel.h"
#include "log.h"
#include "nccl_layout.h"
#include "redirect.h"
#include "reduce.h"
#include "stream.h"
#include "workers.h"

namespace standin {

namespace {

// kernel<<<>>>(dst, src, count, scalar, scalar is a pointer), src/device/onerank.cu: PreMulSum in a communicator of one rank.
void run_one_rank_reduce(const std::string& name, const Arguments& arguments) {
  static constexpr struct {
    const char* mangled;
    Type type;
  } kTypes[] = {{"6__half", Type::kFloat16}, {"13__nv_bfloat16", Type::kBfloat16}};
  static constexpr struct {
    char mangled;
    Type type;
  } kBuiltin[] = {{'a', Type::kInt8}, {'h', Type::kUint8},  {'i', Type::kInt32},   {'j', Type::kUint32},
                  {'l', Type::kInt64}, {'m', Type::kUint64}, {'f', Type::kFloat32}, {'d', Type::kFloat64}};
  static constexpr char kPrefix[] = "FuncPreMulSumI";
  const size_t at = name.find(kPrefix);
  const char* rest = at == std::string::npos ? "" : name.c_str() + at + sizeof kPrefix - 1;
  Reduction reduction{Operator::kPreMulSum, Type::kInt8, arguments.values[3]};
  bool known = false;
  for (const auto& item : kTypes)
    if (strncmp(rest, item.mangled, strlen(item.mangled)) == 0) reduction.type = item.type, known = true;
  for (const auto& item : kBuiltin)
    if (rest[0] == item.mangled && rest[1] == 'E') reduction.type = item.type, known = true;
  if (!known) unsupported("the kernel %s", name.c_str());
  if (arguments.values[4] & 1) memcpy(&reduction.argument, reinterpret_cast<void*>(arguments.values[3]), size_of(reduction.type));
  reduce(reduction, reinterpret_cast<void*>(arguments.values[0]), reinterpret_cast<void*>(arguments.values[1]), nullptr,
         arguments.values[2], true);
}

bool is_one_rank(const std::string& name) { return name.find("oneRankReduce") != std::string::npos; }

}  // namespace

Arguments copy_arguments(const std::string& kernel, void** arguments, void** extra) {
  Arguments copied;
  if (extra) {
    constexpr uintptr_t kEnd = 0, kBuffer = 1, kSize = 2;  // CU_LAUNCH_PARAM_*
    const char* buffer = nullptr;
    size_t size = 0;
    for (; reinterpret_cast<uintptr_t>(extra[0]) != kEnd; extra += 2) {
      if (reinterpret_cast<uintptr_t>(extra[0]) == kBuffer) buffer = static_cast<const char*>(extra[1]);
      if (reinterpret_cast<uintptr_t>(extra[0]) == kSize) size = *static_cast<const size_t*>(extra[1]);
    }
    copied.buffer.assign(buffer, buffer + size);
    return copied;
  }
  const size_t sizes_one_rank[] = {8, 8, 8, 8, 1}, sizes_collective[] = {8, 8, 8};
  const size_t* sizes = is_one_rank(kernel) ? sizes_one_rank : sizes_collective;
  const size_t count = is_one_rank(kernel) ? 5 : 3;
  for (size_t i = 0; i < count; i++) {
    uint64_t value = 0;
    memcpy(&value, arguments[i], sizes[i]);
    copied.values.push_back(value);
  }
  return copied;
}

void run_kernel(const std::string& kernel, unsigned blocks, const Arguments& arguments) {
  count_kernel_started();
  if (is_one_rank(kernel)) {
    run_one_rank_reduce(kernel, arguments);
  } else {
    const uint64_t mask = channel_mask(arguments);
    std::vector<std::function<void()>> tasks;
    RunningKernel running;
    for (int channel = 0, block = 0; channel < 64 && block < static_cast<int>(blocks); channel++)
      if (mask >> channel & 1) tasks.push_back([&arguments, &running, channel, block = block++] {
        InKernel in(&running);
        run_block(arguments, channel, block);
      });
    run_together(std::move(tasks));
  }
  count_kernel_finished();
}

std::function<void()> kernel_task(const void* function, unsigned blocks, void** arguments, void** extra) {
  const std::string name = kernel_name(function);
  if (name.find("ncclDevKernel_") == std::string::npos && !is_one_rank(name))
    unsupported("launching %s", name.empty() ? "a kernel that is not NCCL's" : name.c_str());
  log(1, "launch %s with %u blocks", name.c_str(), blocks);
  auto copied = std::make_shared<Arguments>(copy_arguments(name, arguments, extra));
  return [=] { run_kernel(name, blocks, *copied); };
}

cudaError_t launch(const void* function, unsigned blocks, cudaStream_t stream, void** arguments, void** extra) {
  Stream::of(stream)->push(kernel_task(function, blocks, arguments, extra));
  return cudaSuccess;
}

}  // namespace standin

using namespace standin;

extern "C" {

// A kernel's host stub is its handle.
cudaError_t cudaGetFuncBySymbol(const void** function, const void* symbol) {
  *function = symbol;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 640;
  attributes->numRegs = 96;
  attributes->binaryVersion = attributes->ptxVersion = 80;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
cudaError_t cudaFuncSetAttribute(const void*, int, int) { return cudaSuccess; }

cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3, void** arguments, size_t, cudaStream_t stream) {
  return launch(function, grid.x * grid.y * grid.z, stream, arguments, nullptr);
}

#if NCCL_HAS_cudaLaunchConfig_st
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_st* config, const void* function, void** arguments) {
  const unsigned blocks = config->gridDim.x * config->gridDim.y * config->gridDim.z;
  return launch(function, blocks, static_cast<cudaStream_t>(config->stream), arguments, nullptr);
}
#endif

}  // extern "C"
