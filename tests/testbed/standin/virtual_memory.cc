// Virtual memory management of the CUDA driver (cuMem*), with which NCCL joins GPUs of one host where it may (NCCL_CUMEM_ENABLE): memory,
// the addresses it is mapped at, and descriptors of it for other processes are separate things. There where TESTBED_CUMEM is set.
#include "virtual_memory.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>
#include <set>
#include <string>

#include "device.h"
#include "memory.h"

namespace standin {

namespace {

using Result = int;  // CUresult
using Handle = unsigned long long;

constexpr size_t kGranularity = size_t{2} << 20;  // as on GPUs

// CUmemAllocationProp.
struct Properties {
  int type, handle_types, location_type, location;
  void* unused;
  unsigned char flags[8];
};
static_assert(sizeof(Properties) == 32);
constexpr int kOnDevice = 1;  // CU_MEM_LOCATION_TYPE_DEVICE

// Memory that was created, or imported; its address is its handle. Gone when no handle and no mapping is left.
struct Physical {
  int fd;
  size_t size;
  Properties properties;
  int references;
};

struct Mapping {
  size_t size;
  Physical* memory;
};

std::mutex g_reserved_mutex;
// Never destroyed: other threads outlive main().
std::set<Physical*>& memories() {
  static auto* set = new std::set<Physical*>;
  return *set;
}
std::map<uintptr_t, Mapping>& mappings() {
  static auto* map = new std::map<uintptr_t, Mapping>;
  return *map;
}

Physical* known(Handle handle) {
  auto found = memories().find(reinterpret_cast<Physical*>(handle));
  return found == memories().end() ? nullptr : *found;
}

Handle add(int fd, size_t size, const Properties& properties) {
  auto* memory = new Physical{fd, size, properties, 1};
  memories().insert(memory);
  return reinterpret_cast<Handle>(memory);
}

void drop(Physical* memory) {
  if (--memory->references > 0) return;
  close(memory->fd);
  memories().erase(memory);
  delete memory;
}

Result create(Handle* handle, size_t size, const Properties* properties, unsigned long long) {
  if (size % kGranularity != 0) return cudaErrorInvalidValue;
  if (properties->location_type != kOnDevice) return cudaErrorNotSupported;  // host memory: NCCL falls back to /dev/shm
  const int fd = secret_memory(size);
  std::lock_guard<std::mutex> lock(g_reserved_mutex);
  *handle = add(fd, size, *properties);
  return cudaSuccess;
}

Result release_handle(Handle handle) {
  std::lock_guard<std::mutex> lock(g_reserved_mutex);
  Physical* memory = known(handle);
  if (!memory) return cudaErrorInvalidValue;
  drop(memory);
  return cudaSuccess;
}

Result retain_handle(Handle* handle, void* address) {
  std::lock_guard<std::mutex> lock(g_reserved_mutex);
  auto next = mappings().upper_bound(reinterpret_cast<uintptr_t>(address));
  if (next == mappings().begin()) return cudaErrorInvalidValue;
  --next;
  if (reinterpret_cast<uintptr_t>(address) >= next->first + next->second.size) return cudaErrorInvalidValue;
  next->second.memory->references++;
  *handle = reinterpret_cast<Handle>(next->second.memory);
  return cudaSuccess;
}

Result reserve(uintptr_t* address, size_t size, size_t, uintptr_t, unsigned long long) {
  // Some more, so that it can begin where a GPU would let it.
  const size_t more = size + kGranularity;
  void* pointer = mmap(nullptr, more, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pointer == MAP_FAILED) return cudaErrorMemoryAllocation;
  const auto begin = reinterpret_cast<uintptr_t>(pointer), at = (begin + kGranularity - 1) / kGranularity * kGranularity;
  if (at > begin) munmap(pointer, at - begin);
  if (begin + more > at + size) munmap(reinterpret_cast<void*>(at + size), begin + more - (at + size));
  *address = at;
  return cudaSuccess;
}

Result free_addresses(uintptr_t address, size_t size) {
  return munmap(reinterpret_cast<void*>(address), size) == 0 ? cudaSuccess : cudaErrorInvalidValue;
}

Result map(uintptr_t address, size_t size, size_t offset, Handle handle, unsigned long long) {
  std::lock_guard<std::mutex> lock(g_reserved_mutex);
  Physical* memory = known(handle);
  if (!memory || offset + size > memory->size) return cudaErrorInvalidValue;
  void* pointer = reinterpret_cast<void*>(address);
  if (mmap(pointer, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, static_cast<off_t>(offset)) == MAP_FAILED)
    return cudaErrorMemoryAllocation;
  memory->references++;
  mappings()[address] = {size, memory};
  note_allocation({address, size, MemoryKind::kDevice, current_device(), false});
  return cudaSuccess;
}

Result set_access(uintptr_t address, size_t size, const void*, size_t) {
  return mprotect(reinterpret_cast<void*>(address), size, PROT_READ | PROT_WRITE) == 0 ? cudaSuccess : cudaErrorInvalidValue;
}

Result unmap(uintptr_t address, size_t size) {
  std::lock_guard<std::mutex> lock(g_reserved_mutex);
  auto found = mappings().find(address);
  if (found == mappings().end() || found->second.size != size) return cudaErrorInvalidValue;
  // The addresses stay reserved.
  mmap(reinterpret_cast<void*>(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  forget_allocation(address);
  drop(found->second.memory);
  mappings().erase(found);
  return cudaSuccess;
}

Result export_handle(int* fd, Handle handle, int, unsigned long long) {
  std::lock_guard<std::mutex> lock(g_reserved_mutex);
  Physical* memory = known(handle);
  if (!memory) return cudaErrorInvalidValue;
  *fd = dup(memory->fd);
  return *fd >= 0 ? cudaSuccess : cudaErrorNotSupported;
}

Result import_handle(Handle* handle, void* descriptor, int handle_type) {
  const int fd = dup(static_cast<int>(reinterpret_cast<intptr_t>(descriptor)));
  struct stat status;
  if (fd < 0 || fstat(fd, &status) != 0) return cudaErrorInvalidValue;
  Properties properties{};
  properties.type = 1;  // pinned
  properties.handle_types = handle_type;
  properties.location_type = kOnDevice;
  properties.location = current_device();
  std::lock_guard<std::mutex> lock(g_reserved_mutex);
  *handle = add(fd, static_cast<size_t>(status.st_size), properties);
  return cudaSuccess;
}

Result get_granularity(size_t* granularity, const Properties*, int) {
  *granularity = kGranularity;
  return cudaSuccess;
}

Result get_properties(Properties* properties, Handle handle) {
  std::lock_guard<std::mutex> lock(g_reserved_mutex);
  Physical* memory = known(handle);
  if (!memory) return cudaErrorInvalidValue;
  *properties = memory->properties;
  return cudaSuccess;
}

}  // namespace

bool has_virtual_memory() {
  static const bool has = getenv("TESTBED_CUMEM");
  return has;
}

void* find_virtual_memory_function(const char* name) {
  static const std::map<std::string, void*> functions = {
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release_handle)},
      {"cuMemRetainAllocationHandle", reinterpret_cast<void*>(retain_handle)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(free_addresses)},
      {"cuMemMap", reinterpret_cast<void*>(map)},
      {"cuMemUnmap", reinterpret_cast<void*>(unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(set_access)},
      {"cuMemExportToShareableHandle", reinterpret_cast<void*>(export_handle)},
      {"cuMemImportFromShareableHandle", reinterpret_cast<void*>(import_handle)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(get_granularity)},
      {"cuMemGetAllocationPropertiesFromHandle", reinterpret_cast<void*>(get_properties)},
  };
  auto found = functions.find(name);
  return has_virtual_memory() && found != functions.end() ? found->second : nullptr;
}

}  // namespace standin
