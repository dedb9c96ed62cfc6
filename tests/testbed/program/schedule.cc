#include "schedule.h"

#include <algorithm>

namespace job {

namespace {

// The i-th forward pass of an interleaved schedule takes `stages` micro-batches through a chunk before the next chunk's turn.
Pass interleaved_pass(Direction direction, int i, const ScheduleSize& size) {
  const int round = size.stages * size.chunks;
  const int chunk = i % round / size.stages;
  const int micro_batch = i / round * size.stages + i % size.stages;
  return {direction, micro_batch, direction == Direction::kForward ? chunk : size.chunks - 1 - chunk};
}

std::vector<Pass> one_forward_one_backward(const ScheduleSize& size, int warm_up) {
  const int total = size.micro_batches * size.chunks;
  warm_up = std::min(warm_up, total);
  std::vector<Pass> passes;
  for (int i = 0; i < warm_up; i++) passes.push_back(interleaved_pass(Direction::kForward, i, size));
  for (int i = 0; i < total - warm_up; i++) {
    passes.push_back(interleaved_pass(Direction::kForward, warm_up + i, size));
    passes.push_back(interleaved_pass(Direction::kBackward, i, size));
  }
  for (int i = total - warm_up; i < total; i++) passes.push_back(interleaved_pass(Direction::kBackward, i, size));
  return passes;
}

// Virtual stage before (-1) or after (+1) the one that makes this pass, or -1.
int neighbour(const Pass& pass, int stage, const ScheduleSize& size, int step) {
  const int other = pass.chunk * size.stages + stage + step;
  return other < 0 || other >= size.chunks * size.stages ? -1 : other % size.stages;
}

}  // namespace

std::vector<Pass> make_schedule(const std::string& name, const ScheduleSize& size, int stage, std::string* problem) {
  if (name != "interleaved" && size.chunks != 1) {
    *problem = "only the interleaved schedule has several chunks";
    return {};
  }
  if (name == "gpipe") {
    std::vector<Pass> passes;
    for (int i = 0; i < size.micro_batches; i++) passes.push_back({Direction::kForward, i, 0});
    for (int i = 0; i < size.micro_batches; i++) passes.push_back({Direction::kBackward, i, 0});
    return passes;
  }
  if (name == "1f1b") return one_forward_one_backward({1, size.micro_batches, 1}, size.stages - stage - 1);
  if (name == "interleaved") {
    if (size.micro_batches % size.stages != 0) {
      *problem = "the interleaved schedule needs a multiple of " + std::to_string(size.stages) + " micro-batches";
      return {};
    }
    return one_forward_one_backward(size, (size.stages - stage - 1) * 2 + (size.chunks - 1) * size.stages);
  }
  *problem = "unknown schedule " + name + "; known: gpipe 1f1b interleaved";
  return {};
}

int source_of(const Pass& pass, int stage, const ScheduleSize& size) {
  return neighbour(pass, stage, size, pass.direction == Direction::kForward ? -1 : 1);
}

int target_of(const Pass& pass, int stage, const ScheduleSize& size) {
  return neighbour(pass, stage, size, pass.direction == Direction::kForward ? 1 : -1);
}

}  // namespace job
