// "Device" memory is host memory; what is known of every allocation. It is anonymous, unless GPUs have direct access to each other
// (TESTBED_P2P): then it can be mapped by other processes of the job, and read by no debugger, as real device memory can not
// (memfd_secret).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace standin {

enum class MemoryKind { kHost, kDevice };

struct Allocation {
  uintptr_t base;
  size_t size;
  MemoryKind kind;
  int device;
  bool owned;   // false: registered by the program, not allocated here
  int fd = -1;  // of memory that other processes can open by a handle (ipc.cc)
};

void* allocate(size_t bytes, MemoryKind kind);
bool release(void* pointer);
// Maps what another process has allocated; the descriptor is this process's from now on. Null if that fails.
void* map_shared(int fd, size_t bytes);
// Memory that no debugger can read, and other processes can map. Ends the process where there is none.
int secret_memory(size_t bytes);
// What is mapped elsewhere (virtual_memory.cc) is an allocation too, until it is forgotten.
void note_allocation(const Allocation& allocation);
void forget_allocation(uintptr_t base);
// The allocation that holds this address.
bool find_allocation(const void* pointer, Allocation* found);

}  // namespace standin
