/* Calls to NCCL, as they happen: one record in a ring buffer for every call that is entered or left.
 *
 * Compiled by BCC, loaded and attached by the agent itself (src/ncclwatch/probes/). One program serves every entry and one
 * every return instruction; which function it is comes as a number of the site, by one of two ways:
 *   *_cookie   bpf_get_attach_cookie, for uprobe_multi links (kernel 6.6 and later)
 *   *_patched  a constant in the program, replaced for each site before loading (kernel 5.8 and later)
 * Where arguments and members lie comes from maps (maps.h), so that one compilation serves every version of NCCL.
 */
#include <uapi/linux/ptrace.h>
#include "events.h"
#include "maps.h"

#ifndef NW_RING_PAGES
#define NW_RING_PAGES 1024
#endif

/* The agent finds this constant in a *_patched program and puts the number of the site in its place. */
#define NW_SITE_PLACEHOLDER 0x6e63636c73697465

BPF_RINGBUF_OUTPUT(events, NW_RING_PAGES);
BPF_ARRAY(config, struct nw_config, 1);
BPF_ARRAY(sites, struct nw_site, NW_MAX_SITES);
BPF_ARRAY(functions, struct nw_function_spec, NW_MAX_FUNCTIONS);
BPF_ARRAY(binaries, struct nw_binary, NW_MAX_BINARIES);
BPF_HASH(watched, struct nw_process, u32, NW_MAX_PROCESSES);
BPF_TABLE("lru_hash", struct nw_process, u8, ignored, NW_MAX_PROCESSES);
BPF_TABLE("lru_hash", struct nw_call_key, struct nw_call, calls, NW_MAX_CALLS);
BPF_PERCPU_ARRAY(hits, u64, NW_MAX_SITES);
BPF_PERCPU_ARRAY(counters, u64, NW_COUNTERS);

/* A program can be preempted by another one on its CPU since kernel 6.0: hence the atomic addition. */
static inline void count_in(int counter)
{
	u64 *value = counters.lookup(&counter);

	if (value)
		__sync_fetch_and_add(value, 1);
}

struct caller {
	struct nw_process process;
	u32 tid;
	u32 pid;
	u16 flags;
};

enum standing {
	STANDING_UNTRANSLATED, /* of a pid namespace the agent does not know */
	STANDING_FOREIGN,      /* ruled out by the agent */
	STANDING_UNKNOWN,      /* neither watched nor ruled out: the agent decides, it may be a child of a watched process */
	STANDING_WATCHED,
};

/* Who runs, in numbers the agent understands, and what the agent thinks of it. */
static inline enum standing identify(struct nw_config *cfg, struct caller *who)
{
	u64 ids = bpf_get_current_pid_tgid();

	who->flags = 0;
	who->process.pid_namespace = 0;
	if (cfg->numbering == NW_NUMBERING_INIT) {
		who->process.pid = ids >> 32;
		who->tid = ids;
	} else {
		struct bpf_pidns_info inner = {};
		int found = 0;
#pragma unroll
		for (int i = 0; i < NW_MAX_NAMESPACES; i++) {
			if (found || i >= cfg->namespaces)
				continue;
			/* Succeeds only for the namespace in which the thread itself lives. */
			if (bpf_get_ns_current_pid_tgid(cfg->namespace_list[i].device, cfg->namespace_list[i].inode, &inner,
							sizeof(inner)) == 0) {
				who->process.pid_namespace = i;
				found = 1;
			}
		}
		if (!found)
			return STANDING_UNTRANSLATED;
		who->process.pid = inner.tgid;
		who->tid = inner.pid;
	}
	who->pid = who->process.pid;
	u32 *known = watched.lookup(&who->process);
	if (known) {
		who->pid = *known;
		return STANDING_WATCHED;
	}
	who->flags = NW_FLAG_UNKNOWN_PROCESS;
	return ignored.lookup(&who->process) ? STANDING_FOREIGN : STANDING_UNKNOWN;
}

/* Whether a call of this process is to be recorded. */
static inline int is_wanted(struct nw_config *cfg, struct caller *who)
{
	enum standing standing = identify(cfg, who);

	if (standing == STANDING_UNTRANSLATED) {
		count_in(NW_COUNT_UNTRANSLATED);
		return 0;
	}
	if (standing == STANDING_FOREIGN && !cfg->all) {
		count_in(NW_COUNT_FOREIGN);
		return 0;
	}
	/* Where all are watched its exit must be seen even if it comes before the agent looks. */
	if (standing == STANDING_UNKNOWN && cfg->all && who->process.pid_namespace == 0)
		watched.update(&who->process, &who->pid);
	return 1;
}

