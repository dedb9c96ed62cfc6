// Virtual memory management of the CUDA driver: memory that is created, mapped and given to other processes by a descriptor.
#pragma once

namespace standin {

// Whether the driver has it (TESTBED_CUMEM).
bool has_virtual_memory();
// A function of it by name; null where there is none.
void* find_virtual_memory_function(const char* name);

}  // namespace standin
