/* NCCL's profiler plugin interface, versions 1 to 7, as far as the shim reads it.
 *
 * Facts from NCCL's public headers (src/include/nccl_profiler.h at v2.23.4-1, src/include/plugin/profiler/ from v2.26.2-1 on) and,
 * for version 7, from the debug information of libnccl 2.32.3; declared here in our own words. tests/unit/test_shim_abi.py compares
 * every offset with the debug information of the libraries at hand.
 *
 * version  first in    what differs
 *   1      2.23.4      operations carry communicator hash; function, type, algorithm as numbers
 *   2      2.26.2      names instead of numbers (no release has it as its newest)
 *   3      2.26.2      kernel channel events, without the GPU's time; drops one member
 *   4      2.27.3      communicator's identity at init; transfers say their size; kernel events carry the GPU's time
 *   5      2.28.3      type is 64 bits wide; init takes the identity before the mask
 *   6      2.29.2      copy-engine collectives (not asked for here)
 *   7      2.31/2.32   user tags, phases of kernels (not asked for here)
 */
#ifndef NCCLWATCH_PROFILER_ABI_H
#define NCCLWATCH_PROFILER_ABI_H

#include <stddef.h>
#include <stdint.h>

/* Kinds of events, bits of the activation mask. */
enum {
	NCCL_EVENT_GROUP = 1 << 0,
	NCCL_EVENT_COLL = 1 << 1,
	NCCL_EVENT_P2P = 1 << 2,
	NCCL_EVENT_PROXY_OP = 1 << 3,
	NCCL_EVENT_PROXY_STEP = 1 << 4,
	NCCL_EVENT_KERNEL_CH = 1 << 6,
};

/* States of events; the numbers did not change between versions, only grew. */
enum {
	NCCL_STATE_STEP_SEND_GPU_WAIT = 8,
	NCCL_STATE_STEP_SEND_WAIT = 9,
	NCCL_STATE_STEP_RECV_WAIT = 10,
	NCCL_STATE_STEP_RECV_FLUSH_WAIT = 11,
	NCCL_STATE_STEP_RECV_GPU_WAIT = 12,
	NCCL_STATE_STEP_SEND_PEER_WAIT = 20, /* v4 */
	NCCL_STATE_KERNEL_CH_STOP = 22,      /* v4 */
};

struct nccl_proxy_op {
	int32_t pid;
	uint8_t channel;
	int32_t peer, steps, chunk, is_send;
};

struct nccl_kernel_ch {
	uint8_t channel;
	uint64_t gpu_time; /* v4 */
};

struct nccl_coll_v1 {
	const char *name;
	uint64_t comm_hash, sequence;
	uint8_t function;
	const void *send;
	void *recv;
	size_t count;
	int32_t root;
	uint8_t datatype;
	uint32_t operator;
	size_t traffic;
	uint8_t channels, warps;
};

struct nccl_p2p_v1 {
	const char *name;
	uint64_t comm_hash;
	uint8_t function;
	void *buffer;
	uint8_t datatype;
	size_t count;
	int32_t peer;
};

/* Members that v2 has and v3 has not come after these. */
struct nccl_coll_v3 {
	const char *name;
	uint64_t comm_hash, sequence;
	const char *function;
	const void *send;
	void *recv;
	size_t count;
	int32_t root;
	const char *datatype;
	uint8_t channels, warps;
};

struct nccl_p2p_v2 {
	const char *name;
	uint64_t comm_hash;
	const char *function;
	void *buffer;
	const char *datatype;
	size_t count;
	int32_t peer;
};

struct nccl_coll_v4 {
	uint64_t sequence;
	const char *function;
	const void *send;
	void *recv;
	size_t count;
	int32_t root;
	const char *datatype;
	uint8_t channels, warps;
};

struct nccl_p2p_v4 {
	const char *function;
	void *buffer;
	const char *datatype;
	size_t count;
	int32_t peer;
	uint8_t channels;
};

/* What every descriptor begins with. `type` is one byte up to v4 and eight from v5 on. */
struct nccl_event {
	union {
		uint8_t type_v1;
		uint64_t type_v5;
	};
	void *parent;
	int32_t rank;
	union {
		struct nccl_coll_v1 coll_v1;
		struct nccl_coll_v3 coll_v3;
		struct nccl_coll_v4 coll_v4;
		struct nccl_p2p_v1 p2p_v1;
		struct nccl_p2p_v2 p2p_v2;
		struct nccl_p2p_v4 p2p_v4;
		struct nccl_proxy_op proxy_op;
		struct {
			int32_t step;
		} proxy_step;
		struct nccl_kernel_ch kernel_ch;
	};
};

/* What comes with a state; read only from v4 on (before, it speaks of whole proxy operations). */
union nccl_state_arguments {
	size_t size;       /* of a transfer */
	uint64_t gpu_time; /* of a kernel's end */
};

typedef int nccl_result; /* 0 is success */
typedef nccl_result nccl_start(void *context, void **handle, struct nccl_event *event);
typedef nccl_result nccl_stop(void *handle);
typedef nccl_result nccl_record(void *handle, int state, union nccl_state_arguments *arguments);
typedef nccl_result nccl_finalize(void *context);

struct nccl_profiler_v1 { /* v1 to v3 */
	const char *name;
	nccl_result (*init)(void **context, int *mask);
	nccl_start *start;
	nccl_stop *stop;
	nccl_record *record;
	nccl_finalize *finalize;
};

struct nccl_profiler_v4 {
	const char *name;
	nccl_result (*init)(void **context, int *mask, const char *name, uint64_t hash, int nodes, int ranks, int rank, void *log);
	nccl_start *start;
	nccl_stop *stop;
	nccl_record *record;
	nccl_finalize *finalize;
};

struct nccl_profiler_v5 { /* v5 to v7 */
	const char *name;
	nccl_result (*init)(void **context, uint64_t hash, int *mask, const char *name, int nodes, int ranks, int rank, void *log);
	nccl_start *start;
	nccl_stop *stop;
	nccl_record *record;
	nccl_finalize *finalize;
};

#endif
