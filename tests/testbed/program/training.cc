#include "training.h"

#include <stdio.h>

#include <algorithm>
#include <random>

#include "check.h"
#include "shape.h"
#include "standin.h"

namespace job {

namespace {

// A training step: for each micro-batch forward and backward passes through the stage's layers, with tensor, context and expert
// communication inside a layer, transfers between stages, and gradients reduced over the data dimension at the end. Compute and each
// group have a stream of their own; events order them.
class Training : public Shape {
 public:
  explicit Training(const Context& context)
      : context_(context), options_(context.options), training_(options_.training), random_(static_cast<unsigned>(options_.rank) + 1) {
    Layout& layout = training_.layout;
    const int fixed = layout.tensor * layout.context * layout.pipeline;
    if (options_.ranks % fixed != 0) refuse("the ranks are no multiple of tp x cp x pp");
    layout.data = options_.ranks / fixed;
    if (layout.data % layout.expert != 0) refuse("the data parallel size is no multiple of ep");
    at_ = place(layout, options_.rank);
    size_ = {layout.pipeline, training_.micro_batches, training_.chunks};
    std::string problem;
    passes_ = make_schedule(training_.schedule, size_, at_.pipeline, &problem);
    if (!problem.empty()) refuse(problem);
  }

  void set_up() override {
    world_ = Group::create(options_, "world", options_.rank, options_.ranks, options_.use_config);
    tensor_ = make_group(Axis::kTensor, "");
    context_group_ = make_group(Axis::kContext, "");
    pipeline_ = make_group(Axis::kPipeline, "");
    // With chunks, two stages send each other activations and gradients: on one communicator a receive could take the wrong one.
    if (training_.chunks > 1) gradients_ = make_group(Axis::kPipeline, "-back");
    expert_ = make_group(Axis::kExpert, "");
    model_ = make_group(Axis::kModel, "");
    data_ = make_group(Axis::kData, "");
    gather_ = make_group(Axis::kData, "-gather");  // parameters are gathered on a communicator of their own
    if (gradients_) connect_stages();
    const size_t largest = std::max({training_.activations, training_.gradients, training_.tokens}) * bytes_of(options_.type);
    for (Group* group : groups()) group->reserve(largest * group->ranks);
    CUDA(cudaStreamCreateWithFlags(&compute_, cudaStreamNonBlocking));
    CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    if (training_.input > 0) {
      host_input_.resize(training_.input);
      CUDA(cudaMalloc(reinterpret_cast<void**>(&device_input_), training_.input));
    }
    if (training_.trace) trace_ = fopen((options_.run_dir + "/trace." + std::to_string(options_.rank)).c_str(), "w");
  }

  void iterate(long index) override {
    iteration_ = index;
    host_pauses(index);
    const bool evaluate = training_.evaluate_every > 0 && (index + 1) % training_.evaluate_every == 0;
    std::vector<Pass> passes;
    for (const Pass& pass : passes_)
      if (!evaluate || pass.direction == Direction::kForward) passes.push_back(pass);
    exchange(nullptr, &passes.front());
    for (size_t i = 0; i < passes.size(); i++) {
      run_pass(passes[i]);
      exchange(&passes[i], i + 1 < passes.size() ? &passes[i + 1] : nullptr);
    }
    if (!evaluate) reduce_gradients();
    Group::synchronize(compute_);
    for (Group* group : groups()) group->synchronize();
    if (trace_) fflush(trace_);
  }

  void tear_down() override {
    for (auto* group : {&gather_, &data_, &model_, &expert_, &gradients_, &pipeline_, &context_group_, &tensor_, &world_}) group->reset();
    if (device_input_) CUDA(cudaFree(device_input_));
    CUDA(cudaEventDestroy(event_));
    CUDA(cudaStreamDestroy(compute_));
    if (trace_) fclose(trace_);
  }

  void abort() override {
    for (Group* group : groups()) group->abort();
  }

 private:
  [[noreturn]] static void refuse(const std::string& why) {
    fprintf(stderr, "testjob: %s\n", why.c_str());
    exit(2);
  }

