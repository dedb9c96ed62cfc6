/* Inside of the counter shim. What runs here runs in a training job's process: nothing here may block, crash, print, allocate on the
 * data path, or trust what lies in the shared frame. Every function that NCCL calls returns success. */
#ifndef NCCLWATCH_SHIM_H
#define NCCLWATCH_SHIM_H

#include <asm/types.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#include "frame.h"

#define NW_HIDDEN __attribute__((visibility("hidden")))
#define NW_EXPORT __attribute__((visibility("default")))

/* --- frame.c: the shared segment --- */

/* The frame of this process, or NULL where none can be had. Made on first use; a forked child has none until it uses NCCL itself. */
NW_HIDDEN struct nw_frame *nw_frame_get(void);
/* The same, but never makes one: for the data path. */
NW_HIDDEN struct nw_frame *nw_frame_current(void);
NW_HIDDEN bool nw_enabled(const char *variable, bool otherwise);

static inline uint64_t nw_now(clockid_t clock)
{
	struct timespec now;
	clock_gettime(clock, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#define NW_COUNT(frame, member) ((void)__atomic_fetch_add(&(frame)->header.member, 1, __ATOMIC_RELAXED))
#define NW_SET(place, value) __atomic_store_n(&(place), (value), __ATOMIC_RELAXED)
#define NW_GET(place) __atomic_load_n(&(place), __ATOMIC_RELAXED)

/* Begins to write a record; false where another thread is writing it: the update is then left out, nobody waits. */
static inline bool nw_write_begin(struct nw_frame *frame, __u32 *seq)
{
	__u32 before = NW_GET(*seq);
	if ((before & 1) || !__atomic_compare_exchange_n(seq, &before, before + 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED)) {
		NW_COUNT(frame, contended);
		return false;
	}
	__atomic_thread_fence(__ATOMIC_RELEASE);
	return true;
}

static inline void nw_write_end(__u32 *seq)
{
	__atomic_store_n(seq, NW_GET(*seq) + 1, __ATOMIC_RELEASE);
}

/* --- record.c: what happens, written into the frame --- */

#define NW_UNKNOWN (~(uint64_t)0)

struct nw_comm_facts {
	uint64_t hash;    /* 0 unknown */
	uint64_t address; /* inside ncclComm */
	const char *name; /* NULL unknown */
	int rank, nranks, nnodes;
};

struct nw_operation_facts {
	int function; /* enum nw_function */
	bool point_to_point;
	bool device_known;
	uint64_t sequence; /* NW_UNKNOWN */
	uint64_t count;
	uint32_t datatype;
	int peer;
	uint32_t channels;
	/* Identity of the communicator, where the interface gives it only here (v1 to v3). */
	uint64_t hash;
	int rank;
};

struct nw_proxy_facts {
	int channel, peer, nsteps, chunk, is_send, pid;
};

/* Handles are numbers with a mark of this process, never pointers: what NCCL hands back may be another process's (PXN). */
NW_HIDDEN void *nw_comm_open(const struct nw_comm_facts *facts, enum nw_entry entry, int interface);
NW_HIDDEN void nw_comm_close(void *context);
NW_HIDDEN void *nw_operation_open(void *context, const struct nw_operation_facts *facts);
NW_HIDDEN void *nw_proxy_open(void *context, void *operation, const struct nw_proxy_facts *facts);
NW_HIDDEN void *nw_step_open(void *proxy, int step);
NW_HIDDEN void *nw_kernel_open(void *operation, int channel, uint64_t gpu_time);
NW_HIDDEN void *nw_other_open(void);
NW_HIDDEN void nw_step_state(void *handle, enum nw_step_state state, uint64_t bytes);
NW_HIDDEN void nw_kernel_stop(void *handle, uint64_t gpu_time);
NW_HIDDEN void nw_close(void *handle);
NW_HIDDEN bool nw_is_step(void *handle);
NW_HIDDEN bool nw_is_kernel(void *handle);
/* Of an operation timed by events in its stream: begun, then ended after so long. */
NW_HIDDEN void nw_operation_begun(void *operation);
NW_HIDDEN void nw_operation_ended(void *operation, uint64_t duration_ns);
NW_HIDDEN void nw_record_after_fork(void);

/* --- sampler.c: words of GPU memory --- */

/* Takes over the calling thread's CUDA context and starts the sampler's thread, once. */
NW_HIDDEN void nw_sampler_start(struct nw_frame *frame);
NW_HIDDEN void nw_sampler_after_fork(void);
/* Called by the sampler's thread each time it is awake; whether operations timed by events are unfinished. */
NW_HIDDEN bool nw_preload_poll(void);

#endif
