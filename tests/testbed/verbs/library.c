/* A stand-in for libibverbs, so that real NCCL runs its InfiniBand transport on a machine without RDMA, at the machine's own speed.
 *
 * NCCL finds it as libibverbs.so by LD_LIBRARY_PATH. It has what NCCL asks for (src/misc/ibvsymbols.cc, v2.19.3-1 to v2.32.3-1) and the
 * binary interface of rdma-core: contexts, queue pairs and completion queues lie in memory as any provider's do. What an adapter does,
 * a process of its own does (adapter.c), for a device that was opened: it goes on when this process is stopped, as hardware would.
 *
 * TESTBED_ADAPTERS lists the devices: NAME@IPV4@INTERFACE@FILE, with commas between; FILE is opened as the device's uverbs file. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <limits.h>
#include <net/if.h>
#include <pthread.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "queues.h"

#undef ibv_query_port
#undef ibv_reg_mr
#define EXPORT __attribute__((visibility("default")))
#define DEVICES 8
#define SPEED_EDR 32 /* 25 Gb/s a lane; four of them */
#define WIDTH_4X 2

extern char **environ;

struct device {
	struct ibv_device device;
	struct in_addr address;
	char interface[IF_NAMESIZE], file[PATH_MAX];
};

struct context {
	struct verbs_context verbs;
	struct shared *shared;
	struct in_addr address;
	int doorbell, control;
	pthread_mutex_t lock;
	uint32_t queues, regions;
};

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

static struct context *context_of(struct ibv_context *context)
{
	return (struct context *)((char *)context - offsetof(struct context, verbs.context));
}

/* --- devices --- */

static int next_device(char **text, struct device *device)
{
	char *item = strsep(text, ","), *name = strsep(&item, "@"), *address = strsep(&item, "@"), *interface = strsep(&item, "@");

	if (!interface || !item || inet_pton(AF_INET, address, &device->address) != 1)
		return 0;
	device->device.node_type = IBV_NODE_CA;
	device->device.transport_type = IBV_TRANSPORT_IB;
	snprintf(device->device.name, sizeof(device->device.name), "%s", name);
	snprintf(device->device.dev_name, sizeof(device->device.dev_name), "uverbs-%s", name);
	snprintf(device->interface, sizeof(device->interface), "%s", interface);
	snprintf(device->file, sizeof(device->file), "%s", item);
	return 1;
}

EXPORT struct ibv_device **ibv_get_device_list(int *number)
{
	struct ibv_device **list = calloc(DEVICES + 1, sizeof(*list));
	const char *adapters = getenv("TESTBED_ADAPTERS");
	char *copy = strdup(adapters ? adapters : ""), *rest = copy;
	int found = 0;

	/* Devices stay for ever: contexts point to them. */
	while (rest && found < DEVICES) {
		struct device *device = calloc(1, sizeof(*device));

		if (next_device(&rest, device))
			list[found++] = &device->device;
		else
			free(device);
	}
	free(copy);
	if (number)
		*number = found;
	return list;
}

EXPORT void ibv_free_device_list(struct ibv_device **list)
{
	free(list);
}

EXPORT const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

EXPORT int ibv_fork_init(void)
{
	return 0;
}

/* The adapter: it ends when the control socket does, that is, with this process. */
static int start_adapter(struct context *context, struct device *device, int memory)
{
	char program[PATH_MAX], words[4][24], *slash;
	int ends[2];
	Dl_info where;
	pid_t pid;

	if (!dladdr((void *)start_adapter, &where) || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
		return -1;
	snprintf(program, sizeof(program), "%s", where.dli_fname);
	slash = strrchr(program, '/');
	snprintf(slash + 1, sizeof(program) - (slash + 1 - program), "testbed-adapter");
	snprintf(words[0], sizeof(words[0]), "%d", memory);
	snprintf(words[1], sizeof(words[1]), "%d", context->doorbell);
	snprintf(words[2], sizeof(words[2]), "%d", ends[1]);
	snprintf(words[3], sizeof(words[3]), "%d", (int)getpid());
	char *arguments[] = {program, words[0], words[1], words[2], words[3], device->device.name, device->interface, NULL};
	posix_spawn_file_actions_t actions;

	/* Copied onto themselves, these lose their mark to be closed. */
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_adddup2(&actions, memory, memory);
	posix_spawn_file_actions_adddup2(&actions, context->doorbell, context->doorbell);
	posix_spawn_file_actions_adddup2(&actions, ends[1], ends[1]);
	int failed = posix_spawn(&pid, program, &actions, NULL, arguments, environ);
	char ready = 0;

	posix_spawn_file_actions_destroy(&actions);
	close(ends[1]);
	context->control = ends[0];
	return failed || read(ends[0], &ready, 1) != 1 ? -1 : 0;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *request, struct ibv_send_wr **bad);
static int post_receive(struct ibv_qp *qp, struct ibv_recv_wr *request, struct ibv_recv_wr **bad);
static int poll_completions(struct ibv_cq *cq, int entries, struct ibv_wc *completions);

EXPORT struct ibv_context *ibv_open_device(struct ibv_device *ibdevice)
{
	struct device *device = (struct device *)ibdevice;
	struct context *context = calloc(1, sizeof(*context));
	struct ibv_context *public = &context->verbs.context;
	int memory = memfd_create("testbed-adapter", MFD_CLOEXEC);

	context->verbs.sz = sizeof(context->verbs);
	context->address = device->address;
	context->doorbell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	public->device = ibdevice;
	public->abi_compat = __VERBS_ABI_IS_EXTENDED;
	public->num_comp_vectors = 1;
	public->cmd_fd = open(device->file, O_RDWR | O_CLOEXEC);
	public->async_fd = eventfd(0, EFD_CLOEXEC);
	public->ops.post_send = post_send;
	public->ops.post_recv = post_receive;
	public->ops.poll_cq = poll_completions;
	pthread_mutex_init(&context->lock, NULL);
	if (public->cmd_fd < 0 || memory < 0 || ftruncate(memory, sizeof(struct shared)))
		return NULL;
	context->shared = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	if (context->shared == MAP_FAILED)
		return NULL;
	context->shared->address = device->address.s_addr;
	if (start_adapter(context, device, memory)) {
		fprintf(stderr, "testbed-adapter: it did not start\n");
		return NULL;
	}
	close(memory);
	return public;
}

EXPORT int ibv_close_device(struct ibv_context *public)
{
	struct context *context = context_of(public);

	close(context->control);
	close(context->doorbell);
	close(public->cmd_fd);
	munmap(context->shared, sizeof(struct shared));
	return 0;
}

/* There are no such events: whoever asks waits for ever. */
EXPORT int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	uint64_t count;

	(void)event;
	return read(context->async_fd, &count, sizeof(count)) == sizeof(count) ? 0 : -1;
}

