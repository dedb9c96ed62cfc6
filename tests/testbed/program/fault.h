// Faults that a rank brings upon itself, given as --fault KIND:rank=R,at=I,for=N,when=FILE,key=value…
//
//   kind       what happens from iteration `at` on (counting from 0), for `for` iterations (forever, if not given), while there is a file
//              `when`, if one is given
//   stuck      the rank's host thread never enters a collective, or in shape training an exchange between stages (group=NAME limits
//              it to a group, nth=N to that call on it in an iteration, counted from 0)
//   skip       the rank leaves out one of the iteration (group and nth as above; `for` is 1 if not given, here and in other_*)
//   other_op, other_size, other_type
//              the rank enters a different collective, or with factor= (a half) as many elements, or with another data type
//   swap       two collectives on two communicators are entered in the other order (shapes that have such a pair)
//   corrupt    the rank's input differs from what the others expect
//   stall_gpu  kernels neither consume nor produce; a line says where they stalled (between two operations, at the beginning of one, inside one)
//   stall_proxy
//              NCCL's proxy progress thread does not run
//   slow_gpu   compute kernels take factor= times as long (jitter=J: a random factor up to that, differing each iteration)
//   slow_link  each slice a communication kernel moves takes us= longer (lower power, a slow path to the device)
//   slow_copy  copies between host and device run at rate= bytes per second
//   slow_proxy the proxy thread sleeps us=, with probability p= each time it yields or, with every_us=, at random moments that far apart
//              on average
//   pause      the host pauses us= before every every=th iteration (garbage collection)
//   loader     the host pauses us= before each iteration (data loader)
//   load       threads= busy threads compete for the processor
//   one_cpu    the process may run on one processor only
//   crash      signal=S or exit=E before the iteration's first operation
//   stop       the rank's process is stopped by SIGSTOP
//   no_init    the rank never creates its communicators (at and for do not apply)
// stall_gpu, stall_proxy, crash and stop take group= and nth= too, and then strike when the rank's GPU comes to that call in iteration
// `at`, or delay_us= later, in the middle of it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "group.h"
#include "operation.h"
#include "progress.h"

namespace job {

struct Fault {
  std::string kind;
  std::map<std::string, std::string> values;

  double number(const std::string& key, double fallback) const;
  std::string text(const std::string& key) const;
  bool active(long iteration) const;
};

class Faults {
 public:
  // Keeps the faults of this rank. Ends the process with a usage line on an unknown kind.
  Faults(const std::vector<std::string>& specifications, int rank);

  // Before communicators are created.
  void before_start(const Progress& progress) const;
  // Switches faults on and off; may pause or not return.
  void before_iteration(long iteration, const Progress& progress);
  // To be called before every operation: whether this rank enters it at all. May not return.
  bool enters(const Group& group) { return meets(group) == nullptr; }
  // The operation this rank really enters; nothing if it skips it. Instead of `enters`, where there is an operation.
  std::optional<Operation> replace(const Operation& operation, const Group& group);
  // Whether the pair of collectives at hand is to be entered in the other order.
  bool swaps() const { return find("swap") != nullptr; }
  bool corrupts() const { return find("corrupt") != nullptr; }

 private:
  const Fault* find(const std::string& kind) const;  // active in the current iteration
  // The fault of a single call that strikes here, if any. Arms the faults that wait for this call; does not return from `stuck`.
  const Fault* meets(const Group& group);
  std::vector<Fault> faults_;
  long iteration_ = -1;
  std::vector<int> calls_;  // of each fault: calls of this iteration on its group
  const Progress* progress_ = nullptr;
  std::vector<bool> announced_;
};

// Enqueues what the rank's faults make of the operation.
void issue(Faults& faults, const Operation& operation, Group& group);

}  // namespace job
