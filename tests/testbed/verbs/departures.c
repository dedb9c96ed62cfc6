/* What leaves an adapter: requests of queue pairs, each over a connection of the pair's own, and what the far end answers. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <netinet/tcp.h>
#include <stddef.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "adapter.h"

struct departure {
	int fd;
	int connected, blocked;
	uint64_t sent;	   /* requests that have left, of pair->posted */
	uint64_t alive_ns; /* when the far end was last heard, or there was nothing to hear of */
	uint32_t begin, end, taken, length; /* of the stage; bytes of the message taken into it, of how many */
	int under_way;
	uint32_t answered; /* bytes of an answer that came in part */
	uint32_t placed;
	struct answer answer;
	uint8_t stage[STAGE];
};

static struct departure departures[PAIRS];

static void complete_request(uint32_t index, uint32_t status)
{
	struct pair *pair = &shared->pairs[index];
	const struct request *request = &pair->requests[pair->done % REQUESTS];
	uint32_t opcode = request->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;

	if (request->signalled || status != IBV_WC_SUCCESS)
		complete(pair->send_queue, (struct completion){request->id, status, opcode, 0, number_of(shared, index), 0, 0});
	pair->done++;
}

static void forget(uint32_t index)
{
	struct departure *departure = &departures[index];

	if (departure->fd)
		close(departure->fd);
	departure->fd = 0;
}

/* The first request fails, what is behind it is flushed, and what the far end still says is of no matter. */
static void break_off(uint32_t index, uint32_t status)
{
	struct pair *pair = &shared->pairs[index];

	pair->state = FAILED;
	forget(index);
	for (; pair->done < pair->posted; status = IBV_WC_WR_FLUSH_ERR)
		complete_request(index, status);
	for (; pair->taken < pair->wanted; pair->taken++)
		complete(pair->receive_queue,
			 (struct completion){pair->receives[pair->taken % REQUESTS].id, IBV_WC_WR_FLUSH_ERR, IBV_WC_RECV, 0,
					     number_of(shared, index), 0, 0});
}

static void connect_to(uint32_t index)
{
	const struct pair *pair = &shared->pairs[index];
	struct departure *departure = &departures[index];
	struct sockaddr_in near = {.sin_family = AF_INET, .sin_addr.s_addr = shared->address};
	struct sockaddr_in far = {.sin_family = AF_INET, .sin_addr.s_addr = pair->far_address, .sin_port = htons(pair->far_number >> 8)};
	struct hello hello = {number_of(shared, index), pair->far_number};
	int one = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);

	memset(departure, 0, offsetof(struct departure, stage));
	departure->fd = fd;
	departure->alive_ns = now_ns();
	memcpy(departure->stage, &hello, sizeof(hello));
	departure->end = sizeof(hello);
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	if (bind(fd, (struct sockaddr *)&near, sizeof(near)) || (connect(fd, (struct sockaddr *)&far, sizeof(far)) && errno != EINPROGRESS)) {
		forget(index); /* tried again at the next tick */
		return;
	}
	watch(EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLOUT, DEPARTURE, index);
	departure->blocked = 1;
}

/* Reading is for flushes alone: a queue pair that is connected to its own adapter. */
static uint32_t read_here(const struct request *request)
{
	uint8_t data[INLINE];
	const struct piece *piece = &request->piece[0];

	if (request->pieces != 1 || piece->length > sizeof(data))
		return IBV_WC_LOC_LEN_ERR;
	if (!is_registered(request->remote, piece->length, request->key))
		return IBV_WC_REM_ACCESS_ERR;
	return read_memory(request->remote, data, piece->length) && write_memory(piece->address, data, piece->length) ? IBV_WC_SUCCESS
														       : IBV_WC_LOC_PROT_ERR;
}

static void begin_message(struct departure *departure, const struct request *request)
{
	struct header header = {request->remote, request->opcode, request->immediate, request->key, 0};

	for (uint32_t i = 0; i < request->pieces; i++)
		header.length += request->piece[i].length;
	memcpy(departure->stage, &header, sizeof(header));
	departure->begin = 0;
	departure->end = sizeof(header);
	departure->length = header.length;
	departure->taken = 0;
	departure->under_way = 1;
}

/* As much of the message as the stage holds. */
static int stage_more(struct departure *departure, const struct request *request)
{
	uint32_t past = 0;

	for (uint32_t i = 0; i < request->pieces; past += request->piece[i++].length) {
		const struct piece *piece = &request->piece[i];
		uint32_t from = departure->taken - past, room = STAGE - departure->end;

		if (departure->taken >= past + piece->length || !room)
			continue;
		uint32_t part = piece->length - from < room ? piece->length - from : room;
		if (request->inlined)
			memcpy(departure->stage + departure->end, request->data + departure->taken, part);
		else if (!is_registered(piece->address, piece->length, piece->key) ||
			 !read_memory(piece->address + from, departure->stage + departure->end, part))
			return -1;
		departure->taken += part;
		departure->end += part;
	}
	return 0;
}

