/* The single binary layout of what the calls plane records.
 *
 * Included by the BPF programs, read by scripts/generate_events.py, which writes the numpy mirror
 * src/ncclwatch/model/events.py; the tests fail when the two differ from each other or from what gcc makes of this file.
 *
 * Function numbers, kinds and flags are part of recordings: never renumber, never reuse. Only fixed-size integers, no
 * implicit padding, little-endian.
 */
#ifndef NCCLWATCH_EVENTS_H
#define NCCLWATCH_EVENTS_H

/* What a record tells. */
enum nw_kind {
	NW_KIND_ENTER = 1, /* a thread called a function of NCCL */
	NW_KIND_LEAVE = 2, /* a thread returned from it */
	NW_KIND_EXEC = 3,  /* a process replaced its program */
	NW_KIND_EXIT = 4,  /* the main thread of a process exited */
};

/* NCCL's exported functions, and those of CUDA by which its operations are captured in graphs and replayed. The Config
 * variants of 2.31 and later count as the function they vary, CUDA's driver API and its _ptsz variants likewise. */
enum nw_function {
	NW_FN_NONE = 0,
	NW_FN_ALL_REDUCE = 1,
	NW_FN_BROADCAST = 2,
	NW_FN_BCAST = 3,
	NW_FN_REDUCE = 4,
	NW_FN_ALL_GATHER = 5,
	NW_FN_REDUCE_SCATTER = 6,
	NW_FN_ALL_TO_ALL = 7,
	NW_FN_GATHER = 8,
	NW_FN_SCATTER = 9,
	NW_FN_SEND = 10,
	NW_FN_RECV = 11,
	NW_FN_PUT_SIGNAL = 12,
	NW_FN_SIGNAL = 13,
	NW_FN_WAIT_SIGNAL = 14,
	NW_FN_GROUP_START = 20,
	NW_FN_GROUP_END = 21,
	NW_FN_GROUP_SIMULATE_END = 22,
	NW_FN_GET_UNIQUE_ID = 30,
	NW_FN_COMM_INIT_RANK = 31,
	NW_FN_COMM_INIT_RANK_CONFIG = 32,
	NW_FN_COMM_INIT_RANK_SCALABLE = 33,
	NW_FN_COMM_INIT_ALL = 34,
	NW_FN_COMM_SPLIT = 35,
	NW_FN_COMM_SHRINK = 36,
	NW_FN_COMM_GROW = 37,
	NW_FN_COMM_GET_UNIQUE_ID = 38,
	NW_FN_COMM_FINALIZE = 40,
	NW_FN_COMM_DESTROY = 41,
	NW_FN_COMM_ABORT = 42,
	NW_FN_COMM_REVOKE = 43,
	NW_FN_COMM_SUSPEND = 44,
	NW_FN_COMM_RESUME = 45,
	NW_FN_COMM_REGISTER = 50,
	NW_FN_COMM_DEREGISTER = 51,
	NW_FN_WINDOW_REGISTER = 52,
	NW_FN_WINDOW_DEREGISTER = 53,
	NW_FN_DEV_COMM_CREATE = 54,
	NW_FN_DEV_COMM_DESTROY = 55,
	NW_FN_GRAPH_LAUNCH = 56,         /* sendbuff: the executable graph */
	NW_FN_STREAM_BEGIN_CAPTURE = 57,
	NW_FN_STREAM_END_CAPTURE = 58,   /* LEAVE, comm: the graph */
	NW_FN_GRAPH_INSTANTIATE = 59,    /* sendbuff: the graph; LEAVE, comm: the executable graph */
	NW_FN_GRAPH_EXEC_UPDATE = 60,    /* sendbuff: the executable graph, recvbuff: the graph */
};

/* Bits of nw_event.flags. */
enum nw_flag {
	NW_FLAG_COMM_READ = 1,       /* comm_hash, rank, nranks and op_count were read from the communicator */
	NW_FLAG_UNKNOWN_PROCESS = 2, /* the process is not on the list of watched ones (yet) */
	NW_FLAG_NO_ENTER = 4,        /* a leave whose enter was not seen: it began before the probes */
	NW_FLAG_NO_ARGUMENTS = 8,    /* arguments that NCCL's ABI passes on the stack could not be read */
	NW_FLAG_REPLAYED = 16,       /* no call: what a graph that was launched then had captured (set by the agent) */
	NW_FLAG_UNKNOWN_GRAPH = 32,  /* GRAPH_LAUNCH: what the graph has captured was not seen (set by the agent) */
};

/* One record. Fields that a function does not have are 0, or -1 where 0 means something (rank, nranks, datatype, redop,
 * peer, result, color). */
struct nw_event {
	__u64 time_ns;       /* CLOCK_MONOTONIC of the kernel (bpf_ktime_get_ns) */
	__u64 enter_time_ns; /* LEAVE: when the call was entered, 0 when that was not seen */
	__u32 pid;           /* process, in the numbers /proc shows to the agent; of an unknown process in those of pid_namespace */
	__u32 tid;           /* thread, in the numbers of pid_namespace */
	__u16 function;      /* enum nw_function; 0 for EXEC and EXIT */
	__u8 kind;           /* enum nw_kind */
	__u8 pid_namespace;  /* index into the tracer's list of pid namespaces; 0 is the one /proc shows to the agent */
	__u16 flags;         /* enum nw_flag */
	__u16 binary;        /* the tracer's number of the file that carries NCCL */
	__u64 comm;          /* ncclComm_t; for functions that make one, known from LEAVE on */
	__u64 comm_hash;     /* ncclComm.commHash */
	__u64 op_count;      /* ncclComm.opCount at the time of the record */
	__u64 unique_id;     /* first 8 bytes of the ncclUniqueId (the random magic of ncclBootstrapHandle) */
	__u64 count;         /* elements as given to the call; bytes of registrations */
	__u64 sendbuff;
	__u64 recvbuff;
	__u64 stream;        /* cudaStream_t */
	__u64 caller;        /* return address of the call */
	__s32 rank;          /* rank in the communicator, or the rank argument of a function that makes one */
	__s32 nranks;        /* likewise */
	__s32 datatype;      /* ncclDataType_t */
	__s32 redop;         /* ncclRedOp_t */
	__s32 peer;          /* root of a rooted collective, peer of a point-to-point call */
	__s32 color;         /* colour of CommSplit */
	__s32 result;        /* LEAVE: ncclResult_t */
	__u32 cpu;
};

#endif
