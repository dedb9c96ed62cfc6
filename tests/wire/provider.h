/* A stand-in for an RDMA provider: the structures libibverbs defines, functions of its own behind them, no device and no kernel.
 *
 * What is posted completes after a fixed time; completions come in the order of posting. It keeps exact counts of what it was
 * given, against which the wire plane's accounts are checked, and costs about what a real provider's fast path does.
 */
#ifndef STANDIN_PROVIDER_H
#define STANDIN_PROVIDER_H

#include <infiniband/verbs.h>
#include <stdint.h>

struct standin_options {
	uint64_t latency_ns;   /* from a post to its completion */
	unsigned refuse_every; /* every so manieth post_send call is refused at its last request; 0 never */
	unsigned error_every;  /* every so manieth completion is IBV_WC_RETRY_EXC_ERR; 0 never */
	int sig_all;           /* every request is signalled */
};

struct standin_counts {
	uint64_t posted, bytes, signalled, refused, completed, errors, receives, received;
};

struct ibv_context *standin_open(const char *device);
struct ibv_cq *standin_create_cq(struct ibv_context *context);
struct ibv_qp *standin_create_qp(struct ibv_context *context, struct ibv_cq *cq, uint32_t number, const struct standin_options *options);
struct standin_counts standin_counts(struct ibv_qp *qp);
void standin_stall(struct ibv_qp *qp); /* nothing posted from now on completes */
uint64_t standin_now(void);

#endif
