/* What happens in NCCL, written into the frame. Called by NCCL's threads: application threads for communicators and operations, the
 * proxy's (or the profiler's) thread for the rest. No lock, no allocation, no system call but the clock's. */
#define _GNU_SOURCE
#include <string.h>
#include <unistd.h>

#include "shim.h"

/* A handle: mark of this process (16 bits), kind (4), place (12), rest (32). */
enum kind { KIND_OTHER = 1, KIND_CONTEXT, KIND_OPERATION, KIND_PROXY, KIND_STEP, KIND_KERNEL };

static uint64_t mark; /* 0 until the first communicator */

/* What the shared frame may not decide: which blocks and slots are in use. */
static struct {
	uint32_t generation;
	uint32_t state;      /* enum nw_comm_state */
	uint64_t operations; /* handed out so far */
	uint64_t finished_ns;
	uint32_t named;      /* the rank is known, and the hash where the interface gives it */
} comms[NW_FRAME_COMMUNICATORS];

static uint64_t proxy_used[NW_FRAME_PROXY_OPERATIONS / 64];
static struct {
	uint32_t generation;
	uint32_t sizes[NW_FRAME_STEPS]; /* bytes of the transfer in this step slot, as last said */
} proxies[NW_FRAME_PROXY_OPERATIONS];

static void *handle(enum kind kind, uint32_t place, uint32_t rest)
{
	return (void *)(uintptr_t)(mark << 48 | (uint64_t)kind << 44 | (uint64_t)(place & 0xfff) << 32 | rest);
}

static bool is(void *handle, enum kind kind)
{
	return mark && (uint64_t)(uintptr_t)handle >> 44 == (mark << 4 | kind);
}

static uint32_t place_of(void *handle)
{
	return (uint64_t)(uintptr_t)handle >> 32 & 0xfff;
}

static uint32_t rest_of(void *handle)
{
	return (uint32_t)(uintptr_t)handle;
}

static void make_mark(const struct nw_frame *frame)
{
	if (__atomic_load_n(&mark, __ATOMIC_RELAXED))
		return;
	uint64_t mixed = ((uint64_t)frame->header.pid * 0x9e3779b97f4a7c15u) ^ (frame->header.start_time * 0xc2b2ae3d27d4eb4fu);
	__atomic_store_n(&mark, (mixed >> 48 & 0xffff) | 0x8001, __ATOMIC_RELAXED); /* no pointer of user space has bit 63 */
}

void nw_record_after_fork(void)
{
	mark = 0;
	memset(comms, 0, sizeof comms);
	memset(proxies, 0, sizeof proxies);
	memset(proxy_used, 0, sizeof proxy_used);
}

/* --- communicators --- */

