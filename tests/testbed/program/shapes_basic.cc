// Shapes on one communicator of all ranks: each collective by itself, mixes, and the sweep over everything NCCL offers.
#include "check.h"
#include "shape.h"

namespace job {

namespace {

class World : public Shape {
 public:
  explicit World(const Context& context) : context_(context) {}
  void set_up() override { world_ = Group::create(options_, "world", options_.rank, options_.ranks, options_.use_config); }
  void tear_down() override { world_.reset(); }
  void abort() override { world_->abort(); }

 protected:
  Operation operation(Kind kind, long salt) const {
    return {kind, options_.type, {options_.reduction}, options_.count, static_cast<int>(salt % options_.ranks), 1, salt};
  }
  const Context context_;
  const Options& options_ = context_.options;
  Progress& progress_ = context_.progress;
  std::unique_ptr<Group> world_;
};

// The same operations in every iteration.
class Repeat : public World {
 public:
  Repeat(const Context& context, std::vector<Kind> kinds) : World(context), kinds_(std::move(kinds)) {}
  void iterate(long index) override {
    std::vector<Step> steps;
    for (Kind kind : kinds_) steps.push_back({operation(kind, index * static_cast<long>(kinds_.size()) + steps.size()), world_.get()});
    run_steps(context_, steps);
  }

 private:
  std::vector<Kind> kinds_;
};

// Every collective, type and reduction once per iteration, with odd counts and every root.
class Sweep : public World {
 public:
  using World::World;
  void iterate(long index) override {
    long salt = index * 1000;
    const auto run = [&](Operation operation) {
      operation.salt = ++salt;
      run_steps(context_, {{operation, world_.get()}});
    };
    constexpr ncclDataType_t kTypes[] = {ncclInt8,   ncclUint8,   ncclInt32,   ncclUint32,  ncclInt64,
                                         ncclUint64, ncclFloat16, ncclFloat32, ncclFloat64, ncclBfloat16};
    constexpr ncclRedOp_t kReductions[] = {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg};
    for (ncclDataType_t type : kTypes) {
      for (ncclRedOp_t reduction : kReductions)
        for (Kind kind : {Kind::kAllReduce, Kind::kReduceScatter, Kind::kReduce}) run({kind, type, {reduction}, options_.count, 0, 1, 0});
      run_premul(type, run);
      for (Kind kind : {Kind::kAllGather, Kind::kBroadcast, Kind::kSendRecv, Kind::kAllToAll, Kind::kGroupedAllReduce, Kind::kAllGatherV})
        run({kind, type, {ncclSum}, options_.count, options_.ranks - 1, 1, 0});
    }
    for (int root = 0; root < options_.ranks; root++)
      for (Kind kind : {Kind::kBroadcast, Kind::kReduce}) run({kind, ncclFloat32, {ncclSum}, options_.count + root, root, 1, 0});
    for (size_t count : {size_t{1}, size_t{3}, size_t{1023}, size_t{100'003}})
      for (Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kBroadcast, Kind::kReduce, Kind::kSendRecv, Kind::kAllToAll})
        run({kind, ncclFloat32, {ncclSum}, count, 0, 1, 0});
    for (int distance = 2; distance < options_.ranks; distance++)
      run({Kind::kSendRecv, ncclInt32, {ncclSum}, options_.count, 0, distance, 0});
  }

 private:
  template <class Run>
  void run_premul(ncclDataType_t type, const Run& run) {
    char factor[8];
    fill(type, factor, 1, [](size_t) { return 2.0; });
    ncclRedOp_t reduction;
    NCCL(ncclRedOpCreatePreMulSum(&reduction, factor, type, ncclScalarHostImmediate, world_->comm));
    for (Kind kind : {Kind::kAllReduce, Kind::kReduceScatter, Kind::kReduce}) run({kind, type, {reduction, true}, options_.count, 0, 1, 0});
    NCCL(ncclRedOpDestroy(reduction, world_->comm));
  }
};

// Every collective with messages of 8 bytes, then of eight times as many each, up to the count, and of half the count: NCCL's choices
// depend on the size.
class Sizes : public World {
 public:
  using World::World;
  void iterate(long index) override {
    long salt = index * 1000;
    std::vector<size_t> counts;
    for (size_t count = 8 / bytes_of(options_.type); count <= options_.count; count *= 8) counts.push_back(count);
    counts.push_back(options_.count / 2);
    for (size_t count : counts)
      for (Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kBroadcast, Kind::kReduce, Kind::kSendRecv, Kind::kAllToAll})
        run_steps(context_, {{{kind, options_.type, {options_.reduction}, count, 0, 1, ++salt}, world_.get()}});
  }
};

// Communicator and nothing else.
class Idle : public World {
 public:
  using World::World;
  void iterate(long) override { usleep(100'000); }
};

RegisterShape repeat(const char* name, std::vector<Kind> kinds) {
  return {name, [kinds](const Context& context) { return std::make_unique<Repeat>(context, kinds); }};
}

const RegisterShape kShapes[] = {
    repeat("allreduce", {Kind::kAllReduce}),
    repeat("allgather", {Kind::kAllGather}),
    repeat("reducescatter", {Kind::kReduceScatter}),
    repeat("broadcast", {Kind::kBroadcast}),
    repeat("reduce", {Kind::kReduce}),
    repeat("sendrecv", {Kind::kSendRecv}),
    repeat("alltoall", {Kind::kAllToAll}),
    repeat("grouped", {Kind::kGroupedAllReduce}),
    repeat("allgatherv", {Kind::kAllGatherV}),
    repeat("mix", {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kBroadcast, Kind::kReduce, Kind::kSendRecv, Kind::kAllToAll,
                   Kind::kGroupedAllReduce}),
    plain_shape<Sweep>("sweep"),
    plain_shape<Sizes>("sizes"),
    plain_shape<Idle>("idle"),
};

}  // namespace

}  // namespace job
