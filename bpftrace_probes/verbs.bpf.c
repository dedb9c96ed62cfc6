/* RDMA work requests: accounts per queue pair, kept in the kernel; user space reads the maps at its own pace.
 *
 * ibv_post_send, ibv_post_recv and ibv_poll_cq are inline functions that no library exports. The programs below sit on the provider
 * functions behind them (ibv_context.ops), whose addresses the agent resolves per process (src/ncclwatch/wire/). The offsets are
 * those of libibverbs' public, frozen ABI (IBVERBS_1.1 of infiniband/verbs.h; tests/unit/test_wire_abi.py checks them).
 *
 * What is counted and how:
 *   - every request of a posted chain, its bytes by opcode;
 *   - in flight = signalled requests of the send queue whose completion is due. A completion retires the request it belongs to and all
 *     unsignalled ones before it. Requests complete in the order of posting (IBTA, reliable connection), so pending is a queue;
 *   - receives apart: one that waits is normal.
 * A queue pair is posted to and polled by one thread at a time (NCCL's proxy); where several threads do so at once the sums stay exact
 * (atomic), while latency and window samples may be off by the requests that raced.
 */
#include <uapi/linux/ptrace.h>
#include "verbs_maps.h"

#ifndef NWV_MAX_QPS
#define NWV_MAX_QPS 1024
#endif
#define NWV_MAX_CHAIN 64 /* requests followed in one chain */
#define NWV_MAX_SGE 8    /* elements added up in one request */
#define NWV_SEARCH 4     /* requests looked through for a completion's wr_id */

/* infiniband/verbs.h, x86-64 */
#define QP_CONTEXT 0
#define QP_SEND_CQ 24
#define QP_RECV_CQ 32
#define QP_NUM 52
#define CQ_CONTEXT 0
#define CQ_EX_STATUS 132
#define CQ_EX_WR_ID 136
#define QP_EX_WR_ID 168
#define QP_EX_WR_FLAGS 176
#define SEND_SIGNALED 2
#define SEND_INLINE 8
#define WC_RECV 128
#define PD_CONTEXT 0
#define INIT_ATTR_SEND_CQ 8
#define INIT_ATTR_SIG_ALL 56
#define ATTR_STATE_MASK 1

struct send_wr {
	u64 wr_id;
	u64 next;
	u64 sg_list;
	s32 num_sge;
	u32 opcode;
	u32 flags;
};

struct recv_wr {
	u64 wr_id;
	u64 next;
};

struct sge {
	u64 address;
	u32 length;
	u32 lkey;
};

struct work_completion {
	u64 wr_id;
	u32 status;
	u32 opcode;
	u32 vendor_error;
	u32 bytes;
	u32 immediate;
	u32 qp_num;
};

struct created_qp {
	u64 send_cq;
	u64 sig_all;
};

/* nwv_thread.armed: which return is awaited. Kernels before 6.13 or so run the program of a return probe once for every probe of that
 * function, whichever process it was meant for: only the first run for an entry that was seen counts. */
#define ARMED_POST 1
#define ARMED_POLL 2
#define ARMED_EX_POLL 3

BPF_HASH(qps, struct nwv_qp_key, struct nwv_qp, NWV_MAX_QPS);
BPF_TABLE("lru_hash", u64, struct nwv_thread, threads, NWV_THREADS);
BPF_TABLE("lru_hash", u64, struct created_qp, created, NWV_THREADS);
BPF_HASH(cq_owner, u64, struct nwv_qp_key, NWV_MAX_QPS); /* the only queue pair of a completion queue; qp_num 0: it has several */
BPF_ARRAY(config, struct nwv_config, 1);
BPF_PERCPU_ARRAY(counters, u64, NWV_COUNTERS);
BPF_PERCPU_ARRAY(blank, struct nwv_qp, 1); /* all zero: a new entry is too large for the stack */
BPF_RINGBUF_OUTPUT(control, 16);
BPF_PROG_ARRAY(steps, 1); /* on_completion */

/* A program can be preempted by another one on its CPU since kernel 6.0: hence the atomic addition. */
static inline void count(int which)
{
	u64 *value = counters.lookup(&which);

	if (value)
		__sync_fetch_and_add(value, 1);
}

