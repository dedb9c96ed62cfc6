// A shape of job: which communicators it has and what an iteration does.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fault.h"
#include "group.h"
#include "operation.h"
#include "options.h"
#include "progress.h"

namespace job {

// What every shape works with.
struct Context {
  const Options& options;
  Progress& progress;
  Faults& faults;
};

class Shape {
 public:
  virtual ~Shape() = default;
  // Creates communicators and buffers.
  virtual void set_up() = 0;
  // One iteration, complete when this returns. `index` counts from 0.
  virtual void iterate(long index) = 0;
  virtual void tear_down() = 0;
  // ncclCommAbort of every communicator, from another thread than the one that hangs.
  virtual void abort() = 0;
};

using ShapeMaker = std::function<std::unique_ptr<Shape>(const Context&)>;
// All shapes by name; the files that implement them add theirs.
std::map<std::string, ShapeMaker>& shapes();
struct RegisterShape {
  RegisterShape(const std::string& name, ShapeMaker maker) { shapes()[name] = std::move(maker); }
};

template <class T>
RegisterShape plain_shape(const char* name) {
  return {name, [](const Context& context) { return std::make_unique<T>(context); }};
}

// Fills the group's buffers with the operation's input, or with something else if that is the rank's fault.
void prepare_input(const Context& context, Operation operation, Group& group);

// Enqueues the operations on their groups after the compute kernel, waits for all, and checks them if asked to.
struct Step {
  Operation operation;
  Group* group;
};
void run_steps(const Context& context, const std::vector<Step>& steps);

}  // namespace job
