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
  void create(size_t bytes) {
    world_ = Group::create(options_, "world", options_.rank, options_.ranks, options_.use_config);
    world_->reserve(bytes);
  }
  // What a graph of one operation leaves is checked; of several the last one.
  void check(const Operation& operation) {
    if (!options_.verify) return;
    world_->synchronize();
    const std::string problem = verify(operation, *world_);
    if (!problem.empty()) context_.progress.wrong("replay of " + problem);
  }

  const Context context_;
  const Options& options_ = context_.options;
  std::unique_ptr<Group> world_;
  std::vector<std::unique_ptr<CapturedSteps>> graphs_;
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
      graphs_.push_back(std::make_unique<CapturedSteps>(*world_, std::vector<Operation>{operation}));
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

RegisterShape graphs(const char* name, std::vector<Kind> kinds) {
  return {name, [kinds](const Context& context) { return std::make_unique<Graphs>(context, kinds); }};
}

const RegisterShape kShapes[] = {
    graphs("graph", {Kind::kAllReduce}),
    graphs("graphs", {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kBroadcast, Kind::kSendRecv, Kind::kAllToAll, Kind::kGroupedAllReduce}),
};

}  // namespace

}  // namespace job