/* What a function was called with, by place: the integer registers in order, then the words on the stack. */
struct arguments {
	u64 nothing, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11;
};
#define NW_ON_STACK (11 - NW_REGISTERS)

/* Keep the compiler from turning a choice between values into a choice between addresses, which the verifier refuses. */
#define NW_VALUE(expression)                                                                                                       \
	({                                                                                                                         \
		u64 value_ = (expression);                                                                                         \
		asm volatile("" : "+r"(value_));                                                                                   \
		value_;                                                                                                            \
	})

static inline u64 argument(const struct arguments *a, u8 place)
{
	switch (place) {
	case 1:
		return NW_VALUE(a->a1);
	case 2:
		return NW_VALUE(a->a2);
	case 3:
		return NW_VALUE(a->a3);
	case 4:
		return NW_VALUE(a->a4);
	case 5:
		return NW_VALUE(a->a5);
	case 6:
		return NW_VALUE(a->a6);
	case 7:
		return NW_VALUE(a->a7);
	case 8:
		return NW_VALUE(a->a8);
	case 9:
		return NW_VALUE(a->a9);
	case 10:
		return NW_VALUE(a->a10);
	case 11:
		return NW_VALUE(a->a11);
	}
	return 0;
}

static inline s32 number(const struct arguments *a, u8 place)
{
	return place ? (s32)argument(a, place) : -1;
}

static inline u64 user_word(u64 address)
{
	u64 value = 0;

	if (address)
		bpf_probe_read_user(&value, sizeof(value), (void *)address);
	return value;
}

/* What the communicator says about itself, into the call; the flag is set only when it is one and could be read. */
static inline void read_communicator(struct nw_binary *binary, struct nw_call *call)
{
	u64 word = 0;
	s32 rank = -1, nranks = -1;

	if (!call->comm || binary->hash_offset < 0 || binary->rank_offset < 0 || binary->nranks_offset < 0)
		return;
	if (binary->magic_offset >= 0 && user_word(call->comm + binary->magic_offset) != binary->magic)
		return;
	if (bpf_probe_read_user(&word, sizeof(word), (void *)(call->comm + binary->hash_offset)) ||
	    bpf_probe_read_user(&rank, sizeof(rank), (void *)(call->comm + binary->rank_offset)) ||
	    bpf_probe_read_user(&nranks, sizeof(nranks), (void *)(call->comm + binary->nranks_offset)))
		return;
	call->comm_hash = word;
	call->rank = rank;
	call->nranks = nranks;
	call->op_count = binary->op_count_offset < 0 ? 0 : user_word(call->comm + binary->op_count_offset);
	call->flags |= NW_FLAG_COMM_READ;
}

static inline void put_call(struct nw_event *event, const struct nw_call *call)
{
	event->comm = call->comm;
	event->comm_hash = call->comm_hash;
	event->op_count = call->op_count;
	event->unique_id = call->unique_id;
	event->rank = call->rank;
	event->nranks = call->nranks;
	event->flags |= call->flags;
}

static inline void put_caller(struct nw_event *event, const struct caller *who)
{
	event->pid = who->pid;
	event->tid = who->tid;
	event->pid_namespace = who->process.pid_namespace;
	event->flags = who->flags;
	event->cpu = bpf_get_smp_processor_id();
}

/* Find the site and count the hit: 0 when it is unknown. */
static inline struct nw_site *site_of(u64 number)
{
	int index = number;
	struct nw_site *site = sites.lookup(&index);
	u64 *count = hits.lookup(&index);

	if (count)
		__sync_fetch_and_add(count, 1);
	if (!site || site->kind == NW_SITE_NONE) {
		count_in(NW_COUNT_UNMAPPED);
		return 0;
	}
	return site;
}

/* Whether the call came out of NCCL itself (ncclBcast calls ncclBroadcast; ncclSend of 2.21 opens a group): the user made one. */
static inline int is_nested(struct pt_regs *ctx, struct nw_site *site, struct nw_binary *binary, u64 return_address)
{
	u64 linked = return_address - (NW_IP(ctx) - site->address);

	return linked >= binary->code_begin && linked < binary->code_end;
}

