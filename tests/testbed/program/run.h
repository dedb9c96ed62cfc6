// One rank from its start to its end: what main does, and a program in another language that loads the job as a library (embedded.cc).
#pragma once

#include <memory>

#include "options.h"
#include "progress.h"
#include "shape.h"

namespace job {

class Run {
 public:
  // Makes the communicators. Ends the process on a mistake in the options.
  Run(int argc, char** argv);
  // One iteration; false once there are no more, or SIGTERM has come.
  bool iterate();
  // The exit status. Does not return where the rank was asked to stop.
  int finish();

 private:
  const Options options_;
  Progress progress_;
  Faults faults_;
  std::unique_ptr<Shape> shape_;
};

}  // namespace job
