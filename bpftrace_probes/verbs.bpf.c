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
#include "verbs_abi.h"
#include "verbs_maps.h"

#ifndef NWV_MAX_QPS
#define NWV_MAX_QPS 1024
#endif
#define NWV_MAX_CHAIN 64 /* requests followed in one chain */
#define NWV_MAX_SGE 8    /* elements added up in one request */
#define NWV_MAX_TAKEN 64 /* completions that a poll of NCCL's can find; it asks for 4 */
#define NWV_SEARCH 4     /* requests looked through for a completion's wr_id */

/* Parts of this file by concern. BCC rewrites map accesses in the main file only, so the compiler gets them in place of these lines. */
#include "verbs_accounts.bpf.h"

/* int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr) */
int on_post_send(struct pt_regs *ctx)
{
	u64 now = bpf_ktime_get_ns();
	struct nwv_qp_key key = {};
	struct nwv_thread *thread = this_thread();
	struct nwv_qp *qp = account_of(NW_PARM(ctx, 1), &key, now);
	u64 next = NW_PARM(ctx, 2);

	if (thread) {
		thread->posts++;
		thread->qp = NW_PARM(ctx, 1);
		thread->requests = NW_PARM(ctx, 2);
		thread->bad_request = NW_PARM(ctx, 3);
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
		if (thread)
			thread->requests_seen++;
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
	if ((u32)NW_RESULT(ctx) == 0)
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
	struct nwv_qp *qp = account_of(NW_PARM(ctx, 1), &key, bpf_ktime_get_ns());
	u64 next = NW_PARM(ctx, 2);

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
		if (thread)
			thread->requests_seen++;
		next = request.next;
	}
	if (next)
		ADD(qp->truncated, 1);
	return 0;
}

/* int poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc) */
int on_poll(struct pt_regs *ctx)
{
	struct nwv_thread *thread = this_thread();

	if (thread) {
		thread->polls++;
		thread->cq = NW_PARM(ctx, 1);
		thread->completions = NW_PARM(ctx, 3);
		thread->armed = ARMED_POLL;
	}
	return 0;
}

int on_poll_return(struct pt_regs *ctx)
{
	struct nwv_thread *thread = this_thread();
	int found = NW_RESULT(ctx);

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

/* The value at a place that src/ncclwatch/wire/taken.py names in 30 bits: a register and what is added to it, or what lies there. */
static inline u64 value_at(u64 *registers, u64 place)
{
	u64 value = registers[masked(place >> 1, 31)] + (place >> 6 & 0xffffff);

	return place & 1 ? user_word(value) : value;
}

/* Two such places: filled in when the program is loaded, for older kernels hand no cookie to a probe. */
static inline u64 places(void)
{
	u64 both;

	asm volatile("%0 = 0x6e63636c73697465 ll" : "=r"(both)); /* SITE_PLACEHOLDER of src/ncclwatch/probes/program.py */
	return both;
}

/* Where NCCL goes when a poll has found completions: the places are those of their number, and of the first of them. */
int on_taken(struct pt_regs *ctx)
{
	struct nwv_thread *thread = this_thread();
	u64 registers[32] = {};
	u64 both = places();

	if (!thread)
		return 0;
	thread->takes++;
	bpf_probe_read_kernel(registers, sizeof(struct pt_regs), ctx);
	thread->found = value_at(registers, both);
	thread->completions = value_at(registers, both >> 30);
	thread->cq = 0;
	thread->index = 0;
	thread->poll_ns = bpf_ktime_get_ns();
	if (thread->found - 1U < NWV_MAX_TAKEN)
		steps.call(ctx, 0);
	else
		count(NWV_COUNT_UNREADABLE);
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
	thread->completions_seen++;
	key.pid = bpf_get_current_pid_tgid() >> 32;
	key.qp_num = wc.qp_num;
	key.context = thread->cq ? user_word(thread->cq + CQ_CONTEXT) : context_of(&key);
	struct nwv_qp *qp = key.context ? account(&key, now) : 0;

	if (qp)
		complete(qp, wc.wr_id, wc.status, wc.opcode, wc.bytes, now);
	if (thread->index < thread->found) {
		steps.call(ctx, 0);
		count(NWV_COUNT_POLL_TRUNCATED);
	}
	return 0;
}

#include "verbs_extended.bpf.h"
#include "verbs_control.bpf.h"
