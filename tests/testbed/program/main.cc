// A job for the CPU testbed: one process per rank, real NCCL. See options.h and shape.h.
#include <signal.h>
#include <sys/prctl.h>

#include "run.h"

int main(int argc, char** argv) {
  // The launcher may run us below a wrapper such as unshare(1): whoever starts us, we end with it.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  job::Run run(argc, argv);
  while (run.iterate()) {
  }
  return run.finish();
}
