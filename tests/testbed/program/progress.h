// What the job tells its launcher, one line each on standard output.
//   testjob rank R pid P nccl V ready             communicators exist, the loop begins
//   testjob rank R iteration I                    I iterations are complete
//   testjob rank R holding after I iterations     idle until SIGTERM
//   testjob rank R done I iterations, W wrong     the end; W results were not as expected
#pragma once

#include <string>

namespace job {

class Progress {
 public:
  Progress(int rank, bool quiet) : rank_(rank), quiet_(quiet) {}
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
  bool quiet_;
  long iterations_ = 0;
  long wrong_ = 0;
};

}  // namespace job
