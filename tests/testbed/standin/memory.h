// "Device" memory is anonymous host memory; what is known of every allocation.
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
  bool owned;  // false: registered by the program, not allocated here
};

void* allocate(size_t bytes, MemoryKind kind);
bool release(void* pointer);
// The allocation that holds this address.
bool find_allocation(const void* pointer, Allocation* found);

}  // namespace standin