/* An index into an array of a power of two: masked where neither clang nor the verifier of an older kernel can lose sight of it. */
static inline u64 masked(u64 index, const u64 mask)
{
	asm volatile("%0 &= %1" : "+r"(index) : "i"(mask));
	return index;
}

#define ADD(field, amount) __sync_fetch_and_add(&(field), (amount))

static inline u64 user_word(u64 address)
{
	u64 value = 0;

	bpf_probe_read_user(&value, sizeof(value), (void *)address);
	return value;
}

static inline u32 user_int(u64 address)
{
	u32 value = 0;

	bpf_probe_read_user(&value, sizeof(value), (void *)address);
	return value;
}

static inline struct nwv_thread *this_thread(void)
{
	u64 id = bpf_get_current_pid_tgid();
	struct nwv_thread *thread = threads.lookup(&id);

	if (thread)
		return thread;
	struct nwv_thread fresh = {};

	threads.update(&id, &fresh);
	return threads.lookup(&id);
}

/* The account of a queue pair, made when it is new; its rings begin anew with each generation. */
static inline struct nwv_qp *account(struct nwv_qp_key *key, u64 now)
{
	int zero = 0;
	struct nwv_config *cfg = config.lookup(&zero);
	struct nwv_qp *qp = qps.lookup(key);

	if (!cfg)
		return 0;
	if (!qp) {
		struct nwv_qp *empty = blank.lookup(&zero);

		if (!empty)
			return 0;
		qps.insert(key, empty);
		qp = qps.lookup(key);
		if (!qp) {
			count(NWV_COUNT_QPS_FULL);
			return 0;
		}
		qp->first_ns = now;
		qp->generation = cfg->generation;
	}
	if (qp->generation != cfg->generation) {
		qp->generation = cfg->generation;
		qp->head = qp->tail;
		qp->samples = 0;
	}
	return qp;
}

static inline struct nwv_qp *account_of(u64 address, struct nwv_qp_key *key, u64 now)
{
	key->context = user_word(address + QP_CONTEXT);
	key->qp_num = user_int(address + QP_NUM);
	key->pid = bpf_get_current_pid_tgid() >> 32;
	if (!key->context) {
		count(NWV_COUNT_UNREADABLE);
		return 0;
	}
	struct nwv_qp *qp = account(key, now);

	if (qp && qp->address != address) {
		qp->address = address;
		qp->send_cq = user_word(address + QP_SEND_CQ);
		qp->recv_cq = user_word(address + QP_RECV_CQ);
		struct nwv_qp_key *owner = cq_owner.lookup(&qp->send_cq);

		if (!owner)
			cq_owner.update(&qp->send_cq, key);
		else if (owner->qp_num != key->qp_num || owner->context != key->context || owner->pid != key->pid)
			owner->qp_num = 0;
	}
	return qp;
}

static inline void remember(struct nwv_qp *qp, u64 wr_id, u64 now)
{
	struct nwv_pending *slot = &qp->pending[masked(qp->tail, NWV_PENDING - 1)];

	if (qp->tail - qp->head >= NWV_PENDING) {
		qp->head++;
		ADD(qp->overwritten, 1);
	}
	slot->wr_id = wr_id;
	slot->time_ns = now;
	slot->posted = qp->posted;
	slot->bytes = qp->posted_bytes;
	qp->tail++;
}

static inline u64 request_bytes(struct send_wr *request)
{
	u64 bytes = 0;

	for (int i = 0; i < NWV_MAX_SGE; i++) {
		struct sge element = {};

		if (i >= request->num_sge)
			break;
		if (bpf_probe_read_user(&element, sizeof(element), (void *)(request->sg_list + i * sizeof(element))))
			break;
		bytes += element.length;
	}
	return bytes;
}

