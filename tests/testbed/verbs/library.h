/* The parts of the stand-in for libibverbs: devices.c (devices, memory) and queues.c (queue pairs, completion queues, requests). */
#pragma once

#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stddef.h>

#include "queues.h"

#define EXPORT __attribute__((visibility("default")))

struct context {
	struct verbs_context verbs;
	struct shared *shared;
	struct in_addr address;
	int doorbell, control;
	pthread_mutex_t lock;
	uint32_t queues, regions;
};

static inline struct context *context_of(struct ibv_context *context)
{
	return (struct context *)((char *)context - offsetof(struct context, verbs.context));
}

int post_send(struct ibv_qp *qp, struct ibv_send_wr *request, struct ibv_send_wr **bad);
int post_receive(struct ibv_qp *qp, struct ibv_recv_wr *request, struct ibv_recv_wr **bad);
int poll_completions(struct ibv_cq *cq, int entries, struct ibv_wc *completions);
