// Shapes that test the testbed itself: that streams are asynchronous, that a hung communicator can be aborted, communicators of one.
#include <time.h>

#include "check.h"
#include "shape.h"

namespace job {

namespace {

void touch(const std::string& path) {
  if (FILE* file = fopen(path.c_str(), "w")) fclose(file);
}
void await(const std::string& path) {
  while (access(path.c_str(), F_OK) != 0) usleep(2000);
}

class Behaviour : public Shape {
 public:
  explicit Behaviour(const Context& context) : context_(context) {}
  void set_up() override { world_ = Group::create(options_, "world", options_.rank, options_.ranks, options_.use_config); }
  void tear_down() override { world_.reset(); }
  void abort() override { world_->abort(); }

 protected:
  void expect(bool condition, const char* what) {
    if (!condition) progress_.wrong(what);
  }
  std::string mark(const char* what, int rank, long index) const {
    return options_.run_dir + "/" + what + "." + std::to_string(rank) + "." + std::to_string(index);
  }
  Operation all_reduce(long salt) const { return {Kind::kAllReduce, ncclFloat32, {ncclSum}, options_.count, 0, 1, salt}; }
  void check_result(const Operation& operation) {
    world_->synchronize();
    if (const std::string problem = verify(operation, *world_); !problem.empty()) progress_.wrong(problem);
  }

  const Context context_;
  const Options& options_ = context_.options;
  Progress& progress_ = context_.progress;
  std::unique_ptr<Group> world_;
};

// Rank 0 holds back until all others have seen that their launch returned, that nothing behind it ran, and that queries say so.
class Asynchronous : public Behaviour {
 public:
  using Behaviour::Behaviour;
  void iterate(long index) override {
    const Operation operation = all_reduce(index);
    prepare_input(context_, operation, *world_);
    world_->synchronize();
    if (options_.rank == 0) {
      for (int rank = 1; rank < options_.ranks; rank++) await(mark("launched", rank, index));
      issue(context_.faults, operation, *world_);
      check_result(operation);
      return;
    }
    cudaStream_t other;
    cudaEvent_t before, after, unrecorded;
    char* flag;
    CUDA(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
    for (cudaEvent_t* event : {&before, &after, &unrecorded}) CUDA(cudaEventCreate(event));
    CUDA(cudaMalloc(reinterpret_cast<void**>(&flag), 1));
    CUDA(cudaMemset(flag, 1, 1));
    CUDA(cudaEventRecord(before, world_->stream));
    issue(context_.faults, operation, *world_);
    CUDA(cudaEventRecord(after, world_->stream));
    CUDA(cudaStreamWaitEvent(other, unrecorded, 0));  // no wait at all
    CUDA(cudaStreamWaitEvent(other, after, 0));
    CUDA(cudaMemsetAsync(flag, 2, 1, other));
    expect(cudaStreamQuery(world_->stream) == cudaErrorNotReady, "the stream is done before the collective can be");
    expect(cudaEventQuery(after) == cudaErrorNotReady, "an event is done before what it follows");
    expect(cudaStreamQuery(other) == cudaErrorNotReady, "a stream did not wait for an event");
    expect(*static_cast<volatile char*>(flag) == 1, "work behind an event ran too early");
    CUDA(cudaEventSynchronize(before));
    touch(mark("launched", options_.rank, index));
    CUDA(cudaStreamSynchronize(other));
    expect(*flag == 2, "work behind an event did not run");
    expect(cudaEventQuery(after) == cudaSuccess, "an event is not done after what follows it");
    float milliseconds = -1;
    CUDA(cudaEventElapsedTime(&milliseconds, before, after));
    expect(milliseconds >= 0, "time between two events runs backwards");
    check_result(operation);
    for (cudaEvent_t event : {before, after, unrecorded}) CUDA(cudaEventDestroy(event));
    CUDA(cudaStreamDestroy(other));
    CUDA(cudaFree(flag));
  }
};

// Rank 0 never enters the operation; the others abort their communicator, and all go on with a new one.
class Abort : public Behaviour {
 public:
  using Behaviour::Behaviour;
  void iterate(long index) override {
    const Operation first = all_reduce(index * 10), hung = all_reduce(index * 10 + 1), again = all_reduce(index * 10 + 2);
    prepare_input(context_, first, *world_);
    issue(context_.faults, first, *world_);
    check_result(first);
    if (options_.rank != 0) {
      issue(context_.faults, hung, *world_);
      usleep(static_cast<useconds_t>(options_.abort_after_s * 1e6));
      expect(cudaStreamQuery(world_->stream) == cudaErrorNotReady, "the operation ended without rank 0");
      progress_.note("aborting");
    } else {
      for (int rank = 1; rank < options_.ranks; rank++) await(mark("aborted", rank, index));
    }
    world_->abort();
    world_->synchronize();
    touch(mark("aborted", options_.rank, index));
    world_.reset();
    world_ = Group::create(options_, "again" + std::to_string(index), options_.rank, options_.ranks, options_.use_config);
    prepare_input(context_, again, *world_);
    issue(context_.faults, again, *world_);
    check_result(again);
  }
};

// Every rank has a communicator of its own, where NCCL copies, or launches oneRankReduce for PreMulSum.
class OneRank : public Behaviour {
 public:
  using Behaviour::Behaviour;
  void set_up() override { world_ = Group::create(options_, "alone" + std::to_string(options_.rank), 0, 1, options_.use_config); }
  void iterate(long index) override {
    constexpr ncclDataType_t kTypes[] = {ncclInt8,   ncclUint8,   ncclInt32,   ncclUint32,  ncclInt64,
                                         ncclUint64, ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16};
    for (ncclDataType_t type : kTypes) {
      char factor[8];
      fill(type, factor, 1, [](size_t) { return 2.0; });
      ncclRedOp_t doubled;
      NCCL(ncclRedOpCreatePreMulSum(&doubled, factor, type, ncclScalarHostImmediate, world_->comm));
      for (const ReductionKind& reduction : {ReductionKind{ncclSum}, ReductionKind{doubled, true}})
        run_steps(context_, {{{Kind::kAllReduce, type, reduction, options_.count, 0, 1, index}, world_.get()}});
      NCCL(ncclRedOpDestroy(doubled, world_->comm));
    }
  }
};

const RegisterShape kBehaviourShapes[] = {plain_shape<Asynchronous>("async"), plain_shape<Abort>("abort"), plain_shape<OneRank>("onerank")};

}  // namespace

}  // namespace job
