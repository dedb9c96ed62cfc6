// Operations captured in a CUDA graph, and its replay.
#pragma once

#include <functional>

#include "group.h"

namespace job {

class CapturedCalls {
 public:
  // Captures what `calls` puts on the group's stream as one graph. The group's buffers must be large enough and stay where they are.
  CapturedCalls(Group& group, const std::function<void()>& calls);
  ~CapturedCalls();
  CapturedCalls(const CapturedCalls&) = delete;
  CapturedCalls& operator=(const CapturedCalls&) = delete;

  void replay();

 private:
  Group& group_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace job