static inline void count_request(struct nwv_qp *qp, u32 opcode, u64 bytes, u32 flags)
{
	u64 slot = masked(opcode, NWV_OPCODES - 1);

	ADD(qp->posted, 1);
	ADD(qp->posted_bytes, bytes);
	ADD(qp->opcode_count[slot], 1);
	ADD(qp->opcode_bytes[slot], bytes);
	if (flags & SEND_INLINE)
		ADD(qp->inlined, 1);
	if ((flags & SEND_SIGNALED) || qp->sig_all)
		ADD(qp->signalled, 1);
}

/* int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr) */
int on_post_send(struct pt_regs *ctx)
{
	u64 now = bpf_ktime_get_ns();
	struct nwv_qp_key key = {};
	struct nwv_thread *thread = this_thread();
	struct nwv_qp *qp = account_of(ctx->di, &key, now);
	u64 next = ctx->si;

	if (thread) {
		thread->posts++;
		thread->qp = ctx->di;
		thread->requests = ctx->si;
		thread->bad_request = ctx->dx;
		thread->armed = ARMED_POST;
	}
	if (!qp)
		return 0;
	qp->last_post_ns = now;
	for (int i = 0; i < NWV_MAX_CHAIN && next; i++) {
		struct send_wr request = {};

		if (bpf_probe_read_user(&request, sizeof(request), (void *)next)) {
			count(NWV_COUNT_UNREADABLE);
			return 0;
		}
		count_request(qp, request.opcode, request_bytes(&request), request.flags);
		if ((request.flags & SEND_SIGNALED) || qp->sig_all)
			remember(qp, request.wr_id, now);
		next = request.next;
	}
	if (next)
		ADD(qp->truncated, 1);
	return 0;
}

/* Return of post_send, probed in exact mode only: takes back what the provider refused, from *bad_wr to the end of the chain. */
int on_post_send_return(struct pt_regs *ctx)
{
	struct nwv_qp_key key = {};
	struct nwv_thread *thread = this_thread();

	if (!thread || thread->armed != ARMED_POST)
		return 0;
	thread->armed = 0;
	thread->posts++;
	if ((u32)ctx->ax == 0)
		return 0;
	struct nwv_qp *qp = account_of(thread->qp, &key, bpf_ktime_get_ns());
	u64 next = user_word(thread->bad_request);

	if (!qp)
		return 0;
	for (int i = 0; i < NWV_MAX_CHAIN && next; i++) {
		struct send_wr request = {};

		if (bpf_probe_read_user(&request, sizeof(request), (void *)next))
			return 0;
		u64 bytes = request_bytes(&request);
		u64 slot = masked(request.opcode, NWV_OPCODES - 1);

		ADD(qp->refused, 1);
		ADD(qp->posted, -1);
		ADD(qp->posted_bytes, -bytes);
		ADD(qp->opcode_count[slot], -1);
		ADD(qp->opcode_bytes[slot], -bytes);
		if (request.flags & SEND_INLINE)
			ADD(qp->inlined, -1);
		if ((request.flags & SEND_SIGNALED) || qp->sig_all) {
			ADD(qp->signalled, -1);
			if (qp->tail > qp->head)
				qp->tail--;
		}
		next = request.next;
	}
	return 0;
}

/* int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr) */
int on_post_recv(struct pt_regs *ctx)
{
	struct nwv_qp_key key = {};
	struct nwv_thread *thread = this_thread();
	struct nwv_qp *qp = account_of(ctx->di, &key, bpf_ktime_get_ns());
	u64 next = ctx->si;

	if (thread)
		thread->posts++;
	if (!qp)
		return 0;
	for (int i = 0; i < NWV_MAX_CHAIN && next; i++) {
		struct recv_wr request = {};

		if (bpf_probe_read_user(&request, sizeof(request), (void *)next)) {
			count(NWV_COUNT_UNREADABLE);
			return 0;
		}
		ADD(qp->receives_posted, 1);
		next = request.next;
	}
	if (next)
		ADD(qp->truncated, 1);
	return 0;
}

