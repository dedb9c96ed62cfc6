/* The probing frame: the one layout of what the counter shim publishes about one process (one rank, usually).
 *
 * Included by the shim, read by scripts/generate_events.py, which writes the numpy mirror src/ncclwatch/model/frame_layout.py; the
 * tests fail when the two differ from each other or from what gcc makes of this file. Only fixed-size integers, no implicit
 * padding, little-endian. Any change of the layout raises NW_FRAME_VERSION: a reader refuses what it does not know.
 *
 * The shim writes everything but the last member, the reader nothing but that. Every record that can be half written begins with
 * `seq`: odd while it is being written, raised by two each time (seqlock). A reader never waits, and never makes the shim wait.
 *
 * After CCL-D 5.1 (probing frame of a header and blocks, two counters a channel) and Mycroft 4.2 (fixed shared memory, completion
 * and real-time state). Times ending in _ns are CLOCK_MONOTONIC unless said otherwise; GPU times are the GPU's global timer in ns.
 */
#ifndef NCCLWATCH_FRAME_H
#define NCCLWATCH_FRAME_H

#define NW_FRAME_VERSION 1
#define NW_FRAME_MAGIC 3552567502688437070
#define NW_FRAME_COMMUNICATORS 64
#define NW_FRAME_CHANNELS 64
#define NW_FRAME_OPERATIONS 32
#define NW_FRAME_PROXY_OPERATIONS 1024
#define NW_FRAME_STEPS 8
#define NW_FRAME_WORDS 1024
#define NW_FRAME_NAME 32

/* How the shim came into the process. */
enum nw_entry {
	NW_ENTRY_NONE = 0,      /* not yet known */
	NW_ENTRY_PLUGIN = 1,    /* NCCL loaded it as profiler plugin */
	NW_ENTRY_PRELOAD = 2,   /* LD_PRELOAD: calls of NCCL's functions pass through it */
	NW_ENTRY_INJECTION = 3, /* CUDA_INJECTION64_PATH: the CUDA driver loaded it; only the sampler works */
};

/* What the sampler of GPU memory does. */
enum nw_sampler {
	NW_SAMPLER_OFF = 0,        /* switched off by NCCLWATCH_SAMPLER=0 */
	NW_SAMPLER_NO_DRIVER = 1,  /* no CUDA driver in the process, or one without the functions needed */
	NW_SAMPLER_IDLE = 2,       /* nothing is asked of it */
	NW_SAMPLER_RUNNING = 3,    /* it reads what is asked */
	NW_SAMPLER_NO_CONTEXT = 4, /* waits for a CUDA context */
	NW_SAMPLER_FAILED = 5,     /* the driver refused its stream or buffer: last_error */
	NW_SAMPLER_GONE = 6,       /* the process is exiting */
};

enum nw_comm_state {
	NW_COMM_FREE = 0,     /* the block holds nothing */
	NW_COMM_LIVE = 1,     /* the communicator exists */
	NW_COMM_FINISHED = 2, /* it was destroyed or aborted; the block is kept until it is needed */
};

enum nw_proxy_state {
	NW_PROXY_FREE = 0, /* the slot holds nothing */
	NW_PROXY_OPEN = 1, /* the operation is unfinished */
};

/* What an unfinished network transfer of the proxy waits for. */
enum nw_step_state {
	NW_STEP_NONE = 0,            /* no transfer */
	NW_STEP_BEGUN = 1,           /* begun, nothing said about it yet */
	NW_STEP_SEND_GPU_WAIT = 2,   /* the GPU has not produced the data */
	NW_STEP_SEND_PEER_WAIT = 3,  /* the receiver has not given a buffer */
	NW_STEP_SEND_WAIT = 4,       /* handed to the network, not completed */
	NW_STEP_RECV_WAIT = 5,       /* a buffer is posted, nothing has arrived */
	NW_STEP_RECV_FLUSH_WAIT = 6, /* arrived, the flush to GPU memory runs */
	NW_STEP_RECV_GPU_WAIT = 7,   /* the GPU has not consumed the data */
};