/* A free block, else the one whose communicator ended first; -1 where all are live. */
static int claim_comm(void)
{
	for (int attempt = 0; attempt < 4; attempt++) {
		int best = -1;
		for (int index = 0; index < NW_FRAME_COMMUNICATORS; index++) {
			uint32_t state = NW_GET(comms[index].state);
			if (state == NW_COMM_FREE) {
				best = index;
				break;
			}
			if (state == NW_COMM_FINISHED && (best < 0 || comms[index].finished_ns < comms[best].finished_ns))
				best = index;
		}
		if (best < 0)
			return -1;
		uint32_t seen = NW_GET(comms[best].state);
		if (seen != NW_COMM_LIVE &&
		    __atomic_compare_exchange_n(&comms[best].state, &seen, NW_COMM_LIVE, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
			return best;
	}
	return -1;
}

void *nw_comm_open(const struct nw_comm_facts *facts, enum nw_entry entry, int interface)
{
	struct nw_frame *frame = nw_frame_get();
	if (!frame)
		return NULL;
	make_mark(frame);
	NW_SET(frame->header.entry, entry);
	NW_SET(frame->header.interface, (uint32_t)interface);
	int index = claim_comm();
	if (index < 0) {
		NW_COUNT(frame, refused_communicators);
		return handle(KIND_OTHER, 0, 0);
	}
	uint32_t generation = ++comms[index].generation;
	comms[index].operations = 0;
	NW_SET(comms[index].named, facts->rank >= 0);
	struct nw_communicator *comm = &frame->communicators[index];
	if (nw_write_begin(frame, &comm->seq)) {
		comm->state = NW_COMM_LIVE;
		comm->hash = facts->hash;
		comm->address = facts->address;
		comm->rank = facts->rank;
		comm->nranks = facts->nranks;
		comm->nnodes = facts->nnodes;
		comm->generation = generation;
		comm->created_ns = nw_now(CLOCK_MONOTONIC);
		comm->finished_ns = comm->operations = comm->collectives = comm->transfers = 0;
		memset(comm->name, 0, sizeof comm->name);
		for (size_t at = 0; facts->name && at < sizeof comm->name - 1 && facts->name[at]; at++)
			comm->name[at] = (uint8_t)facts->name[at];
		memset(comm->channels, 0, sizeof comm->channels);
		memset(comm->recent, 0, sizeof comm->recent);
		nw_write_end(&comm->seq);
	}
	return handle(KIND_CONTEXT, (uint32_t)index, generation);
}

/* Index of the live communicator a context stands for, or -1. */
static int comm_of(void *context)
{
	if (!is(context, KIND_CONTEXT) || place_of(context) >= NW_FRAME_COMMUNICATORS)
		return -1;
	int index = (int)place_of(context);
	return comms[index].generation == rest_of(context) && NW_GET(comms[index].state) == NW_COMM_LIVE ? index : -1;
}

void nw_comm_close(void *context)
{
	struct nw_frame *frame = nw_frame_current();
	int index = frame ? comm_of(context) : -1;
	if (index < 0)
		return;
	uint64_t now = nw_now(CLOCK_MONOTONIC);
	struct nw_communicator *comm = &frame->communicators[index];
	if (nw_write_begin(frame, &comm->seq)) {
		comm->state = NW_COMM_FINISHED;
		comm->finished_ns = now;
		nw_write_end(&comm->seq);
	}
	comms[index].finished_ns = now;
	__atomic_store_n(&comms[index].state, NW_COMM_FINISHED, __ATOMIC_RELEASE);
}

/* --- operations --- */

/* An operation's handle: place is the block with the low bits of its generation, rest is the ordinal. */
static void *operation_handle(int index, uint64_t ordinal)
{
	return handle(KIND_OPERATION, (uint32_t)index | (comms[index].generation & 0x3f) << 6, (uint32_t)ordinal);
}

static int comm_of_place(uint32_t place)
{
	int index = place & 0x3f;
	return (comms[index].generation & 0x3f) == place >> 6 && NW_GET(comms[index].state) == NW_COMM_LIVE ? index : -1;
}

void *nw_operation_open(void *context, const struct nw_operation_facts *facts)
{
	struct nw_frame *frame = nw_frame_current();
	if (!frame)
		return NULL;
	NW_COUNT(frame, events);
	int index = comm_of(context);
	if (index < 0) {
		NW_COUNT(frame, unmatched);
		return handle(KIND_OTHER, 0, 0);
	}
	uint64_t ordinal = __atomic_add_fetch(&comms[index].operations, 1, __ATOMIC_RELAXED);
	struct nw_communicator *comm = &frame->communicators[index];
	struct nw_operation *operation = &comm->recent[ordinal % NW_FRAME_OPERATIONS];
	if (nw_write_begin(frame, &operation->device_seq)) {
		operation->started = operation->finished = 0;
		operation->device_known = facts->device_known;
		operation->gpu_start = operation->gpu_stop = operation->seen_start_ns = operation->seen_stop_ns = 0;
		operation->duration_ns = 0;
		nw_write_end(&operation->device_seq);
	}
	if (nw_write_begin(frame, &operation->seq)) {
		operation->function = (uint32_t)facts->function;
		operation->ordinal = ordinal;
		operation->sequence = facts->sequence;
		operation->count = facts->count;
		operation->datatype = facts->datatype;
		operation->peer = facts->peer;
		operation->channels = facts->channels;
		operation->point_to_point = facts->point_to_point;
		operation->launched_ns = nw_now(CLOCK_MONOTONIC);
		nw_write_end(&operation->seq);
	}
	if (nw_write_begin(frame, &comm->seq)) {
		comm->operations = ordinal;
		if (facts->point_to_point)
			comm->transfers++;
		else
			comm->collectives++;
		/* NCCL from 2.27 on has no hash for interfaces before v4; the rank comes with every event. */
		if (!comms[index].named && facts->rank >= 0) {
			comm->hash = facts->hash;
			comm->rank = facts->rank;
			comms[index].named = 1;
		}
		nw_write_end(&comm->seq);
	}
	return operation_handle(index, ordinal);
}

/* The record an operation's handle stands for, or NULL where its slot has a newer one. */
static struct nw_operation *operation_of(struct nw_frame *frame, int index, uint32_t ordinal)
{
	struct nw_operation *operation = &frame->communicators[index].recent[ordinal % NW_FRAME_OPERATIONS];
	return (uint32_t)NW_GET(operation->ordinal) == ordinal ? operation : NULL;
}

/* --- kernels --- */

/* A kernel's handle: place as the operation's, rest is channel (6 bits) and the low bits of the ordinal. */
static void *kernel_handle(uint32_t place, uint32_t ordinal, uint32_t channel)
{
	return handle(KIND_KERNEL, place, ordinal << 6 | channel);
}

void *nw_kernel_open(void *parent, int channel, uint64_t gpu_time)
{
	struct nw_frame *frame = nw_frame_current();
	if (!frame)
		return NULL;
	NW_COUNT(frame, events);
	int index = is(parent, KIND_OPERATION) ? comm_of_place(place_of(parent)) : -1;
	if (index < 0 || (unsigned)channel >= NW_FRAME_CHANNELS) {
		NW_COUNT(frame, unmatched);
		return handle(KIND_OTHER, 0, 0);
	}
	uint32_t ordinal = rest_of(parent);
	uint64_t now = nw_now(CLOCK_MONOTONIC);
	struct nw_channel *slot = &frame->communicators[index].channels[channel];
	if (nw_write_begin(frame, &slot->seq)) {
		slot->started++;
		slot->operation = ordinal;
		slot->gpu_start = gpu_time;
		slot->seen_start_ns = now;
		nw_write_end(&slot->seq);
	}
	struct nw_operation *operation = operation_of(frame, index, ordinal);
	if (operation && nw_write_begin(frame, &operation->device_seq)) {
		if (!operation->started++)
			operation->seen_start_ns = now;
		if (gpu_time && (!operation->gpu_start || gpu_time < operation->gpu_start))
			operation->gpu_start = gpu_time;
		nw_write_end(&operation->device_seq);
	}
	return kernel_handle(place_of(parent), ordinal, (uint32_t)channel);
}

void nw_kernel_stop(void *kernel, uint64_t gpu_time)
{
	struct nw_frame *frame = nw_frame_current();
	int index = frame && is(kernel, KIND_KERNEL) ? comm_of_place(place_of(kernel)) : -1;
	if (index < 0)
		return;
	uint32_t ordinal = rest_of(kernel) >> 6, channel = rest_of(kernel) & 0x3f;
	uint64_t now = nw_now(CLOCK_MONOTONIC);
	struct nw_communicator *comm = &frame->communicators[index];
	struct nw_channel *slot = &comm->channels[channel];
	if (nw_write_begin(frame, &slot->seq)) {
		slot->finished++;
		slot->gpu_stop = gpu_time;
		slot->seen_stop_ns = now;
		nw_write_end(&slot->seq);
	}
	struct nw_operation *operation = &comm->recent[ordinal % NW_FRAME_OPERATIONS];
	if (((uint32_t)NW_GET(operation->ordinal) & 0x3ffffff) != ordinal || !nw_write_begin(frame, &operation->device_seq))
		return;
	operation->finished++;
	operation->seen_stop_ns = now;
	if (gpu_time > operation->gpu_stop)
		operation->gpu_stop = gpu_time;
	if (operation->gpu_start && operation->gpu_stop >= operation->gpu_start)
		operation->duration_ns = operation->gpu_stop - operation->gpu_start;
	nw_write_end(&operation->device_seq);
}

bool nw_is_kernel(void *event)
{
	return is(event, KIND_KERNEL);
}

void nw_operation_begun(void *event)
{
	struct nw_frame *frame = nw_frame_current();
	int index = frame && is(event, KIND_OPERATION) ? comm_of_place(place_of(event)) : -1;
	struct nw_operation *operation = index < 0 ? NULL : operation_of(frame, index, rest_of(event));
	if (!operation || !nw_write_begin(frame, &operation->device_seq))
		return;
	operation->started = 1;
	operation->seen_start_ns = nw_now(CLOCK_MONOTONIC);
	nw_write_end(&operation->device_seq);
}

void nw_operation_ended(void *event, uint64_t duration_ns)
{
	struct nw_frame *frame = nw_frame_current();
	int index = frame && is(event, KIND_OPERATION) ? comm_of_place(place_of(event)) : -1;
	struct nw_operation *operation = index < 0 ? NULL : operation_of(frame, index, rest_of(event));
	if (!operation || !nw_write_begin(frame, &operation->device_seq))
		return;
	operation->started = operation->finished = 1;
	operation->seen_stop_ns = nw_now(CLOCK_MONOTONIC);
	if (!operation->seen_start_ns)
		operation->seen_start_ns = operation->seen_stop_ns;
	operation->duration_ns = duration_ns;
	nw_write_end(&operation->device_seq);
}

/* --- the proxy --- */

static int claim_proxy(void)
{
	static _Thread_local unsigned first; /* where this thread last found one */
	for (unsigned number = 0; number < NW_FRAME_PROXY_OPERATIONS / 64; number++) {
		unsigned word = (first + number) % (NW_FRAME_PROXY_OPERATIONS / 64);
		uint64_t used = NW_GET(proxy_used[word]);
		while (~used) {
			unsigned bit = (unsigned)__builtin_ctzll(~used);
			if (__atomic_compare_exchange_n(&proxy_used[word], &used, used | (uint64_t)1 << bit, false, __ATOMIC_ACQ_REL,
							__ATOMIC_RELAXED)) {
				first = word;
				return (int)(word * 64 + bit);
			}
		}
	}
	return -1;
}

/* A step's handle: place is the slot, rest its generation and the step's place in it. */
static struct nw_proxy_operation *proxy_of(struct nw_frame *frame, void *event, uint32_t generation)
{
	uint32_t place = place_of(event);
	if (place >= NW_FRAME_PROXY_OPERATIONS || (proxies[place].generation & 0x1fffffff) != generation)
		return NULL;
	if (!(NW_GET(proxy_used[place / 64]) >> place % 64 & 1))
		return NULL;
	return &frame->proxy[place];
}

void *nw_proxy_open(void *context, void *parent, const struct nw_proxy_facts *facts)
{
	struct nw_frame *frame = nw_frame_current();
	if (!frame)
		return NULL;
	NW_COUNT(frame, events);
	NW_COUNT(frame, proxy_begun);
	int place = claim_proxy();
	if (place < 0) {
		NW_COUNT(frame, refused_operations);
		return handle(KIND_OTHER, 0, 0);
	}
	/* With PXN both handles are another process's, whose mark is unlike ours. */
	int index = comm_of(context);
	uint32_t generation = ++proxies[place].generation & 0x1fffffff;
	memset(proxies[place].sizes, 0, sizeof proxies[place].sizes);
	struct nw_proxy_operation *proxy = &frame->proxy[place];
	if (nw_write_begin(frame, &proxy->seq)) {
		proxy->state = NW_PROXY_OPEN;
		proxy->communicator = index < 0 ? ~0u : (uint32_t)index;
		proxy->generation = index < 0 ? 0 : comms[index].generation;
		proxy->ordinal = index >= 0 && is(parent, KIND_OPERATION) ? rest_of(parent) : 0;
		proxy->channel = (uint32_t)facts->channel;
		proxy->peer = facts->peer;
		proxy->nsteps = facts->nsteps;
		proxy->chunk = facts->chunk;
		proxy->is_send = facts->is_send != 0;
		proxy->owner_pid = facts->pid;
		proxy->begun_ns = nw_now(CLOCK_MONOTONIC);
		proxy->changed_ns = nw_now(CLOCK_MONOTONIC_COARSE);
		proxy->bytes = 0;
		proxy->steps_begun = proxy->steps_finished = 0;
		memset(proxy->steps, 0, sizeof proxy->steps);
		nw_write_end(&proxy->seq);
	}
	return handle(KIND_PROXY, (uint32_t)place, generation);
}

void *nw_step_open(void *parent, int step)
{
	struct nw_frame *frame = nw_frame_current();
	if (!frame)
		return NULL;
	NW_COUNT(frame, events);
	NW_COUNT(frame, steps_begun);
	struct nw_proxy_operation *proxy = is(parent, KIND_PROXY) ? proxy_of(frame, parent, rest_of(parent)) : NULL;
	if (!proxy) {
		NW_COUNT(frame, unmatched);
		return handle(KIND_OTHER, 0, 0);
	}
	unsigned slot = (unsigned)step % NW_FRAME_STEPS;
	if (nw_write_begin(frame, &proxy->seq)) {
		proxy->steps_begun++;
		proxy->changed_ns = nw_now(CLOCK_MONOTONIC_COARSE);
		proxy->steps[slot].step = step;
		proxy->steps[slot].state = NW_STEP_BEGUN;
		proxy->steps[slot].since_ns = proxy->changed_ns;
		nw_write_end(&proxy->seq);
	}
	proxies[place_of(parent)].sizes[slot] = 0;
	return handle(KIND_STEP, place_of(parent), rest_of(parent) << 3 | slot);
}

bool nw_is_step(void *event)
{
	return is(event, KIND_STEP);
}

void nw_step_state(void *event, enum nw_step_state state, uint64_t bytes)
{
	struct nw_frame *frame = nw_frame_current();
	if (!frame || !is(event, KIND_STEP))
		return;
	NW_COUNT(frame, events);
	struct nw_proxy_operation *proxy = proxy_of(frame, event, rest_of(event) >> 3);
	if (!proxy) {
		NW_COUNT(frame, unmatched);
		return;
	}
	unsigned slot = rest_of(event) & 7;
	if (nw_write_begin(frame, &proxy->seq)) {
		proxy->changed_ns = nw_now(CLOCK_MONOTONIC_COARSE);
		proxy->steps[slot].state = state;
		proxy->steps[slot].since_ns = proxy->changed_ns;
		nw_write_end(&proxy->seq);
	}
	if (bytes <= UINT32_MAX)
		proxies[place_of(event)].sizes[slot] = (uint32_t)bytes;
}

static void close_step(struct nw_frame *frame, void *event)
{
	NW_COUNT(frame, steps_finished);
	struct nw_proxy_operation *proxy = proxy_of(frame, event, rest_of(event) >> 3);
	if (!proxy)
		return;
	unsigned slot = rest_of(event) & 7;
	if (nw_write_begin(frame, &proxy->seq)) {
		proxy->steps_finished++;
		proxy->changed_ns = nw_now(CLOCK_MONOTONIC_COARSE);
		proxy->bytes += proxies[place_of(event)].sizes[slot];
		proxy->steps[slot].state = NW_STEP_NONE;
		nw_write_end(&proxy->seq);
	}
}

static void close_proxy(struct nw_frame *frame, void *event)
{
	NW_COUNT(frame, proxy_finished);
	struct nw_proxy_operation *proxy = proxy_of(frame, event, rest_of(event));
	if (!proxy)
		return;
	if (nw_write_begin(frame, &proxy->seq)) {
		proxy->state = NW_PROXY_FREE;
		nw_write_end(&proxy->seq);
	}
	uint32_t place = place_of(event);
	__atomic_fetch_and(&proxy_used[place / 64], ~((uint64_t)1 << place % 64), __ATOMIC_RELEASE);
}

void nw_close(void *event)
{
	struct nw_frame *frame = nw_frame_current();
	if (!frame)
		return;
	NW_COUNT(frame, events);
	if (is(event, KIND_STEP))
		close_step(frame, event);
	else if (is(event, KIND_PROXY))
		close_proxy(frame, event);
}

void *nw_other_open(void)
{
	return handle(KIND_OTHER, 0, 0);
}
