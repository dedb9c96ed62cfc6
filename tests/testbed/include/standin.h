// What the CUDA stand-in offers beyond the CUDA runtime API: compute kernels that only take time, and faults to inject.
// A real GPU has no such calls; the testbed's job uses them to play a training step and its accidents.
#pragma once

#include <stdint.h>

#include "cuda_runtime.h"

#ifdef __cplusplus
extern "C" {
#endif

// Put a kernel on the stream that computes nothing and takes this long (it sleeps; the CPU is free meanwhile).
cudaError_t standinLaunchCompute(double microseconds, cudaStream_t stream);

// How much longer compute kernels take (1 = as asked).
void standinSetComputeSlowdown(double factor);
// Time added to every slice a communication kernel moves (a GPU with less power, a slow copy over PCIe).
void standinSetSliceDelay(double microseconds);
// Bytes per second of copies between host and device; 0 = as fast as the machine.
void standinSetCopyRate(double bytesPerSecond);
// While set, communication kernels neither consume nor produce: the GPU is stuck, the host is not.
void standinStallKernels(int stalled);
// Where the GPU stalled: nowhere yet; between two of NCCL's kernels; in one that has not moved anything; in the middle of one.
enum { STANDIN_NOT_STALLED, STANDIN_STALLED_BETWEEN, STANDIN_STALLED_AT_BEGIN, STANDIN_STALLED_INSIDE };
int standinStalledWhere(void);
// While set, NCCL's proxy progress thread does not run on once it next yields.
void standinStallProxy(int stalled);
// The proxy progress thread sleeps this long with this probability each time it yields.
void standinSetProxyDelay(double microseconds, double probability);
// The proxy progress thread sleeps this long at random moments, on average so far apart; 0 = never.
void standinSetProxyPauses(double microseconds, double apartMicroseconds);
// Kernels of NCCL that have been started and finished since the process began.
uint64_t standinKernelsStarted(void);
uint64_t standinKernelsFinished(void);

#ifdef __cplusplus
}
#endif