/* Number of the highest bit set, without branches: each would double what the verifier has to look at in every loop around it. */
static inline u32 highest_bit(u64 value)
{
	value |= value >> 1;
	value |= value >> 2;
	value |= value >> 4;
	value |= value >> 8;
	value |= value >> 16;
	value |= value >> 32;
	value >>= 1;
	value -= (value >> 1) & 0x5555555555555555ULL;
	value = (value & 0x3333333333333333ULL) + ((value >> 2) & 0x3333333333333333ULL);
	value = (value + (value >> 4)) & 0x0f0f0f0f0f0f0f0fULL;
	return (value * 0x0101010101010101ULL) >> 56;
}

/* Four buckets to an octave from 32 ns on; layouts.bucket_bounds is the inverse. */
static inline u32 bucket_of(u64 ns)
{
	if (ns < 32)
		ns = 32;
	if (ns >> 37)
		ns = (1ULL << 37) - 1;
	u32 octave = highest_bit(ns) & 63;

	return (octave - 5) * 4 + ((ns >> (octave - 2)) & 3);
}

/* Whether a completion belongs to a request of the send queue that we saw; if so that one and all before it are done. */
static inline int retire(struct nwv_qp *qp, u64 wr_id, u64 now)
{
	u64 head = qp->head, tail = qp->tail;

	for (int i = 0; i < NWV_SEARCH; i++) {
		if (head + i >= tail)
			return 0;
		struct nwv_pending *slot = &qp->pending[masked(head + i, NWV_PENDING - 1)];

		if (slot->wr_id != wr_id)
			continue;
		u64 bucket = masked(bucket_of(now - slot->time_ns), NWV_BUCKETS - 1);
		struct nwv_sample *sample = &qp->window[masked(qp->samples, NWV_WINDOW - 1)];

		ADD(qp->latency[bucket], 1);
		if (i)
			ADD(qp->skipped, i);
		qp->retired = slot->posted;
		qp->retired_bytes = slot->bytes;
		sample->time_ns = now;
		sample->bytes = slot->bytes;
		qp->samples++;
		qp->head = head + i + 1;
		return 1;
	}
	return 0;
}

/* One completion. opcode holds only for a successful one; else the wr_id tells the queue it belongs to. */
static inline void complete(struct nwv_qp *qp, u64 wr_id, u32 status, u32 opcode, u32 bytes, u64 now)
{
	ADD(qp->status_count[masked(status, NWV_STATUSES - 1)], 1);
	if (status)
		ADD(qp->errors, 1);
	if (!status && (opcode & WC_RECV)) {
		ADD(qp->received, 1);
		ADD(qp->received_bytes, bytes);
		return;
	}
	if (retire(qp, wr_id, now)) {
		ADD(qp->completed, 1);
		qp->last_completion_ns = now;
	} else if (status && qp->receives_posted > qp->received) {
		ADD(qp->received, 1);
	} else {
		ADD(qp->completed, 1);
		ADD(qp->unmatched, 1);
		qp->last_completion_ns = now;
	}
}

/* int poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc) */
int on_poll(struct pt_regs *ctx)
{
	struct nwv_thread *thread = this_thread();

	if (thread) {
		thread->polls++;
		thread->cq = ctx->di;
		thread->completions = ctx->dx;
		thread->armed = ARMED_POLL;
	}
	return 0;
}

int on_poll_return(struct pt_regs *ctx)
{
	struct nwv_thread *thread = this_thread();
	int found = ctx->ax;

	if (!thread || thread->armed != ARMED_POLL)
		return 0;
	thread->armed = 0;
	thread->polls++;
	if (found <= 0) {
		thread->polls_empty++;
		return 0;
	}
	thread->found = found;
	thread->index = 0;
	thread->poll_ns = bpf_ktime_get_ns();
	steps.call(ctx, 0);
	return 0;
}

/* One completion of the poll that has just returned, then on to the next: a loop of tail calls (the kernel allows 33), because the
 * verifiers before 6.4 or so give up on a loop around this much. */
