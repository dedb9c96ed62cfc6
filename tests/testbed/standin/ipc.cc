// Memory handles: what one process has allocated on its GPU, mapped by another, whose GPU then has direct access to it.
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda_runtime.h"
#include "device.h"
#include "memory.h"

using namespace standin;

namespace {

// cudaIpcMemHandle_t; opaque to the program.
struct Handle {
  pid_t pid;
  int fd;
  size_t size;
  char unused[48];
};
static_assert(sizeof(Handle) == 64);

}  // namespace

extern "C" {

cudaError_t cudaIpcGetMemHandle(Handle* handle, void* pointer) {
  Allocation allocation;
  if (!find_allocation(pointer, &allocation) || allocation.fd < 0) return remember(cudaErrorInvalidValue);
  memset(handle, 0, sizeof *handle);
  handle->pid = getpid();
  handle->fd = allocation.fd;
  handle->size = allocation.size;
  return cudaSuccess;
}

cudaError_t cudaIpcOpenMemHandle(void** pointer, Handle handle, unsigned int) {
  const int process = static_cast<int>(syscall(SYS_pidfd_open, handle.pid, 0));
  const int fd = process < 0 ? -1 : static_cast<int>(syscall(SYS_pidfd_getfd, process, handle.fd, 0));
  if (process >= 0) close(process);
  *pointer = fd < 0 ? nullptr : map_shared(fd, handle.size);
  return *pointer ? cudaSuccess : remember(cudaErrorInvalidValue);
}

cudaError_t cudaIpcCloseMemHandle(void* pointer) { return release(pointer) ? cudaSuccess : remember(cudaErrorInvalidValue); }

}  // extern "C"
