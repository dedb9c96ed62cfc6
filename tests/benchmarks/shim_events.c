// What one event costs in a profiler plugin: calls it as NCCL does, a whole collective at a time.
// shim_events PLUGIN ROUNDS: prints the nanoseconds per call of each kind, over all rounds.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "profiler_abi.h"

enum { CHANNELS = 4, STEPS = 32 };

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1e9 + time.tv_nsec;
}

struct kind {
  const char* name;
  double spent;
  long calls;
};
static struct kind kinds[] = {{"launch", 0, 0}, {"kernel", 0, 0}, {"proxy", 0, 0}, {"step", 0, 0}};
enum { LAUNCH, KERNEL, PROXY, STEP };

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  void* library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  struct nccl_profiler_v5* plugin = library ? dlsym(library, "ncclProfiler_v5") : NULL;
  if (!plugin) return fprintf(stderr, "%s\n", dlerror()), 1;
  void* context = NULL;
  int mask = 0;
  const int pid = getpid();
  plugin->init(&context, 1, &mask, "bench", 1, 8, 0, NULL);
  for (long round = atol(argv[2]); round > 0; round--) {
    struct nccl_event event = {.type_v5 = NCCL_EVENT_COLL};
    void *operation = NULL, *kernels[CHANNELS] = {0}, *proxies[2 * CHANNELS] = {0}, *steps[2 * CHANNELS] = {0};
    union nccl_state_arguments arguments = {.size = 1 << 19};
    event.coll_v4 = (struct nccl_coll_v4){.function = "AllReduce", .count = 1 << 20, .datatype = "ncclFloat32", .channels = CHANNELS};
    double begin = now();
    plugin->start(context, &operation, &event);
    plugin->stop(operation);
    kinds[LAUNCH].spent += now() - begin, kinds[LAUNCH].calls += 2;

    event = (struct nccl_event){.type_v5 = NCCL_EVENT_KERNEL_CH, .parent = operation};
    begin = now();
    for (int channel = 0; channel < CHANNELS; channel++) {
      event.kernel_ch = (struct nccl_kernel_ch){(uint8_t)channel, 1000};
      plugin->start(context, &kernels[channel], &event);
    }
    kinds[KERNEL].spent += now() - begin, kinds[KERNEL].calls += CHANNELS;

    event = (struct nccl_event){.type_v5 = NCCL_EVENT_PROXY_OP, .parent = operation};
    begin = now();
    for (int number = 0; number < 2 * CHANNELS; number++) {
      event.proxy_op = (struct nccl_proxy_op){pid, (uint8_t)(number / 2), 1, STEPS, 1 << 19, number & 1};
      plugin->start(context, &proxies[number], &event);
    }
    kinds[PROXY].spent += now() - begin, kinds[PROXY].calls += 2 * CHANNELS;

    begin = now();
    for (int step = 0; step < STEPS; step++)
      for (int number = 0; number < 2 * CHANNELS; number++) {
        event = (struct nccl_event){.type_v5 = NCCL_EVENT_PROXY_STEP, .parent = proxies[number]};
        event.proxy_step.step = step;
        plugin->start(context, &steps[number], &event);
        plugin->record(steps[number], NCCL_STATE_STEP_SEND_GPU_WAIT, &arguments);
        plugin->record(steps[number], NCCL_STATE_STEP_SEND_PEER_WAIT, &arguments);
        plugin->record(steps[number], NCCL_STATE_STEP_SEND_WAIT, &arguments);
        plugin->stop(steps[number]);
      }
    kinds[STEP].spent += now() - begin, kinds[STEP].calls += 5L * STEPS * 2 * CHANNELS;

    begin = now();
    for (int number = 0; number < 2 * CHANNELS; number++) plugin->stop(proxies[number]);
    kinds[PROXY].spent += now() - begin, kinds[PROXY].calls += 2 * CHANNELS;

    arguments.gpu_time = 2000;
    begin = now();
    for (int channel = 0; channel < CHANNELS; channel++) {
      plugin->record(kernels[channel], NCCL_STATE_KERNEL_CH_STOP, &arguments);
      plugin->stop(kernels[channel]);
    }
    kinds[KERNEL].spent += now() - begin, kinds[KERNEL].calls += 2 * CHANNELS;
  }
  plugin->finalize(context);
  for (size_t index = 0; index < sizeof kinds / sizeof *kinds; index++)
    printf("%s %.2f\n", kinds[index].name, kinds[index].spent / kinds[index].calls);
  return 0;
}
