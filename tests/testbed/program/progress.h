// What the job tells its launcher, one line each on standard output.
//   testjob rank R pid P nccl V ready             communicators exist, the loop begins
//   testjob rank R iteration I                    I iterations are complete
//   testjob rank R iteration I took S at T        the same with --time: seconds since the one before; T is CLOCK_MONOTONIC
//   testjob rank R TEXT at T                      a fault begins or ends, the watchdog ends the job
//   testjob rank R calls N                        before it holds or ends: collectives, sends and receives it has called
//   testjob rank R holding after I iterations     idle until SIGTERM
//   testjob rank R done I iterations, W wrong     the end; W results were not as expected
#pragma once

#include <atomic>
#include <string>

namespace job {

class Progress {
 public:
  Progress(int rank, bool quiet, bool timed) : rank_(rank), quiet_(quiet), timed_(timed) {}
  void ready();
  void iteration();
  void holding();
  void done();
  // Says what happened, e.g. that a fault began.
  void note(const std::string& text) const;
  void wrong(const std::string& what);
  long iterations() const { return iterations_; }
  long wrong_results() const { return wrong_; }

 private:
  int rank_;
  bool quiet_, timed_;
  double last_ = 0;
  std::atomic<long> iterations_{0};  // read by the watchdog
  long wrong_ = 0;
};

}  // namespace job
