#include "group.h"

#include <atomic>

#include "check.h"
#include "rendezvous.h"

namespace job {

namespace {
std::atomic<bool> g_aborting{false};
std::atomic<bool> g_register{false};
std::atomic<bool> g_allocate_by_nccl{false};

char* allocate(size_t bytes) {
  void* buffer = nullptr;
  if (g_allocate_by_nccl)
    NCCL(ncclMemAlloc(&buffer, bytes));
  else
    CUDA(cudaMalloc(&buffer, bytes));
  return static_cast<char*>(buffer);
}

void set_name([[maybe_unused]] ncclConfig_t& config, [[maybe_unused]] const char* name) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
  if (name) config.commName = name;
#endif
}

void release(char* buffer) {
  if (!buffer) return;
  if (g_allocate_by_nccl)
    NCCL(ncclMemFree(buffer));
  else
    CUDA(cudaFree(buffer));
}
}

void set_aborting() { g_aborting = true; }

void halt_if_aborting() {
  while (g_aborting) pause();
}

Group::Group(std::string name_, ncclComm_t comm_) : name(std::move(name_)), comm(comm_) {
  NCCL(ncclCommUserRank(comm, &rank));
  NCCL(ncclCommCount(comm, &ranks));
  CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
}

std::unique_ptr<Group> Group::create(const Options& options, const std::string& name, int rank, int ranks, bool use_config,
                                     const char* comm_name) {
  const ncclUniqueId id = exchange_id(options.run_dir, name, rank == 0);
  ncclComm_t comm = nullptr;
  if (use_config) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    set_name(config, comm_name);
    NCCL(ncclCommInitRankConfig(&comm, ranks, id, rank, &config));
  } else {
    NCCL(ncclCommInitRank(&comm, ranks, id, rank));
  }
  return std::unique_ptr<Group>(new Group(name, comm));
}

std::unique_ptr<Group> Group::split(const std::string& part, int color, int key, bool share, const char* comm_name) {
  ncclComm_t child = nullptr;
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.splitShare = share;
  set_name(config, comm_name);
  NCCL(ncclCommSplit(comm, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, &child, &config));
  if (!child) return nullptr;
  return std::unique_ptr<Group>(new Group(part, child));
}

void Group::register_buffers() { g_register = true; }
void Group::allocate_by_nccl() { g_allocate_by_nccl = true; }

void Group::deregister() {
  for (void* handle : registered_) NCCL(ncclCommDeregister(comm, handle));
  registered_.clear();
}

void Group::reserve(size_t bytes) {
  if (bytes <= capacity) return;
  if (capacity) synchronize();  // operations on the old buffers may still run
  deregister();
  release(input);
  release(output);
  input = allocate(bytes);
  output = allocate(bytes);
  capacity = bytes;
  if (!g_register) return;
  for (char* buffer : {input, output}) NCCL(ncclCommRegister(comm, buffer, bytes, &registered_.emplace_back()));
}

void Group::synchronize(cudaStream_t stream) {
  CUDA(cudaStreamSynchronize(stream));
  halt_if_aborting();
}

void Group::destroy() {
  if (comm) deregister();
  if (comm) NCCL(ncclCommDestroy(comm));
  comm = nullptr;
}

void Group::abort() {
  if (comm) NCCL(ncclCommAbort(comm));
  comm = nullptr;
}

Group::~Group() {
  destroy();
  release(input);
  release(output);
  CUDA(cudaStreamDestroy(stream));
}

}  // namespace job
