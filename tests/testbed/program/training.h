// Options of the shape `training`.
#pragma once

#include <stddef.h>

#include <string>
#include <vector>

#include "parallel.h"
#include "schedule.h"

namespace job {

struct TrainingOptions {
  Layout layout;                 // --tp --cp --pp --ep; the rest of the ranks is data parallel
  std::string schedule = "1f1b"; // --schedule gpipe|1f1b|interleaved
  int micro_batches = 4;         // --micro-batches
  int chunks = 1;                // --chunks, per stage
  int layers = 2;                // --layers, per chunk
  bool sequence_parallel = false; // --sequence-parallel: AllGather + ReduceScatter instead of AllReduce in tensor groups
  size_t activations = 16384;    // --count: elements of an activation
  size_t gradients = 65536;      // --gradients: elements per rank and stage
  size_t tokens = 2048;          // --tokens: elements each rank sends to each expert
  double forward_us = 2000;      // --forward-us: compute of a layer's forward pass; a backward pass takes twice that
  double optimizer_us = 2000;    // --optimizer-us
  double jitter = 0;             // --jitter: each compute kernel takes up to that fraction longer, at random
  std::vector<double> stage_scale; // --stage-scale 1,1,1.5: compute of each stage relative to the others
  double loader_us = 0;          // --loader-us: host time per iteration on all ranks alike
  size_t input = 0;              // --input: bytes of a micro-batch, copied from the host to the device of every rank
  double warm_up_us = 0;         // --warm-up-us: host time before the first iteration
  int checkpoint_every = 0;      // --checkpoint-every N --checkpoint-us: a host pause and a barrier on all ranks
  double checkpoint_us = 0;
  int evaluate_every = 0;        // --evaluate-every N: an iteration of forward passes only
  bool trace = false;            // --trace: every operation entered, one line each, to trace.RANK in the run directory
};

}  // namespace job
