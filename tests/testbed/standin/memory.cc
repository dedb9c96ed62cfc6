#include "memory.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "control.h"
#include "cuda_runtime.h"
#include "device.h"
#include "log.h"
#include "nccl_layout.h"
#include "stream.h"

namespace standin {

namespace {

constexpr size_t kPage = 4096;
std::mutex g_mutex;
std::map<uintptr_t, Allocation>& allocations() {
  static auto* map = new std::map<uintptr_t, Allocation>;  // never destroyed: other threads outlive main()
  return *map;
}

}  // namespace

void* map_shared(int fd, size_t bytes) {
  void* pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (pointer == MAP_FAILED) return nullptr;
  const auto base = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(g_mutex);
  allocations()[base] = Allocation{base, bytes, MemoryKind::kDevice, current_device(), true, fd};
  return pointer;
}

int secret_memory(size_t bytes) {
  const int fd = static_cast<int>(syscall(SYS_memfd_secret, O_CLOEXEC));
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0)
    unsupported("direct access between GPUs: this kernel has no secret memory, or no more of it (memfd_secret)");
  return fd;
}

void note_allocation(const Allocation& allocation) {
  std::lock_guard<std::mutex> lock(g_mutex);
  allocations()[allocation.base] = allocation;
}

void forget_allocation(uintptr_t base) {
  std::lock_guard<std::mutex> lock(g_mutex);
  allocations().erase(base);
}

void* allocate(size_t bytes, MemoryKind kind) {
  const size_t size = (bytes + kPage - 1) / kPage * kPage;
  static const bool direct = getenv("TESTBED_P2P");
  if (direct && kind == MemoryKind::kDevice) {
    return map_shared(secret_memory(size), size);
  }
  void* pointer = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pointer == MAP_FAILED) return nullptr;
  const auto base = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(g_mutex);
  allocations()[base] = Allocation{base, size, kind, current_device(), true};
  return pointer;
}

bool release(void* pointer) {
  Allocation allocation;
  {
    std::lock_guard<std::mutex> lock(g_mutex);
    auto found = allocations().find(reinterpret_cast<uintptr_t>(pointer));
    if (found == allocations().end()) return false;
    allocation = found->second;
    allocations().erase(found);
  }
  if (allocation.owned) munmap(pointer, allocation.size);
  if (allocation.fd >= 0) close(allocation.fd);
  return true;
}

bool find_allocation(const void* pointer, Allocation* found) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(g_mutex);
  auto next = allocations().upper_bound(address);
  if (next == allocations().begin()) return false;
  --next;
  if (address >= next->second.base + next->second.size) return false;
  *found = next->second;
  return true;
}

}  // namespace standin

using namespace standin;

extern "C" {

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  *pointer = bytes ? allocate(bytes, MemoryKind::kDevice) : nullptr;
  return *pointer || !bytes ? cudaSuccess : remember(cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaMallocFromPoolAsync(void** pointer, size_t bytes, void*, cudaStream_t) { return cudaMalloc(pointer, bytes); }

cudaError_t cudaFree(void* pointer) {
  if (!pointer) return cudaSuccess;
  return release(pointer) ? cudaSuccess : remember(cudaErrorInvalidValue);
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  Stream::of(stream)->push([pointer] { release(pointer); });
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned int) {
  *pointer = bytes ? allocate(bytes, MemoryKind::kHost) : nullptr;
  return *pointer || !bytes ? cudaSuccess : remember(cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, 0); }
cudaError_t cudaFreeHost(void* pointer) { return cudaFree(pointer); }

cudaError_t cudaHostRegister(void* pointer, size_t bytes, unsigned int) {
  const auto base = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> lock(g_mutex);
  allocations()[base] = Allocation{base, bytes, MemoryKind::kHost, current_device(), false};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* pointer) { return release(pointer) ? cudaSuccess : remember(cudaErrorInvalidValue); }

cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned int) {
  *device = host;
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = kDeviceMemory;
  return cudaSuccess;
}

// Pools are only ever passed back to cudaMallocFromPoolAsync: any non-null handle will do.
cudaError_t cudaMemPoolCreate(void** pool, const void*) {
  static int token;
  *pool = &token;
  return cudaSuccess;
}
cudaError_t cudaMemPoolDestroy(void*) { return cudaSuccess; }
cudaError_t cudaMemPoolSetAttribute(void*, int, void*) { return cudaSuccess; }

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes* attributes, const void* pointer) {
  memset(attributes, 0, sizeof *attributes);
  enum { kUnregistered = 0, kHost = 1, kDevice = 2 };  // cudaMemoryType
  Allocation allocation;
  if (!find_allocation(pointer, &allocation)) {
    attributes->type = kUnregistered;
    attributes->device = -2;  // cudaInvalidDeviceId
    attributes->hostPointer = const_cast<void*>(pointer);
    return cudaSuccess;
  }
  const bool host = allocation.kind == MemoryKind::kHost;
  attributes->type = host ? kHost : kDevice;
  attributes->device = allocation.device;
  attributes->devicePointer = const_cast<void*>(pointer);
  attributes->hostPointer = host ? const_cast<void*>(pointer) : nullptr;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  Stream::of(nullptr)->synchronize();
  copy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  Allocation allocation;
  if (!find_allocation(from, &allocation)) {
    // CUDA stages pageable memory before the call returns: the source may be a local variable.
    auto staged = std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    Stream::of(stream)->push([=] { copy(to, staged->data(), bytes); });
  } else {
    Stream::of(stream)->push([=] { copy(to, from, bytes); });
  }
  return cudaSuccess;
}

cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  Stream::of(nullptr)->synchronize();
  memset(pointer, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t stream) {
  Stream::of(stream)->push([=] { memset(pointer, value, bytes); });
  return cudaSuccess;
}

}  // extern "C"
