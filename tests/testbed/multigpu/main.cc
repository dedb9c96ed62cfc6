// Processes that drive several GPUs each, as nccl-tests with -g, JAX or a thread for every GPU do: AllReduce over all GPUs of all
// processes, again and again. One rank may stop taking part.
//   multigpu PROCESS PROCESSES GPUS FOLDER threads|group ABSENT_RANK ITERATIONS_BEFORE
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>

#include <string>
#include <thread>
#include <vector>

#include "../program/check.h"
#include "../program/rendezvous.h"

namespace {

constexpr size_t kCount = 1 << 14;
constexpr useconds_t kPauseUs = 20'000;

struct Gpu {
  int device, rank;
  ncclComm_t comm;
  cudaStream_t stream;
  float *input, *output;
};

void prepare(Gpu& gpu) {
  CUDA(cudaSetDevice(gpu.device));
  CUDA(cudaStreamCreateWithFlags(&gpu.stream, cudaStreamNonBlocking));
  CUDA(cudaMalloc(reinterpret_cast<void**>(&gpu.input), kCount * sizeof(float)));
  CUDA(cudaMalloc(reinterpret_cast<void**>(&gpu.output), kCount * sizeof(float)));
}

void reduce(Gpu& gpu) { NCCL(ncclAllReduce(gpu.input, gpu.output, kCount, ncclFloat, ncclSum, gpu.comm, gpu.stream)); }

void wait(Gpu& gpu) {
  CUDA(cudaSetDevice(gpu.device));
  CUDA(cudaStreamSynchronize(gpu.stream));
}

void tell(int rank, long iteration) {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  printf("rank %d iteration %ld at %.6f\n", rank, iteration, now.tv_sec + now.tv_nsec * 1e-9);
  fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) return 2;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const int process = atoi(argv[1]), processes = atoi(argv[2]), gpus = atoi(argv[3]), absent = atoi(argv[6]);
  const bool grouped = strcmp(argv[5], "group") == 0;
  const long before = atol(argv[7]);
  const ncclUniqueId id = job::exchange_id(argv[4], "world", process == 0);
  std::vector<Gpu> own(gpus);
  for (int i = 0; i < gpus; ++i) own[i] = {i, process * gpus + i, nullptr, nullptr, nullptr, nullptr};
  if (grouped) {  // one thread for all GPUs
    NCCL(ncclGroupStart());
    for (Gpu& gpu : own) {
      CUDA(cudaSetDevice(gpu.device));
      NCCL(ncclCommInitRank(&gpu.comm, processes * gpus, id, gpu.rank));
    }
    NCCL(ncclGroupEnd());
    for (Gpu& gpu : own) prepare(gpu);
    for (long iteration = 0;; ++iteration) {
      NCCL(ncclGroupStart());
      for (Gpu& gpu : own)
        if (gpu.rank != absent || iteration < before) reduce(gpu);
      NCCL(ncclGroupEnd());
      for (Gpu& gpu : own) wait(gpu);
      tell(own[0].rank, iteration);
      usleep(kPauseUs);
    }
  }
  std::vector<std::thread> threads;
  for (Gpu& gpu : own)
    threads.emplace_back([&gpu, processes, gpus, id, absent, before] {
      CUDA(cudaSetDevice(gpu.device));
      NCCL(ncclCommInitRank(&gpu.comm, processes * gpus, id, gpu.rank));
      prepare(gpu);
      for (long iteration = 0;; ++iteration) {
        while (gpu.rank == absent && iteration >= before) pause();
        reduce(gpu);
        wait(gpu);
        tell(gpu.rank, iteration);
        usleep(kPauseUs);
      }
    });
  for (std::thread& thread : threads) thread.join();
}
