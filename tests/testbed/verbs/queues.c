/* Queue pairs and completion queues of the stand-in for libibverbs: they lie in the memory that is shared with the adapter, and what
 * verbs' users hold of them points there. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "library.h"

struct pair_of {
	struct ibv_qp qp;
	struct context *context;
	struct pair *pair;
	uint32_t index;
	int all_signalled;
	pthread_mutex_t lock;
};

struct queue_of {
	struct ibv_cq cq;
	struct queue *queue;
	uint32_t index;
	pthread_mutex_t lock;
};

EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *public, int entries, void *cookie, struct ibv_comp_channel *channel, int vector)
{
	struct context *context = context_of(public);
	struct queue_of *found = calloc(1, sizeof(*found));

	(void)vector;
	pthread_mutex_lock(&context->lock);
	found->index = context->queues < QUEUES ? context->queues++ : QUEUES;
	pthread_mutex_unlock(&context->lock);
	if (found->index == QUEUES || channel || entries > ENTRIES) {
		free(found);
		errno = ENOMEM;
		return NULL;
	}
	found->queue = &context->shared->queues[found->index];
	found->cq.context = public;
	found->cq.cq_context = cookie;
	found->cq.cqe = entries;
	pthread_mutex_init(&found->lock, NULL);
	return &found->cq;
}

EXPORT int ibv_destroy_cq(struct ibv_cq *cq)
{
	free(cq);
	return 0;
}

int poll_completions(struct ibv_cq *cq, int entries, struct ibv_wc *completions)
{
	struct queue_of *of = (struct queue_of *)cq;
	struct queue *queue = of->queue;
	int found = 0;

	if (queue->head == queue->tail)
		return 0;
	pthread_mutex_lock(&of->lock);
	for (; found < entries && queue->head != queue->tail; found++) {
		struct completion *entry = &queue->entries[queue->head % ENTRIES];
		struct ibv_wc *completion = &completions[found];

		memset(completion, 0, sizeof(*completion));
		completion->wr_id = entry->id;
		completion->status = entry->status;
		completion->opcode = entry->opcode;
		completion->byte_len = entry->bytes;
		completion->qp_num = entry->number;
		completion->imm_data = entry->immediate;
		completion->wc_flags = entry->flags;
		queue->head++;
	}
	pthread_mutex_unlock(&of->lock);
	return found;
}

EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *wanted)
{
	struct context *context = context_of(pd->context);
	struct pair_of *found = calloc(1, sizeof(*found));
	uint32_t index;

	pthread_mutex_lock(&context->lock);
	for (index = 1; index < PAIRS && context->shared->pairs[index].state != UNUSED; index++)
		;
	if (index < PAIRS)
		context->shared->pairs[index].state = MADE;
	pthread_mutex_unlock(&context->lock);
	if (index == PAIRS || wanted->qp_type != IBV_QPT_RC || wanted->srq || wanted->cap.max_send_wr > REQUESTS ||
	    wanted->cap.max_recv_wr > REQUESTS || wanted->cap.max_send_sge > PIECES || wanted->cap.max_inline_data > INLINE) {
		free(found);
		errno = index == PAIRS ? ENOMEM : EINVAL;
		return NULL;
	}
	found->context = context;
	found->index = index;
	found->pair = &context->shared->pairs[index];
	found->pair->send_queue = ((struct queue_of *)wanted->send_cq)->index;
	found->pair->receive_queue = ((struct queue_of *)wanted->recv_cq)->index;
	found->pair->posted = found->pair->done = found->pair->wanted = found->pair->taken = 0;
	found->all_signalled = wanted->sq_sig_all;
	found->qp.context = pd->context;
	found->qp.qp_context = wanted->qp_context;
	found->qp.pd = pd;
	found->qp.send_cq = wanted->send_cq;
	found->qp.recv_cq = wanted->recv_cq;
	found->qp.qp_num = number_of(context->shared, index);
	found->qp.state = IBV_QPS_RESET;
	found->qp.qp_type = wanted->qp_type;
	pthread_mutex_init(&found->lock, NULL);
	return &found->qp;
}

static void ring(struct context *context)
{
	uint64_t one = 1;

	(void)!write(context->doorbell, &one, sizeof(one));
}

EXPORT int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask)
{
	struct pair_of *of = (struct pair_of *)qp;

	if (mask & IBV_QP_AV)
		memcpy(&of->pair->far_address, attributes->ah_attr.grh.dgid.raw + 12, 4);
	if (mask & IBV_QP_DEST_QPN)
		of->pair->far_number = attributes->dest_qp_num;
	if (mask & IBV_QP_TIMEOUT) /* the specification's unit, and as many tries */
		of->pair->timeout_ns = attributes->timeout ? (4096ull << attributes->timeout) * (attributes->retry_cnt + 1) : 0;
	if (mask & IBV_QP_STATE) {
		qp->state = attributes->qp_state;
		if (qp->state == IBV_QPS_RTS)
			of->pair->state = READY;
		else if (qp->state == IBV_QPS_ERR)
			of->pair->state = FAILED;
		ring(of->context);
	}
	return 0;
}

