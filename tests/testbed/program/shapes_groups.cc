// Shapes with several communicators, or with a role per rank: pipelines, tensor and data parallel groups.
#include "check.h"
#include "shape.h"
#include "standin.h"

namespace job {

namespace {

// All ranks in one pipeline: activations go forward from stage to stage, gradients come back, for several micro-batches.
class Pipeline : public Shape {
 public:
  explicit Pipeline(const Context& context) : context_(context) {}
  void set_up() override {
    world_ = Group::create(options_, "pipeline", options_.rank, options_.ranks, options_.use_config);
    world_->reserve(options_.count * bytes_of(options_.type));
  }
  void iterate(long index) override {
    const int stage = world_->rank, last = world_->ranks - 1;
    for (int batch = 0; batch < kMicroBatches; batch++) {
      const long salt = index * 100 + batch;
      if (stage > 0) receive(stage - 1, salt);
      compute();
      if (stage < last) send(stage + 1, salt);
    }
    for (int batch = 0; batch < kMicroBatches; batch++) {
      const long salt = index * 100 + 50 + batch;
      if (stage < last) receive(stage + 1, salt);
      compute();
      if (stage > 0) send(stage - 1, salt);
    }
    world_->synchronize();
  }
  void tear_down() override { world_.reset(); }
  void abort() override { world_->abort(); }

 private:
  static constexpr int kMicroBatches = 4;

  void compute() const {
    if (options_.compute_us > 0) CUDA(standinLaunchCompute(options_.compute_us, world_->stream));
  }
  void send(int to, long salt) {
    if (options_.verify) {
      std::vector<char> staging(options_.count * bytes_of(options_.type));
      fill(options_.type, staging.data(), options_.count, [&](size_t i) { return value_of(options_.type, {ncclSum}, world_->rank, i, salt); });
      CUDA(cudaMemcpyAsync(world_->input, staging.data(), staging.size(), cudaMemcpyHostToDevice, world_->stream));
    }
    NCCL(ncclSend(world_->input, options_.count, options_.type, to, world_->comm, world_->stream));
  }
  void receive(int from, long salt) {
    NCCL(ncclRecv(world_->output, options_.count, options_.type, from, world_->comm, world_->stream));
    if (!options_.verify) return;
    world_->synchronize();
    size_t first = 0;
    const auto expected = [&](size_t i) { return value_of(options_.type, {ncclSum}, from, i, salt); };
    if (const size_t wrong = count_wrong(options_.type, world_->output, options_.count, expected, true, &first))
      progress_.wrong("pipeline from rank " + std::to_string(from) + ": " + std::to_string(wrong) + " elements, the first at " + std::to_string(first));
  }

  const Context context_;
  const Options& options_ = context_.options;
  Progress& progress_ = context_.progress;
  std::unique_ptr<Group> world_;
};

// Tensor parallel groups of neighbours and data parallel groups across them, made by ncclCommSplit or, with --config, each from an id
// of its own. Both work at the same time on their own streams; the data parallel operation waits for the tensor parallel one.
class TensorData : public Shape {
 public:
  explicit TensorData(const Context& context) : context_(context) {}
  void set_up() override {
    const int rank = options_.rank, tensor = options_.tensor;
    if (options_.ranks % tensor != 0) {
      fprintf(stderr, "testjob: %d ranks are no multiple of --tp %d\n", options_.ranks, tensor);
      exit(2);
    }
    if (options_.use_config) {
      tensor_ = Group::create(options_, "tp" + std::to_string(rank / tensor), rank % tensor, tensor, true);
      data_ = Group::create(options_, "dp" + std::to_string(rank % tensor), rank / tensor, options_.ranks / tensor, true);
    } else {
      world_ = Group::create(options_, "world", rank, options_.ranks, false);
      tensor_ = world_->split("tp", rank / tensor, rank, options_.split_share);
      data_ = world_->split("dp", rank % tensor, rank, options_.split_share);
    }
    CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
  }
  void iterate(long index) override {
    const Operation reduce{Kind::kAllReduce, options_.type, {ncclSum}, options_.count, 0, 1, index * 2};
    Operation gather{Kind::kAllGather, options_.type, {ncclSum}, options_.count, 0, 1, index * 2 + 1};
    for (const auto& [operation, group] : {std::pair{reduce, tensor_.get()}, std::pair{gather, data_.get()}}) {
      if (options_.verify) prepare_input(context_, operation, *group);
      else group->reserve(buffer_bytes(operation, group->ranks));
    }
    if (options_.compute_us > 0) CUDA(standinLaunchCompute(options_.compute_us, tensor_->stream));
    issue(context_.faults, reduce, *tensor_);
    CUDA(cudaEventRecord(event_, tensor_->stream));
    CUDA(cudaStreamWaitEvent(data_->stream, event_, 0));
    issue(context_.faults, gather, *data_);
    tensor_->synchronize();
    data_->synchronize();
    if (!options_.verify) return;
    for (const std::string& problem : {verify(reduce, *tensor_), verify(gather, *data_)})
      if (!problem.empty()) progress_.wrong(problem);
  }
  void tear_down() override {
    tensor_.reset();
    data_.reset();
    world_.reset();
    CUDA(cudaEventDestroy(event_));
  }
  void abort() override {
    for (auto* group : {&tensor_, &data_, &world_})
      if (*group) (*group)->abort();
  }

