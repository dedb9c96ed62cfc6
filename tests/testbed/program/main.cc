// A job for the CPU testbed: one process per rank, real NCCL. See options.h and shape.h.
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <thread>

#include "check.h"
#include "options.h"
#include "progress.h"
#include "rendezvous.h"
#include "shape.h"

namespace {

volatile sig_atomic_t g_stop = 0;
void stop(int) { g_stop = 1; }

// SIGTERM ends an idle or running job at the end of an iteration; a hung one takes SIGKILL.
void catch_stop() {
  struct sigaction action = {};
  action.sa_handler = stop;
  sigaction(SIGTERM, &action, nullptr);
}

// As frameworks do: an iteration that takes too long ends the process, after its communicators were aborted.
void start_watchdog(double limit_s, job::Progress& progress, job::Shape& shape) {
  std::thread([limit_s, &progress, &shape] {
    long seen = -1;
    for (;;) {
      if (progress.iterations() == seen) break;
      seen = progress.iterations();
      usleep(static_cast<useconds_t>(limit_s * 1e6));
    }
    progress.note("watchdog: iteration " + std::to_string(seen + 1) + " takes too long, aborting");
    job::set_aborting();
    constexpr int kAborted = 3;
    std::thread([] {
      constexpr useconds_t kGrace = 3'000'000;  // an abort may itself wait for a peer that is gone
      usleep(kGrace);
      _exit(kAborted);
    }).detach();
    shape.abort();
    _exit(kAborted);
  }).detach();
}

}  // namespace

int main(int argc, char** argv) {
  using namespace job;
  // The launcher may run us below a wrapper such as unshare(1): whoever starts us, we end with it.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const Options options = parse_options(argc, argv);
  const auto maker = shapes().find(options.shape);
  if (maker == shapes().end()) {
    fprintf(stderr, "testjob: unknown shape %s; known:", options.shape.c_str());
    for (const auto& item : shapes()) fprintf(stderr, " %s", item.first.c_str());
    fprintf(stderr, "\n");
    return 2;
  }
  CUDA(cudaSetDevice(0));
  Progress progress(options.rank, options.quiet, options.timed);
  if (options.gate) {
    progress.note("waits at the gate");
    wait_for_file(options.run_dir + "/gate");
  }
  Faults faults(options.faults, options.rank);
  const auto shape = maker->second(Context{options, progress, faults});
  faults.before_start(progress);
  shape->set_up();
  catch_stop();
  progress.ready();
  if (options.watchdog_s > 0 && !options.hold) start_watchdog(options.watchdog_s, progress, *shape);
  while (!g_stop && (options.iterations < 0 || progress.iterations() < options.iterations)) {
    faults.before_iteration(progress.iterations(), progress);
    if (options.pause_us > 0) usleep(static_cast<useconds_t>(options.pause_us));
    shape->iterate(progress.iterations());
    progress.iteration();
  }
  if (options.hold) {
    progress.holding();
    while (!g_stop) pause();
  }
  // Ranks asked to stop are not all at the same iteration: leave without a collective teardown.
  if (g_stop) {
    progress.done();
    _exit(progress.wrong_results() != 0);
  }
  shape->tear_down();
  progress.done();
  return progress.wrong_results() != 0;
}
