// A CUDA stream is a queue of tasks and one host thread that runs them in order.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_runtime.h"
#include "graph.h"

namespace standin {

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  using Task = std::function<void()>;

  // The stream behind a handle; null and the two special handles are the device's default stream.
  static Stream* of(cudaStream_t handle);
  static Stream* create(unsigned flags, int priority);
  static void destroy(cudaStream_t handle);
  // Waits for all streams of the process.
  static void synchronize_all();

  // Runs it behind all that was pushed before or, while the stream is captured, makes it a node.
  void push(Task task);
  void synchronize();
  bool idle();

  // The capture this stream is part of, or null.
  std::shared_ptr<Capture> capture();
  // Makes the stream part of a capture, if it is not yet, and its next node follow these too.
  void join(std::shared_ptr<Capture> capture, const std::vector<Node*>& nodes);
  // Adds a node to the capture, behind what this stream has come to.
  void add(Node node);
  // The nodes that the next one of this stream will follow.
  const std::vector<Node*>& tips() const { return tips_; }
  void set_tips(std::vector<Node*> nodes) { tips_ = std::move(nodes); }

  cudaStream_t handle() { return reinterpret_cast<cudaStream_t>(this); }
  unsigned flags() const { return flags_; }
  int priority() const { return priority_; }
  unsigned long long id() const { return id_; }

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<Task> tasks_;
  bool busy_ = false, started_ = false, closed_ = false;
  unsigned flags_ = 0;
  int priority_ = 0;
  unsigned long long id_ = 0;
  std::shared_ptr<Capture> capture_;
  std::vector<Node*> tips_;
};

}  // namespace standin
