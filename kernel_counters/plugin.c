/* The way in through NCCL's profiler plugin interface: one table for each version, all leading to record.c. */
#include <string.h>

#include "profiler_abi.h"
#include "shim.h"

#include "events.h" /* needs the types that shim.h brings */

#define NW_NAME "ncclwatch"

static int function_by_name(const char *name)
{
	static const struct {
		const char *name;
		int function;
	} known[] = {
		{"AllReduce", NW_FN_ALL_REDUCE}, {"AllGather", NW_FN_ALL_GATHER}, {"ReduceScatter", NW_FN_REDUCE_SCATTER},
		{"Broadcast", NW_FN_BROADCAST}, {"Reduce", NW_FN_REDUCE}, {"Send", NW_FN_SEND}, {"Recv", NW_FN_RECV},
		{"AlltoAll", NW_FN_ALL_TO_ALL}, {"Gather", NW_FN_GATHER}, {"Scatter", NW_FN_SCATTER},
		{"PutSignal", NW_FN_PUT_SIGNAL}, {"Signal", NW_FN_SIGNAL}, {"WaitSignal", NW_FN_WAIT_SIGNAL},
	};
	for (size_t index = 0; name && index < sizeof known / sizeof *known; index++)
		if (!strcmp(name, known[index].name))
			return known[index].function;
	return NW_FN_NONE;
}

/* ncclFunc_t of v2.23 to v2.25 (src/include/nccl_common.h). */
static int function_by_number(unsigned number)
{
	static const int known[] = {NW_FN_BROADCAST, NW_FN_REDUCE, NW_FN_ALL_GATHER, NW_FN_REDUCE_SCATTER, NW_FN_ALL_REDUCE,
				    NW_FN_NONE, NW_FN_SEND, NW_FN_RECV};
	return number < sizeof known / sizeof *known ? known[number] : NW_FN_NONE;
}

/* ncclDataType_t of its name. */
static uint32_t datatype_by_name(const char *name)
{
	static const char *const known[] = {"ncclInt8", "ncclUint8", "ncclInt32", "ncclUint32", "ncclInt64", "ncclUint64",
					    "ncclFloat16", "ncclFloat32", "ncclFloat64", "ncclBfloat16", "ncclFloat8e4m3",
					    "ncclFloat8e5m2"};
	for (uint32_t index = 0; name && index < sizeof known / sizeof *known; index++)
		if (!strcmp(name, known[index]))
			return index;
	return ~0u;
}

static void coll_facts(int version, const struct nccl_event *event, struct nw_operation_facts *facts)
{
	facts->rank = event->rank;
	switch (version) {
	case 1: {
		const struct nccl_coll_v1 *coll = &event->coll_v1;
		facts->hash = coll->comm_hash, facts->sequence = coll->sequence, facts->count = coll->count, facts->peer = coll->root;
		facts->function = function_by_number(coll->function), facts->datatype = coll->datatype;
		return; /* its number of channels is the most there may be, not how many there are */
	}
	case 2:
	case 3: { /* they agree but for the last members, which hold the most channels there may be */
		const struct nccl_coll_v3 *coll = &event->coll_v3;
		facts->hash = coll->comm_hash, facts->sequence = coll->sequence, facts->count = coll->count, facts->peer = coll->root;
		facts->function = function_by_name(coll->function), facts->datatype = datatype_by_name(coll->datatype);
		return;
	}
	default: {
		const struct nccl_coll_v4 *coll = &event->coll_v4;
		facts->sequence = coll->sequence, facts->count = coll->count, facts->peer = coll->root, facts->channels = coll->channels;
		facts->function = function_by_name(coll->function), facts->datatype = datatype_by_name(coll->datatype);
	}
	}
}

static void p2p_facts(int version, const struct nccl_event *event, struct nw_operation_facts *facts)
{
	facts->rank = event->rank;
	facts->point_to_point = true;
	switch (version) {
	case 1: {
		const struct nccl_p2p_v1 *p2p = &event->p2p_v1;
		facts->hash = p2p->comm_hash, facts->count = p2p->count, facts->peer = p2p->peer;
		facts->function = function_by_number(p2p->function), facts->datatype = p2p->datatype;
		return;
	}
	case 2:
	case 3: {
		const struct nccl_p2p_v2 *p2p = &event->p2p_v2;
		facts->hash = p2p->comm_hash, facts->count = p2p->count, facts->peer = p2p->peer;
		facts->function = function_by_name(p2p->function), facts->datatype = datatype_by_name(p2p->datatype);
		return;
	}
	default: {
		const struct nccl_p2p_v4 *p2p = &event->p2p_v4;
		facts->count = p2p->count, facts->peer = p2p->peer, facts->channels = p2p->channels;
		facts->function = function_by_name(p2p->function), facts->datatype = datatype_by_name(p2p->datatype);
	}
	}
}

static inline nccl_result start(int version, void *context, void **handle, const struct nccl_event *event)
{
	if (!handle || !event)
		return 0;
	switch (version < 5 ? event->type_v1 : event->type_v5) {
	case NCCL_EVENT_COLL:
	case NCCL_EVENT_P2P: {
		struct nw_operation_facts facts = {.sequence = NW_UNKNOWN, .peer = -1, .device_known = version >= 3};
		if ((version < 5 ? event->type_v1 : event->type_v5) == NCCL_EVENT_COLL)
			coll_facts(version, event, &facts);
		else
			p2p_facts(version, event, &facts);
		*handle = nw_operation_open(context, &facts);
		break;
	}
	case NCCL_EVENT_PROXY_OP: {
		const struct nccl_proxy_op *op = &event->proxy_op;
		const struct nw_proxy_facts facts = {op->channel, op->peer, op->steps, op->chunk, op->is_send, op->pid};
		*handle = nw_proxy_open(context, event->parent, &facts);
		break;
	}
	case NCCL_EVENT_PROXY_STEP:
		*handle = nw_step_open(event->parent, event->proxy_step.step);
		break;
	case NCCL_EVENT_KERNEL_CH:
		*handle = nw_kernel_open(event->parent, event->kernel_ch.channel, version >= 4 ? event->kernel_ch.gpu_time : 0);
		break;
	default:
		*handle = nw_other_open(); /* NCCL reports what is inside a group only where the group has a handle */
	}
	return 0;
}

