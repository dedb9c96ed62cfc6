// Running one of NCCL's kernels: what its thread blocks do, from the arguments of the launch.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

#include "cuda_runtime.h"

namespace standin {

// Arguments of a launch, copied at the time of the launch.
struct Arguments {
  std::vector<uint64_t> values;  // one word each (kernels up to 2.21, and oneRankReduce)
  std::vector<char> buffer;      // the parameter buffer (from 2.22 on); 16-byte aligned content
};

// Bytes of the array-of-pointers form that belong to this kernel.
Arguments copy_arguments(const std::string& kernel, void** arguments, void** extra);
// Runs on a stream's thread and returns when all blocks have ended.
void run_kernel(const std::string& kernel, unsigned blocks, const Arguments& arguments);

// One thread block of a collective kernel; which of the two a release has depends on its work descriptors.
uint64_t channel_mask(const Arguments& arguments);
void run_block(const Arguments& arguments, int channel, int block);

}  // namespace standin
