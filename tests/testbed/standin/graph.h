// CUDA graphs: what is pushed on a stream while it is captured becomes nodes, and a launch of the executable graph runs them.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_runtime.h"
#include "event.h"

namespace standin {

// A piece of work that runs once those before it have.
class Node {
 public:
  enum class Kind { kTask, kRecord, kWait };
  Kind kind;
  std::function<void()> task;         // of kTask
  std::shared_ptr<EventState> event;  // of kRecord and kWait
  std::vector<Node*> after{};

  cudaGraphNode_t handle() { return reinterpret_cast<cudaGraphNode_t>(this); }
};

// Calls the program's destructor when the last graph that was given a reference is gone.
struct UserObject;

// Nodes in the order they were added; each only follows earlier ones.
class Graph {
 public:
  static Graph* of(cudaGraph_t handle) { return reinterpret_cast<Graph*>(handle); }
  Node* add(Node node, std::vector<Node*> after);

  std::vector<std::shared_ptr<Node>> nodes;
  std::vector<std::shared_ptr<UserObject>> objects;
};

// Streams that are captured together. `active` until the capture has been ended.
struct Capture {
  Graph* graph;  // the program's, from the end of the capture on
  unsigned long long id;
  std::atomic<bool> active{true};
};

}  // namespace standin