int on_completion(struct pt_regs *ctx)
{
	struct nwv_thread *thread = this_thread();

	if (!thread)
		return 0;
	u64 now = thread->poll_ns;
	struct nwv_qp_key key = {};
	struct work_completion wc = {};

	if (bpf_probe_read_user(&wc, sizeof(wc), (void *)(thread->completions + thread->index * 48ULL))) {
		count(NWV_COUNT_UNREADABLE);
		return 0;
	}
	thread->index++;
	key.context = user_word(thread->cq + CQ_CONTEXT);
	key.pid = bpf_get_current_pid_tgid() >> 32;
	key.qp_num = wc.qp_num;
	struct nwv_qp *qp = account(&key, now);

	if (qp)
		complete(qp, wc.wr_id, wc.status, wc.opcode, wc.bytes, now);
	if (thread->index < thread->found) {
		steps.call(ctx, 0);
		count(NWV_COUNT_POLL_TRUNCATED);
	}
	return 0;
}

/* Extended queue pairs (struct ibv_qp_ex): requests are built by one call for the opcode and one for the data. */

/* void wr_start(struct ibv_qp_ex *qp) */
int on_wr_start(struct pt_regs *ctx)
{
	struct nwv_qp_key key = {};
	struct nwv_thread *thread = this_thread();
	struct nwv_qp *qp = account_of(ctx->di, &key, bpf_ktime_get_ns());

	if (thread)
		thread->posts++;
	if (qp) {
		qp->batch_posted = qp->posted;
		qp->batch_bytes = qp->posted_bytes;
		qp->batch_signalled = qp->signalled;
		qp->batch_tail = qp->tail;
	}
	return 0;
}

static inline int build(struct pt_regs *ctx, u32 opcode)
{
	u64 now = bpf_ktime_get_ns();
	struct nwv_qp_key key = {};
	struct nwv_thread *thread = this_thread();
	struct nwv_qp *qp = account_of(ctx->di, &key, now);

	if (thread)
		thread->posts++;
	if (!qp)
		return 0;
	u32 flags = user_int(ctx->di + QP_EX_WR_FLAGS);

	qp->last_post_ns = now;
	qp->last_opcode = opcode;
	count_request(qp, opcode, 0, flags);
	if ((flags & SEND_SIGNALED) || qp->sig_all)
		remember(qp, user_word(ctx->di + QP_EX_WR_ID), now);
	return 0;
}

#define BUILDER(name, opcode)                                                                                                      \
	int on_wr_##name(struct pt_regs *ctx)                                                                                      \
	{                                                                                                                          \
		return build(ctx, opcode);                                                                                         \
	}
BUILDER(rdma_write, 0)
BUILDER(rdma_write_imm, 1)
BUILDER(send, 2)
BUILDER(send_imm, 3)
BUILDER(rdma_read, 4)
BUILDER(atomic_cmp_swp, 5)
BUILDER(atomic_fetch_add, 6)
BUILDER(local_inv, 7)
BUILDER(bind_mw, 8)
BUILDER(send_inv, 9)
BUILDER(send_tso, 10)
BUILDER(atomic_write, 15)

/* The bytes of the request that was begun last. */
static inline int add_bytes(struct pt_regs *ctx, u64 bytes)
{
	struct nwv_qp_key key = {};
	struct nwv_thread *thread = this_thread();
	struct nwv_qp *qp = account_of(ctx->di, &key, bpf_ktime_get_ns());

	if (thread)
		thread->posts++;
	if (!qp)
		return 0;
	ADD(qp->posted_bytes, bytes);
	ADD(qp->opcode_bytes[masked(qp->last_opcode, NWV_OPCODES - 1)], bytes);
	if (qp->tail > qp->head) {
		struct nwv_pending *last = &qp->pending[masked(qp->tail - 1, NWV_PENDING - 1)];

		if (last->posted == qp->posted)
			last->bytes = qp->posted_bytes;
	}
	return 0;
}

/* void wr_set_sge(struct ibv_qp_ex *qp, uint32_t lkey, uint64_t addr, uint32_t length) */
int on_wr_set_sge(struct pt_regs *ctx)
{
	return add_bytes(ctx, (u32)ctx->cx);
}

/* void wr_set_sge_list(struct ibv_qp_ex *qp, size_t num_sge, const struct ibv_sge *sg_list) */
int on_wr_set_sge_list(struct pt_regs *ctx)
{
	struct send_wr request = {};

	request.num_sge = ctx->si > NWV_MAX_SGE ? NWV_MAX_SGE : ctx->si;
	request.sg_list = ctx->dx;
	return add_bytes(ctx, request_bytes(&request));
}

