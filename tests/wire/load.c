/* A load of known size on the stand-in provider: posts chains of writes, posts receives, polls, and says exactly what it did.
 *
 *   load KEY=VALUE …   see the table below; it prints one JSON line when it is ready, waits for a line on its standard input if wait=1,
 *                      works, prints one JSON line with its counts, and waits for the end of its standard input.
 */
#include "provider.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAX_QPS 64
#define MAX_CHAIN 32

static struct {
	const char *name;
	uint64_t value;
} options[] = {
	{"posts", 1009},      /* calls that post, over all queue pairs */
	{"chain", 1},         /* requests in one call */
	{"qps", 1},
	{"cqs", 1},           /* completion queues; queue pairs take them in turn */
	{"contexts", 1},      /* devices; likewise */
	{"bytes", 65536},     /* of each request */
	{"pieces", 1},        /* scatter-gather elements that make up a request */
	{"signal_every", 1},  /* calls whose last request is signalled; the others of a chain never are */
	{"outstanding", 32},  /* calls without completion at most */
	{"rate", 0},          /* calls a second; 0: as fast as it goes */
	{"busy", 1},          /* poll without pause, as NCCL's proxy does */
	{"poll_rate", 0},     /* polls a second between posts when not busy; 0: only when needed */
	{"latency_ns", 5000},
	{"refuse_every", 0},
	{"error_every", 0},
	{"sig_all", 0},
	{"receives", 0},      /* posted on the first queue pair before anything else */
	{"extended", 0},      /* use ibv_wr_* and the extended completion queue */
	{"abort_every", 0},   /* extended: every so manieth batch is aborted */
	{"stall_after", 0},   /* after so many calls nothing completes any more */
	{"wait", 0},
};

static uint64_t option(const char *name)
{
	for (size_t i = 0; i < sizeof(options) / sizeof(*options); i++)
		if (!strcmp(options[i].name, name))
			return options[i].value;
	fprintf(stderr, "load: no option %s\n", name);
	exit(2);
}

static void parse(int count, char **words)
{
	for (int i = 1; i < count; i++) {
		char *equals = strchr(words[i], '=');
		size_t found = 0;

		if (!equals)
			exit(2);
		for (size_t k = 0; k < sizeof(options) / sizeof(*options); k++) {
			if (strlen(options[k].name) == (size_t)(equals - words[i]) && !strncmp(options[k].name, words[i], equals - words[i])) {
				options[k].value = strtoull(equals + 1, NULL, 10);
				found = 1;
			}
		}
		if (!found) {
			fprintf(stderr, "load: no option %s\n", words[i]);
			exit(2);
		}
	}
}

static void wait_line(void)
{
	char line[64];

	if (!fgets(line, sizeof(line), stdin))
		exit(0);
}

static uint64_t polls, polled;