  // Groups of one rank communicate nothing and are left out. The data parallel ones come from ncclCommInitRankConfig, as PyTorch makes
  // its first groups, the others from splitting the world.
  std::unique_ptr<Group> make_group(Axis axis, const std::string& suffix) {
    const Membership member = membership(training_.layout, options_.rank, axis);
    if (axis == Axis::kData) {
      if (member.ranks == 1) return nullptr;
      return Group::create(options_, member.name + suffix, member.rank, member.ranks, true);
    }
    // All ranks take part in a split; a group is known by its first member.
    int color = member.ranks == 1 ? -1 : options_.rank;
    for (int rank = options_.rank; color >= 0 && rank >= 0; rank--)
      if (membership(training_.layout, rank, axis).name == member.name) color = rank;
    const bool anybody = member.ranks > 1;  // the same on all ranks: groups of an axis are equally large
    return anybody ? world_->split(member.name, color, member.rank, options_.split_share) : nullptr;
  }

  // NCCL connects two ranks when they first exchange something, and both wait for that on the host. In an interleaved schedule such
  // waits can form a circle, so all neighbours are connected beforehand, in one group call.
  void connect_stages() {
    const int stages = pipeline_->ranks, next = (pipeline_->rank + 1) % stages, previous = (pipeline_->rank + stages - 1) % stages;
    for (Group* group : {pipeline_.get(), gradients_.get()}) group->reserve(1);
    constexpr int kCalls = 4;
    count_calls(kCalls);
    NCCL(ncclGroupStart());
    NCCL(ncclSend(pipeline_->input, 1, ncclInt8, next, pipeline_->comm, pipeline_->stream));
    NCCL(ncclRecv(pipeline_->output, 1, ncclInt8, previous, pipeline_->comm, pipeline_->stream));
    NCCL(ncclSend(gradients_->input, 1, ncclInt8, previous, gradients_->comm, pipeline_->stream));
    NCCL(ncclRecv(gradients_->output, 1, ncclInt8, next, gradients_->comm, pipeline_->stream));
    NCCL(ncclGroupEnd());
    pipeline_->synchronize();
  }

  std::vector<Group*> groups() const {
    std::vector<Group*> all;
    for (const auto* group : {&world_, &tensor_, &context_group_, &pipeline_, &gradients_, &expert_, &model_, &data_, &gather_})
      if (*group) all.push_back(group->get());
    return all;
  }

  void host_pauses(long index) {
    double us = training_.loader_us + (index == 0 ? training_.warm_up_us : 0);
    if (us > 0) usleep(static_cast<useconds_t>(us));
    if (training_.checkpoint_every <= 0 || (index + 1) % training_.checkpoint_every != 0) return;
    usleep(static_cast<useconds_t>(training_.checkpoint_us));
    communicate(world_.get(), {Kind::kAllReduce, options_.type, {ncclSum}, 1});  // a barrier, as frameworks make them
  }

  void wait_for(cudaStream_t waiting, cudaStream_t other) const {
    CUDA(cudaEventRecord(event_, other));
    CUDA(cudaStreamWaitEvent(waiting, event_, 0));
  }

  void compute(double microseconds) {
    const auto stage = static_cast<size_t>(at_.pipeline);
    if (stage < training_.stage_scale.size()) microseconds *= training_.stage_scale[stage];
    microseconds *= 1 + training_.jitter * std::uniform_real_distribution<double>{0, 1}(random_);
    CUDA(standinLaunchCompute(microseconds, compute_));
  }

  void note(const Group& group, const char* what, size_t count, int peer) const {
    if (trace_) fprintf(trace_, "%ld %s %s %zu %d\n", iteration_, group.name.c_str(), what, count, peer);
  }

  // A collective between two pieces of compute. Does nothing in a dimension of size one.
  void communicate(Group* group, Operation operation) {
    if (!group) return;
    wait_for(group->stream, compute_);
    note(*group, kind_name(operation.kind), operation.count, -1);
    issue(context_.faults, operation, *group);
    wait_for(compute_, group->stream);
  }

