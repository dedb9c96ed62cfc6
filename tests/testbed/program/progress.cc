#include "progress.h"

#include <nccl.h>
#include <stdio.h>
#include <unistd.h>

#include "check.h"

namespace job {

namespace {

constexpr long kReportedInFull = 10;  // a broken run would otherwise fill the log

void say(int rank, const std::string& text) {
  printf("testjob rank %d %s\n", rank, text.c_str());
  fflush(stdout);
}

}  // namespace

void Progress::ready() {
  int version = 0;
  NCCL(ncclGetVersion(&version));
  char text[80];
  snprintf(text, sizeof text, "pid %d nccl %d.%d.%d ready", getpid(), version / 10000, version / 100 % 100, version % 100);
  say(rank_, text);
}

void Progress::iteration() {
  ++iterations_;
  if (!quiet_) say(rank_, "iteration " + std::to_string(iterations_));
}

void Progress::holding() { say(rank_, "holding after " + std::to_string(iterations_) + " iterations"); }

void Progress::done() { say(rank_, "done " + std::to_string(iterations_) + " iterations, " + std::to_string(wrong_) + " wrong"); }

void Progress::note(const std::string& text) const { say(rank_, text); }

void Progress::wrong(const std::string& what) {
  if (++wrong_ <= kReportedInFull) say(rank_, "wrong " + what);
}

}  // namespace job
