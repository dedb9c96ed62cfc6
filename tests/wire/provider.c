/* See provider.h. */
#define _GNU_SOURCE
#include "provider.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define QUEUE 4096 /* a power of 2 */

struct due {
	uint64_t wr_id, time_ns;
	uint32_t qp_num, bytes;
	enum ibv_wc_status status;
	enum ibv_wc_opcode opcode;
};

struct standin_cq {
	union {
		struct ibv_cq cq;
		struct ibv_cq_ex cq_ex;
	};
	struct due queue[QUEUE];
	uint64_t head, tail;
	uint32_t open_qp_num;
	enum ibv_wc_opcode open_opcode;
};

struct standin_qp {
	union {
		struct ibv_qp qp;
		struct ibv_qp_ex qp_ex;
	};
	struct standin_options options;
	struct standin_counts counts;
	uint64_t calls, completions;
	/* the batch that an extended queue pair is building */
	struct standin_counts before;
	uint64_t cq_tail;
};

uint64_t standin_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static struct standin_cq *cq_of(struct ibv_cq *cq)
{
	return (struct standin_cq *)cq;
}

static void complete_later(struct standin_qp *qp, uint64_t wr_id, enum ibv_wc_opcode opcode, uint32_t bytes)
{
	struct standin_cq *cq = cq_of(qp->qp.send_cq);
	struct due *due = &cq->queue[cq->tail++ & (QUEUE - 1)];

	qp->completions++;
	due->wr_id = wr_id;
	due->time_ns = standin_now() + qp->options.latency_ns;
	due->qp_num = qp->qp.qp_num;
	due->bytes = bytes;
	due->opcode = opcode;
	due->status = IBV_WC_SUCCESS;
	if (qp->options.error_every && qp->completions % qp->options.error_every == 0) {
		due->status = IBV_WC_RETRY_EXC_ERR;
		due->opcode = 0x55; /* undefined by the specification when the status is an error */
		qp->counts.errors++;
	}
}

static enum ibv_wc_opcode completion_opcode(enum ibv_wr_opcode opcode)
{
	switch (opcode) {
	case IBV_WR_RDMA_READ:
		return IBV_WC_RDMA_READ;
	case IBV_WR_SEND:
	case IBV_WR_SEND_WITH_IMM:
		return IBV_WC_SEND;
	default:
		return IBV_WC_RDMA_WRITE;
	}
}

static int standin_post_send(struct ibv_qp *ibqp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct standin_qp *qp = (struct standin_qp *)ibqp;
	int refuse = qp->options.refuse_every && ++qp->calls % qp->options.refuse_every == 0;

	for (; wr; wr = wr->next) {
		if (refuse && !wr->next) {
			qp->counts.refused++;
			*bad = wr;
			return ENOMEM;
		}
		qp->counts.posted++;
		for (int i = 0; i < wr->num_sge; i++)
			qp->counts.bytes += wr->sg_list[i].length;
		if ((wr->send_flags & IBV_SEND_SIGNALED) || qp->options.sig_all) {
			qp->counts.signalled++;
			complete_later(qp, wr->wr_id, completion_opcode(wr->opcode), 0);
		}
	}
	return 0;
}

/* A receive is filled at once, with 32 bytes. */
static int standin_post_recv(struct ibv_qp *ibqp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct standin_qp *qp = (struct standin_qp *)ibqp;

	(void)bad;
	for (; wr; wr = wr->next) {
		qp->counts.receives++;
		if (wr->wr_id & 1) { /* odd ones wait for ever */
			struct standin_cq *cq = cq_of(qp->qp.recv_cq);
			struct due *due = &cq->queue[cq->tail++ & (QUEUE - 1)];

			*due = (struct due){wr->wr_id, 0, qp->qp.qp_num, 32, IBV_WC_SUCCESS, IBV_WC_RECV_RDMA_WITH_IMM};
			qp->counts.received++;
		}
	}
	return 0;
}

static int standin_poll_cq(struct ibv_cq *ibcq, int entries, struct ibv_wc *wc)
{
	struct standin_cq *cq = cq_of(ibcq);
	int found = 0;

	if (cq->head == cq->tail)
		return 0;
	uint64_t now = standin_now();

	while (found < entries && cq->head != cq->tail && cq->queue[cq->head & (QUEUE - 1)].time_ns <= now) {
		struct due *due = &cq->queue[cq->head++ & (QUEUE - 1)];

		memset(wc, 0x77, sizeof(*wc)); /* members that are not set hold garbage, as with real providers */
		wc->wr_id = due->wr_id;
		wc->status = due->status;
		wc->opcode = due->opcode;
		wc->byte_len = due->bytes;
		wc->qp_num = due->qp_num;
		wc++;
		found++;
	}
	return found;
}

/* --- extended queue pairs ------------------------------------------------------------------------------------------- */

static void begin_request(struct ibv_qp_ex *ex, enum ibv_wr_opcode opcode)
{
	struct standin_qp *qp = (struct standin_qp *)ex;

	qp->counts.posted++;
	if ((ex->wr_flags & IBV_SEND_SIGNALED) || qp->options.sig_all) {
		qp->counts.signalled++;
		complete_later(qp, ex->wr_id, completion_opcode(opcode), 0);
	}
}

static void standin_wr_start(struct ibv_qp_ex *ex)
{
	struct standin_qp *qp = (struct standin_qp *)ex;

	qp->before = qp->counts;
	qp->cq_tail = cq_of(qp->qp.send_cq)->tail;
}

