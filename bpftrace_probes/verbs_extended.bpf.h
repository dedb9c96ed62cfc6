/* Extended queue pairs and completion queues (ibv_wr_*, ibv_start_poll). A part of verbs.bpf.c. */

/* Extended queue pairs (struct ibv_qp_ex): requests are built by one call for the opcode and one for the data. */

/* void wr_start(struct ibv_qp_ex *qp) */
int on_wr_start(struct pt_regs *ctx)
{
	struct nwv_qp_key key = {};
	struct nwv_thread *thread = this_thread();
	struct nwv_qp *qp = account_of(NW_PARM(ctx, 1), &key, bpf_ktime_get_ns());

	if (thread) {
		thread->posts++;
		thread->extended_posts++;
	}
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
	struct nwv_qp *qp = account_of(NW_PARM(ctx, 1), &key, now);

	if (thread) {
		thread->posts++;
		thread->extended_posts++;
	}
	if (!qp)
		return 0;
	u32 flags = user_int(NW_PARM(ctx, 1) + QP_EX_WR_FLAGS);

	qp->last_post_ns = now;
	qp->last_opcode = opcode;
	count_request(qp, opcode, 0, flags);
	if ((flags & SEND_SIGNALED) || qp->sig_all)
		remember(qp, user_word(NW_PARM(ctx, 1) + QP_EX_WR_ID), now);
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
	struct nwv_qp *qp = account_of(NW_PARM(ctx, 1), &key, bpf_ktime_get_ns());

	if (thread) {
		thread->posts++;
		thread->extended_posts++;
	}
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
	return add_bytes(ctx, (u32)NW_PARM(ctx, 4));
}

/* void wr_set_sge_list(struct ibv_qp_ex *qp, size_t num_sge, const struct ibv_sge *sg_list) */
int on_wr_set_sge_list(struct pt_regs *ctx)
{
	struct send_wr request = {};

	request.num_sge = NW_PARM(ctx, 2) > NWV_MAX_SGE ? NWV_MAX_SGE : NW_PARM(ctx, 2);
	request.sg_list = NW_PARM(ctx, 3);
	return add_bytes(ctx, request_bytes(&request));
}

/* void wr_set_inline_data(struct ibv_qp_ex *qp, void *addr, size_t length) */
int on_wr_set_inline_data(struct pt_regs *ctx)
{
	return add_bytes(ctx, NW_PARM(ctx, 3));
}

/* void wr_set_inline_data_list(struct ibv_qp_ex *qp, size_t num_buf, const struct ibv_data_buf *buf_list): {void *addr; size_t length;} */
int on_wr_set_inline_data_list(struct pt_regs *ctx)
{
	u64 bytes = 0;

	for (int i = 0; i < NWV_MAX_SGE; i++) {
		if (i >= NW_PARM(ctx, 2))
			break;
		bytes += user_word(NW_PARM(ctx, 3) + i * 16 + 8);
	}
	return add_bytes(ctx, bytes);
}

/* void wr_abort(struct ibv_qp_ex *qp): what was built since wr_start is not posted. Opcode sums keep it: it is too rare to undo. */
int on_wr_abort(struct pt_regs *ctx)
{
	struct nwv_qp_key key = {};
	struct nwv_thread *thread = this_thread();
	struct nwv_qp *qp = account_of(NW_PARM(ctx, 1), &key, bpf_ktime_get_ns());

	if (thread) {
		thread->posts++;
		thread->extended_posts++;
	}
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
	thread->extended_polls++;
	close_completion(thread);
	if ((u32)NW_RESULT(ctx)) {
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
		thread->extended_polls++;
		thread->cq = NW_PARM(ctx, 1);
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
	thread->extended_polls++;
	struct nwv_qp_key key = {};

	key.context = user_word(thread->open_cq + CQ_CONTEXT);
	key.pid = bpf_get_current_pid_tgid() >> 32;
	key.qp_num = NW_RESULT(ctx);
	give(thread, &key, bpf_ktime_get_ns());
	return 0;
}
