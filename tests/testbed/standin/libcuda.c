// A stand-in for the few functions of the CUDA driver (libcuda.so.1) that the counter shim uses: copies at once on the host, events of
// the stand-in runtime's streams where that is in the process. For tests only; LD_PRELOAD it.
//
//   STANDIN_CUDA_ALL=1     every readable address counts as GPU memory; otherwise what cuMemAlloc_v2 gave, and what the stand-in runtime
//                          calls so (with TESTBED_P2P nobody outside the process can read that)
//   STANDIN_CUDA_HANG=FILE while FILE exists, the copy engine does not answer
//   STANDIN_CUDA_LOG=FILE  appends a line for each copy: address and size
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NO_DEVICE_MEMORY = 2, NOT_READY = 600 };

#define MAX_ALLOCATIONS 64
static struct {
  uintptr_t base;
  size_t size;
} allocations[MAX_ALLOCATIONS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct stream {
  bool own;
};
struct event {
  void* runtime;  // the event of the stand-in runtime; NULL where it belongs to a stream of ours
};

static void* runtime(const char* name) { return dlsym(RTLD_DEFAULT, name); }

static bool hangs(void) {
  const char* file = getenv("STANDIN_CUDA_HANG");
  return file && access(file, F_OK) == 0;
}

// Through a pipe: the kernel refuses an address that is not mapped, and reads secret memory as its process would.
static bool copy(void* to, uintptr_t from, size_t size) {
  int ends[2];
  if (size > PIPE_BUF || pipe2(ends, O_CLOEXEC)) return false;
  const bool copied = write(ends[1], (void*)from, size) == (ssize_t)size && read(ends[0], to, size) == (ssize_t)size;
  close(ends[0]);
  close(ends[1]);
  return copied;
}

static bool readable(uintptr_t address) {
  char byte;
  return copy(&byte, address, 1);
}

// cudaPointerAttributes as far as is needed.
static bool is_device_to_runtime(uintptr_t address) {
  enum { DEVICE = 2 };
  int attributes[16];
  int (*get)(void*, const void*) = runtime("cudaPointerGetAttributes");
  return get && get(attributes, (void*)address) == SUCCESS && attributes[0] == DEVICE;
}

static bool is_device(uintptr_t address) {
  if (getenv("STANDIN_CUDA_ALL")) return readable(address);
  bool found = is_device_to_runtime(address);
  pthread_mutex_lock(&lock);
  for (int index = 0; index < MAX_ALLOCATIONS; index++)
    found = found || (address >= allocations[index].base && address < allocations[index].base + allocations[index].size);
  pthread_mutex_unlock(&lock);
  return found;
}

static int context;

int cuCtxGetCurrent(void** out) { return *out = &context, SUCCESS; }
int cuCtxSetCurrent(void* wanted) { return wanted == &context ? SUCCESS : INVALID_VALUE; }
int cuCtxGetDevice(int* device) { return *device = 0, SUCCESS; }
int cuDeviceGetCount(int* count) { return *count = 1, SUCCESS; }
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) { return *flags = 0, *active = device == 0, SUCCESS; }
int cuDevicePrimaryCtxRetain(void** out, int device) { return *out = &context, device == 0 ? SUCCESS : INVALID_VALUE; }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = 0, *greatest = -5, SUCCESS; }
int cuThreadExchangeStreamCaptureMode(int* mode) { return *mode = 0, SUCCESS; }
int cuStreamIsCapturing(void* stream, int* status) { return (void)stream, *status = getenv("STANDIN_CUDA_CAPTURING") != NULL, SUCCESS; }

static struct stream ours = {true};
int cuStreamCreateWithPriority(void** stream, unsigned flags, int priority) {
  return (void)priority, *stream = &ours, flags == 1 ? SUCCESS : INVALID_VALUE;
}

int cuEventCreate(void** event, unsigned flags) {
  struct event* made = calloc(1, sizeof *made);
  int (*create)(void**, unsigned) = runtime("cudaEventCreateWithFlags");
  if (create && create(&made->runtime, flags)) return INVALID_VALUE;
  *event = made;
  return SUCCESS;
}
int cuEventRecord(void* event, void* stream) {
  int (*record)(void*, void*) = runtime("cudaEventRecord");
  if (stream == &ours || !record) return SUCCESS;
  return record(((struct event*)event)->runtime, stream);
}
int cuEventQuery(void* event) {
  int (*query)(void*) = runtime("cudaEventQuery");
  if (hangs()) return NOT_READY;
  return query && ((struct event*)event)->runtime ? query(((struct event*)event)->runtime) : SUCCESS;
}
int cuEventElapsedTime(float* milliseconds, void* begin, void* end) {
  int (*elapsed)(float*, void*, void*) = runtime("cudaEventElapsedTime");
  *milliseconds = 1;
  return elapsed ? elapsed(milliseconds, ((struct event*)begin)->runtime, ((struct event*)end)->runtime) : SUCCESS;
}

int cuMemHostAlloc(void** pointer, size_t size, unsigned flags) {
  (void)flags;
  return (*pointer = calloc(1, size)) ? SUCCESS : NO_DEVICE_MEMORY;
}
int cuMemAlloc_v2(unsigned long long* pointer, size_t size) {
  void* memory = calloc(1, size);
  int result = NO_DEVICE_MEMORY;
  pthread_mutex_lock(&lock);
  for (int index = 0; memory && index < MAX_ALLOCATIONS; index++) {
    if (allocations[index].base) continue;
    allocations[index].base = (uintptr_t)memory, allocations[index].size = size;
    *pointer = (uintptr_t)memory;
    result = SUCCESS;
    break;
  }
  pthread_mutex_unlock(&lock);
  return result;
}
int cuMemFree_v2(unsigned long long pointer) {
  pthread_mutex_lock(&lock);
  for (int index = 0; index < MAX_ALLOCATIONS; index++)
    if (allocations[index].base == pointer) allocations[index].base = allocations[index].size = 0;
  pthread_mutex_unlock(&lock);
  free((void*)(uintptr_t)pointer);
  return SUCCESS;
}

int cuPointerGetAttribute(void* value, int attribute, unsigned long long pointer) {
  enum { MEMORY_TYPE = 2, IS_MANAGED = 8, DEVICE_ORDINAL = 9, MAPPED = 13, DEVICE = 2 };
  if (!is_device(pointer)) return INVALID_VALUE;
  switch (attribute) {
    case MEMORY_TYPE: return *(unsigned*)value = DEVICE, SUCCESS;
    case IS_MANAGED: return *(int*)value = 0, SUCCESS;
    case DEVICE_ORDINAL: return *(int*)value = 0, SUCCESS;
    case MAPPED: return *(int*)value = 1, SUCCESS;
    default: return INVALID_VALUE;
  }
}

int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t size, void* stream) {
  const char* log = getenv("STANDIN_CUDA_LOG");
  if (log) {
    char line[64];
    int length = snprintf(line, sizeof line, "%llx %zu\n", from, size);
    int file = open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    if (file >= 0 && write(file, line, (size_t)length) < 0) return INVALID_VALUE;
    if (file >= 0) close(file);
  }
  if (stream != &ours || !is_device(from)) return INVALID_VALUE;
  return copy(to, (uintptr_t)from, size) ? SUCCESS : INVALID_VALUE;
}