EXPORT void ibv_ack_async_event(struct ibv_async_event *event)
{
	(void)event;
}

EXPORT const char *ibv_event_type_str(enum ibv_event_type event)
{
	(void)event;
	return "event";
}

EXPORT int ibv_query_device(struct ibv_context *public, struct ibv_device_attr *attributes)
{
	memset(attributes, 0, sizeof(*attributes));
	attributes->node_guid = attributes->sys_image_guid = (uint64_t)context_of(public)->address.s_addr << 32 | 1;
	attributes->max_qp = PAIRS - 1;
	attributes->max_qp_wr = REQUESTS;
	attributes->max_sge = PIECES;
	attributes->max_cq = QUEUES;
	attributes->max_cqe = ENTRIES;
	attributes->max_mr = REGIONS;
	attributes->max_mr_size = UINT64_MAX;
	attributes->max_qp_rd_atom = attributes->max_qp_init_rd_atom = 1;
	attributes->phys_port_cnt = 1;
	return 0;
}

EXPORT int ibv_query_port(struct ibv_context *public, uint8_t port, struct _compat_ibv_port_attr *compatible)
{
	struct ibv_port_attr *attributes = (struct ibv_port_attr *)compatible;

	(void)public;
	if (port != 1)
		return EINVAL;
	attributes->state = IBV_PORT_ACTIVE;
	attributes->max_mtu = attributes->active_mtu = IBV_MTU_1024;
	attributes->gid_tbl_len = 1;
	attributes->max_msg_sz = 1u << 31;
	attributes->lid = attributes->sm_lid = 0;
	attributes->active_width = WIDTH_4X;
	attributes->active_speed = SPEED_EDR;
	attributes->phys_state = 5;
	attributes->link_layer = IBV_LINK_LAYER_ETHERNET;
	attributes->flags = 0;
	return 0;
}

EXPORT int ibv_query_gid(struct ibv_context *public, uint8_t port, int index, union ibv_gid *gid)
{
	if (port != 1 || index != 0)
		return -1;
	memset(gid, 0, sizeof(*gid));
	gid->raw[10] = gid->raw[11] = 0xff;
	memcpy(gid->raw + 12, &context_of(public)->address, 4);
	return 0;
}

EXPORT int ibv_query_pkey(struct ibv_context *public, uint8_t port, int index, __be16 *key)
{
	(void)public, (void)port, (void)index;
	*key = 0xffff;
	return 0;
}

/* --- memory --- */

EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *public)
{
	struct ibv_pd *pd = calloc(1, sizeof(*pd));

	pd->context = public;
	return pd;
}

EXPORT int ibv_dealloc_pd(struct ibv_pd *pd)
{
	free(pd);
	return 0;
}

EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
	struct context *context = context_of(pd->context);
	struct ibv_mr *mr = calloc(1, sizeof(*mr));
	uint32_t index;

	(void)access;
	pthread_mutex_lock(&context->lock);
	for (index = 1; index < REGIONS && context->shared->regions[index].valid; index++)
		;
	if (index < REGIONS) {
		context->shared->regions[index].address = (uint64_t)address;
		context->shared->regions[index].length = length;
		context->shared->regions[index].valid = 1;
	}
	pthread_mutex_unlock(&context->lock);
	if (index == REGIONS) {
		free(mr);
		errno = ENOMEM;
		return NULL;
	}
	mr->context = pd->context;
	mr->pd = pd;
	mr->addr = address;
	mr->length = length;
	mr->handle = mr->lkey = mr->rkey = index;
	return mr;
}

EXPORT int ibv_dereg_mr(struct ibv_mr *mr)
{
	context_of(mr->context)->shared->regions[mr->handle].valid = 0;
	free(mr);
	return 0;
}

/* --- queues --- */

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

static int poll_completions(struct ibv_cq *cq, int entries, struct ibv_wc *completions)
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

/* --- requests --- */

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

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *request, struct ibv_send_wr **bad)
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

static int post_receive(struct ibv_qp *qp, struct ibv_recv_wr *request, struct ibv_recv_wr **bad)
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
