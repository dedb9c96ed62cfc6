// What PyTorch's backend nccl2 asks of NCCL, played (torch/csrc/distributed/c10d/nccl2: init_process_group(backend="nccl2"), and what
// "nccl" means from PyTorch 2.15 on). The group of all ranks is made by ncclCommInitRankConfig and has a name; split_group gives parts
// of it by ncclCommSplit; with "nccl-lazy" each pair of ranks gets a communicator of its own in its first message.
#include <nccl.h>
#include <string.h>

#include <string>

#include "check.h"
#include "shape.h"

namespace job {

namespace {

class Nccl2 : public Shape {
 public:
  explicit Nccl2(const Context& context) : context_(context) {}

  void set_up() override {
    const int half = (options_.ranks + 1) / 2, color = options_.rank < half ? 0 : half;  // the lowest rank of each part
    world_ = Group::create(options_, "0", options_.rank, options_.ranks, true, "0");
    // NCCL keeps the pointer; the name is freed when split_group returns (ProcessGroupNCCL::split), and other things come to lie there.
    static char name[] = "split:part";
    part_ = world_->split("part", color, options_.rank - color, false, name);
    memset(name, 0xfe, sizeof name - 1);
  }

  // A step of sharded training, and what a pipeline passes on.
  void iterate(long index) override {
    const int pair = options_.rank / 2;
    if (!pair_ && (pair + 1) * 2 <= options_.ranks) {
      pair_name_ = "pair" + std::to_string(pair);
      pair_ = Group::create(options_, pair_name_, options_.rank % 2, 2, true, pair_name_.c_str());
    }
    const auto operation = [&](Kind kind, long salt) { return Operation{kind, options_.type, {ncclSum}, options_.count, 0, 1, index * 4 + salt}; };
    run_steps(context_, {{operation(Kind::kAllGather, 0), part_.get()}, {operation(Kind::kReduceScatter, 1), part_.get()}});
    if (pair_) run_steps(context_, {{operation(Kind::kSendRecv, 2), pair_.get()}});
    run_steps(context_, {{operation(Kind::kAllReduce, 3), world_.get()}});
  }

  void tear_down() override {
    pair_.reset();
    part_.reset();
    world_.reset();
  }
  void abort() override {
    for (auto* group : {&pair_, &part_, &world_})
      if (*group) (*group)->abort();
  }

 private:
  const Context context_;
  const Options& options_ = context_.options;
  std::string pair_name_;
  std::unique_ptr<Group> world_, part_, pair_;
};

const RegisterShape kTorchShapes[] = {plain_shape<Nccl2>("nccl2")};

}  // namespace

}  // namespace job