 private:
  const Context context_;
  const Options& options_ = context_.options;
  Progress& progress_ = context_.progress;
  std::unique_ptr<Group> world_, tensor_, data_;
  cudaEvent_t event_ = nullptr;
};

// Several communicators of all ranks, each with its own stream, all busy at once.
class ManyCommunicators : public Shape {
 public:
  explicit ManyCommunicators(const Context& context) : context_(context) {}
  void set_up() override {
    for (int i = 0; i < options_.communicators; i++)
      groups_.push_back(Group::create(options_, "comm" + std::to_string(i), options_.rank, options_.ranks, options_.use_config));
  }
  void iterate(long index) override {
    std::vector<Operation> operations;
    constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter};
    for (size_t i = 0; i < groups_.size(); i++) {
      operations.push_back({kKinds[i % 3], options_.type, {ncclSum}, options_.count, 0, 1, index * 10 + static_cast<long>(i)});
      if (options_.verify) prepare_input(context_, operations[i], *groups_[i]);
      else groups_[i]->reserve(buffer_bytes(operations[i], options_.ranks));
    }
    for (size_t i = 0; i < groups_.size(); i++) issue(context_.faults, operations[i], *groups_[i]);
    for (auto& group : groups_) group->synchronize();
    if (!options_.verify) return;
    for (size_t i = 0; i < groups_.size(); i++)
      if (const std::string problem = verify(operations[i], *groups_[i]); !problem.empty()) progress_.wrong(problem);
  }
  void tear_down() override { groups_.clear(); }
  void abort() override {
    for (auto& group : groups_) group->abort();
  }

 private:
  const Context context_;
  const Options& options_ = context_.options;
  Progress& progress_ = context_.progress;
  std::vector<std::unique_ptr<Group>> groups_;
};

// Two communicators of all ranks used one after the other; entered in the other order by one rank (fault `swap`) they deadlock.
class Ordered : public Shape {
 public:
  explicit Ordered(const Context& context) : context_(context) {}
  void set_up() override {
    const Options& options = context_.options;
    for (const char* name : {"first", "second"})
      groups_.push_back(Group::create(options, name, options.rank, options.ranks, options.use_config));
  }
  void iterate(long index) override {
    const Options& options = context_.options;
    const Operation operation{Kind::kAllReduce, options.type, {ncclSum}, options.count, 0, 1, index};
    std::vector<Step> steps{{operation, groups_[0].get()}, {operation, groups_[1].get()}};
    if (context_.faults.swaps()) std::swap(steps[0], steps[1]);
    for (const Step& step : steps) run_steps(context_, {step});  // returns when the operation is complete
  }
  void tear_down() override { groups_.clear(); }
  void abort() override {
    for (auto& group : groups_) group->abort();
  }

 private:
  const Context context_;
  std::vector<std::unique_ptr<Group>> groups_;
};

const RegisterShape kGroupsShapes[] = {plain_shape<Pipeline>("pipeline"), plain_shape<TensorData>("split"), plain_shape<ManyCommunicators>("multicomm"),
                                 plain_shape<Ordered>("ordered")};

}  // namespace

}  // namespace job