  void tensor_sum() {
    const size_t share = tensor_ ? training_.activations / tensor_->ranks : 0;
    if (training_.sequence_parallel) {
      communicate(tensor_.get(), {Kind::kAllGather, options_.type, {ncclSum}, share});
      communicate(tensor_.get(), {Kind::kReduceScatter, options_.type, {ncclSum}, share});
    } else {
      communicate(tensor_.get(), {Kind::kAllReduce, options_.type, {ncclSum}, training_.activations});
    }
  }

  void run_pass(const Pass& pass) {
    const bool forward = pass.direction == Direction::kForward;
    const double us = training_.forward_us * (forward ? 1 : 2);
    if (forward && device_input_) CUDA(cudaMemcpyAsync(device_input_, host_input_.data(), training_.input, cudaMemcpyHostToDevice, compute_));
    for (int layer = 0; layer < training_.layers; layer++) {
      // Attention: context ranks gather keys and values, and scatter their gradients on the way back.
      const size_t share = context_group_ ? training_.activations / context_group_->ranks : 0;
      communicate(context_group_.get(), {forward ? Kind::kAllGather : Kind::kReduceScatter, options_.type, {ncclSum}, share});
      compute(us / 2);
      tensor_sum();
      // Feed-forward, or experts: tokens go to their expert and come back.
      communicate(expert_.get(), {Kind::kAllToAll, options_.type, {ncclSum}, training_.tokens});
      compute(us / 2);
      communicate(expert_.get(), {Kind::kAllToAll, options_.type, {ncclSum}, training_.tokens});
      tensor_sum();
    }
  }

  Group& pipe(const Pass& pass) const { return pass.direction == Direction::kBackward && gradients_ ? *gradients_ : *pipeline_; }

  // Sends the result of one pass and receives the input of the next in one group call, so that neighbours cannot wait for each other.
  void exchange(const Pass* done, const Pass* next) {
    if (!pipeline_) return;
    const int to = done ? target_of(*done, at_.pipeline, size_) : -1, from = next ? source_of(*next, at_.pipeline, size_) : -1;
    if (to < 0 && from < 0) return;
    if (!context_.faults.enters(*pipeline_)) return;
    wait_for(pipeline_->stream, compute_);
    count_calls((to >= 0) + (from >= 0));
    NCCL(ncclGroupStart());
    if (to >= 0) {
      Group& group = pipe(*done);
      note(group, "Send", training_.activations, to);
      NCCL(ncclSend(group.input, training_.activations, options_.type, to, group.comm, pipeline_->stream));
    }
    if (from >= 0) {
      Group& group = pipe(*next);
      note(group, "Recv", training_.activations, from);
      NCCL(ncclRecv(group.output, training_.activations, options_.type, from, group.comm, pipeline_->stream));
    }
    NCCL(ncclGroupEnd());
    wait_for(compute_, pipeline_->stream);
  }

  // Gradients are reduced and scattered over the data dimension, their norm summed over the model, parameters updated and gathered.
  void reduce_gradients() {
    const Operation scatter{Kind::kReduceScatter, options_.type, {ncclSum}, data_ ? training_.gradients / data_->ranks : 0};
    const Operation gather{Kind::kAllGather, options_.type, {ncclSum}, scatter.count};
    if (context_.faults.swaps()) {
      communicate(gather_.get(), gather);
      communicate(model_.get(), {Kind::kAllReduce, options_.type, {ncclSum}, 1});
      communicate(data_.get(), scatter);
      return;
    }
    communicate(data_.get(), scatter);
    communicate(model_.get(), {Kind::kAllReduce, options_.type, {ncclSum}, 1});
    compute(training_.optimizer_us);
    communicate(gather_.get(), gather);
  }

  const Context context_;
  const Options& options_;
  TrainingOptions training_;
  std::minstd_rand random_;
  Coordinates at_{};
  ScheduleSize size_{};
  std::vector<Pass> passes_;
  std::unique_ptr<Group> world_, tensor_, context_group_, pipeline_, gradients_, expert_, model_, data_, gather_;
  cudaStream_t compute_ = nullptr;
  cudaEvent_t event_ = nullptr;
  FILE* trace_ = nullptr;
  long iteration_ = 0;
  std::vector<char> host_input_;
  char* device_input_ = nullptr;
};

const RegisterShape kShape = plain_shape<Training>("training");

}  // namespace

}  // namespace job
