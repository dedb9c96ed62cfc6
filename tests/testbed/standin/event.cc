#include "event.h"

#include "graph.h"
#include "stream.h"

namespace standin {

void Record::complete() {
  std::lock_guard<std::mutex> lock(mutex_);
  clock_gettime(CLOCK_MONOTONIC, &time_);
  done_ = true;
  changed_.notify_all();
}

void Record::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this] { return done_; });
}

bool Record::done() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_;
}

void EventState::set(std::shared_ptr<Record> record) {
  std::lock_guard<std::mutex> lock(mutex_);
  record_ = std::move(record);
  capture_ = nullptr;
}

void EventState::set(std::shared_ptr<Capture> capture, std::vector<Node*> nodes) {
  std::lock_guard<std::mutex> lock(mutex_);
  record_ = nullptr;
  capture_ = std::move(capture);
  nodes_ = std::move(nodes);
}

std::shared_ptr<Record> EventState::current() {
  std::lock_guard<std::mutex> lock(mutex_);
  return record_;
}

std::shared_ptr<Capture> EventState::captured(std::vector<Node*>* nodes) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!capture_ || !capture_->active) return nullptr;
  *nodes = nodes_;
  return capture_;
}

namespace {

struct Event {
  std::shared_ptr<EventState> state = std::make_shared<EventState>();
};

}  // namespace

std::shared_ptr<EventState> event_state(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle)->state; }

}  // namespace standin

using namespace standin;

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int) {
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned int flags) {
  constexpr unsigned kExternal = 1;  // cudaEventRecordExternal
  Stream* stream = Stream::of(handle);
  const auto state = event_state(event);
  if (const auto capture = stream->capture()) {
    if (flags & kExternal) stream->add({Node::Kind::kRecord, nullptr, state});
    else state->set(capture, stream->tips());
    return cudaSuccess;
  }
  auto record = std::make_shared<Record>();
  state->set(record);
  stream->push([record] { record->complete(); });
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

cudaError_t cudaEventQuery(cudaEvent_t event) {
  auto record = event_state(event)->current();
  return !record || record->done() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  if (auto record = event_state(event)->current()) record->wait();
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  auto first = event_state(start)->current(), last = event_state(end)->current();
  if (!first || !last) return cudaErrorInvalidResourceHandle;
  if (!first->done() || !last->done()) return cudaErrorNotReady;
  *milliseconds = static_cast<float>(last->milliseconds() - first->milliseconds());
  return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned int flags) {
  constexpr unsigned kExternal = 1;  // cudaEventWaitExternal
  Stream* stream = Stream::of(handle);
  const auto state = event_state(event);
  if (stream->capture() && flags & kExternal) {
    stream->add({Node::Kind::kWait, nullptr, state});
    return cudaSuccess;
  }
  std::vector<Node*> nodes;
  if (const auto capture = state->captured(&nodes)) {
    stream->join(capture, nodes);
    return cudaSuccess;
  }
  if (stream->capture()) return cudaErrorStreamCaptureIsolation;  // an event from outside, without the flag that says so
  auto record = state->current();
  if (record && !record->done()) stream->push([record] { record->wait(); });
  return cudaSuccess;
}

}  // extern "C"