static void send_on(uint32_t index)
{
	struct pair *pair = &shared->pairs[index];
	struct departure *departure = &departures[index];
	uint64_t before = departure->sent;

	for (;;) {
		if (departure->begin < departure->end) {
			ssize_t went = send(departure->fd, departure->stage + departure->begin, departure->end - departure->begin,
					    MSG_DONTWAIT | MSG_NOSIGNAL);

			if (went < 0) {
				if (errno == EAGAIN && !departure->blocked) {
					departure->blocked = 1;
					watch(EPOLL_CTL_MOD, departure->fd, EPOLLIN | EPOLLOUT, DEPARTURE, index);
				}
				break;
			}
			departure->begin += went;
			continue;
		}
		departure->begin = departure->end = 0;
		if (departure->under_way && departure->taken == departure->length) {
			departure->under_way = 0;
			departure->sent++;
		}
		if (departure->sent >= pair->posted)
			break;
		const struct request *request = &pair->requests[departure->sent % REQUESTS];
		if (request->opcode == IBV_WR_RDMA_READ) {
			if (departure->sent != pair->done)
				break; /* what is before it, first */
			uint32_t status = pair->far_number >> 8 == shared->port ? read_here(request) : IBV_WC_LOC_QP_OP_ERR;

			departure->sent++;
			complete_request(index, status);
			continue;
		}
		if (!departure->under_way)
			begin_message(departure, request);
		if (stage_more(departure, request)) {
			break_off(index, IBV_WC_LOC_PROT_ERR);
			break;
		}
	}
	if (before == pair->done)
		departure->alive_ns = now_ns(); /* nothing was under way until now */
}

/* Acknowledgements. A far end that is gone says nothing more: the queue pair's time runs out. */
static void hear(uint32_t index)
{
	struct pair *pair = &shared->pairs[index];
	struct departure *departure = &departures[index];

	for (;;) {
		ssize_t came = recv(departure->fd, (uint8_t *)&departure->answer + departure->answered,
				    sizeof(departure->answer) - departure->answered, MSG_DONTWAIT);

		if (came <= 0) {
			if (came == 0 || (errno != EAGAIN && errno != EINTR))
				watch(EPOLL_CTL_DEL, departure->fd, 0, DEPARTURE, index);
			return;
		}
		departure->answered += came;
		if (departure->answered < sizeof(departure->answer))
			continue;
		departure->answered = 0;
		departure->alive_ns = now_ns();
		for (; departure->placed != departure->answer.placed && pair->done < departure->sent; departure->placed++)
			complete_request(index, IBV_WC_SUCCESS);
		if (departure->answer.status != IBV_WC_SUCCESS) {
			break_off(index, departure->answer.status);
			return;
		}
	}
}

void departure_event(uint32_t index, uint32_t events)
{
	struct departure *departure = &departures[index];

	if (!departure->fd)
		return;
	if (events & (EPOLLERR | EPOLLHUP) && !departure->connected) {
		forget(index); /* nobody there, or no way: tried again at the next tick */
		return;
	}
	if (events & EPOLLIN)
		hear(index);
	if (departure->fd && events & EPOLLOUT) {
		departure->connected = 1;
		departure->blocked = 0;
		watch(EPOLL_CTL_MOD, departure->fd, EPOLLIN, DEPARTURE, index);
	}
	if (departure->connected && !departure->blocked && shared->pairs[index].state == READY)
		send_on(index);
}

void look_at_pairs(void)
{
	for (uint32_t index = 1; index < PAIRS; index++) {
		struct pair *pair = &shared->pairs[index];
		struct departure *departure = &departures[index];

		if (pair->state == UNUSED || pair->state == MADE) {
			forget(index);
			continue;
		}
		if (pair->state == FAILED) {
			break_off(index, IBV_WC_WR_FLUSH_ERR);
			continue;
		}
		if (!departure->fd)
			connect_to(index);
		else if (departure->connected && !departure->blocked)
			send_on(index);
	}
}

/* A far end that has said nothing for as long as the queue pair's timeout and tries allow. */
void look_for_silence(uint64_t now)
{
	for (uint32_t index = 1; index < PAIRS; index++) {
		const struct pair *pair = &shared->pairs[index];

		if (pair->state == READY && pair->done != pair->posted && pair->timeout_ns && departures[index].fd &&
		    now - departures[index].alive_ns > pair->timeout_ns)
			break_off(index, IBV_WC_RETRY_EXC_ERR);
	}
}
