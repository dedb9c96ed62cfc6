// The counters of profiler() in src/device/common.h (v2.27.5-1) and of the kernel loop of v2.26.2-1. The made-up GPU's global timer is
// the host's CLOCK_MONOTONIC plus an hour, so that nobody takes the one for the other.
#include "profile.h"

#include <stdint.h>
#include <time.h>

namespace standin {

namespace {

[[maybe_unused]] uint64_t global_timer() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (static_cast<uint64_t>(now.tv_sec) + 3600) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

#if NCCL_HAS_ncclDevProfiler
void say(ncclDevProfiler* words, uint64_t before, int channel, const std::vector<bool>& profiled) {
  constexpr uint64_t kEvents = sizeof words->data / sizeof words->data[0];  // MAX_PROFILER_EVENTS_PER_CHANNEL
  for (size_t index = 0; index < profiled.size(); index++) {
    if (!profiled[index]) continue;
    auto& word = words[channel].data[(before + 1 + index) % kEvents];
    word.timestamp = global_timer();
    __atomic_store_n(&word.counter, before + 1 + index, __ATOMIC_RELEASE);
  }
}
#elif NCCL_HAS_ncclDevChannel_workCounter
void say(uint64_t* words, uint64_t before, int channel, const std::vector<bool>& profiled) {
  __atomic_store_n(&words[channel], before + profiled.size(), __ATOMIC_RELEASE);
}
#endif

}  // namespace

#if NCCL_HAS_ncclDevChannel_workCounter
void say_started(const KernelComm& comm, const ncclDevChannel& channel, int channel_id, const std::vector<bool>& profiled) {
  say(comm.workStarted, channel.workCounter, channel_id, profiled);
}
void say_completed(const KernelComm& comm, const ncclDevChannel& channel, int channel_id, const std::vector<bool>& profiled) {
  say(comm.workCompleted, channel.workCounter, channel_id, profiled);
}
#else
void say_started(const KernelComm&, const ncclDevChannel&, int, const std::vector<bool>&) {}
void say_completed(const KernelComm&, const ncclDevChannel&, int, const std::vector<bool>&) {}
#endif

}  // namespace standin
