// A shape of job: which communicators it has and what an iteration does.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "group.h"
#include "operation.h"
#include "options.h"
#include "progress.h"

namespace job {

class Shape {
 public:
  virtual ~Shape() = default;
  // Creates communicators and buffers.
  virtual void set_up() = 0;
  // One iteration, complete when this returns. `index` counts from 0.
  virtual void iterate(long index) = 0;
  virtual void tear_down() = 0;
};

using ShapeMaker = std::function<std::unique_ptr<Shape>(const Options&, Progress&)>;
// All shapes by name; the files that implement them add theirs.
std::map<std::string, ShapeMaker>& shapes();
struct RegisterShape {
  RegisterShape(const std::string& name, ShapeMaker maker) { shapes()[name] = std::move(maker); }
};

template <class T>
RegisterShape plain_shape(const char* name) {
  return {name, [](const Options& options, Progress& progress) { return std::make_unique<T>(options, progress); }};
}

// Enqueues the operations on their groups after the compute kernel, waits for all, and checks them if asked to.
struct Step {
  Operation operation;
  Group* group;
};
void run_steps(const Options& options, Progress& progress, const std::vector<Step>& steps);

}  // namespace job