enum nw_word_status {
	NW_WORD_NONE = 0,      /* not read yet */
	NW_WORD_OK = 1,        /* value and time_ns are good */
	NW_WORD_MALFORMED = 2, /* the request makes no sense: alignment, size, address 0 */
	NW_WORD_NOT_HELD = 3,  /* NCCL does not hold this address where the request says it does */
	NW_WORD_NOT_DEVICE = 4, /* the driver does not know the address as memory of a GPU */
	NW_WORD_FAILED = 5,    /* the driver refused the copy: last_error */
	NW_WORD_IN_FLIGHT = 6, /* the copy was begun and has not returned */
};

/* First part of the frame: who writes it, and what was lost. Plain counters are exact once nobody writes. */
struct nw_frame_header {
	__u64 magic;
	__u32 version;
	__u32 size;          /* bytes of the whole frame */
	__u32 pid;           /* as the process itself sees it */
	__u32 entry;         /* enum nw_entry */
	__u32 interface;     /* version of NCCL's profiler interface in use; 0 without */
	__u32 events_wanted; /* activation mask given to NCCL */
	__u64 start_time;    /* of the process, clock ticks since boot (/proc/PID/stat) */
	__u64 created_ns;
	__u64 created_wall_ns; /* CLOCK_REALTIME */
	__u64 heartbeat_ns;  /* the sampler's thread was last awake; 0 without one */
	__u64 events;        /* events taken from NCCL */
	__u64 unmatched;     /* events that belong to nothing here: another process's (PXN), or of a communicator refused */
	__u64 refused_communicators; /* more communicators at once than the frame holds */
	__u64 refused_operations;    /* more unfinished proxy operations than the frame holds */
	__u64 contended;     /* updates left out because another thread was writing the same record */
	__u64 proxy_begun;   /* proxy operations */
	__u64 proxy_finished;
	__u64 steps_begun;   /* network transfers */
	__u64 steps_finished;
	__u32 sampler;       /* enum nw_sampler */
	__s32 last_error;    /* CUresult of the last failure */
	__u64 copy_begun_ns; /* a round of copies is under way since; 0 when none is */
	__u64 copies;        /* words copied */
	__u64 rounds;        /* rounds of copies finished */
	__u64 round_duration_ns; /* of the last round */
	__u32 period_us;     /* at which it reads now */
	__u32 words;         /* addresses taken from the request */
	__u64 request_seen;  /* seq of the request these words answer */
	__u64 malformed_requests;
	__u64 reserved[7];
};

/* One channel of one communicator: what the GPU said about its kernels there. */
struct nw_channel {
	__u32 seq;
	__u32 reserved;
	__u64 started;      /* works begun by the GPU */
	__u64 finished;     /* works finished by the GPU */
	__u64 operation;    /* ordinal of the operation last begun */
	__u64 gpu_start;    /* GPU time at which the last work began; 0 where the interface does not say (before v4) */
	__u64 gpu_stop;     /* GPU time at which the last finished work ended */
	__u64 seen_start_ns; /* when NCCL's host thread saw it begin */
	__u64 seen_stop_ns;
};

/* One operation of one communicator: the host's part, then the GPU's. */
struct nw_operation {
	__u32 seq;          /* of the host's part */
	__u32 function;     /* enum nw_function of events.h; 0 unknown */
	__u64 ordinal;      /* counts this communicator's operations from 1; the slot is ordinal % NW_FRAME_OPERATIONS */
	__u64 sequence;     /* NCCL's seqNumber of this function; all bits set where unknown */
	__u64 count;        /* elements */
	__u32 datatype;     /* ncclDataType_t; all bits set where unknown */
	__s32 peer;         /* root or peer, -1 where neither applies */
	__u32 channels;     /* on how many channels it runs; 0 unknown */
	__u32 point_to_point;
	__u64 launched_ns;  /* the host began to launch it */
	__u32 device_seq;   /* of the GPU's part */
	__u32 started;      /* channels on which the GPU has begun it */
	__u32 finished;     /* channels on which the GPU has finished it */
	__u32 device_known; /* 1 where start and finish are observed at all */
	__u64 gpu_start;    /* earliest begin, GPU time; 0 unknown */
	__u64 gpu_stop;     /* latest end, GPU time; 0 unknown */
	__u64 seen_start_ns; /* when the first begin was seen by the host */
	__u64 seen_stop_ns;
	__u64 duration_ns;  /* by the GPU's clock, once finished; 0 unknown */
	__u64 reserved[2];
};

