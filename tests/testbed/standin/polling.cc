// Polling loops of NCCL's that would take all of a small machine's time. Its proxy progress thread calls sched_yield() without end
// while operations are open and nothing moves; its bootstrap calls recv() without blocking until the other ranks have got that far.
// With several ranks on two cores those loops mostly keep the ranks they wait for from running. Here a thread that keeps polling
// without doing anything in between sleeps for a moment, which to NCCL looks like a busy machine. What a proxy does shows in the
// bytes that it sends and receives; where it has no sockets (InfiniBand), and of other threads, in the time between two polls.
#include <dlfcn.h>
#include <errno.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "control.h"
#include "redirect.h"

namespace {

long now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000L + time.tv_nsec;
}

// One per thread and kind of poll.
class Throttle {
 public:
  // A poll that found nothing. Sleeps when there were many in a row; true if it did. By time a thread that is preempted in every
  // round, on a busy machine, always seems to have done something.
  bool nothing_found(bool by_time = true) {
    if (by_time && now_ns() - last_ > kWorkNs) reset();
    bool slept = false;
    if (++streak_ > kFreePolls) {
      const timespec time{0, sleep_ns_};
      nanosleep(&time, nullptr);
      if (sleep_ns_ < kLongestSleepNs) sleep_ns_ += sleep_ns_ / 4;
      slept = true;
    }
    last_ = now_ns();
    return slept;
  }
  void reset() {
    streak_ = 0;
    sleep_ns_ = kFirstSleepNs;
  }

 private:
  static constexpr long kWorkNs = 15'000;  // longer between two polls: the thread did something
  static constexpr int kFreePolls = 48;
  static constexpr long kFirstSleepNs = 20'000, kLongestSleepNs = 500'000;
  long last_ = 0, sleep_ns_ = kFirstSleepNs;
  int streak_ = 0;
};

// Known from where it yields; NCCL names its threads only if asked to.
thread_local bool t_proxy_progress = false;

thread_local bool t_moved_bytes = false;  // since its last sched_yield()
thread_local bool t_has_sockets = false;

template <typename Function>
Function next_of(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

int sched_yield(void) {
  static thread_local Throttle throttle;
  if (!t_proxy_progress) t_proxy_progress = standin::in_proxy_progress(__builtin_return_address(0));
  if (t_proxy_progress) standin::proxy_point();
  if (t_moved_bytes) throttle.reset();
  t_moved_bytes = false;
  if (!throttle.nothing_found(!(t_proxy_progress && t_has_sockets))) syscall(SYS_sched_yield);
  return 0;
}

ssize_t recv(int socket, void* buffer, size_t length, int flags) {
  static const auto next = next_of<ssize_t (*)(int, void*, size_t, int)>("recv");
  static thread_local Throttle throttle;
  const ssize_t got = next(socket, buffer, length, flags);
  t_has_sockets = true;
  t_moved_bytes |= got > 0;
  if (got >= 0 || errno != EAGAIN || !(flags & MSG_DONTWAIT)) {
    throttle.reset();
  } else if (!t_proxy_progress) {  // that one polls many sockets, and yields between its rounds
    throttle.nothing_found();
    errno = EAGAIN;
  }
  return got;
}

ssize_t send(int socket, const void* buffer, size_t length, int flags) {
  static const auto next = next_of<ssize_t (*)(int, const void*, size_t, int)>("send");
  const ssize_t sent = next(socket, buffer, length, flags);
  t_has_sockets = true;
  t_moved_bytes |= sent > 0;
  return sent;
}

}  // extern "C"