EXPORT int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask, struct ibv_qp_init_attr *wanted)
{
	(void)mask, (void)wanted;
	memset(attributes, 0, sizeof(*attributes));
	attributes->qp_state = attributes->cur_qp_state = qp->state;
	attributes->dest_qp_num = ((struct pair_of *)qp)->pair->far_number;
	attributes->port_num = 1;
	return 0;
}

EXPORT int ibv_destroy_qp(struct ibv_qp *qp)
{
	struct pair_of *of = (struct pair_of *)qp;

	of->pair->state = UNUSED;
	ring(of->context);
	free(of);
	return 0;
}

static int fill(struct request *into, const struct ibv_send_wr *from)
{
	into->id = from->wr_id;
	into->opcode = from->opcode;
	into->immediate = from->imm_data;
	into->remote = from->wr.rdma.remote_addr;
	into->key = from->wr.rdma.rkey;
	into->pieces = from->num_sge;
	into->inlined = 0;
	if (from->num_sge > PIECES ||
	    (from->opcode != IBV_WR_RDMA_WRITE && from->opcode != IBV_WR_RDMA_WRITE_WITH_IMM && from->opcode != IBV_WR_RDMA_READ))
		return EINVAL;
	for (int i = 0; i < from->num_sge; i++) {
		const struct ibv_sge *piece = &from->sg_list[i];

		into->piece[i] = (struct piece){piece->addr, piece->length, piece->lkey};
		if (!(from->send_flags & IBV_SEND_INLINE))
			continue;
		if (into->inlined + piece->length > INLINE)
			return EINVAL;
		memcpy(into->data + into->inlined, (void *)piece->addr, piece->length);
		into->inlined += piece->length;
	}
	return 0;
}

int post_send(struct ibv_qp *qp, struct ibv_send_wr *request, struct ibv_send_wr **bad)
{
	struct pair_of *of = (struct pair_of *)qp;
	struct pair *pair = of->pair;
	int failed = 0;

	pthread_mutex_lock(&of->lock);
	for (; request && !failed; request = request->next) {
		struct request *into = &pair->requests[pair->posted % REQUESTS];

		failed = pair->posted - pair->done >= REQUESTS ? ENOMEM : fill(into, request);
		if (failed) {
			*bad = request;
			break;
		}
		into->signalled = of->all_signalled || (request->send_flags & IBV_SEND_SIGNALED);
		pair->posted++;
	}
	pthread_mutex_unlock(&of->lock);
	ring(of->context);
	return failed;
}

int post_receive(struct ibv_qp *qp, struct ibv_recv_wr *request, struct ibv_recv_wr **bad)
{
	struct pair_of *of = (struct pair_of *)qp;
	struct pair *pair = of->pair;
	int failed = 0;

	pthread_mutex_lock(&of->lock);
	for (; request; request = request->next) {
		if (pair->wanted - pair->taken >= REQUESTS) {
			failed = ENOMEM;
			*bad = request;
			break;
		}
		pair->receives[pair->wanted % REQUESTS].id = request->wr_id;
		pair->wanted++;
	}
	pthread_mutex_unlock(&of->lock);
	ring(of->context);
	return failed;
}
