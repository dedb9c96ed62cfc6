/* The control path of libibverbs: devices, queue pairs and completion queues as they are made. A part of verbs.bpf.c. */

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
	tell(NWV_CONTEXT_USED, NW_PARM(ctx, 1), 0, -1, 0);
	return 0;
}

/* ibv_reg_mr(pd, …) and its variants */
int on_use_pd(struct pt_regs *ctx)
{
	tell(NWV_CONTEXT_USED, user_word(NW_PARM(ctx, 1) + PD_CONTEXT), 0, -1, 0);
	return 0;
}

int on_close_device(struct pt_regs *ctx)
{
	tell(NWV_CONTEXT_CLOSED, NW_PARM(ctx, 1), 0, -1, 0);
	return 0;
}

/* struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) */
int on_create_qp(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid();
	struct created_qp made = {};

	made.send_cq = user_word(NW_PARM(ctx, 2) + INIT_ATTR_SEND_CQ);
	made.sig_all = user_int(NW_PARM(ctx, 2) + INIT_ATTR_SIG_ALL);
	created.update(&id, &made);
	tell(NWV_QP_CREATED, user_word(NW_PARM(ctx, 1) + PD_CONTEXT), 0, -1, made.sig_all);
	return 0;
}

/* int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask): the first moment at which the new queue pair is known
 * without probing the return of ibv_create_qp. */
int on_modify_qp(struct pt_regs *ctx)
{
	u64 id = bpf_get_current_pid_tgid(), sig_all = 0;
	s32 state = (NW_PARM(ctx, 3) & ATTR_STATE_MASK) ? (s32)user_int(NW_PARM(ctx, 2)) : -1;
	struct nwv_qp_key key = {};
	struct created_qp *made = created.lookup(&id);

	if (made && made->sig_all && made->send_cq == user_word(NW_PARM(ctx, 1) + QP_SEND_CQ)) {
		struct nwv_qp *qp = account_of(NW_PARM(ctx, 1), &key, bpf_ktime_get_ns());

		if (qp)
			qp->sig_all = 1;
		sig_all = 1;
	}
	tell(NWV_QP_MODIFIED, user_word(NW_PARM(ctx, 1) + QP_CONTEXT), NW_PARM(ctx, 1), state, sig_all);
	return 0;
}

int on_destroy_qp(struct pt_regs *ctx)
{
	tell(NWV_QP_DESTROYED, user_word(NW_PARM(ctx, 1) + QP_CONTEXT), NW_PARM(ctx, 1), -1, 0);
	return 0;
}
