// Pipeline schedules: the order in which a stage works on micro-batches, and which stage it gets its input from.
#pragma once

#include <string>
#include <vector>

namespace job {

enum class Direction { kForward, kBackward };

// One forward or backward pass of a micro-batch through one of the stage's model chunks.
struct Pass {
  Direction direction;
  int micro_batch;
  int chunk;
};

// Sizes of a schedule. Chunks are the model chunks per stage: 1, or more when interleaved.
struct ScheduleSize {
  int stages, micro_batches, chunks;
};

// "gpipe": all forward passes, then all backward ones. "1f1b": one forward, one backward in turn after a warm-up that shrinks along
// the pipeline (PipeDream-flush). "interleaved": 1F1B over chunks (Narayanan et al., SC 2021, section 2.2), where micro-batches must
// be a multiple of the stages. Empty, with a reason, if the sizes do not allow the schedule.
std::vector<Pass> make_schedule(const std::string& name, const ScheduleSize& size, int stage, std::string* problem);

// Stage that a pass gets its input from or gives its result to; -1 at the ends of the model. Virtual stage v is chunk v / stages of
// stage v % stages.
int source_of(const Pass& pass, int stage, const ScheduleSize& size);
int target_of(const Pass& pass, int stage, const ScheduleSize& size);

}  // namespace job
