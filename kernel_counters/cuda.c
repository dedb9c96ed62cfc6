#define _GNU_SOURCE
#include "cuda.h"

#include <dlfcn.h>
#include <pthread.h>

static struct nw_cuda found;
static bool complete;
static pthread_mutex_t looking = PTHREAD_MUTEX_INITIALIZER;

static void look(void)
{
	void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
	if (!driver)
		return;
	const struct {
		void **place;
		const char *name;
		bool needed;
	} names[] = {
		{(void **)&found.get_context, "cuCtxGetCurrent", true},
		{(void **)&found.set_context, "cuCtxSetCurrent", true},
		{(void **)&found.get_device, "cuCtxGetDevice", true},
		{(void **)&found.priority_range, "cuCtxGetStreamPriorityRange", true},
		{(void **)&found.create_stream, "cuStreamCreateWithPriority", true},
		{(void **)&found.create_event, "cuEventCreate", true},
		{(void **)&found.record_event, "cuEventRecord", true},
		{(void **)&found.query_event, "cuEventQuery", true},
		{(void **)&found.allocate_host, "cuMemHostAlloc", true},
		{(void **)&found.copy_to_host, "cuMemcpyDtoHAsync_v2", true},
		{(void **)&found.pointer_attribute, "cuPointerGetAttribute", true},
		{(void **)&found.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", true},
		{(void **)&found.device_count, "cuDeviceGetCount", false},
		{(void **)&found.primary_state, "cuDevicePrimaryCtxGetState", false},
		{(void **)&found.retain_primary, "cuDevicePrimaryCtxRetain", false},
		{(void **)&found.is_capturing, "cuStreamIsCapturing", false},
		{(void **)&found.elapsed, "cuEventElapsedTime", false},
	};
	bool all = true;
	for (size_t index = 0; index < sizeof names / sizeof *names; index++) {
		*names[index].place = dlsym(driver, names[index].name);
		all = all && (*names[index].place || !names[index].needed);
	}
	/* The handle is kept: the functions must stay. */
	__atomic_store_n(&complete, all, __ATOMIC_RELEASE);
}

const struct nw_cuda *nw_cuda_get(void)
{
	if (!__atomic_load_n(&complete, __ATOMIC_ACQUIRE)) {
		pthread_mutex_lock(&looking);
		if (!complete)
			look();
		pthread_mutex_unlock(&looking);
	}
	return __atomic_load_n(&complete, __ATOMIC_ACQUIRE) ? &found : NULL;
}