static uint64_t cpu_now(void)
{
	struct timespec now;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static void poll_plain(struct ibv_cq *cq)
{
	struct ibv_wc wc[4];

	polls++;
	polled += ibv_poll_cq(cq, 4, wc);
}

static void poll_extended(struct ibv_cq *cq)
{
	struct ibv_cq_ex *ex = (struct ibv_cq_ex *)cq;
	struct ibv_poll_cq_attr attr = {0};

	polls++;
	if (ibv_start_poll(ex, &attr))
		return;
	do {
		(void)ibv_wc_read_qp_num(ex);
		(void)ibv_wc_read_opcode(ex);
		polled++;
	} while (!ibv_next_poll(ex));
	ibv_end_poll(ex);
}

int main(int count, char **words)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	parse(count, words);
	uint64_t posts = option("posts"), chain = option("chain"), qps = option("qps"), cqs = option("cqs"), contexts = option("contexts");
	uint64_t pieces = option("pieces"), bytes = option("bytes"), signal_every = option("signal_every"), rate = option("rate");
	uint64_t outstanding = option("outstanding"), extended = option("extended"), abort_every = option("abort_every");
	uint64_t stall_after = option("stall_after"), busy = option("busy"), poll_rate = option("poll_rate");
	struct standin_options provider = {option("latency_ns"), option("refuse_every"), option("error_every"), option("sig_all")};
	struct ibv_context *context[MAX_QPS];
	struct ibv_cq *cq[MAX_QPS];
	struct ibv_qp *qp[MAX_QPS];
	struct ibv_sge sge[16];
	struct ibv_send_wr wr[MAX_CHAIN], *bad;
	char name[16];

	if (!qps || qps > MAX_QPS || cqs > qps || contexts > cqs || !chain || chain > MAX_CHAIN || !pieces || pieces > 16)
		return 2;
	for (uint64_t i = 0; i < contexts; i++) {
		snprintf(name, sizeof(name), "standin%d", (int)i);
		context[i] = standin_open(name);
	}
	for (uint64_t i = 0; i < cqs; i++)
		cq[i] = standin_create_cq(context[i % contexts]);
	for (uint64_t i = 0; i < qps; i++)
		qp[i] = standin_create_qp(cq[i % cqs]->context, cq[i % cqs], 100 + i, &provider);
	printf("{\"pid\": %d, \"contexts\": [", getpid());
	for (uint64_t i = 0; i < contexts; i++)
		printf("%s{\"address\": %" PRIu64 ", \"fd\": %d, \"device\": \"standin%d\"}", i ? ", " : "", (uint64_t)context[i], context[i]->cmd_fd, (int)i);
	printf("], \"poll_cq\": %" PRIu64 "}\n", (uint64_t)context[0]->ops.poll_cq);
	if (option("wait"))
		wait_line();

	for (uint64_t i = 0; i < option("receives"); i++) {
		struct ibv_recv_wr receive = {.wr_id = i}, *bad_receive;

		ibv_post_recv(qp[0], &receive, &bad_receive);
	}
	for (uint64_t i = 0; i < pieces; i++)
		sge[i] = (struct ibv_sge){0x1000, bytes / pieces + (i < bytes % pieces), 0};
	void (*poll)(struct ibv_cq *) = extended ? poll_extended : poll_plain;
	uint64_t cpu_begin = cpu_now(), begin = standin_now(), signalled = 0, next_poll = 0;

	for (uint64_t i = 0; i < posts; i++) {
		struct ibv_qp *target = qp[i % qps];
		int signal = (i / qps + 1) % signal_every == 0;

		if (stall_after && i == stall_after)
			for (uint64_t k = 0; k < qps; k++)
				standin_stall(qp[k]);
		while (rate && standin_now() < begin + i * 1000000000ull / rate) {
			if (busy) {
				poll(cq[i % cqs]);
			} else {
				struct timespec pause = {0, 20000};

				if (poll_rate && standin_now() >= next_poll) {
					poll(cq[i % cqs]);
					next_poll = standin_now() + 1000000000ull / poll_rate;
				}
				nanosleep(&pause, NULL);
			}
		}
		if (rate) {
			/* A load that was without a CPU does not make up for it: it would post faster than its rate. */
			uint64_t now = standin_now(), due = begin + i * 1000000000ull / rate;

			if (now > due + 5000000)
				begin += now - due;
		}
		while (!stall_after && (int64_t)(signalled - polled) >= (int64_t)outstanding)
			for (uint64_t k = 0; k < cqs; k++)
				poll(cq[k]);
		struct standin_counts before = standin_counts(target);

		if (extended) {
			struct ibv_qp_ex *ex = (struct ibv_qp_ex *)target;

			ibv_wr_start(ex);
			for (uint64_t k = 0; k < chain; k++) {
				int last = k + 1 == chain;

				ex->wr_id = i % 32;
				ex->wr_flags = last && signal ? IBV_SEND_SIGNALED : 0;
				if (last)
					ibv_wr_rdma_write_imm(ex, 0, 0, 0);
				else
					ibv_wr_rdma_write(ex, 0, 0);
				if (pieces > 1)
					ibv_wr_set_sge_list(ex, pieces, sge);
				else
					ibv_wr_set_sge(ex, 0, 0, sge[0].length);
			}
			if (abort_every && (i + 1) % abort_every == 0)
				ibv_wr_abort(ex);
			else
				ibv_wr_complete(ex);
		} else {
			for (uint64_t k = 0; k < chain; k++) {
				int last = k + 1 == chain;

				wr[k] = (struct ibv_send_wr){.wr_id = i % 32, .next = last ? NULL : &wr[k + 1], .sg_list = sge, .num_sge = pieces};
				wr[k].opcode = last ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE;
				wr[k].send_flags = last && signal ? IBV_SEND_SIGNALED : 0;
			}
			ibv_post_send(target, wr, &bad);
		}
		signalled += standin_counts(target).signalled - before.signalled;
		if (busy)
			poll(cq[i % cqs]);
	}
	uint64_t end = standin_now(), cpu_ns = cpu_now() - cpu_begin, polls_at_end = polls;

	/* What is due comes in; receives add to what is polled. */
	for (int idle = 0; idle < 200 && !stall_after; idle++) {
		uint64_t had = polled;
		struct timespec pause = {0, 1000000};

		for (uint64_t k = 0; k < cqs; k++)
			poll(cq[k]);
		nanosleep(&pause, NULL);
		if (polled != had)
			idle = 0;
		if (idle > 20)
			break;
	}
	printf("{\"ns\": %" PRIu64 ", \"cpu_ns\": %" PRIu64 ", \"polls\": %" PRIu64 ", \"polled\": %" PRIu64 ", \"qps\": [", end - begin, cpu_ns,
	       polls_at_end, polled);
	for (uint64_t i = 0; i < qps; i++) {
		struct standin_counts c = standin_counts(qp[i]);

		printf("%s{\"number\": %u, \"posted\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"signalled\": %" PRIu64 ", \"refused\": %" PRIu64
		       ", \"errors\": %" PRIu64 ", \"receives\": %" PRIu64 ", \"received\": %" PRIu64 "}",
		       i ? ", " : "", qp[i]->qp_num, c.posted, c.bytes, c.signalled, c.refused, c.errors, c.receives, c.received);
	}
	printf("]}\n");
	char line[64];

	while (fgets(line, sizeof(line), stdin))
		;
	return 0;
}
