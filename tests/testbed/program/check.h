// Errors end the process with one line that names the call.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

namespace job {

[[noreturn]] inline void fail_nccl(const char* call, ncclResult_t result, ncclComm_t comm) {
  fprintf(stderr, "testjob pid %d: %s: %s (%s)\n", getpid(), call, ncclGetErrorString(result), ncclGetLastError(comm));
  exit(1);
}

inline void check_nccl(const char* call, ncclResult_t result) {
  if (result != ncclSuccess && result != ncclInProgress) fail_nccl(call, result, nullptr);
}

inline void check_cuda(const char* call, cudaError_t result) {
  if (result == cudaSuccess) return;
  fprintf(stderr, "testjob pid %d: %s: %s\n", getpid(), call, cudaGetErrorString(result));
  exit(1);
}

}  // namespace job

#define NCCL(call) ::job::check_nccl(#call, call)
#define CUDA(call) ::job::check_cuda(#call, call)
