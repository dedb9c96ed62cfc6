/* Layout of the BPF maps by which the agent steers the programs of nccl_calls.bpf.c.
 *
 * Mirrored for Python by scripts/generate_events.py in src/ncclwatch/probes/map_layouts.py, under the same rules as events.h.
 */
#ifndef NCCLWATCH_MAPS_H
#define NCCLWATCH_MAPS_H

#define NW_MAX_SITES 1024      /* probed instructions, over all binaries */
#define NW_MAX_BINARIES 64     /* files that carry NCCL */
#define NW_MAX_FUNCTIONS 64    /* above the largest nw_function */
#define NW_MAX_PROCESSES 8192  /* watched at once on one node */
#define NW_MAX_CALLS 8192      /* calls in flight of which the leave is awaited */
#define NW_MAX_NAMESPACES 4    /* pid namespaces the agent can translate at once */

/* Counters per CPU. */
enum nw_counter {
	NW_COUNT_RECORDS = 0,      /* records put into the ring */
	NW_COUNT_LOST = 1,         /* records lost because the ring was full */
	NW_COUNT_FOREIGN = 2,      /* hits by processes that are not watched */
	NW_COUNT_GATED = 3,        /* hits of functions that are switched off */
	NW_COUNT_NESTED = 4,       /* calls that NCCL made to itself */
	NW_COUNT_UNTRANSLATED = 5, /* hits by processes of a pid namespace that the agent does not know */
	NW_COUNT_UNMAPPED = 6,     /* hits of a site that has no entry: attached or detached this moment */
	NW_COUNTERS = 8,
};

/* What a probe site is for. */
enum nw_site_kind {
	NW_SITE_NONE = 0,
	NW_SITE_ENTER = 1,
	NW_SITE_LEAVE = 2,
};

/* How the programs number processes. */
enum nw_numbering {
	NW_NUMBERING_INIT = 0,      /* the kernel's own numbers: /proc shows the initial pid namespace */
	NW_NUMBERING_NAMESPACE = 1, /* numbers of the namespaces listed in nw_config */
};

/* Where an argument is at the first instruction of a function (System V ABI, x86-64):
 * 0 it has none, 1-6 the integer registers in order, 7 and up the words above the return address. */
struct nw_function_spec {
	__u8 enter_on; /* gate of ENTER records */
	__u8 leave_on; /* gate of LEAVE records */
	__u8 leave_seen; /* the leave is probed: remember the call */
	__u8 comm;     /* ncclComm_t */
	__u8 comm_out; /* ncclComm_t* that the function fills */
	__u8 sendbuff;
	__u8 recvbuff;
	__u8 count;
	__u8 datatype;
	__u8 redop;
	__u8 peer;
	__u8 stream;
	__u8 rank;
	__u8 nranks;
	__u8 color;
	__u8 id_pointer; /* ncclUniqueId* read on entry */
	__u8 id_value;   /* ncclUniqueId passed by value: its first word */
	__u8 id_out;     /* ncclUniqueId* that the function fills */
	__u8 comm_freed; /* the communicator may be gone when the function returns */
	__u8 reserved[5];
};

struct nw_site {
	__u64 address;   /* as linked: the load bias is the instruction pointer less this */
	__u16 function;  /* enum nw_function */
	__u16 binary;
	__u8 kind;       /* enum nw_site_kind */
	__u8 reserved[3];
};

/* A file that carries NCCL: where its code lies and where ncclComm keeps what we read; -1 where this build has no such member. */
struct nw_binary {
	__u64 code_begin; /* addresses as linked; a return address between them is a call NCCL made to itself */
	__u64 code_end;
	__u64 magic;      /* what ncclComm holds at magic_offset when it is alive */
	__s32 magic_offset;
	__s32 hash_offset;
	__s32 rank_offset;
	__s32 nranks_offset;
	__s32 op_count_offset;
	__u32 reserved;
};

struct nw_namespace {
	__u64 device; /* of the namespace's inode, in the kernel's dev_t encoding */
	__u64 inode;
};

struct nw_config {
	__u32 numbering;  /* enum nw_numbering */
	__u32 namespaces; /* how many of the list are valid */
	__u32 all;        /* watch every process */
	__u32 every_exec; /* EXEC records: 0 of watched processes only, 1 of every process */
	struct nw_namespace namespace_list[NW_MAX_NAMESPACES];
};

struct nw_process {
	__u32 pid_namespace;
	__u32 pid;
};

struct nw_call_key {
	__u64 thread; /* bpf_get_current_pid_tgid */
	__u32 function;
	__u32 reserved;
};

struct nw_call {
	__u64 time_ns;
	__u64 comm;      /* or, when pending_out is set, the ncclComm_t* that is being filled */
	__u64 comm_hash;
	__u64 op_count;
	__u64 unique_id; /* or, when pending_id is set, the ncclUniqueId* that is being filled */
	__s32 rank;
	__s32 nranks;
	__u16 flags;
	__u8 pending_out;
	__u8 pending_id;
	__u32 reserved;
};

#endif
