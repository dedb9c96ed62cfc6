/* Layout of the BPF maps in which verbs.bpf.c keeps its accounts of RDMA work requests.
 *
 * Mirrored for Python in src/ncclwatch/wire/layouts.py; the tests fail when the two differ.
 * Only fixed-size integers, no implicit padding, little-endian.
 */
#ifndef NCCLWATCH_VERBS_MAPS_H
#define NCCLWATCH_VERBS_MAPS_H

#define NWV_PENDING 256 /* signalled requests in flight on one queue pair that are remembered; a power of 2 */
#define NWV_WINDOW 128  /* completions remembered for the sliding window; a power of 2 above the largest w */
#define NWV_OPCODES 16  /* enum ibv_wr_opcode */
#define NWV_STATUSES 32 /* enum ibv_wc_status */
#define NWV_BUCKETS 128 /* of the latency histogram: four to an octave from 32 ns to 2^37 ns */
#define NWV_THREADS 4096

/* A queue pair: its number is unique on a device, and a context stands for one opened device of one process. */
struct nwv_qp_key {
	__u64 context; /* struct ibv_context* in the process */
	__u32 pid;     /* process as the kernel's initial pid namespace numbers it */
	__u32 qp_num;
};

/* A signalled request whose completion is due. Sums are over the queue pair's send queue up to and including this request. */
struct nwv_pending {
	__u64 wr_id;
	__u64 time_ns;
	__u64 posted;
	__u64 bytes;
};

/* One completion of the sliding window: when it was polled and the bytes completed by then. */
struct nwv_sample {
	__u64 time_ns;
	__u64 bytes;
};

struct nwv_qp {
	__u64 generation;         /* nwv_config.generation in which the rings below began */
	__u64 address;            /* struct ibv_qp*, 0 when only completions were seen */
	__u64 send_cq;
	__u64 recv_cq;
	__u64 first_ns;           /* first request or completion seen */
	__u64 last_post_ns;       /* requester side only */
	__u64 last_completion_ns; /* likewise */
	__u64 posted;             /* requests to the send queue, each of a chain */
	__u64 posted_bytes;
	__u64 signalled;          /* of them those that ask for a completion */
	__u64 inlined;            /* of them those that carry their data with them */
	__u64 refused;            /* requests the provider did not take; already subtracted above (only where the return is probed) */
	__u64 completed;          /* completions of the send queue */
	__u64 retired;            /* requests that these completions end, unsignalled predecessors included */
	__u64 retired_bytes;
	__u64 received;           /* completions of the receive queue */
	__u64 received_bytes;
	__u64 receives_posted;
	__u64 errors;             /* completions whose status is not success, of either queue */
	__u64 unmatched;          /* send completions of no request that we saw posted */
	__u64 skipped;            /* requests passed over because the completion of a later one came */
	__u64 overwritten;        /* requests forgotten because more than NWV_PENDING were in flight */
	__u64 truncated;          /* chains longer than we follow */
	__u64 sig_all;            /* created with sq_sig_all: every request is signalled */
	__u64 last_opcode;        /* of the request that an extended queue pair is building */
	__u64 batch_posted;       /* sums at wr_start, to which wr_abort returns */
	__u64 batch_bytes;
	__u64 batch_signalled;
	__u64 batch_tail;
	__u64 head;               /* pending[head..tail) wait for their completion; both only rise */
	__u64 tail;
	__u64 samples;            /* completions ever put into window */
	__u64 opcode_count[NWV_OPCODES];
	__u64 opcode_bytes[NWV_OPCODES];
	__u64 status_count[NWV_STATUSES];
	__u64 latency[NWV_BUCKETS];
	struct nwv_pending pending[NWV_PENDING];
	struct nwv_sample window[NWV_WINDOW];
};

/* What one thread does: the hits the governor accounts for, and the arguments of the call it is in. */
struct nwv_thread {
	__u64 posts; /* hits of probes on the posting functions */
	__u64 polls; /* hits of probes on the polling functions: entry and return are two */
	__u64 extended_posts; /* of them those on functions of extended queue pairs */
	__u64 extended_polls; /* of them those on functions of extended completion queues */
	__u64 polls_empty;
	__u64 takes; /* hits where NCCL takes the completions of a poll that found some */
	__u64 requests_seen; /* requests of posts that were booked, and completions of polls: what each costs beyond the hit */
	__u64 completions_seen;
	__u64 cq;
	__u64 completions; /* struct ibv_wc* that poll_cq fills */
	__u64 qp;
	__u64 requests;    /* struct ibv_send_wr* of post_send */
	__u64 bad_request; /* struct ibv_send_wr** of post_send */
	__u64 open_cq;     /* extended queue: completion that is being looked at, not yet given to a queue pair */
	__u64 open_wr_id;
	__u32 open_status;
	__u32 open_wanted;
	__u32 armed; /* the entry of a call was seen and not yet its return */
	__u32 reserved;
	__u64 poll_ns; /* the poll whose completions are being looked at: when it returned, how many, and the next of them */
	__u32 found;
	__u32 index;
};

struct nwv_config {
	__u64 generation; /* raised when a burst begins: what was in flight before is unknown */
	__u64 paused;     /* accounts stand still: probes come and go one after the other, a burst counts between two moments */
};

/* What happened on the control path. */
enum nwv_control_kind {
	NWV_CONTEXT_USED = 1, /* a protection domain, queue or memory region was made on a context */
	NWV_CONTEXT_CLOSED = 2,
	NWV_QP_CREATED = 3, /* address and number are not yet known */
	NWV_QP_MODIFIED = 4,
	NWV_QP_DESTROYED = 5,
	NWV_DEVICE_OPENED = 6,
};

struct nwv_control {
	__u64 time_ns;
	__u64 context;
	__u64 qp;
	__u64 send_cq;
	__u32 pid;
	__u32 tid;
	__u32 kind;   /* enum nwv_control_kind */
	__u32 qp_num;
	__s32 state;  /* QP_MODIFIED: the enum ibv_qp_state asked for, else -1 */
	__u32 sig_all;
};

/* Counters per CPU. */
enum nwv_counter {
	NWV_COUNT_QPS_FULL = 0,      /* requests or completions of queue pairs beyond the table's size */
	NWV_COUNT_CONTROL_LOST = 1,  /* control events lost because the ring was full */
	NWV_COUNT_UNREADABLE = 2,    /* a request or completion that could not be read */
	NWV_COUNT_UNATTRIBUTED = 3,  /* completions of an extended queue whose queue pair is unknown */
	NWV_COUNT_POLL_TRUNCATED = 4, /* polls that returned more completions than we look at */
	NWV_COUNTERS = 8,
};

#endif
