// The job as a library, for ranks whose loop is written in another language (python_rank.py).
#include "run.h"

namespace {
job::Run* g_run = nullptr;
}

extern "C" {

__attribute__((visibility("default"))) void testjob_start(int argc, char** argv) { g_run = new job::Run(argc, argv); }
__attribute__((visibility("default"))) int testjob_iterate() { return g_run->iterate(); }

}  // extern "C"
