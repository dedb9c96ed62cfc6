/* The way in for NCCL without a profiler interface (before 2.23): LD_PRELOAD, so that calls of NCCL's functions pass through here, each
 * handed on unchanged; and CUDA_INJECTION64_PATH, by which the CUDA driver loads us for the sampler alone.
 *
 * Start and end of an operation on the GPU are two events in its stream, asked for by the sampler's thread. A stream that is being
 * captured into a graph gets none. Where NCCL has loaded us as its profiler plugin, calls only pass through. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <string.h>

#include "cuda.h"
#include "shim.h"

#include "events.h" /* needs the types that shim.h brings */

typedef struct {
	char internal[128];
} unique_id;

#define NCCL_SUCCESS 0
#define NCCL_INTERNAL_ERROR 3

/* --- NCCL's own functions --- */

struct search {
	const char *name;
	void *own, *found;
};

static int look_into(struct dl_phdr_info *object, size_t size, void *data)
{
	struct search *search = data;
	(void)size;
	void *handle = object->dlpi_name && *object->dlpi_name ? dlopen(object->dlpi_name, RTLD_LAZY | RTLD_NOLOAD) : NULL;
	if (!handle)
		return 0;
	void *found = dlsym(handle, search->name);
	dlclose(handle); /* it stays loaded: somebody else did that */
	if (found && found != search->own)
		search->found = found;
	return search->found != NULL;
}

static void *find_real(const char *name, void *own)
{
	void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
	void *found = library ? dlsym(library, name) : NULL;
	if (library)
		dlclose(library);
	if (!found || found == own)
		found = dlsym(RTLD_NEXT, name);
	if (!found || found == own) {
		/* Part of another library that is not in the global scope, such as a PyTorch with NCCL linked in. */
		struct search search = {name, own, NULL};
		dl_iterate_phdr(look_into, &search);
		found = search.found;
	}
	return found;
}

#define REAL(name) ((__typeof__(&name))real_function(#name, (void *)name, &(static_place(name))))
#define static_place(name) place_##name

static void *real_function(const char *name, void *own, void **place)
{
	void *known = __atomic_load_n(place, __ATOMIC_ACQUIRE);
	if (!known) {
		int error = errno;
		known = find_real(name, own);
		__atomic_store_n(place, known, __ATOMIC_RELEASE);
		errno = error;
	}
	return known;
}

/* --- communicators by their address --- */

static struct {
	void *address;
	void *context;
} comms[NW_FRAME_COMMUNICATORS];
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;

static bool plugin_speaks(void)
{
	const struct nw_frame *frame = nw_frame_current();
	return frame && NW_GET(frame->header.entry) == NW_ENTRY_PLUGIN;
}

static void *known_context(void *comm)
{
	for (int index = 0; comm && index < NW_FRAME_COMMUNICATORS; index++)
		if (__atomic_load_n(&comms[index].address, __ATOMIC_ACQUIRE) == comm)
			return comms[index].context;
	return NULL;
}

int ncclCommUserRank(const void *comm, int *rank);
int ncclCommCount(const void *comm, int *count);

static int ask(const char *name, const void *comm)
{
	int value = -1;
	int (*function)(const void *, int *) = find_real(name, NULL);
	return function && function(comm, &value) == NCCL_SUCCESS ? value : -1;
}

