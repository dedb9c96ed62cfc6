// Shapes whose communication is replayed from CUDA graphs.
#include "check.h"
#include "replay.h"
#include "shape.h"
#include "standin.h"

namespace job {

namespace {

class Replayed : public Shape {
 public:
  explicit Replayed(const Context& context) : context_(context) {}
  void abort() override { world_->abort(); }
  void tear_down() override {
    graphs_.clear();  // before the communicator, as NCCL demands
    world_.reset();
  }

 protected:
  void create(size_t bytes, const std::string& name = "world") {
    world_ = Group::create(options_, name, options_.rank, options_.ranks, options_.use_config);
    world_->reserve(bytes);
  }
  // What the last operation of a graph leaves is checked.
  void check(const Operation& operation) {
    if (!options_.verify) return;
    world_->synchronize();
    const std::string problem = verify(operation, *world_);
    if (!problem.empty()) context_.progress.wrong("replay of " + problem);
  }

  const Context context_;
  const Options& options_ = context_.options;
  std::unique_ptr<Group> world_;
  std::vector<std::unique_ptr<CapturedCalls>> graphs_;
};

// Graphs of one operation each, replayed in turn with new input.
class Graphs : public Replayed {
 public:
  Graphs(const Context& context, std::vector<Kind> kinds) : Replayed(context) {
    for (Kind kind : kinds) operations_.push_back({kind, options_.type, {options_.reduction}, options_.count});
  }
  void set_up() override {
    size_t bytes = 0;
    for (const Operation& operation : operations_) bytes = std::max(bytes, buffer_bytes(operation, options_.ranks));
    create(bytes);
    for (const Operation& operation : operations_) {
      if (!options_.verify) enqueue(operation, *world_);  // the others also capture what was never called before
      graphs_.push_back(std::make_unique<CapturedCalls>(*world_, [&] { enqueue(operation, *world_); }));
    }
    world_->synchronize();
  }
  void iterate(long index) override {
    for (size_t i = 0; i < graphs_.size(); i++) {
      Operation operation = operations_[i];
      operation.salt = index * static_cast<long>(graphs_.size()) + static_cast<long>(i);
      if (options_.verify) prepare_input(context_, operation, *world_);
      if (options_.compute_us > 0) CUDA(standinLaunchCompute(options_.compute_us, world_->stream));
      halt_if_aborting();
      for (int repeat = 0; repeat < options_.burst; repeat++)
        if (context_.faults.enters(*world_)) graphs_[i]->replay();
      check(operation);
    }
    world_->synchronize();
  }

 private:
  std::vector<Operation> operations_;
};

// An inference server whose ranks share each layer: a graph for each size of batch is replayed for a token of every request, requests
// that are new are computed by eager calls, and now and then there are none. All ranks know the same requests by their step. With experts
// the tokens of a layer go to the ranks that hold them and come back. Now and then the server starts over: all ranks abort their
// communicator and make another.
class Serving : public Replayed {
 public:
  using Replayed::Replayed;
  void set_up() override { start("world"); }
  void iterate(long index) override {
    const ServingOptions& serving = options_.serving;
    if (serving.rebuild_every > 0 && index > 0 && index % serving.rebuild_every == 0) start_over(index);
    if (serving.idle_every > 0 && index % serving.idle_every == serving.idle_every - 1) usleep(static_cast<useconds_t>(serving.idle_us));
    if (serving.prefill_every > 0 && index % serving.prefill_every == 0) prefill();
    // Requests come and go: each batch is served for some tokens.
    const size_t size = static_cast<size_t>(index / kTokens) % graphs_.size();
    Operation operation = layer(1 << size).back();
    operation.salt = index;
    if (options_.verify) prepare_input(context_, operation, *world_);
    halt_if_aborting();
    if (const auto served = context_.faults.replace(operation, *world_)) {
      // Another size is another batch: there are graphs of half or twice as many requests only.
      const bool other = served->count != operation.count;
      graphs_[!other ? size : size > 0 ? size - 1 : size + 1]->replay();
    }
    check(operation);
    world_->synchronize();
  }

 private:
  static constexpr long kTokens = 3;

  void start(const std::string& name) {
    size_t bytes = 0;
    for (const Operation& operation : layer(options_.serving.prompt)) bytes = std::max(bytes, buffer_bytes(operation, options_.ranks));
    create(bytes, name);
    prefill();
    for (int batch = 1; batch <= options_.serving.largest_batch; batch *= 2)
      graphs_.push_back(std::make_unique<CapturedCalls>(*world_, [this, batch] {
        each_call(batch, [this](const Operation& operation) { enqueue(operation, *world_); });
      }));
    world_->synchronize();
  }
  void start_over(long index) {
    graphs_.clear();
    world_->abort();
    world_.reset();
    start("world" + std::to_string(index));
    context_.progress.note("started over");
  }
  // Attention, and the feed-forward network: of all ranks together, or of experts.
  std::vector<Operation> layer(int tokens) const {
    const auto call = [&](Kind kind) { return Operation{kind, options_.type, {ncclSum}, options_.count * tokens}; };
    if (options_.serving.experts) return {call(Kind::kAllReduce), call(Kind::kAllToAll), call(Kind::kAllToAll)};
    return {call(Kind::kAllReduce), call(Kind::kAllReduce)};
  }
  template <class Call>
  void each_call(int tokens, const Call& call) {
    for (int i = 0; i < options_.training.layers; i++)
      for (const Operation& operation : layer(tokens)) {
        if (options_.compute_us > 0) CUDA(standinLaunchCompute(options_.compute_us, world_->stream));
        call(operation);
      }
  }
  void prefill() {
    each_call(options_.serving.prompt, [this](const Operation& operation) { issue(context_.faults, operation, *world_); });
  }
};

RegisterShape graphs(const char* name, std::vector<Kind> kinds) {
  return {name, [kinds](const Context& context) { return std::make_unique<Graphs>(context, kinds); }};
}

const RegisterShape kGraphsShapes[] = {
    plain_shape<Serving>("serving"),
    graphs("graph", {Kind::kAllReduce}),
    graphs("graphs", {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kBroadcast, Kind::kSendRecv, Kind::kAllToAll, Kind::kGroupedAllReduce}),
};

}  // namespace

}  // namespace job