static enum nw_step_state step_state(int state)
{
	switch (state) {
	case NCCL_STATE_STEP_SEND_GPU_WAIT: return NW_STEP_SEND_GPU_WAIT;
	case NCCL_STATE_STEP_SEND_PEER_WAIT: return NW_STEP_SEND_PEER_WAIT;
	case NCCL_STATE_STEP_SEND_WAIT: return NW_STEP_SEND_WAIT;
	case NCCL_STATE_STEP_RECV_WAIT: return NW_STEP_RECV_WAIT;
	case NCCL_STATE_STEP_RECV_FLUSH_WAIT: return NW_STEP_RECV_FLUSH_WAIT;
	case NCCL_STATE_STEP_RECV_GPU_WAIT: return NW_STEP_RECV_GPU_WAIT;
	default: return NW_STEP_BEGUN;
	}
}

static inline nccl_result record(int version, void *handle, int state, const union nccl_state_arguments *arguments)
{
	if (nw_is_step(handle))
		nw_step_state(handle, step_state(state), version >= 4 && arguments ? arguments->size : 0);
	else if (version >= 4 && state == NCCL_STATE_KERNEL_CH_STOP && arguments)
		nw_kernel_stop(handle, arguments->gpu_time);
	return 0;
}

static nccl_result stop(int version, void *handle)
{
	if (version < 4 && nw_is_kernel(handle))
		nw_kernel_stop(handle, 0); /* no state says so there */
	nw_close(handle);
	return 0;
}

static nccl_result begin(int version, void **context, int *mask, const struct nw_comm_facts *facts)
{
	if (!context || !mask)
		return 0;
	*context = nw_comm_open(facts, NW_ENTRY_PLUGIN, version);
	struct nw_frame *frame = nw_frame_current();
	int wanted = 0;
	if (frame) {
		wanted = NCCL_EVENT_COLL | NCCL_EVENT_P2P | NCCL_EVENT_PROXY_OP;
		if (nw_enabled("NCCLWATCH_STEPS", true))
			wanted |= NCCL_EVENT_PROXY_STEP;
		if (version >= 3 && nw_enabled("NCCLWATCH_KERNELS", true))
			wanted |= NCCL_EVENT_KERNEL_CH;
		NW_SET(frame->header.events_wanted, (uint32_t)wanted);
		nw_sampler_start(frame);
	}
	*mask = wanted;
	return 0;
}

static nccl_result finalize(void *context)
{
	nw_comm_close(context);
	return 0;
}

#define NW_CALLS(version)                                                                                                           \
	static nccl_result start_v##version(void *context, void **handle, struct nccl_event *event)                                 \
	{                                                                                                                           \
		return start(version, context, handle, event);                                                                      \
	}                                                                                                                           \
	static nccl_result stop_v##version(void *handle)                                                                            \
	{                                                                                                                           \
		return stop(version, handle);                                                                                       \
	}                                                                                                                           \
	static nccl_result record_v##version(void *handle, int state, union nccl_state_arguments *arguments)                        \
	{                                                                                                                           \
		return record(version, handle, state, arguments);                                                                   \
	}

/* Up to v3 the interface names the communicator only by where it keeps our context. */
#define NW_TABLE_V1(version)                                                                                                        \
	NW_CALLS(version)                                                                                                           \
	static nccl_result init_v##version(void **context, int *mask)                                                               \
	{                                                                                                                           \
		const struct nw_comm_facts facts = {.address = (uintptr_t)context, .rank = -1};                                     \
		return begin(version, context, mask, &facts);                                                                       \
	}                                                                                                                           \
	NW_EXPORT struct nccl_profiler_v1 ncclProfiler_v##version = {NW_NAME, init_v##version, start_v##version, stop_v##version,    \
								      record_v##version, finalize};

#define NW_TABLE_V5(version)                                                                                                        \
	NW_CALLS(version)                                                                                                           \
	static nccl_result init_v##version(void **context, uint64_t hash, int *mask, const char *name, int nodes, int ranks,        \
					   int rank, void *log)                                                                     \
	{                                                                                                                           \
		(void)log;                                                                                                          \
		const struct nw_comm_facts facts = {hash, (uintptr_t)context, name, rank, ranks, nodes};                            \
		return begin(version, context, mask, &facts);                                                                       \
	}                                                                                                                           \
	NW_EXPORT struct nccl_profiler_v5 ncclProfiler_v##version = {NW_NAME, init_v##version, start_v##version, stop_v##version,    \
								      record_v##version, finalize};

NW_TABLE_V1(1)
NW_TABLE_V1(2)
NW_TABLE_V1(3)

NW_CALLS(4)
static nccl_result init_v4(void **context, int *mask, const char *name, uint64_t hash, int nodes, int ranks, int rank, void *log)
{
	(void)log;
	const struct nw_comm_facts facts = {hash, (uintptr_t)context, name, rank, ranks, nodes};
	return begin(4, context, mask, &facts);
}
NW_EXPORT struct nccl_profiler_v4 ncclProfiler_v4 = {NW_NAME, init_v4, start_v4, stop_v4, record_v4, finalize};

NW_TABLE_V5(5)
NW_TABLE_V5(6)
NW_TABLE_V5(7)
