#include "options.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <map>

namespace job {

namespace {

constexpr struct {
  const char* name;
  ncclDataType_t type;
} kTypes[] = {{"i8", ncclInt8},       {"u8", ncclUint8},     {"i32", ncclInt32},   {"u32", ncclUint32},   {"i64", ncclInt64},
              {"u64", ncclUint64},    {"f16", ncclFloat16},  {"f32", ncclFloat32}, {"f64", ncclFloat64}, {"bf16", ncclBfloat16}};
constexpr struct {
  const char* name;
  ncclRedOp_t reduction;
} kReductions[] = {{"sum", ncclSum}, {"prod", ncclProd}, {"max", ncclMax}, {"min", ncclMin}, {"avg", ncclAvg}};

[[noreturn]] void usage(const std::string& problem) {
  fprintf(stderr,
          "testjob: %s\nusage: --rank N --ranks N --run-dir DIR --shape NAME [--count N] [--type i8|…|bf16] [--reduction sum|prod|max|min|avg]\n"
          "  [--iterations N] [--hold] [--verify] [--quiet] [--time] [--config] [--register] [--mem-alloc] [--split-share] [--compute-us N] [--pause-us N] [--burst N] [--burst-after-us N] [--communicators N]\n"
          "  [--tp N] [--gate] [--abort-after S] [--watchdog S] [--fault KIND:rank=R,…]\n"
          "  of shape serving: [--layers N] [--largest-batch N] [--prompt N] [--prefill-every N] [--idle-every N] [--idle-us N]\n"
          "  [--experts] [--rebuild-every N]\n"
          "  of shape training: [--cp N] [--pp N] [--ep N] [--schedule NAME] [--micro-batches N] … (training.h)\n",
          problem.c_str());
  exit(2);
}

int from_environment(const char* name, int fallback) {
  const char* text = getenv(name);
  return text ? atoi(text) : fallback;
}

ncclDataType_t parse_type(const std::string& text) {
  for (const auto& item : kTypes)
    if (text == item.name) return item.type;
  usage("unknown type " + text);
}

ncclRedOp_t parse_reduction(const std::string& text) {
  for (const auto& item : kReductions)
    if (text == item.name) return item.reduction;
  usage("unknown reduction " + text);
}

using Valued = std::map<std::string, std::function<void(const std::string&)>>;

void add_training(TrainingOptions& training, Valued& valued) {
  const auto whole = [&valued](const char* name, int& value) { valued[name] = [&value](const std::string& v) { value = atoi(v.c_str()); }; };
  const auto size = [&valued](const char* name, size_t& value) {
    valued[name] = [&value](const std::string& v) { value = strtoull(v.c_str(), nullptr, 0); };
  };
  const auto real = [&valued](const char* name, double& value) { valued[name] = [&value](const std::string& v) { value = atof(v.c_str()); }; };
  whole("--cp", training.layout.context);
  whole("--pp", training.layout.pipeline);
  whole("--ep", training.layout.expert);
  whole("--micro-batches", training.micro_batches);
  whole("--chunks", training.chunks);
  whole("--layers", training.layers);
  whole("--checkpoint-every", training.checkpoint_every);
  whole("--evaluate-every", training.evaluate_every);
  size("--gradients", training.gradients);
  size("--tokens", training.tokens);
  real("--forward-us", training.forward_us);
  real("--optimizer-us", training.optimizer_us);
  real("--jitter", training.jitter);
  real("--loader-us", training.loader_us);
  size("--input", training.input);
  real("--warm-up-us", training.warm_up_us);
  real("--checkpoint-us", training.checkpoint_us);
  valued["--schedule"] = [&training](const std::string& v) { training.schedule = v; };
  valued["--stage-scale"] = [&training](const std::string& v) {
    for (size_t at = 0; at <= v.size(); at = v.find(',', at) == std::string::npos ? v.size() + 1 : v.find(',', at) + 1)
      training.stage_scale.push_back(atof(v.c_str() + at));
  };
}

}  // namespace

const char* type_name(ncclDataType_t type) {
  for (const auto& item : kTypes)
    if (item.type == type) return item.name;
  return "?";
}

const char* reduction_name(ncclRedOp_t reduction) {
  for (const auto& item : kReductions)
    if (item.reduction == reduction) return item.name;
  return "premul";
}

Options parse_options(int argc, char** argv) {
  Options options;
  options.rank = from_environment("RANK", 0);
  options.ranks = from_environment("WORLD_SIZE", 1);
  Valued valued = {
      {"--rank", [&](auto& v) { options.rank = atoi(v.c_str()); }},
      {"--ranks", [&](auto& v) { options.ranks = atoi(v.c_str()); }},
      {"--run-dir", [&](auto& v) { options.run_dir = v; }},
      {"--shape", [&](auto& v) { options.shape = v; }},
      {"--count", [&](auto& v) { options.count = strtoull(v.c_str(), nullptr, 0); }},
      {"--type", [&](auto& v) { options.type = parse_type(v); }},
      {"--reduction", [&](auto& v) { options.reduction = parse_reduction(v); }},
      {"--iterations", [&](auto& v) { options.iterations = atol(v.c_str()); }},
      {"--compute-us", [&](auto& v) { options.compute_us = atof(v.c_str()); }},
      {"--pause-us", [&](auto& v) { options.pause_us = atof(v.c_str()); }},
      {"--burst", [&](auto& v) { options.burst = atoi(v.c_str()); }},
      {"--burst-after-us", [&](auto& v) { options.burst_after_us = atof(v.c_str()); }},
      {"--communicators", [&](auto& v) { options.communicators = atoi(v.c_str()); }},
      {"--tp", [&](auto& v) { options.tensor = options.training.layout.tensor = atoi(v.c_str()); }},
      {"--watchdog", [&](auto& v) { options.watchdog_s = atof(v.c_str()); }},
      {"--fault", [&](auto& v) { options.faults.push_back(v); }},
      {"--abort-after", [&](auto& v) { options.abort_after_s = atof(v.c_str()); }},
  };
  add_training(options.training, valued);
  const auto whole = [&valued](const char* name, int& value) { valued[name] = [&value](const std::string& v) { value = atoi(v.c_str()); }; };
  whole("--largest-batch", options.serving.largest_batch);
  whole("--prompt", options.serving.prompt);
  whole("--prefill-every", options.serving.prefill_every);
  whole("--idle-every", options.serving.idle_every);
  whole("--rebuild-every", options.serving.rebuild_every);
  valued["--idle-us"] = [&](auto& v) { options.serving.idle_us = atof(v.c_str()); };
  const std::map<std::string, bool*> switches = {
      {"--hold", &options.hold}, {"--verify", &options.verify}, {"--quiet", &options.quiet},
      {"--time", &options.timed}, {"--config", &options.use_config}, {"--gate", &options.gate},
      {"--split-share", &options.split_share}, {"--register", &options.register_buffers}, {"--mem-alloc", &options.allocate_by_nccl},
      {"--experts", &options.serving.experts},
      {"--sequence-parallel", &options.training.sequence_parallel},
      {"--trace", &options.training.trace}};
  for (int i = 1; i < argc; i++) {
    const std::string name = argv[i];
    if (auto found = switches.find(name); found != switches.end()) {
      *found->second = true;
    } else if (auto value = valued.find(name); value != valued.end() && i + 1 < argc) {
      value->second(argv[++i]);
    } else {
      usage("unknown option or missing value: " + name);
    }
  }
  if (options.ranks < 1 || options.rank < 0 || options.rank >= options.ranks) usage("--rank must lie below --ranks");
  if (options.tensor < 1 || options.burst < 1 || options.communicators < 1 || options.serving.largest_batch < 2) usage("sizes must be positive");
  options.training.activations = options.count;
  return options;
}

}  // namespace job
