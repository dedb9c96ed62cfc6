// Faults and speed of the made-up GPU, set by the job through standin.h.
#pragma once

#include <stddef.h>

#include <atomic>

namespace standin {

// A kernel of NCCL that runs: whether it has moved anything yet.
struct RunningKernel {
  std::atomic<bool> moved{false};
};
// While it lives, this thread runs a block of that kernel.
class InKernel {
 public:
  explicit InKernel(RunningKernel* kernel);
  ~InKernel();
  InKernel(const InKernel&) = delete;
  InKernel& operator=(const InKernel&) = delete;
};
// The kernel that this thread runs a block of has moved a slice.
void note_moved();

// Returns once kernels may go on: blocks while the GPU is stalled, unless the communicator is being aborted.
void stall_point(const volatile unsigned* abort_flag);
// Time a communication kernel spends per slice beyond its work.
void slice_delay();
// Copies like a DMA engine of the configured rate.
void copy(void* to, const void* from, size_t bytes);
// A pause asked of the proxy progress thread, called each time it yields.
void proxy_point();
void count_kernel_started();
void count_kernel_finished();

}  // namespace standin
