#include "replay.h"

#include "check.h"

namespace job {

CapturedCalls::CapturedCalls(Group& group, const std::function<void()>& calls) : group_(group) {
  CUDA(cudaStreamBeginCapture(group.stream, cudaStreamCaptureModeThreadLocal));
  calls();
  CUDA(cudaStreamEndCapture(group.stream, &graph_));
  CUDA(cudaGraphInstantiate(&executable_, graph_, 0));
}

CapturedCalls::~CapturedCalls() {
  CUDA(cudaGraphExecDestroy(executable_));
  CUDA(cudaGraphDestroy(graph_));
}

void CapturedCalls::replay() { CUDA(cudaGraphLaunch(executable_, group_.stream)); }

}  // namespace job