static inline int on_enter(struct pt_regs *ctx, u64 number_of_site)
{
	int zero = 0;
	struct caller who = {};
	struct nw_call call = {};
	u64 stack[NW_ON_STACK + 1] = {};
	struct nw_site *site = site_of(number_of_site);
	struct nw_config *cfg = config.lookup(&zero);

	if (!site || !cfg)
		return 0;
	int function = site->function, binary_number = site->binary;
	struct nw_function_spec *spec = functions.lookup(&function);
	struct nw_binary *binary = binaries.lookup(&binary_number);

	if (!spec || !binary)
		return 0;
	if (!spec->enter_on && !(spec->leave_seen && spec->leave_on)) {
		count_in(NW_COUNT_GATED);
		return 0;
	}
	if (!is_wanted(cfg, &who))
		return 0;
	/* stack[0] is the return address, the words behind it the arguments that found no register. */
#ifdef NW_LINK
	stack[0] = NW_LINK(ctx);
	if (bpf_probe_read_user(stack + 1, sizeof(stack) - sizeof(stack[0]), (void *)NW_SP(ctx)))
		call.flags = NW_FLAG_NO_ARGUMENTS;
	struct arguments a = {0, NW_VALUE(NW_PARM(ctx, 1)), NW_VALUE(NW_PARM(ctx, 2)), NW_VALUE(NW_PARM(ctx, 3)),
			      NW_VALUE(NW_PARM(ctx, 4)), NW_VALUE(NW_PARM(ctx, 5)), NW_VALUE(NW_PARM(ctx, 6)),
			      NW_VALUE(NW_PARM(ctx, 7)), NW_VALUE(NW_PARM(ctx, 8)), NW_VALUE(stack[1]), NW_VALUE(stack[2]),
			      NW_VALUE(stack[3])};
#else
	if (bpf_probe_read_user(stack, sizeof(stack), (void *)NW_SP(ctx))) {
		bpf_probe_read_user(stack, sizeof(stack[0]), (void *)NW_SP(ctx));
		call.flags = NW_FLAG_NO_ARGUMENTS;
	}
	struct arguments a = {0, NW_VALUE(NW_PARM(ctx, 1)), NW_VALUE(NW_PARM(ctx, 2)), NW_VALUE(NW_PARM(ctx, 3)),
			      NW_VALUE(NW_PARM(ctx, 4)), NW_VALUE(NW_PARM(ctx, 5)), NW_VALUE(NW_PARM(ctx, 6)), NW_VALUE(stack[1]),
			      NW_VALUE(stack[2]), NW_VALUE(stack[3]), NW_VALUE(stack[4]), NW_VALUE(stack[5])};
#endif

	if (is_nested(ctx, site, binary, stack[0])) {
		count_in(NW_COUNT_NESTED);
		return 0;
	}
	call.time_ns = bpf_ktime_get_ns();
	call.rank = number(&a, spec->rank);
	call.nranks = number(&a, spec->nranks);
	call.comm = argument(&a, spec->comm);
	read_communicator(binary, &call);
	if (spec->id_value)
		call.unique_id = stack[1]; /* x86-64: a struct of 128 bytes is passed in memory, right above the return address */
	else if (spec->id_pointer)
		call.unique_id = user_word(argument(&a, spec->id_pointer));

	if (spec->enter_on) {
		struct nw_event *event = events.ringbuf_reserve(sizeof(struct nw_event));

		if (event) {
			put_caller(event, &who);
			put_call(event, &call);
			event->time_ns = call.time_ns;
			event->enter_time_ns = 0;
			event->function = function;
			event->kind = NW_KIND_ENTER;
			event->binary = binary_number;
			event->count = argument(&a, spec->count);
			event->sendbuff = argument(&a, spec->sendbuff);
			event->recvbuff = argument(&a, spec->recvbuff);
			event->stream = argument(&a, spec->stream);
			event->caller = stack[0];
			event->datatype = number(&a, spec->datatype);
			event->redop = number(&a, spec->redop);
			event->peer = number(&a, spec->peer);
			event->color = number(&a, spec->color);
			event->result = -1;
			events.ringbuf_submit(event, 0);
			count_in(NW_COUNT_RECORDS);
		} else {
			count_in(NW_COUNT_LOST);
		}
	}
	if (spec->leave_seen && spec->leave_on) {
		struct nw_call_key key = {};

		key.thread = bpf_get_current_pid_tgid();
		key.function = function;
		if (spec->comm_out) {
			call.comm = argument(&a, spec->comm_out);
			call.pending_out = 1;
			if (call.flags & NW_FLAG_COMM_READ) { /* of the parent of a split */
				call.flags &= ~NW_FLAG_COMM_READ;
				call.comm_hash = 0;
				call.op_count = 0;
				call.rank = -1;
				call.nranks = -1;
			}
		}
		if (spec->id_out) {
			call.unique_id = argument(&a, spec->id_out);
			call.pending_id = 1;
		}
		calls.update(&key, &call);
	}
	return 0;
}