struct nw_communicator {
	__u32 seq;
	__u32 state;        /* enum nw_comm_state */
	__u64 hash;         /* commHash; 0 unknown */
	__u64 address;      /* an address inside this ncclComm (where NCCL keeps the plugin's context), or its own; 0 unknown */
	__s32 rank;         /* -1 unknown */
	__s32 nranks;       /* 0 unknown */
	__s32 nnodes;       /* 0 unknown */
	__u32 generation;   /* raised each time the block is used for another communicator */
	__u64 created_ns;
	__u64 finished_ns;
	__u64 operations;   /* operations seen; the newest has this ordinal */
	__u64 collectives;
	__u64 transfers;    /* point-to-point operations */
	__u8 name[NW_FRAME_NAME];
	__u64 reserved[2];
	struct nw_channel channels[NW_FRAME_CHANNELS];
	struct nw_operation recent[NW_FRAME_OPERATIONS];
};

/* One unfinished network transfer. */
struct nw_step {
	__s32 step;
	__u32 state;        /* enum nw_step_state */
	__u64 since_ns;     /* CLOCK_MONOTONIC_COARSE */
};

/* One unfinished operation of the proxy thread. */
struct nw_proxy_operation {
	__u32 seq;
	__u32 state;        /* enum nw_proxy_state */
	__u32 communicator; /* index of the block */
	__u32 generation;   /* of the block */
	__u64 ordinal;      /* of the operation it works for; 0 unknown */
	__u32 channel;
	__s32 peer;
	__s32 nsteps;       /* transfers */
	__s32 chunk;        /* bytes a transfer at most */
	__u32 is_send;
	__s32 owner_pid;    /* process on whose behalf it runs, as that process sees itself */
	__u64 begun_ns;
	__u64 changed_ns;   /* CLOCK_MONOTONIC_COARSE */
	__u64 bytes;        /* of finished transfers, where the interface says so */
	__u32 steps_begun;
	__u32 steps_finished;
	struct nw_step steps[NW_FRAME_STEPS]; /* slot: step % NW_FRAME_STEPS */
};

/* One word of GPU memory, the answer to the request's entry of the same index. */
struct nw_word {
	__u32 seq;
	__u32 status;       /* enum nw_word_status */
	__u64 address;
	__u64 value;
	__u64 time_ns;      /* when the round of copies that read it had ended */
	__u64 changes;      /* how often the value was another than at the round before */
	__u64 changed_ns;   /* when it last was */
};

/* One word the reader asks for. */
struct nw_wanted_word {
	__u64 address;      /* of the word in GPU memory; a multiple of `size` */
	__u64 held_at;      /* where in host memory NCCL keeps this address: it must hold exactly `address` */
	__u32 size;         /* 4 or 8 bytes */
	__u32 reserved;
};

/* Written by the reader, read by the shim, which believes none of it. On a page of its own. */
struct nw_request {
	__u32 seq;
	__u32 count;        /* entries in use */
	__u32 period_us;    /* between rounds; 1000 to 1000000 */
	__u32 reader_pid;
	__u64 expires_ns;   /* after this nothing is read any more, unless asked anew: a dead reader costs nothing */
	__u64 reserved;
	struct nw_wanted_word words[NW_FRAME_WORDS];
	__u8 padding[4064];
};

struct nw_frame {
	struct nw_frame_header header;
	struct nw_communicator communicators[NW_FRAME_COMMUNICATORS];
	struct nw_proxy_operation proxy[NW_FRAME_PROXY_OPERATIONS];
	struct nw_word words[NW_FRAME_WORDS];
	__u8 padding[3840];
	struct nw_request request;
};

#endif
