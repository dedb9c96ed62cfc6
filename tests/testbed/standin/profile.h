// What NCCL's kernels tell its profiler: per channel, the number of the work last begun and last finished, with the GPU's time.
#pragma once

#include <vector>

#include "nccl_layout.h"

namespace standin {

// `profiled` says of each work of the batch whether the profiler wants it. Up to 2.25 there is nothing to tell.
void say_started(const KernelComm& comm, const ncclDevChannel& channel, int channel_id, const std::vector<bool>& profiled);
void say_completed(const KernelComm& comm, const ncclDevChannel& channel, int channel_id, const std::vector<bool>& profiled);

}  // namespace standin
