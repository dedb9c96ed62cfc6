#include "fault.h"

#include <dirent.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>

#include "check.h"
#include "standin.h"

namespace job {

namespace {

constexpr const char* kKinds[] = {"stuck", "skip",      "other_op",  "other_size", "other_type", "swap",   "corrupt", "stall_gpu", "stall_proxy", "slow_gpu",
                                  "slow_link", "slow_copy", "slow_proxy", "pause",      "loader", "load",    "one_cpu",   "crash",       "stop",   "no_init"};
constexpr const char* kOfCalls[] = {"stuck", "skip", "other_op", "other_size", "other_type"};
constexpr const char* kTriggered[] = {"stall_gpu", "stall_proxy", "crash", "stop"};

template <size_t N>
bool is_one_of(const char* const (&kinds)[N], const std::string& kind) {
  return std::find(std::begin(kinds), std::end(kinds), kind) != std::end(kinds);
}

[[noreturn]] void refuse(const std::string& specification) {
  fprintf(stderr, "testjob: cannot read --fault %s; kinds:", specification.c_str());
  for (const char* kind : kKinds) fprintf(stderr, " %s", kind);
  fprintf(stderr, "\n");
  exit(2);
}

std::vector<std::string> cut(const std::string& text, char at) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == at) parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

Fault parse(const std::string& specification) {
  const size_t colon = specification.find(':');
  Fault fault{specification.substr(0, colon), {}};
  if (!is_one_of(kKinds, fault.kind)) refuse(specification);
  if (colon == std::string::npos) refuse(specification);
  for (const std::string& part : cut(specification.substr(colon + 1), ',')) {
    const size_t equals = part.find('=');
    if (equals == std::string::npos) refuse(specification);
    fault.values[part.substr(0, equals)] = part.substr(equals + 1);
  }
  if (!fault.values.count("rank")) refuse(specification);
  return fault;
}

void sleep_us(double microseconds) { usleep(static_cast<useconds_t>(microseconds)); }

// Busy threads as long as `on`; they exist once and pause while off.
void set_load(int threads, bool on) {
  static std::atomic<bool> busy{false};
  static bool started = false;
  busy = on;
  if (!on || started) return;
  started = true;
  for (int i = 0; i < threads; i++)
    std::thread([] {
      for (;;) {
        if (!busy) usleep(10'000);
      }
    }).detach();
}

// All threads of the process, NCCL's included, on the processor that runs this one, or back on all.
void set_one_processor(bool on) {
  cpu_set_t set;
  CPU_ZERO(&set);
  const long processors = sysconf(_SC_NPROCESSORS_CONF);
  for (int i = 0; i < processors; i++) CPU_SET(i, &set);
  if (on) {
    CPU_ZERO(&set);
    CPU_SET(sched_getcpu(), &set);
  }
  DIR* threads = opendir("/proc/self/task");
  while (const dirent* entry = threads ? readdir(threads) : nullptr)
    if (const pid_t thread = atoi(entry->d_name)) sched_setaffinity(thread, sizeof set, &set);
  if (threads) closedir(threads);
}

// Groups of a dimension are called by it; the one that gathers parameters carries a suffix.
bool in_group(const std::string& name, const std::string& wanted) {
  static const std::string kGather = "-gather";
  const bool gather = name.size() > kGather.size() && name.compare(name.size() - kGather.size(), kGather.size(), kGather) == 0;
  return wanted.empty() || (wanted == "gather" ? gather : !gather && name.compare(0, wanted.size(), wanted) == 0);
}

bool waits_for_a_call(const Fault& fault) { return fault.values.count("group") && is_one_of(kTriggered, fault.kind); }

// Ends or stops the process, or returns.
void end_or_stop(const Fault& fault) {
  if (fault.kind == "stop") kill(getpid(), SIGSTOP);
  if (fault.kind != "crash") return;
  if (fault.values.count("exit")) _exit(static_cast<int>(fault.number("exit", 1)));
  const int number = static_cast<int>(fault.number("signal", SIGSEGV));
  signal(number, SIG_DFL);
  kill(getpid(), number);
}

// Says where the GPU that is stalled from now on has come to stand. Streams come to stand one after another: the last line counts.
void watch_stall(const Progress* progress) {
  static std::atomic<bool> watched{false};
  if (watched.exchange(true)) return;
  std::thread([progress] {
    for (int known = STANDIN_NOT_STALLED;; usleep(20'000)) {
      const int now = standinStalledWhere();
      if (now == known) continue;
      known = now;
      if (now == STANDIN_STALLED_BETWEEN) progress->note("gpu stalled between operations");
      if (now == STANDIN_STALLED_AT_BEGIN) progress->note("gpu stalled at-begin of an operation");
      if (now == STANDIN_STALLED_INSIDE) progress->note("gpu stalled inside an operation");
    }
  }).detach();
}

void stall_gpu(bool on, const Progress* progress) {
  standinStallKernels(on);
  if (on) watch_stall(progress);
}

// What a fault does that has waited for the GPU to come to a call. Runs on the stream's thread, so that the call follows it.
struct Armed {
  Fault fault;
  const Progress* progress;
  long iteration;

  void strike() const {
    progress->note("fault " + fault.kind + " begins in iteration " + std::to_string(iteration + 1));
    if (fault.kind == "stall_gpu") stall_gpu(true, progress);
    if (fault.kind == "stall_proxy") standinStallProxy(1);
    end_or_stop(fault);
  }
};

void reach(void* data) {
  const auto* armed = static_cast<Armed*>(data);
  const double delay = armed->fault.number("delay_us", 0);
  const auto strike = [armed, delay] {
    if (delay > 0) sleep_us(delay);
    armed->strike();
    delete armed;
  };
  if (delay > 0) std::thread(strike).detach();
  else strike();
}

}  // namespace

double Fault::number(const std::string& key, double fallback) const {
  const auto found = values.find(key);
  return found == values.end() ? fallback : atof(found->second.c_str());
}

std::string Fault::text(const std::string& key) const {
  const auto found = values.find(key);
  return found == values.end() ? "" : found->second;
}

bool Fault::active(long iteration) const {
  const std::string when = text("when");
  if (!when.empty() && access(when.c_str(), F_OK) != 0) return false;
  const bool once = kind != "stuck" && is_one_of(kOfCalls, kind);
  const auto begin = static_cast<long>(number("at", 3)), length = static_cast<long>(number("for", once ? 1 : -1));
  return iteration >= begin && (length < 0 || iteration < begin + length);
}

Faults::Faults(const std::vector<std::string>& specifications, int rank) {
  for (const std::string& specification : specifications)
    if (Fault fault = parse(specification); static_cast<int>(fault.number("rank", -1)) == rank) faults_.push_back(fault);
  announced_.resize(faults_.size());
  calls_.resize(faults_.size());
}

const Fault* Faults::find(const std::string& kind) const {
  for (const Fault& fault : faults_)
    if (fault.kind == kind && fault.active(iteration_)) return &fault;
  return nullptr;
}

void Faults::before_start(const Progress& progress) const {
  for (const Fault& fault : faults_) {
    if (fault.kind != "no_init") continue;
    progress.note("fault no_init begins");
    for (;;) pause();
  }
}

void Faults::before_iteration(long iteration, const Progress& progress) {
  iteration_ = iteration;
  progress_ = &progress;
  std::fill(calls_.begin(), calls_.end(), 0);
  for (size_t i = 0; i < faults_.size(); i++) {
    const Fault& fault = faults_[i];
    if (waits_for_a_call(fault)) continue;
    const bool on = fault.active(iteration), changed = on != announced_[i];
    const double us = fault.number("us", 0);
    if (changed) {
      progress.note("fault " + fault.kind + (on ? " begins" : " ends") + " before iteration " + std::to_string(iteration + 1));
      announced_[i] = on;
      if (fault.kind == "stall_gpu") stall_gpu(on, &progress);
      if (fault.kind == "stall_proxy") standinStallProxy(on);
      if (fault.kind == "slow_link") standinSetSliceDelay(on ? us : 0);
      if (fault.kind == "slow_copy") standinSetCopyRate(on ? fault.number("rate", 1e8) : 0);
      if (fault.kind == "slow_proxy") {
        const double every = fault.number("every_us", 0);
        standinSetProxyDelay(on && every <= 0 ? us : 0, fault.number("p", 0.01));
        standinSetProxyPauses(on && every > 0 ? us : 0, every);
      }
      if (fault.kind == "slow_gpu") standinSetComputeSlowdown(on ? fault.number("factor", 3) : 1);
      if (fault.kind == "load") set_load(static_cast<int>(fault.number("threads", 2)), on);
      if (fault.kind == "one_cpu") set_one_processor(on);
    }
    if (!on) continue;
    if (fault.kind == "slow_gpu" && fault.number("jitter", 0) > 0) {
      static std::minstd_rand random{12345};
      standinSetComputeSlowdown(std::uniform_real_distribution<double>{1, fault.number("jitter", 2)}(random));
    }
    if (fault.kind == "loader") sleep_us(us);
    if (fault.kind == "pause" && iteration % std::max(1L, static_cast<long>(fault.number("every", 1))) == 0) sleep_us(us);
    if (changed || fault.kind == "crash") end_or_stop(fault);
  }
}

const Fault* Faults::meets(const Group& group) {
  const Fault* met = nullptr;
  for (size_t i = 0; i < faults_.size(); i++) {
    const Fault& fault = faults_[i];
    const bool triggered = waits_for_a_call(fault);
    if (!triggered && !is_one_of(kOfCalls, fault.kind)) continue;
    if (!in_group(group.name, fault.text("group"))) continue;
    if (calls_[i]++ != static_cast<int>(fault.number("nth", 0))) continue;
    if (triggered && iteration_ == static_cast<long>(fault.number("at", 3)))
      CUDA(cudaLaunchHostFunc(group.stream, reach, new Armed{fault, progress_, iteration_}));
    if (triggered || !fault.active(iteration_) || met) continue;
    met = &fault;
    progress_->note("fault " + fault.kind + " strikes in iteration " + std::to_string(iteration_ + 1));
    while (fault.kind == "stuck") pause();
  }
  return met;
}

std::optional<Operation> Faults::replace(const Operation& operation, const Group& group) {
  const Fault* fault = meets(group);
  if (!fault) return operation;
  Operation other = operation;
  if (fault->kind == "skip") return std::nullopt;
  if (fault->kind == "other_op") other.kind = operation.kind == Kind::kAllReduce ? Kind::kBroadcast : Kind::kAllReduce;
  if (fault->kind == "other_size") other.count = std::max<size_t>(1, static_cast<size_t>(operation.count * fault->number("factor", 0.5)));
  while (other.count > 1 && buffer_bytes(other, group.ranks) > group.capacity) other.count /= 2;  // stay within the buffers
  if (fault->kind == "other_type") other.type = bytes_of(operation.type) == 2 ? ncclInt8 : ncclFloat16;
  return other;
}

void issue(Faults& faults, const Operation& operation, Group& group) {
  halt_if_aborting();
  if (const auto real = faults.replace(operation, group)) enqueue(*real, group);
}

}  // namespace job
