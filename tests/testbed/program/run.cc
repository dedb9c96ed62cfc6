#include "run.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <thread>

#include "check.h"
#include "rendezvous.h"

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

namespace job {

Run::Run(int argc, char** argv)
    : options_(parse_options(argc, argv)), progress_(options_.rank, options_.quiet, options_.timed), faults_(options_.faults, options_.rank) {
  const auto maker = shapes().find(options_.shape);
  if (maker == shapes().end()) {
    fprintf(stderr, "testjob: unknown shape %s; known:", options_.shape.c_str());
    for (const auto& item : shapes()) fprintf(stderr, " %s", item.first.c_str());
    fprintf(stderr, "\n");
    exit(2);
  }
  CUDA(cudaSetDevice(0));
  if (options_.gate) {
    progress_.note("waits at the gate");
    wait_for_file(options_.run_dir + "/gate");
  }
  shape_ = maker->second(Context{options_, progress_, faults_});
  faults_.before_start(progress_);
  if (options_.register_buffers) Group::register_buffers();
  if (options_.allocate_by_nccl) Group::allocate_by_nccl();
  shape_->set_up();
  catch_stop();
  progress_.ready();
  if (options_.watchdog_s > 0 && !options_.hold) start_watchdog(options_.watchdog_s, progress_, *shape_);
}

bool Run::iterate() {
  if (g_stop || (options_.iterations >= 0 && progress_.iterations() >= options_.iterations)) return false;
  faults_.before_iteration(progress_.iterations(), progress_);
  if (options_.pause_us > 0) usleep(static_cast<useconds_t>(options_.pause_us));
  shape_->iterate(progress_.iterations());
  progress_.iteration();
  return true;
}

int Run::finish() {
  if (options_.hold) {
    progress_.holding();
    while (!g_stop) pause();
  }
  // Ranks asked to stop are not all at the same iteration: leave without a collective teardown.
  if (g_stop) {
    progress_.done();
    _exit(progress_.wrong_results() != 0);
  }
  shape_->tear_down();
  progress_.done();
  return progress_.wrong_results() != 0;
}

}  // namespace job
