// CUDA events. A record is an object of its own: waiting takes the record current at the time of the call, as CUDA specifies, so
// recording the event again does not move an earlier wait.
#include <time.h>

#include <condition_variable>
#include <memory>
#include <mutex>

#include "cuda_runtime.h"
#include "stream.h"

namespace standin {

class Record {
 public:
  void complete() {
    std::lock_guard<std::mutex> lock(mutex_);
    clock_gettime(CLOCK_MONOTONIC, &time_);
    done_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
  }
  bool done() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }
  double milliseconds() const { return time_.tv_sec * 1e3 + time_.tv_nsec * 1e-6; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  timespec time_{};
};

class Event {
 public:
  static Event* of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }
  void set(std::shared_ptr<Record> record) {
    std::lock_guard<std::mutex> lock(mutex_);
    record_ = std::move(record);
  }
  // Null when the event was never recorded: it then counts as complete.
  std::shared_ptr<Record> current() {
    std::lock_guard<std::mutex> lock(mutex_);
    return record_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Record> record_;
};

}  // namespace standin

using namespace standin;

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete Event::of(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  auto record = std::make_shared<Record>();
  Event::of(event)->set(record);
  Stream::of(stream)->push([record] { record->complete(); });
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int) { return cudaEventRecord(event, stream); }

cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto record = Event::of(event)->current();
  return !record || record->done() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (auto record = Event::of(event)->current()) record->wait();
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  auto first = Event::of(start)->current(), last = Event::of(end)->current();
  if (!first || !last) return cudaErrorInvalidResourceHandle;
  if (!first->done() || !last->done()) return cudaErrorNotReady;
  *milliseconds = static_cast<float>(last->milliseconds() - first->milliseconds());
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int) {
  auto record = Event::of(event)->current();
  if (record && !record->done()) Stream::of(stream)->push([record] { record->wait(); });
  return cudaSuccess;
}

}  // extern "C"
