// Operations captured in a CUDA graph, and its replay.
#pragma once

#include <vector>

#include "group.h"
#include "operation.h"
#include "shape.h"

namespace job {

class CapturedSteps {
 public:
  // Captures the calls on the group's stream, in this order, as one graph. The group's buffers must be large enough and stay where they are.
  CapturedSteps(Group& group, const std::vector<Operation>& operations);
  ~CapturedSteps();
  CapturedSteps(const CapturedSteps&) = delete;
  CapturedSteps& operator=(const CapturedSteps&) = delete;

  void replay();

 private:
  Group& group_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace job
