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
std::atomic<int> g_stalled_where{STANDIN_NOT_STALLED};
thread_local RunningKernel* t_kernel = nullptr;
std::atomic<bool> g_proxy_stalled{false};
std::atomic<double> g_proxy_delay_us{0.0}, g_proxy_delay_probability{0.0};
std::atomic<double> g_proxy_pause_us{0.0}, g_proxy_pauses_apart_us{0.0};
std::atomic<uint64_t> g_started{0}, g_finished{0};

void sleep_us(double microseconds) {
  if (microseconds <= 0) return;
  timespec left{static_cast<time_t>(microseconds / 1e6), static_cast<long>(fmod(microseconds, 1e6) * 1e3)};
  while (nanosleep(&left, &left) != 0) {
  }
}

constexpr double kStallPollUs = 2000;

// What the stalled GPU is seen to be in: of several streams the one that is deepest in an operation.
void note_stalled() {
  const int here = !t_kernel ? STANDIN_STALLED_BETWEEN : t_kernel->moved ? STANDIN_STALLED_INSIDE : STANDIN_STALLED_AT_BEGIN;
  int known = g_stalled_where;
  while (known < here && !g_stalled_where.compare_exchange_weak(known, here)) {
  }
}

double now_us() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e6 + time.tv_nsec * 1e-3;
}

std::minstd_rand& proxy_random() {
  static thread_local std::minstd_rand random{static_cast<unsigned>(time(nullptr))};
  return random;
}

// Sleeps when the next of the random moments has come.
void proxy_pause() {
  static thread_local double next = 0;
  const double pause = g_proxy_pause_us.load(std::memory_order_relaxed);
  if (pause <= 0) return;
  const auto later = [] { return now_us() + std::exponential_distribution<double>{1 / g_proxy_pauses_apart_us}(proxy_random()); };
  if (next == 0) next = later();
  if (now_us() < next) return;
  sleep_us(pause);
  next = later();
}

}  // namespace

InKernel::InKernel(RunningKernel* kernel) { t_kernel = kernel; }
InKernel::~InKernel() { t_kernel = nullptr; }
void note_moved() {
  if (t_kernel) t_kernel->moved.store(true, std::memory_order_relaxed);
}

void stall_point(const volatile unsigned* abort_flag) {
  while (g_kernels_stalled.load(std::memory_order_relaxed) && !(abort_flag && *abort_flag)) {
    note_stalled();
    sleep_us(kStallPollUs);
  }
}

void slice_delay() { sleep_us(g_slice_delay_us.load(std::memory_order_relaxed)); }

void copy(void* to, const void* from, size_t bytes) {
  const double rate = g_copy_rate.load(std::memory_order_relaxed);
  if (rate > 0) sleep_us(static_cast<double>(bytes) / rate * 1e6);
  memmove(to, from, bytes);
}

void proxy_point() {
  while (g_proxy_stalled.load(std::memory_order_relaxed)) sleep_us(kStallPollUs);
  proxy_pause();
  const double delay = g_proxy_delay_us.load(std::memory_order_relaxed);
  if (delay > 0 && std::uniform_real_distribution<double>{0, 1}(proxy_random()) < g_proxy_delay_probability) sleep_us(delay);
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
void standinStallKernels(int stalled) {
  g_stalled_where = STANDIN_NOT_STALLED;
  g_kernels_stalled = stalled != 0;
}
int standinStalledWhere(void) { return g_stalled_where; }
void standinStallProxy(int stalled) { g_proxy_stalled = stalled != 0; }
void standinSetProxyDelay(double microseconds, double probability) {
  g_proxy_delay_us = microseconds;
  g_proxy_delay_probability = probability;
}
void standinSetProxyPauses(double microseconds, double apart_microseconds) {
  g_proxy_pauses_apart_us = apart_microseconds;
  g_proxy_pause_us = microseconds;
}
uint64_t standinKernelsStarted(void) { return g_started; }
uint64_t standinKernelsFinished(void) { return g_finished; }

}  // extern "C"
