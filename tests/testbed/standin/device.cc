#include "device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "log.h"
#include "nccl_layout.h"
#include "virtual_memory.h"

namespace standin {

namespace {

thread_local int t_device = 0;
thread_local cudaError_t t_last_error = cudaSuccess;

int from_environment(const char* name, int fallback) {
  const char* text = getenv(name);
  return text ? atoi(text) : fallback;
}

constexpr int kVirtualMemoryManagement = 102;  // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, of the driver alone
constexpr char kName[] = "ncclwatch testbed (CPU)";

}  // namespace

int current_device() { return t_device; }

int device_count() {
  static const int count = from_environment("TESTBED_DEVICES", 1);
  return count;
}

int bus_number(int device) {
  static const int first = 0x10 + from_environment("TESTBED_BUS", 0);
  return first + device;
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) t_last_error = error;
  return error;
}

}  // namespace standin

using namespace standin;

extern "C" {

cudaError_t cudaDriverGetVersion(int* version) {
  *version = kDriverVersion;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) { return cudaDriverGetVersion(version); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count();
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = t_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return remember(cudaErrorInvalidDevice);
  t_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = kComputeMajor; break;
    case cudaDevAttrComputeCapabilityMinor: *value = kComputeMinor; break;
    case cudaDevAttrMultiProcessorCount: *value = kMultiprocessors; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 166912; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    case cudaDevAttrCanMapHostMemory: *value = 1; break;
    case cudaDevAttrCanUseHostPointerForRegisteredMem: *value = 1; break;
    case cudaDevAttrPciBusId: *value = bus_number(device); break;
    case kVirtualMemoryManagement: *value = has_virtual_memory(); break;
    default: *value = 0;  // everything else (GPUDirect, multicast, fabric, …) does not exist here
  }
  log(2, "attribute %d of device %d is %d", attribute, device, *value);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", bus_number(device));
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* text) {
  unsigned domain, bus;
  if (sscanf(text, "%x:%x", &domain, &bus) != 2) return remember(cudaErrorInvalidValue);
  *device = static_cast<int>(bus) - bus_number(0);
  return *device >= 0 && *device < device_count() ? cudaSuccess : remember(cudaErrorInvalidDevice);
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned int) { return remember(cudaErrorPeerAccessUnsupported); }
cudaError_t cudaDeviceSetLimit(int, size_t) { return cudaSuccess; }

cudaError_t cudaGetDeviceProperties_v2(struct cudaDeviceProp* properties, int device) {
  memset(properties, 0, sizeof *properties);
  snprintf(properties->name, sizeof properties->name, "%s", kName);
  properties->totalGlobalMem = kDeviceMemory;
  properties->major = kComputeMajor;
  properties->minor = kComputeMinor;
  properties->multiProcessorCount = kMultiprocessors;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 166912;
  properties->pciBusID = bus_number(device);
  properties->unifiedAddressing = 1;
  properties->canMapHostMemory = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp* properties, int device) {
  return cudaGetDeviceProperties_v2(properties, device);
}

cudaError_t cudaGetLastError(void) {
  const cudaError_t error = t_last_error;
  t_last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return t_last_error; }
const char* cudaGetErrorString(cudaError_t error) {
  static thread_local char text[48];
  snprintf(text, sizeof text, "cudaError %d (CPU testbed)", static_cast<int>(error));
  return text;
}
const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

}  // extern "C"
