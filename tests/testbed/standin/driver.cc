// The few CUDA driver functions NCCL looks up by name (ncclCudaLibraryInit() in src/misc/cudawrap.cc). Those not listed do not
// exist, which NCCL takes as a driver without that feature (multicast, DMA-BUF; virtual memory unless asked for: virtual_memory.cc).
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <string>
#include <unordered_map>

#include "cuda_runtime.h"
#include "device.h"
#include "launch.h"
#include "log.h"
#include "memory.h"
#include "nccl_layout.h"
#include "virtual_memory.h"

using namespace standin;

namespace {

using Result = int;  // CUresult: the values used here equal those of cudaError_t

Result device_get(int* device, int ordinal) {
  *device = ordinal;
  return ordinal >= 0 && ordinal < device_count() ? cudaSuccess : cudaErrorInvalidDevice;
}

// CUdevice_attribute and cudaDeviceAttr share their numbering; what matters to NCCL here is that most are 0.
extern "C" cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int device);
Result device_get_attribute(int* value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }

Result device_get_uuid(char* uuid, int device) {
  memset(uuid, 0, 16);
  memcpy(uuid, "cpu-testbed", 11);
  uuid[15] = static_cast<char>(bus_number(device));
  return cudaSuccess;
}

Result get_error_text(Result error, const char** text) {
  static thread_local char buffer[40];
  snprintf(buffer, sizeof buffer, "CUresult %d (CPU testbed)", error);
  *text = buffer;
  return cudaSuccess;
}

Result mem_get_address_range(uintptr_t* base, size_t* size, uintptr_t pointer) {
  Allocation allocation;
  if (!find_allocation(reinterpret_cast<void*>(pointer), &allocation)) return cudaErrorInvalidValue;
  if (base) *base = allocation.base;
  if (size) *size = allocation.size;
  return cudaSuccess;
}

int g_context;  // there is one context per process; its address is its handle

Result ctx_create(void** context, unsigned, int) {
  *context = &g_context;
  return cudaSuccess;
}
Result ctx_destroy(void*) { return cudaSuccess; }
Result ctx_get_current(void** context) { return ctx_create(context, 0, 0); }
Result ctx_set_current(void*) { return cudaSuccess; }
Result ctx_get_device(int* device) { return cudaGetDevice(device); }

Result pointer_get_attribute(void* value, int attribute, uintptr_t pointer) {
  Allocation allocation;
  if (!find_allocation(reinterpret_cast<void*>(pointer), &allocation)) return cudaErrorInvalidValue;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *static_cast<int*>(value) = allocation.device; return cudaSuccess;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *static_cast<int*>(value) = allocation.kind == MemoryKind::kHost ? 1 : 2; return cudaSuccess;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *static_cast<int*>(value) = 0; return cudaSuccess;
    default: log(1, "cuPointerGetAttribute %d", attribute); return cudaErrorNotSupported;
  }
}

Result launch_kernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned, unsigned, unsigned, unsigned,
                     cudaStream_t stream, void** arguments, void** extra) {
  return launch(function, grid_x * grid_y * grid_z, stream, arguments, extra);
}

#if NCCL_HAS_CUlaunchConfig_st
Result launch_kernel_ex(const CUlaunchConfig_st* config, void* function, void** arguments, void** extra) {
  const unsigned grid = config->gridDimX * config->gridDimY * config->gridDimZ;
  return launch(function, grid, static_cast<cudaStream_t>(config->hStream), arguments, extra);
}
#endif

void* find(const char* name) {
  static const std::unordered_map<std::string, void*> functions = {
      {"cuDeviceGet", reinterpret_cast<void*>(device_get)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(device_get_attribute)},
      {"cuDeviceGetUuid", reinterpret_cast<void*>(device_get_uuid)},
      {"cuGetErrorString", reinterpret_cast<void*>(get_error_text)},
      {"cuGetErrorName", reinterpret_cast<void*>(get_error_text)},
      {"cuMemGetAddressRange", reinterpret_cast<void*>(mem_get_address_range)},
      {"cuCtxCreate", reinterpret_cast<void*>(ctx_create)},
      {"cuCtxDestroy", reinterpret_cast<void*>(ctx_destroy)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(ctx_get_current)},
      {"cuCtxSetCurrent", reinterpret_cast<void*>(ctx_set_current)},
      {"cuCtxGetDevice", reinterpret_cast<void*>(ctx_get_device)},
      {"cuPointerGetAttribute", reinterpret_cast<void*>(pointer_get_attribute)},
      {"cuLaunchKernel", reinterpret_cast<void*>(launch_kernel)},
#if NCCL_HAS_CUlaunchConfig_st
      {"cuLaunchKernelEx", reinterpret_cast<void*>(launch_kernel_ex)},
#endif
  };
  auto found = functions.find(name);
  void* function = found == functions.end() ? find_virtual_memory_function(name) : found->second;
  log(2, "driver function %s %s", name, function ? "found" : "does not exist");
  return function;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long, int* result) {
  *function = find(name);
  if (result) *result = *function ? 0 : 1;  // cudaDriverEntryPointSuccess, …SymbolNotFound
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned int, unsigned long long flags, int* result) {
  return cudaGetDriverEntryPoint(name, function, flags, result);
}

}  // extern "C"