static inline int on_leave(struct pt_regs *ctx, u64 number_of_site)
{
	int zero = 0;
	struct caller who = {};
	struct nw_call call = {};
	struct nw_call_key key = {};
	struct nw_site *site = site_of(number_of_site);
	struct nw_config *cfg = config.lookup(&zero);

	if (!site || !cfg)
		return 0;
	int function = site->function, binary_number = site->binary;
	struct nw_function_spec *spec = functions.lookup(&function);
	struct nw_binary *binary = binaries.lookup(&binary_number);

	if (!spec || !binary)
		return 0;
	if (!spec->leave_on) {
		count_in(NW_COUNT_GATED);
		return 0;
	}
	if (!is_wanted(cfg, &who))
		return 0;
#ifdef NW_LINK
	u64 return_address = NW_LINK(ctx);
#else
	/* At a return instruction the stack pointer is at the return address. */
	u64 return_address = user_word(NW_SP(ctx));
#endif

	if (is_nested(ctx, site, binary, return_address)) {
		count_in(NW_COUNT_NESTED);
		return 0;
	}
	key.thread = bpf_get_current_pid_tgid();
	key.function = function;
	struct nw_call *entered = calls.lookup(&key);

	if (entered) {
		call = *entered;
		calls.delete(&key);
	} else {
		call.rank = -1;
		call.nranks = -1;
		call.flags = NW_FLAG_NO_ENTER;
	}
	if (call.pending_out) {
		call.comm = user_word(call.comm);
		read_communicator(binary, &call);
	} else if (!spec->comm_freed) {
		read_communicator(binary, &call);
	}
	if (call.pending_id)
		call.unique_id = user_word(call.unique_id);

	struct nw_event *event = events.ringbuf_reserve(sizeof(struct nw_event));

	if (!event) {
		count_in(NW_COUNT_LOST);
		return 0;
	}
	put_caller(event, &who);
	put_call(event, &call);
	event->time_ns = bpf_ktime_get_ns();
	event->enter_time_ns = call.time_ns;
	event->function = function;
	event->kind = NW_KIND_LEAVE;
	event->binary = binary_number;
	event->count = 0;
	event->sendbuff = 0;
	event->recvbuff = 0;
	event->stream = 0;
	event->caller = return_address;
	event->datatype = -1;
	event->redop = -1;
	event->peer = -1;
	event->color = -1;
	event->result = NW_RESULT(ctx);
	events.ringbuf_submit(event, 0);
	count_in(NW_COUNT_RECORDS);
	return 0;
}

static inline u64 patched_site(void)
{
	u64 number_of_site;

	asm volatile("%0 = 0x6e63636c73697465 ll" : "=r"(number_of_site)); /* NW_SITE_PLACEHOLDER */
	return number_of_site;
}

int enter_cookie(struct pt_regs *ctx)
{
	return on_enter(ctx, bpf_get_attach_cookie(ctx));
}

int leave_cookie(struct pt_regs *ctx)
{
	return on_leave(ctx, bpf_get_attach_cookie(ctx));
}

int enter_patched(struct pt_regs *ctx)
{
	return on_enter(ctx, patched_site());
}

int leave_patched(struct pt_regs *ctx)
{
	return on_leave(ctx, patched_site());
}

/* EXEC and EXIT of processes, on raw tracepoints: they need neither tracefs nor kernel types. */
static inline int lifecycle(u8 kind)
{
	int zero = 0;
	struct caller who = {};
	struct nw_config *cfg = config.lookup(&zero);

	if (!cfg)
		return 0;
	enum standing standing = identify(cfg, &who);

	/* The number may be given to another process now: what was decided about it is void. */
	if (kind == NW_KIND_EXIT && standing == STANDING_WATCHED)
		watched.delete(&who.process);
	if (kind == NW_KIND_EXIT && standing == STANDING_FOREIGN)
		ignored.delete(&who.process);
	if (standing != STANDING_WATCHED && !(kind == NW_KIND_EXEC && cfg->every_exec && standing != STANDING_UNTRANSLATED))
		return 0;
	struct nw_event *event = events.ringbuf_reserve(sizeof(struct nw_event));

	if (!event) {
		count_in(NW_COUNT_LOST);
		return 0;
	}
	__builtin_memset(event, 0, sizeof(*event));
	put_caller(event, &who);
	event->time_ns = bpf_ktime_get_ns();
	event->kind = kind;
	event->rank = -1;
	event->nranks = -1;
	event->datatype = -1;
	event->redop = -1;
	event->peer = -1;
	event->color = -1;
	event->result = -1;
	events.ringbuf_submit(event, 0);
	count_in(NW_COUNT_RECORDS);
	return 0;
}

int on_exec(struct bpf_raw_tracepoint_args *ctx)
{
	return lifecycle(NW_KIND_EXEC);
}

int on_exit(struct bpf_raw_tracepoint_args *ctx)
{
	u64 ids = bpf_get_current_pid_tgid();

	if ((u32)ids != ids >> 32)
		return 0;
	return lifecycle(NW_KIND_EXIT);
}