static void *open_context(void *comm)
{
	void *context = known_context(comm);
	if (context || !comm)
		return context;
	pthread_mutex_lock(&opening);
	context = known_context(comm);
	for (int index = 0; !context && index < NW_FRAME_COMMUNICATORS; index++) {
		if (comms[index].address)
			continue;
		int nranks = ask("ncclCommCount", comm);
		const struct nw_comm_facts facts = {
			.address = (uintptr_t)comm, .rank = ask("ncclCommUserRank", comm), .nranks = nranks < 0 ? 0 : nranks};
		context = nw_comm_open(&facts, NW_ENTRY_PRELOAD, 0);
		if (!context)
			break;
		comms[index].context = context;
		__atomic_store_n(&comms[index].address, comm, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&opening);
	return context;
}

static void close_context(void *comm)
{
	pthread_mutex_lock(&opening);
	for (int index = 0; comm && index < NW_FRAME_COMMUNICATORS; index++) {
		if (comms[index].address != comm)
			continue;
		__atomic_store_n(&comms[index].address, NULL, __ATOMIC_RELEASE);
		nw_comm_close(comms[index].context);
	}
	pthread_mutex_unlock(&opening);
}

static void begin_sampling(void)
{
	struct nw_frame *frame = plugin_speaks() ? NULL : nw_frame_get();
	if (!frame)
		return;
	if (NW_GET(frame->header.entry) != NW_ENTRY_PLUGIN)
		NW_SET(frame->header.entry, NW_ENTRY_PRELOAD);
	nw_sampler_start(frame);
}

/* --- events around operations --- */

#define TIMED 512

enum { TIMED_FREE, TIMED_CLAIMED, TIMED_RECORDED };

static struct timed {
	uint32_t state;
	void *cuda_context;
	void *begin, *end;
	void *operation;
	bool begun;
} timed[TIMED];

#define GROUPED 64

static _Thread_local struct {
	int depth;
	unsigned count;
	struct {
		struct timed *timed;
		void *stream;
	} waiting[GROUPED];
} group;

static struct timed *claim_timed(const struct nw_cuda *cuda)
{
	static uint32_t next;
	void *context = NULL;
	if (cuda->get_context(&context) || !context)
		return NULL;
	for (unsigned attempt = 0; attempt < 16; attempt++) {
		struct timed *entry = &timed[__atomic_fetch_add(&next, 1, __ATOMIC_RELAXED) % TIMED];
		uint32_t free_state = TIMED_FREE;
		if (!__atomic_compare_exchange_n(&entry->state, &free_state, TIMED_CLAIMED, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
			continue;
		bool made = entry->begin && entry->end;
		if (!made && !entry->cuda_context) {
			entry->cuda_context = context;
			made = !cuda->create_event(&entry->begin, NW_EVENT_DEFAULT) && !cuda->create_event(&entry->end, NW_EVENT_DEFAULT);
			if (!made)
				entry->begin = entry->end = NULL;
		}
		if (made && entry->cuda_context == context) {
			entry->begun = false;
			return entry;
		}
		__atomic_store_n(&entry->state, TIMED_FREE, __ATOMIC_RELEASE); /* another GPU's, or a broken one */
	}
	return NULL;
}

static struct timed *begin_timing(void *stream)
{
	const struct nw_cuda *cuda = nw_cuda_get();
	int capturing = 1;
	if (!cuda || !cuda->is_capturing || !cuda->elapsed || cuda->is_capturing(stream, &capturing) || capturing)
		return NULL;
	struct timed *entry = claim_timed(cuda);
	if (entry && cuda->record_event(entry->begin, stream)) {
		__atomic_store_n(&entry->state, TIMED_FREE, __ATOMIC_RELEASE);
		return NULL;
	}
	return entry;
}

static void end_timing(struct timed *entry, void *stream, int result)
{
	const struct nw_cuda *cuda = nw_cuda_get();
	/* In progress (a communicator that does not block): the kernel is not in the stream yet. */
	bool recorded = result == NCCL_SUCCESS && cuda && !cuda->record_event(entry->end, stream);
	__atomic_store_n(&entry->state, recorded ? TIMED_RECORDED : TIMED_FREE, __ATOMIC_RELEASE);
}

bool nw_preload_poll(void)
{
	const struct nw_cuda *cuda = nw_cuda_get();
	bool pending = false;
	for (unsigned index = 0; cuda && index < TIMED; index++) {
		struct timed *entry = &timed[index];
		if (__atomic_load_n(&entry->state, __ATOMIC_ACQUIRE) != TIMED_RECORDED || cuda->set_context(entry->cuda_context))
			continue;
		pending = true;
		if (!entry->begun && cuda->query_event(entry->begin) == NW_CUDA_SUCCESS) {
			entry->begun = true;
			nw_operation_begun(entry->operation);
		}
		int ended = entry->begun ? cuda->query_event(entry->end) : NW_CUDA_NOT_READY;
		if (ended == NW_CUDA_NOT_READY)
			continue;
		float milliseconds = 0;
		if (!ended && !cuda->elapsed(&milliseconds, entry->begin, entry->end))
			nw_operation_ended(entry->operation, milliseconds > 0 ? (uint64_t)((double)milliseconds * 1e6) : 1);
		__atomic_store_n(&entry->state, TIMED_FREE, __ATOMIC_RELEASE);
	}
	return pending;
}

struct call {
	struct timed *timed;
	void *stream;
	bool seen;
};

static struct call enter(void *comm, void *stream, int function, uint64_t count, int datatype, int peer, bool point_to_point)
{
	struct call call = {NULL, stream, false};
	if (plugin_speaks())
		return call;
	int error = errno;
	begin_sampling();
	void *context = open_context(comm);
	if (context) {
		call.seen = true;
		if (!group.depth || group.count < GROUPED)
			call.timed = begin_timing(stream);
		const struct nw_operation_facts facts = {.function = function, .sequence = NW_UNKNOWN, .count = count,
							 .datatype = (uint32_t)datatype, .peer = peer, .channels = 1,
							 .point_to_point = point_to_point, .device_known = call.timed != NULL};
		void *operation = nw_operation_open(context, &facts);
		if (call.timed)
			call.timed->operation = operation;
	}
	errno = error;
	return call;
}

static int leave(struct call call, int result)
{
	if (!call.timed)
		return result;
	int error = errno;
	if (group.depth && result == NCCL_SUCCESS) {
		group.waiting[group.count].timed = call.timed;
		group.waiting[group.count++].stream = call.stream;
	} else {
		end_timing(call.timed, call.stream, result);
	}
	errno = error;
	return result;
}

/* --- NCCL's functions --- */

#define PASS(name, arguments, before, after)                                                                                        \
	{                                                                                                                           \
		static void *place_##name;                                                                                          \
		__typeof__(&name) real = REAL(name);                                                                                \
		if (!real)                                                                                                          \
			return NCCL_INTERNAL_ERROR;                                                                                 \
		before;                                                                                                             \
		int result = real arguments;                                                                                        \
		after;                                                                                                              \
		return result;                                                                                                      \
	}

#define OPERATION(name, parameters, arguments, function, count, peer, point_to_point)                                               \
	NW_EXPORT int name parameters PASS(name, arguments,                                                                         \
					   struct call call = enter(comm, stream, function, count, datatype, peer, point_to_point), \
					   result = leave(call, result))

OPERATION(ncclAllReduce, (const void *from, void *to, size_t count, int datatype, int operator, void *comm, void *stream),
	  (from, to, count, datatype, operator, comm, stream), NW_FN_ALL_REDUCE, count, -1, false)
OPERATION(ncclBroadcast, (const void *from, void *to, size_t count, int datatype, int root, void *comm, void *stream),
	  (from, to, count, datatype, root, comm, stream), NW_FN_BROADCAST, count, root, false)
OPERATION(ncclBcast, (void *buffer, size_t count, int datatype, int root, void *comm, void *stream),
	  (buffer, count, datatype, root, comm, stream), NW_FN_BCAST, count, root, false)
OPERATION(ncclReduce, (const void *from, void *to, size_t count, int datatype, int operator, int root, void *comm, void *stream),
	  (from, to, count, datatype, operator, root, comm, stream), NW_FN_REDUCE, count, root, false)
OPERATION(ncclAllGather, (const void *from, void *to, size_t count, int datatype, void *comm, void *stream),
	  (from, to, count, datatype, comm, stream), NW_FN_ALL_GATHER, count, -1, false)
OPERATION(ncclReduceScatter, (const void *from, void *to, size_t count, int datatype, int operator, void *comm, void *stream),
	  (from, to, count, datatype, operator, comm, stream), NW_FN_REDUCE_SCATTER, count, -1, false)
OPERATION(ncclSend, (const void *buffer, size_t count, int datatype, int peer, void *comm, void *stream),
	  (buffer, count, datatype, peer, comm, stream), NW_FN_SEND, count, peer, true)
OPERATION(ncclRecv, (void *buffer, size_t count, int datatype, int peer, void *comm, void *stream),
	  (buffer, count, datatype, peer, comm, stream), NW_FN_RECV, count, peer, true)

NW_EXPORT int ncclGroupStart(void) PASS(ncclGroupStart, (), , group.depth += result == NCCL_SUCCESS)

static void end_group(int result)
{
	if (group.depth > 0)
		group.depth--;
	if (group.depth)
		return;
	int error = errno;
	for (unsigned index = 0; index < group.count; index++)
		end_timing(group.waiting[index].timed, group.waiting[index].stream, result);
	group.count = 0;
	errno = error;
}

NW_EXPORT int ncclGroupEnd(void) PASS(ncclGroupEnd, (), , end_group(result))

/* Streams and buffers of the sampler are made right after a communicator, before its first kernel. */
NW_EXPORT int ncclCommInitRank(void **comm, int nranks, unique_id id, int rank)
	PASS(ncclCommInitRank, (comm, nranks, id, rank), , begin_sampling())
NW_EXPORT int ncclCommInitRankConfig(void **comm, int nranks, unique_id id, int rank, void *config)
	PASS(ncclCommInitRankConfig, (comm, nranks, id, rank, config), , begin_sampling())
NW_EXPORT int ncclCommInitAll(void **comms, int count, const int *devices)
	PASS(ncclCommInitAll, (comms, count, devices), , begin_sampling())
NW_EXPORT int ncclCommSplit(void *comm, int color, int key, void **other, void *config)
	PASS(ncclCommSplit, (comm, color, key, other, config), , begin_sampling())
NW_EXPORT int ncclCommDestroy(void *comm) PASS(ncclCommDestroy, (comm), close_context(comm), )
NW_EXPORT int ncclCommAbort(void *comm) PASS(ncclCommAbort, (comm), close_context(comm), )

/* Called by the CUDA driver when it loads the library named by CUDA_INJECTION64_PATH. */
NW_EXPORT int InitializeInjection(void)
{
	struct nw_frame *frame = nw_frame_get();
	if (frame) {
		NW_SET(frame->header.entry, NW_ENTRY_INJECTION);
		nw_sampler_start(frame);
	}
	return 1;
}
