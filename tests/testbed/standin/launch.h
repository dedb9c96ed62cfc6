// From a kernel launch by NCCL to its execution on a stream.
#pragma once

#include <functional>

#include "cuda_runtime.h"

namespace standin {

// The handle stands for a kernel of libnccl (cudaGetFuncBySymbol, or the address of its host stub). Arguments come as an array of
// pointers or as one buffer (`extra`), as cuLaunchKernel specifies; they are copied before this returns.
std::function<void()> kernel_task(const void* function, unsigned blocks, void** arguments, void** extra);
// Puts it on a stream.
cudaError_t launch(const void* function, unsigned blocks, cudaStream_t stream, void** arguments, void** extra);

}  // namespace standin
