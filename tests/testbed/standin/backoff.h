// Waiting without burning the machine's few cores: spin briefly, then yield, then sleep for longer and longer.
#pragma once

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace standin {

class Backoff {
 public:
  void pause() {
    ++rounds_;
    if (rounds_ < kSpins) {
#if defined(__aarch64__)
      asm volatile("yield");
#else
      __builtin_ia32_pause();
#endif
    } else if (rounds_ < kYields) {
      syscall(SYS_sched_yield);  // the library's own sched_yield() is for NCCL's threads (polling.cc)
    } else {
      const timespec time{0, sleep_ns_};
      nanosleep(&time, nullptr);
      if (sleep_ns_ < kLongestSleepNs) sleep_ns_ += sleep_ns_ / 4;
    }
  }

 private:
  static constexpr int kSpins = 64;
  static constexpr int kYields = 96;
  static constexpr long kLongestSleepNs = 2'000'000;
  int rounds_ = 0;
  long sleep_ns_ = 20'000;
};

}  // namespace standin