/* void wr_set_inline_data(struct ibv_qp_ex *qp, void *addr, size_t length) */
int on_wr_set_inline_data(struct pt_regs *ctx)
{
	return add_bytes(ctx, ctx->dx);
}

/* void wr_set_inline_data_list(struct ibv_qp_ex *qp, size_t num_buf, const struct ibv_data_buf *buf_list): {void *addr; size_t length;} */
int on_wr_set_inline_data_list(struct pt_regs *ctx)
{
	u64 bytes = 0;

	for (int i = 0; i < NWV_MAX_SGE; i++) {
		if (i >= ctx->si)
			break;
		bytes += user_word(ctx->dx + i * 16 + 8);
	}
	return add_bytes(ctx, bytes);
}

/* void wr_abort(struct ibv_qp_ex *qp): what was built since wr_start is not posted. Opcode sums keep it: it is too rare to undo. */
int on_wr_abort(struct pt_regs *ctx)
{
	struct nwv_qp_key key = {};
	struct nwv_thread *thread = this_thread();
	struct nwv_qp *qp = account_of(ctx->di, &key, bpf_ktime_get_ns());

	if (thread)
		thread->posts++;
	if (qp && qp->batch_posted) {
		qp->refused += qp->posted - qp->batch_posted;
		qp->posted = qp->batch_posted;
		qp->posted_bytes = qp->batch_bytes;
		qp->signalled = qp->batch_signalled;
		if (qp->batch_tail >= qp->head)
			qp->tail = qp->batch_tail;
	}
	return 0;
}

/* Extended completion queues: status and wr_id are members of struct ibv_cq_ex, the queue pair's number is asked for by a function. */

static inline void give(struct nwv_thread *thread, struct nwv_qp_key *key, u64 now)
{
	struct nwv_qp *qp = account(key, now);

	/* Of an extended queue the opcode is unknown: the wr_id tells which queue it is (see complete). */
	if (qp) {
		u32 opcode = 0;

		if (!thread->open_status && qp->receives_posted > qp->received) {
			u64 head = qp->head;
			struct nwv_pending *slot = &qp->pending[masked(head, NWV_PENDING - 1)];

			if (head >= qp->tail || slot->wr_id != thread->open_wr_id)
				opcode = WC_RECV;
		}
		complete(qp, thread->open_wr_id, thread->open_status, opcode, 0, now);
	}
	thread->open_wanted = 0;
}

static inline void close_completion(struct nwv_thread *thread)
{
	if (thread->open_wanted) {
		count(NWV_COUNT_UNATTRIBUTED);
		thread->open_wanted = 0;
	}
}

/* Return of start_poll and next_poll: 0 when there is a completion to look at. */
static inline int open_completion(struct pt_regs *ctx)
{
	struct nwv_thread *thread = this_thread();
	u64 now = bpf_ktime_get_ns();

	if (!thread || thread->armed != ARMED_EX_POLL)
		return 0;
	thread->armed = 0;
	thread->polls++;
	close_completion(thread);
	if ((u32)ctx->ax) {
		thread->polls_empty++;
		return 0;
	}
	u64 cq = thread->cq;

	thread->open_status = user_int(cq + CQ_EX_STATUS);
	thread->open_wr_id = user_word(cq + CQ_EX_WR_ID);
	thread->open_cq = cq;
	thread->open_wanted = 1;
	struct nwv_qp_key *owner = cq_owner.lookup(&cq);

	if (owner && owner->qp_num) {
		struct nwv_qp_key key = *owner;

		if (key.pid == (u32)(bpf_get_current_pid_tgid() >> 32))
			give(thread, &key, now);
	}
	return 0;
}

/* int start_poll(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr); int next_poll(struct ibv_cq_ex *cq) */
int on_ex_poll(struct pt_regs *ctx)
{
	struct nwv_thread *thread = this_thread();

	if (thread) {
		thread->polls++;
		thread->cq = ctx->di;
		thread->armed = ARMED_EX_POLL;
	}
	return 0;
}

