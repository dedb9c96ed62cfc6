#include "workers.h"

#include <pthread.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>

namespace standin {

namespace {

class Worker {
 public:
  Worker() {
    std::thread([this] { run(); }).detach();
  }
  void start(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    task_ = std::move(task);
    changed_.notify_all();
  }

 private:
  void run();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::function<void()> task_;
};

class Pool {
 public:
  Worker* take() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!idle_.empty()) {
        Worker* worker = idle_.back();
        idle_.pop_back();
        return worker;
      }
    }
    return new Worker;  // lives as long as the process
  }
  void give(Worker* worker) {
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(worker);
  }

 private:
  std::mutex mutex_;
  std::vector<Worker*> idle_;
};

Pool& pool() {
  static auto* instance = new Pool;
  return *instance;
}

void Worker::run() {
  pthread_setname_np(pthread_self(), "standin-block");
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return static_cast<bool>(task_); });
      task = std::move(task_);
      task_ = nullptr;
    }
    task();
  }
}

}  // namespace

void run_together(std::vector<std::function<void()>> tasks) {
  if (tasks.empty()) return;
  std::mutex mutex;
  std::condition_variable changed;
  size_t running = tasks.size() - 1;
  for (size_t i = 1; i < tasks.size(); i++) {
    Worker* worker = pool().take();
    worker->start([&, worker, task = std::move(tasks[i])] {
      task();
      std::lock_guard<std::mutex> lock(mutex);
      pool().give(worker);
      if (--running == 0) changed.notify_all();
    });
  }
  tasks[0]();
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [&] { return running == 0; });
}

}  // namespace standin
