#include "shape.h"

#include <unistd.h>

#include <set>

#include "check.h"
#include "standin.h"

namespace job {

std::map<std::string, ShapeMaker>& shapes() {
  static std::map<std::string, ShapeMaker> all;
  return all;
}

void prepare_input(const Context& context, Operation operation, Group& group) {
  operation.salt += context.faults.corrupts();
  prepare(operation, group);
}

void run_steps(const Context& context, const std::vector<Step>& steps) {
  const Options& options = context.options;
  std::set<Group*> groups;
  for (const Step& step : steps) groups.insert(step.group);
  // A group's buffers are used by one verified operation at a time.
  for (const Step& step : steps) {
    if (options.verify) {
      prepare_input(context, step.operation, *step.group);
    } else {
      step.group->reserve(buffer_bytes(step.operation, step.group->ranks));
    }
    if (options.compute_us > 0) CUDA(standinLaunchCompute(options.compute_us, step.group->stream));
    for (int i = 0; i < options.burst; i++) {
      issue(context.faults, step.operation, *step.group);
      if (i == 0 && options.burst_after_us > 0) usleep(static_cast<useconds_t>(options.burst_after_us));
    }
    if (!options.verify) continue;
    step.group->synchronize();
    const std::string problem = verify(step.operation, *step.group);
    if (!problem.empty()) context.progress.wrong(problem);
  }
  for (Group* group : groups) group->synchronize();
}

}  // namespace job
