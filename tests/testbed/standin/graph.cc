#include "graph.h"

#include <algorithm>
#include <condition_variable>
#include <map>

#include "launch.h"
#include "log.h"
#include "nccl_layout.h"
#include "stream.h"
#include "workers.h"

namespace standin {

struct UserObject {
  cudaHostFn_t destroy;
  void* data;
  ~UserObject() { destroy(data); }
};

Node* Graph::add(Node node, std::vector<Node*> after) {
  node.after = std::move(after);
  nodes.push_back(std::make_shared<Node>(std::move(node)));
  return nodes.back().get();
}

namespace {

// What an executable graph holds; launches under way keep it when the program has destroyed the graph.
struct Executable {
  std::vector<std::shared_ptr<Node>> nodes;
  std::vector<std::shared_ptr<UserObject>> objects;
  // Each chain is a thread's: a node stands behind one that it follows, where that one was the last of its chain.
  std::vector<std::vector<size_t>> chains;
  std::vector<std::vector<size_t>> after;
  std::mutex running;  // CUDA never runs the same executable twice at once
};

std::shared_ptr<Executable> instantiate(const Graph& graph) {
  auto made = std::make_shared<Executable>();
  made->nodes = graph.nodes;
  made->objects = graph.objects;
  std::map<const Node*, size_t> index;
  for (size_t i = 0; i < graph.nodes.size(); i++) {
    const Node& node = *graph.nodes[i];
    index[&node] = i;
    made->after.emplace_back();
    for (const Node* before : node.after) made->after[i].push_back(index.at(before));
    const auto chain = std::find_if(made->chains.begin(), made->chains.end(), [&](const auto& chain) {
      return std::count(made->after[i].begin(), made->after[i].end(), chain.back()) != 0;
    });
    if (chain == made->chains.end()) made->chains.push_back({i});
    else chain->push_back(i);
  }
  return made;
}

// One launch. Events are taken and set when the launch is called, like those of a stream.
class Replay {
 public:
  explicit Replay(std::shared_ptr<Executable> executable) : executable_(std::move(executable)), done_(executable_->nodes.size()) {
    for (const auto& node : executable_->nodes) {
      records_.push_back(nullptr);
      if (node->kind == Node::Kind::kWait) records_.back() = node->event->current();
      if (node->kind == Node::Kind::kRecord) node->event->set(records_.back() = std::make_shared<Record>());
    }
  }

  void run() {
    std::lock_guard<std::mutex> lock(executable_->running);
    std::vector<std::function<void()>> tasks;
    for (const auto& chain : executable_->chains)
      tasks.push_back([this, &chain] {
        for (size_t index : chain) step(index);
      });
    run_together(std::move(tasks));
  }

 private:
  void step(size_t index) {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto& after = executable_->after[index];
      changed_.wait(lock, [&] { return std::all_of(after.begin(), after.end(), [this](size_t before) { return done_[before]; }); });
    }
    const Node& node = *executable_->nodes[index];
    if (node.kind == Node::Kind::kTask) node.task();
    if (node.kind == Node::Kind::kRecord) records_[index]->complete();
    if (node.kind == Node::Kind::kWait && records_[index]) records_[index]->wait();
    std::lock_guard<std::mutex> lock(mutex_);
    done_[index] = true;
    changed_.notify_all();
  }

  std::shared_ptr<Executable> executable_;
  std::vector<std::shared_ptr<Record>> records_;
  std::vector<bool> done_;
  std::mutex mutex_;
  std::condition_variable changed_;
};

std::vector<Node*> list_of(const cudaGraphNode_t* nodes, size_t count) {
  const auto* first = reinterpret_cast<Node* const*>(nodes);
  return {first, first + count};
}

cudaError_t add_node(cudaGraphNode_t* made, cudaGraph_t graph, const cudaGraphNode_t* after, size_t count, Node node) {
  *made = Graph::of(graph)->add(std::move(node), list_of(after, count))->handle();
  return cudaSuccess;
}

// cudaKernelNodeParams and cudaHostNodeParams of driver_types.h.
struct KernelNodeParams {
  void* function;
  dim3 grid, block;
  unsigned shared;
  void **arguments, **extra;
};
struct HostNodeParams {
  cudaHostFn_t function;
  void* data;
};

thread_local int t_mode = cudaStreamCaptureModeGlobal;

}  // namespace

}  // namespace standin

