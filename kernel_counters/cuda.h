/* The functions of the CUDA driver that the sampler uses, taken from the driver that is already in the process; declared here so that
 * no CUDA toolkit is needed. Names and versions are those that libcuda.so.1 has exported since CUDA 4. */
#ifndef NCCLWATCH_CUDA_H
#define NCCLWATCH_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NW_CUDA_SUCCESS 0
#define NW_CUDA_NOT_READY 600

enum { NW_POINTER_MEMORY_TYPE = 2, NW_POINTER_IS_MANAGED = 8, NW_POINTER_DEVICE_ORDINAL = 9, NW_POINTER_MAPPED = 13 };
enum { NW_MEMORY_TYPE_DEVICE = 2 };
enum { NW_STREAM_NON_BLOCKING = 1, NW_CAPTURE_MODE_RELAXED = 2, NW_EVENT_DISABLE_TIMING = 2, NW_EVENT_DEFAULT = 0 };

struct nw_cuda {
	int (*get_context)(void **context);
	int (*set_context)(void *context);
	int (*get_device)(int *device);
	int (*priority_range)(int *least, int *greatest);
	int (*create_stream)(void **stream, unsigned flags, int priority);
	int (*create_event)(void **event, unsigned flags);
	int (*record_event)(void *event, void *stream);
	int (*query_event)(void *event);
	int (*allocate_host)(void **pointer, size_t size, unsigned flags);
	int (*copy_to_host)(void *to, unsigned long long from, size_t size, void *stream);
	int (*pointer_attribute)(void *value, int attribute, unsigned long long pointer);
	int (*exchange_capture_mode)(int *mode);
	/* For a process into which the driver itself loads us; may be missing. */
	int (*device_count)(int *count);
	int (*primary_state)(int device, unsigned *flags, int *active);
	int (*retain_primary)(void **context, int device);
	/* For operations timed by events; may be missing. */
	int (*is_capturing)(void *stream, int *status);
	int (*elapsed)(float *milliseconds, void *begin, void *end);
};

/* The driver, or NULL where the process has none (yet). Never loads one. */
const struct nw_cuda *nw_cuda_get(void) __attribute__((visibility("hidden")));

#endif
