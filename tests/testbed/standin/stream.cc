#include "stream.h"

#include <pthread.h>

#include <algorithm>
#include <thread>

#include "device.h"
#include "log.h"

namespace standin {

namespace {

std::mutex g_stream_mutex;
// Streams stay alive until destroyed by the program and their last task has run.
std::vector<std::shared_ptr<Stream>>& streams() {
  static auto* list = new std::vector<std::shared_ptr<Stream>>;
  return *list;
}

}  // namespace

Stream* Stream::of(cudaStream_t handle) {
  const auto value = reinterpret_cast<uintptr_t>(handle);
  if (value > 2) return reinterpret_cast<Stream*>(handle);
  static Stream* fallback = create(0, 0);  // cudaStreamLegacy (1) and cudaStreamPerThread (2) included
  return fallback;
}

Stream* Stream::create(unsigned flags, int priority) {
  auto stream = std::make_shared<Stream>();
  stream->flags_ = flags;
  stream->priority_ = priority;
  static std::atomic<unsigned long long> next_id{1};
  stream->id_ = next_id++;
  std::lock_guard<std::mutex> lock(g_stream_mutex);
  streams().push_back(stream);
  return stream.get();
}

void Stream::destroy(cudaStream_t handle) {
  std::shared_ptr<Stream> stream;
  {
    std::lock_guard<std::mutex> lock(g_stream_mutex);
    auto& list = streams();
    auto found = std::find_if(list.begin(), list.end(), [&](auto& item) { return item->handle() == handle; });
    if (found == list.end()) return;
    stream = *found;
    list.erase(found);
  }
  // Like CUDA, destroying a busy stream returns at once; its thread ends after the last task.
  std::lock_guard<std::mutex> lock(stream->mutex_);
  stream->closed_ = true;
  stream->work_.notify_all();
}

void Stream::synchronize_all() {
  std::vector<std::shared_ptr<Stream>> all;
  {
    std::lock_guard<std::mutex> lock(g_stream_mutex);
    all = streams();
  }
  for (auto& stream : all) stream->synchronize();
}

std::shared_ptr<Capture> Stream::capture() {
  if (capture_ && !capture_->active) capture_ = nullptr;
  return capture_;
}

void Stream::join(std::shared_ptr<Capture> capture, const std::vector<Node*>& nodes) {
  if (this->capture() != capture) tips_.clear();
  capture_ = std::move(capture);
  for (Node* node : nodes)
    if (std::find(tips_.begin(), tips_.end(), node) == tips_.end()) tips_.push_back(node);
}

void Stream::add(Node node) { tips_ = {capture()->graph->add(std::move(node), std::move(tips_))}; }

void Stream::push(Task task) {
  if (capture()) {
    add({Node::Kind::kTask, std::move(task), nullptr});
    return;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  tasks_.push_back(std::move(task));
  if (started_) {
    work_.notify_one();
    return;
  }
  started_ = true;
  std::thread([self = shared_from_this()] { self->run(); }).detach();
}

void Stream::run() {
  pthread_setname_np(pthread_self(), "standin-stream");
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return !tasks_.empty() || closed_; });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    task();
    task = nullptr;
    lock.lock();
    busy_ = false;
    if (tasks_.empty()) done_.notify_all();
  }
}

void Stream::synchronize() {
  std::unique_lock<std::mutex> lock(mutex_);
  done_.wait(lock, [this] { return tasks_.empty() && !busy_; });
}

bool Stream::idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return tasks_.empty() && !busy_;
}

}  // namespace standin

using namespace standin;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int flags, int priority) {
  *stream = Stream::create(flags, priority)->handle();
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  Stream::destroy(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (Stream::of(stream)->capture()) return cudaErrorStreamCaptureUnsupported;
  Stream::of(stream)->synchronize();
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t stream) {
  if (Stream::of(stream)->capture()) return cudaErrorStreamCaptureUnsupported;
  return Stream::of(stream)->idle() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long* id) {
  *id = Stream::of(stream)->id();
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void) {
  Stream::synchronize_all();
  return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  Stream::of(stream)->push([=] { function(data); });
  return cudaSuccess;
}

}  // extern "C"
