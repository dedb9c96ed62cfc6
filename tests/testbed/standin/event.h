// CUDA events. A record is an object of its own: waiting takes the record current at the time of the call, as CUDA specifies, so
// recording the event again does not move an earlier wait.
#pragma once

#include <time.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_runtime.h"

namespace standin {

struct Capture;
class Node;

class Record {
 public:
  void complete();
  void wait();
  bool done();
  double milliseconds() const { return time_.tv_sec * 1e3 + time_.tv_nsec * 1e-6; }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  timespec time_{};
};

// What an event stands for: a record, or, recorded while its stream was captured, the nodes the stream had come to.
class EventState {
 public:
  void set(std::shared_ptr<Record> record);
  void set(std::shared_ptr<Capture> capture, std::vector<Node*> nodes);
  // Null when the event was never recorded, or only in a capture: it then counts as complete.
  std::shared_ptr<Record> current();
  // The capture it was last recorded in, if that has not ended, and the nodes; else null.
  std::shared_ptr<Capture> captured(std::vector<Node*>* nodes);

 private:
  std::mutex mutex_;
  std::shared_ptr<Record> record_;
  std::shared_ptr<Capture> capture_;
  std::vector<Node*> nodes_;
};

// The state behind a handle. Nodes of graphs keep it when the program has destroyed its event.
std::shared_ptr<EventState> event_state(cudaEvent_t handle);

}  // namespace standin
