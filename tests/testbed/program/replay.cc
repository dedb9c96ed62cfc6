#include "replay.h"

#include "check.h"

namespace job {

CapturedSteps::CapturedSteps(Group& group, const std::vector<Operation>& operations) : group_(group) {
  CUDA(cudaStreamBeginCapture(group.stream, cudaStreamCaptureModeThreadLocal));
  for (const Operation& operation : operations) enqueue(operation, group);
  CUDA(cudaStreamEndCapture(group.stream, &graph_));
  CUDA(cudaGraphInstantiate(&executable_, graph_, 0));
}

CapturedSteps::~CapturedSteps() {
  CUDA(cudaGraphExecDestroy(executable_));
  CUDA(cudaGraphDestroy(graph_));
}

void CapturedSteps::replay() { CUDA(cudaGraphLaunch(executable_, group_.stream)); }

}  // namespace job