static int standin_wr_complete(struct ibv_qp_ex *ex)
{
	(void)ex;
	return 0;
}

static void standin_wr_abort(struct ibv_qp_ex *ex)
{
	struct standin_qp *qp = (struct standin_qp *)ex;
	uint64_t refused = qp->counts.posted - qp->before.posted;

	qp->counts = qp->before;
	qp->counts.refused += refused;
	cq_of(qp->qp.send_cq)->tail = qp->cq_tail;
}

static void standin_wr_rdma_write(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address)
{
	(void)rkey, (void)address;
	begin_request(ex, IBV_WR_RDMA_WRITE);
}

static void standin_wr_rdma_write_imm(struct ibv_qp_ex *ex, uint32_t rkey, uint64_t address, __be32 immediate)
{
	(void)rkey, (void)address, (void)immediate;
	begin_request(ex, IBV_WR_RDMA_WRITE_WITH_IMM);
}

static void standin_wr_set_sge(struct ibv_qp_ex *ex, uint32_t lkey, uint64_t address, uint32_t length)
{
	(void)lkey, (void)address;
	((struct standin_qp *)ex)->counts.bytes += length;
}

static void standin_wr_set_sge_list(struct ibv_qp_ex *ex, size_t count, const struct ibv_sge *list)
{
	for (size_t i = 0; i < count; i++)
		((struct standin_qp *)ex)->counts.bytes += list[i].length;
}

/* --- extended completion queues -------------------------------------------------------------------------------------- */

static int standin_next_poll(struct ibv_cq_ex *ex)
{
	struct standin_cq *cq = (struct standin_cq *)ex;

	if (cq->head == cq->tail || cq->queue[cq->head & (QUEUE - 1)].time_ns > standin_now())
		return ENOENT;
	struct due *due = &cq->queue[cq->head++ & (QUEUE - 1)];

	ex->status = due->status;
	ex->wr_id = due->wr_id;
	cq->open_qp_num = due->qp_num;
	cq->open_opcode = due->opcode;
	return 0;
}

static int standin_start_poll(struct ibv_cq_ex *ex, struct ibv_poll_cq_attr *attr)
{
	(void)attr;
	return standin_next_poll(ex);
}

static void standin_end_poll(struct ibv_cq_ex *ex)
{
	(void)ex;
}

static uint32_t standin_read_qp_num(struct ibv_cq_ex *ex)
{
	return ((struct standin_cq *)ex)->open_qp_num;
}

static enum ibv_wc_opcode standin_read_opcode(struct ibv_cq_ex *ex)
{
	return ((struct standin_cq *)ex)->open_opcode;
}

/* --- objects ----------------------------------------------------------------------------------------------------------- */

struct ibv_context *standin_open(const char *name)
{
	struct verbs_context *context = calloc(1, sizeof(*context));
	struct ibv_device *device = calloc(1, sizeof(*device));

	strncpy(device->name, name, sizeof(device->name) - 1);
	context->sz = sizeof(*context);
	context->context.device = device;
	context->context.cmd_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	context->context.async_fd = -1;
	context->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
	context->context.ops.post_send = standin_post_send;
	context->context.ops.post_recv = standin_post_recv;
	context->context.ops.poll_cq = standin_poll_cq;
	return &context->context;
}

struct ibv_cq *standin_create_cq(struct ibv_context *context)
{
	struct standin_cq *cq = calloc(1, sizeof(*cq));

	cq->cq.context = context;
	cq->cq.cqe = QUEUE;
	cq->cq_ex.start_poll = standin_start_poll;
	cq->cq_ex.next_poll = standin_next_poll;
	cq->cq_ex.end_poll = standin_end_poll;
	cq->cq_ex.read_qp_num = standin_read_qp_num;
	cq->cq_ex.read_opcode = standin_read_opcode;
	return &cq->cq;
}

struct ibv_qp *standin_create_qp(struct ibv_context *context, struct ibv_cq *cq, uint32_t number, const struct standin_options *options)
{
	struct standin_qp *qp = calloc(1, sizeof(*qp));
	struct ibv_pd *pd = calloc(1, sizeof(*pd));

	pd->context = context;
	qp->qp.context = context;
	qp->qp.pd = pd;
	qp->qp.send_cq = qp->qp.recv_cq = cq;
	qp->qp.qp_num = number;
	qp->qp.qp_type = IBV_QPT_RC;
	qp->qp.state = IBV_QPS_RTS;
	qp->options = *options;
	qp->qp_ex.wr_start = standin_wr_start;
	qp->qp_ex.wr_complete = standin_wr_complete;
	qp->qp_ex.wr_abort = standin_wr_abort;
	qp->qp_ex.wr_rdma_write = standin_wr_rdma_write;
	qp->qp_ex.wr_rdma_write_imm = standin_wr_rdma_write_imm;
	qp->qp_ex.wr_set_sge = standin_wr_set_sge;
	qp->qp_ex.wr_set_sge_list = standin_wr_set_sge_list;
	return &qp->qp;
}

struct standin_counts standin_counts(struct ibv_qp *qp)
{
	return ((struct standin_qp *)qp)->counts;
}

void standin_stall(struct ibv_qp *qp)
{
	((struct standin_qp *)qp)->options.latency_ns = 1ull << 60;
}
