#include "control.h"

#include <math.h>
#include <string.h>
#include <time.h>

#include <atomic>
#include <random>

#include "standin.h"
#include "stream.h"

namespace standin {

namespace {

std::atomic<double> g_compute_slowdown{1.0};
std::atomic<double> g_slice_delay_us{0.0};
std::atomic<double> g_copy_rate{0.0};
std::atomic<bool> g_kernels_stalled{false};
std::atomic<bool> g_proxy_stalled{false};
std::atomic<double> g_proxy_delay_us{0.0}, g_proxy_delay_probability{0.0};
std::atomic<uint64_t> g_started{0}, g_finished{0};

void sleep_us(double microseconds) {
  if (microseconds <= 0) return;
  timespec left{static_cast<time_t>(microseconds / 1e6), static_cast<long>(fmod(microseconds, 1e6) * 1e3)};
  while (nanosleep(&left, &left) != 0) {
  }
}

constexpr double kStallPollUs = 2000;

}  // namespace

void stall_point(const volatile unsigned* abort_flag) {
  while (g_kernels_stalled.load(std::memory_order_relaxed) && !(abort_flag && *abort_flag)) sleep_us(kStallPollUs);
}

void slice_delay() { sleep_us(g_slice_delay_us.load(std::memory_order_relaxed)); }

void copy(void* to, const void* from, size_t bytes) {
  const double rate = g_copy_rate.load(std::memory_order_relaxed);
  if (rate > 0) sleep_us(static_cast<double>(bytes) / rate * 1e6);
  memmove(to, from, bytes);
}

void proxy_point() {
  while (g_proxy_stalled.load(std::memory_order_relaxed)) sleep_us(kStallPollUs);
  const double delay = g_proxy_delay_us.load(std::memory_order_relaxed);
  if (delay <= 0) return;
  static thread_local std::minstd_rand random{static_cast<unsigned>(time(nullptr))};
  if (std::uniform_real_distribution<double>{0, 1}(random) < g_proxy_delay_probability) sleep_us(delay);
}

void count_kernel_started() { ++g_started; }
void count_kernel_finished() { ++g_finished; }

}  // namespace standin

using namespace standin;

extern "C" {

cudaError_t standinLaunchCompute(double microseconds, cudaStream_t stream) {
  Stream::of(stream)->push([microseconds] {
    stall_point(nullptr);
    sleep_us(microseconds * g_compute_slowdown);
  });
  return cudaSuccess;
}
void standinSetComputeSlowdown(double factor) { g_compute_slowdown = factor; }
void standinSetSliceDelay(double microseconds) { g_slice_delay_us = microseconds; }
void standinSetCopyRate(double bytes_per_second) { g_copy_rate = bytes_per_second; }
void standinStallKernels(int stalled) { g_kernels_stalled = stalled != 0; }
void standinStallProxy(int stalled) { g_proxy_stalled = stalled != 0; }
void standinSetProxyDelay(double microseconds, double probability) {
  g_proxy_delay_us = microseconds;
  g_proxy_delay_probability = probability;
}
uint64_t standinKernelsStarted(void) { return g_started; }
uint64_t standinKernelsFinished(void) { return g_finished; }

}  // extern "C"
