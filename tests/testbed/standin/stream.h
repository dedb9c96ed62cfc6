// A CUDA stream is a queue of tasks and one host thread that runs them in order.
#pragma once

#include <time.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_runtime.h"

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

  void push(Task task);
  void synchronize();
  bool idle();
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
};

}  // namespace standin
