#include "progress.h"

#include <nccl.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "operation.h"

namespace job {

namespace {

constexpr long kReportedInFull = 10;  // a broken run would otherwise fill the log

void say(int rank, const std::string& text) {
  printf("testjob rank %d %s\n", rank, text.c_str());
  fflush(stdout);
}

double seconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec + time.tv_nsec * 1e-9;
}

}  // namespace

void Progress::ready() {
  int version = 0;
  NCCL(ncclGetVersion(&version));
  char text[80];
  snprintf(text, sizeof text, "pid %d nccl %d.%d.%d ready", getpid(), version / 10000, version / 100 % 100, version % 100);
  say(rank_, text);
  last_ = seconds();
}

void Progress::iteration() {
  ++iterations_;
  const double before = last_;
  last_ = seconds();
  if (quiet_) return;
  std::string text = "iteration " + std::to_string(iterations_);
  if (timed_) text += " took " + std::to_string(last_ - before) + " at " + std::to_string(last_);
  say(rank_, text);
}

void Progress::holding() {
  say(rank_, "calls " + std::to_string(calls_made()));
  say(rank_, "holding after " + std::to_string(iterations_) + " iterations");
}

void Progress::done() {
  say(rank_, "calls " + std::to_string(calls_made()));
  say(rank_, "done " + std::to_string(iterations_) + " iterations, " + std::to_string(wrong_) + " wrong");
}

void Progress::note(const std::string& text) const { say(rank_, text + " at " + std::to_string(seconds())); }

void Progress::wrong(const std::string& what) {
  if (++wrong_ <= kReportedInFull) say(rank_, "wrong " + what);
}

}  // namespace job