using namespace standin;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, int) {
  static std::atomic<unsigned long long> next_id{1};
  if (Stream::of(stream)->capture()) return cudaErrorIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->graph = new Graph;
  capture->id = next_id++;
  Stream::of(stream)->join(capture, {});
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  const auto capture = Stream::of(stream)->capture();
  if (!capture) return cudaErrorIllegalState;
  *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
  capture->active = false;
  log(1, "captured %zu nodes", capture->graph->nodes.size());
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, int* status) {
  *status = Stream::of(stream)->capture() != nullptr;  // cudaStreamCaptureStatusNone, …Active
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t handle, int* status, unsigned long long* id, cudaGraph_t* graph,
                                        const cudaGraphNode_t** nodes, size_t* count) {
  Stream* stream = Stream::of(handle);
  const auto capture = stream->capture();
  if (status) *status = capture != nullptr;
  if (!capture) return cudaSuccess;
  if (id) *id = capture->id;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(capture->graph);
  if (nodes) *nodes = reinterpret_cast<const cudaGraphNode_t*>(stream->tips().data());
  if (count) *count = stream->tips().size();
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, int* status, unsigned long long* id) {
  return cudaStreamGetCaptureInfo_v2(stream, status, id, nullptr, nullptr, nullptr);
}
cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, int* status, unsigned long long* id, cudaGraph_t* graph,
                                        const cudaGraphNode_t** nodes, const void** edges, size_t* count) {
  if (edges) *edges = nullptr;
  return cudaStreamGetCaptureInfo_v2(stream, status, id, graph, nodes, count);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle, cudaGraphNode_t* nodes, size_t count, unsigned int flags) {
  constexpr unsigned kSet = 1;  // cudaStreamSetCaptureDependencies
  Stream* stream = Stream::of(handle);
  if (!stream->capture()) return cudaErrorIllegalState;
  if (flags & kSet) stream->set_tips(list_of(nodes, count));
  else stream->join(stream->capture(), list_of(nodes, count));
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(int* mode) {
  std::swap(t_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after, size_t count,
                                   const KernelNodeParams* kernel) {
  const unsigned blocks = kernel->grid.x * kernel->grid.y * kernel->grid.z;
  return add_node(node, graph, after, count, {Node::Kind::kTask, kernel_task(kernel->function, blocks, kernel->arguments, kernel->extra), nullptr});
}
cudaError_t cudaGraphAddHostNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after, size_t count, const HostNodeParams* host) {
  return add_node(node, graph, after, count, {Node::Kind::kTask, [host = *host] { host.function(host.data); }, nullptr});
}
cudaError_t cudaGraphAddEventRecordNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after, size_t count, cudaEvent_t event) {
  return add_node(node, graph, after, count, {Node::Kind::kRecord, nullptr, event_state(event)});
}
cudaError_t cudaGraphAddEventWaitNode(cudaGraphNode_t* node, cudaGraph_t graph, const cudaGraphNode_t* after, size_t count, cudaEvent_t event) {
  return add_node(node, graph, after, count, {Node::Kind::kWait, nullptr, event_state(event)});
}
cudaError_t cudaGraphAddDependencies(cudaGraph_t, const cudaGraphNode_t* from, const cudaGraphNode_t* to, size_t count) {
  for (size_t i = 0; i < count; i++) reinterpret_cast<Node*>(to[i])->after.push_back(reinterpret_cast<Node*>(from[i]));
  return cudaSuccess;
}

// The reference of the creator is its to move into a graph, as NCCL does (cudaGraphUserObjectMove).
cudaError_t cudaUserObjectCreate(void** object, void* data, cudaHostFn_t destroy, unsigned int, unsigned int) {
  *object = new std::shared_ptr<UserObject>(new UserObject{destroy, data});
  return cudaSuccess;
}
cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, void* object, unsigned int, unsigned int flags) {
  constexpr unsigned kMove = 1;  // cudaGraphUserObjectMove
  if (flags != kMove) return cudaErrorNotSupported;
  auto* owner = static_cast<std::shared_ptr<UserObject>*>(object);
  Graph::of(graph)->objects.push_back(*owner);
  delete owner;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new std::shared_ptr<Executable>(instantiate(*Graph::of(graph))));
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  Stream* stream = Stream::of(handle);
  if (stream->capture()) unsupported("a graph launched into a captured stream (child graphs)");
  auto replay = std::make_shared<Replay>(*reinterpret_cast<std::shared_ptr<Executable>*>(executable));
  stream->push([replay] { replay->run(); });
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete reinterpret_cast<std::shared_ptr<Executable>*>(executable);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete Graph::of(graph);
  return cudaSuccess;
}

}  // extern "C"
