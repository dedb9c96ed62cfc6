// Command line of the job.
#pragma once

#include <nccl.h>
#include <stddef.h>

#include <string>
#include <vector>

#include "training.h"

namespace job {

struct ServingOptions {
  int largest_batch = 4;          // --largest-batch: requests; there is a graph for each power of two up to it
  int prompt = 16;                // --prompt: tokens of new requests, computed together
  int prefill_every = 8;          // --prefill-every: steps
  int idle_every = 0;             // --idle-every N --idle-us: no requests before every Nth step
  double idle_us = 0;
  bool experts = false;           // --experts: all-to-all in each layer
  int rebuild_every = 0;          // --rebuild-every: steps after which the communicator is aborted and made anew
};

struct Options {
  int rank = 0, ranks = 1;        // --rank, --ranks; else RANK and WORLD_SIZE as torchrun sets them
  std::string run_dir = ".";      // --run-dir: where ranks exchange unique ids
  std::string shape = "allreduce";
  size_t count = 1 << 16;         // --count: elements per operation
  ncclDataType_t type = ncclFloat32;
  ncclRedOp_t reduction = ncclSum;
  long iterations = -1;           // --iterations: -1 runs until SIGTERM
  bool hold = false;              // --hold: stay alive, idle, after the last iteration
  bool verify = false;            // --verify: check every element of every result
  bool quiet = false;             // --quiet: no line per iteration
  bool timed = false;             // --time: seconds each iteration took
  bool use_config = false;        // --config: ncclCommInitRankConfig instead of ncclCommInitRank
  double compute_us = 0;          // --compute-us: compute kernel before each iteration's communication
  double pause_us = 0;            // --pause-us: host pause per iteration (a data loader)
  int burst = 1;                  // --burst: launches per iteration before the host waits
  double burst_after_us = 0;      // --burst-after-us: host time between the first of them and the others
  int communicators = 3;          // --communicators: of shape multicomm
  int tensor = 2;                 // --tp, of shape split (of shape training: training.layout)
  TrainingOptions training;
  ServingOptions serving;
  bool register_buffers = false;  // --register: buffers are registered with their communicators (ncclCommRegister)
  bool allocate_by_nccl = false;  // --mem-alloc: buffers are NCCL's own memory (ncclMemAlloc)
  bool split_share = false;       // --split-share: split communicators share resources (ncclConfig_t.splitShare)
  bool gate = false;              // --gate: create nothing until there is a file `gate` in the run directory
  double abort_after_s = 2;       // --abort-after: of shape abort
  double watchdog_s = 0;          // --watchdog: abort all communicators and exit when an iteration takes longer
  std::vector<std::string> faults;  // --fault, any number (fault.h)
};

// Ends the process with a usage line on a mistake.
Options parse_options(int argc, char** argv);
const char* type_name(ncclDataType_t type);
const char* reduction_name(ncclRedOp_t reduction);

}  // namespace job
