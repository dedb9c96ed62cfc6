// A communicator with what it works on: a stream and a pair of device buffers.
#pragma once

#include <cuda_runtime.h>
#include <nccl.h>

#include <memory>
#include <string>
#include <vector>

#include "options.h"

namespace job {

// Once a watchdog aborts the communicators, the thread that used them stops for good in the next of its calls.
void set_aborting();
void halt_if_aborting();

class Group {
 public:
  // Creates the communicator from an id exchanged under this name, with ncclCommInitRank or, with `config`, ncclCommInitRankConfig.
  // `comm_name` is what the program calls the communicator (config.commName, 2.27 and later): NCCL keeps the pointer.
  static std::unique_ptr<Group> create(const Options& options, const std::string& name, int rank, int ranks, bool config,
                                       const char* comm_name = nullptr);
  // ncclCommSplit of this communicator, which shares its connections with `share`. Null for ranks that pass a negative colour, which belong to no part.
  std::unique_ptr<Group> split(const std::string& name, int color, int key, bool share, const char* comm_name = nullptr);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Makes both buffers at least this large; what they held is lost.
  void reserve(size_t bytes);
  void synchronize() { synchronize(stream); }
  static void synchronize(cudaStream_t stream);
  void destroy();  // ncclCommDestroy
  void abort();    // ncclCommAbort
  // From now on buffers are registered with their communicator (ncclCommRegister).
  static void register_buffers();
  // From now on buffers are NCCL's own memory (ncclMemAlloc), of which peers can map what is registered.
  static void allocate_by_nccl();

  const std::string name;
  ncclComm_t comm;
  int rank = 0, ranks = 0;
  cudaStream_t stream = nullptr;
  char *input = nullptr, *output = nullptr;
  size_t capacity = 0;

 private:
  Group(std::string name, ncclComm_t comm);
  void deregister();
  std::vector<void*> registered_;  // handles of NCCL
};

}  // namespace job
