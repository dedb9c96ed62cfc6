// The one "GPU" of a process, its errors and its place on the made-up PCI bus.
#pragma once

#include <stddef.h>

#include "cuda_runtime.h"

namespace standin {

constexpr size_t kDeviceMemory = size_t{16} << 30;
constexpr int kComputeMajor = 8, kComputeMinor = 0;  // an A100: no NVLS, no thread block clusters, no FP8 reductions
constexpr int kMultiprocessors = 108;
constexpr int kDriverVersion = 12040;

int current_device();
// Devices of this process (TESTBED_DEVICES, 1 if unset) and the bus number of a device (TESTBED_BUS + device + 16).
int device_count();
int bus_number(int device);
// Remembers the error for cudaGetLastError and returns it.
cudaError_t remember(cudaError_t error);

}  // namespace standin
