// What is known of the libnccl that the process has loaded.
#pragma once

#include <string>

namespace standin {

// Name of the kernel whose host stub is at this address; empty if there is none.
std::string kernel_name(const void* stub);

// Whether an address lies in the function that NCCL's proxy progress thread runs.
bool in_proxy_progress(const void* address);

}  // namespace standin