int on_ex_poll_return(struct pt_regs *ctx)
{
	return open_completion(ctx);
}

/* Return of uint32_t read_qp_num(struct ibv_cq_ex *cq) */
int on_read_qp_num_return(struct pt_regs *ctx)
{
	struct nwv_thread *thread = this_thread();

	if (!thread || !thread->open_wanted)
		return 0;
	thread->polls++;
	struct nwv_qp_key key = {};

	key.context = user_word(thread->open_cq + CQ_CONTEXT);
	key.pid = bpf_get_current_pid_tgid() >> 32;
	key.qp_num = ctx->ax;
	give(thread, &key, bpf_ktime_get_ns());
	return 0;
}

/* The control path: functions that libibverbs does export. Rare calls, entries only. */

static inline void tell(u32 kind, u64 context, u64 qp, s32 state, u32 sig_all)
{
	u64 ids = bpf_get_current_pid_tgid();
	struct nwv_control *event = control.ringbuf_reserve(sizeof(struct nwv_control));

	if (!event) {
		count(NWV_COUNT_CONTROL_LOST);
		return;
	}
	event->time_ns = bpf_ktime_get_ns();
	event->context = context;
	event->qp = qp;
	event->send_cq = 0;
	event->pid = ids >> 32;
	event->tid = ids;
	event->kind = kind;
	event->qp_num = 0;
	event->state = state;
	event->sig_all = sig_all;
	if (qp) {
		bpf_probe_read_user(&event->qp_num, 4, (void *)(qp + QP_NUM));
		bpf_probe_read_user(&event->send_cq, 8, (void *)(qp + QP_SEND_CQ));
	}
	control.ringbuf_submit(event, 0);
}

/* struct ibv_context *ibv_open_device(struct ibv_device *device): the context shows up with the first use. */
int on_open_device(struct pt_regs *ctx)
{
	tell(NWV_DEVICE_OPENED, 0, 0, -1, 0);
	return 0;
}

/* ibv_alloc_pd(context), ibv_create_cq(context, …), ibv_create_comp_channel(context) */
int on_use_context(struct pt_regs *ctx)
{
	tell(NWV_CONTEXT_USED, ctx->di, 0, -1, 0);
	return 0;
}

/* ibv_reg_mr(pd, …) and its variants */
int on_use_pd(struct pt_regs *ctx)
{
	tell(NWV_CONTEXT_USED, user_word(ctx->di + PD_CONTEXT), 0, -1, 0);
	return 0;
}

int on_close_device(struct pt_regs *ctx)
{
	tell(NWV_CONTEXT_CLOSED, ctx->di, 0, -1, 0);
	return 0;
}

/* struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) */
int on_create_qp(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	struct created_qp made = {};

	made.send_cq = user_word(ctx->si + INIT_ATTR_SEND_CQ);
	made.sig_all = user_int(ctx->si + INIT_ATTR_SIG_ALL);
	created.update(&id, &made);
	tell(NWV_QP_CREATED, user_word(ctx->di + PD_CONTEXT), 0, -1, made.sig_all);
	return 0;
}

/* int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask): the first moment at which the new queue pair is known
 * without probing the return of ibv_create_qp. */
int on_modify_qp(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid(), sig_all = 0;
	s32 state = (ctx->dx & ATTR_STATE_MASK) ? (s32)user_int(ctx->si) : -1;
	struct nwv_qp_key key = {};
	struct created_qp *made = created.lookup(&id);

	if (made && made->sig_all && made->send_cq == user_word(ctx->di + QP_SEND_CQ)) {
		struct nwv_qp *qp = account_of(ctx->di, &key, bpf_ktime_get_ns());

		if (qp)
			qp->sig_all = 1;
		sig_all = 1;
	}
	tell(NWV_QP_MODIFIED, user_word(ctx->di + QP_CONTEXT), ctx->di, state, sig_all);
	return 0;
}

int on_destroy_qp(struct pt_regs *ctx)
{
	tell(NWV_QP_DESTROYED, user_word(ctx->di + QP_CONTEXT), ctx->di, -1, 0);
	return 0;
}
