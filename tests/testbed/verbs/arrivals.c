/* What comes to an adapter: messages of far queue pairs, which are placed in the process's memory and answered. */
#define _GNU_SOURCE
#include <errno.h>
#include <infiniband/verbs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "adapter.h"

#define ARRIVALS 512
#define TURN (1 << 20) /* bytes of one connection before the others have their turn */
#define ALIVE_NS 1000000000ull

struct arrival {
	int fd;
	uint32_t pair; /* 0: not told yet */
	uint32_t have, left;
	uint32_t placed, told, status;
	int waits, moved;
	uint64_t told_ns;
	struct header header;
	struct hello hello;
};

static struct arrival arrivals[ARRIVALS];

static void answer(struct arrival *arrival, uint64_t now)
{
	struct answer words = {arrival->placed, arrival->status};
	uint32_t went = 0;

	while (went < sizeof(words)) {
		ssize_t part = send(arrival->fd, (uint8_t *)&words + went, sizeof(words) - went, MSG_DONTWAIT | MSG_NOSIGNAL);

		if (part < 0 && (errno != EAGAIN || went == 0))
			return; /* the next one tells it as well */
		went += part > 0 ? part : 0;
	}
	arrival->told = arrival->placed;
	arrival->told_ns = now;
}

static void hang_up(uint32_t index)
{
	close(arrivals[index].fd);
	arrivals[index].fd = 0;
}

void accept_all(int listener)
{
	for (;;) {
		int one = 1, fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
		uint32_t index;

		if (fd < 0)
			return;
		for (index = 0; index < ARRIVALS && arrivals[index].fd; index++)
			;
		if (index == ARRIVALS) {
			close(fd);
			continue;
		}
		memset(&arrivals[index], 0, sizeof(arrivals[index]));
		arrivals[index].fd = fd;
		setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
		watch(EPOLL_CTL_ADD, fd, EPOLLIN, ARRIVAL, index);
	}
}

/* The message is placed: it may be one that a receive is told of, which then is waited for. Whether it is done with. */
static int finish(struct arrival *arrival)
{
	struct pair *pair = &shared->pairs[arrival->pair];

	if (arrival->header.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
		if (pair->taken == pair->wanted)
			return 0;
		complete(pair->receive_queue,
			 (struct completion){pair->receives[pair->taken % REQUESTS].id, IBV_WC_SUCCESS, IBV_WC_RECV_RDMA_WITH_IMM,
					     arrival->header.length, number_of(shared, arrival->pair), arrival->header.immediate,
					     IBV_WC_WITH_IMM});
		pair->taken++;
	}
	arrival->placed++;
	arrival->have = 0;
	return 1;
}

/* Receive into a structure as far as it comes; 1 when it is whole, 0 when more is to come, -1 at the end. */
static int gather(struct arrival *arrival, void *into, uint32_t length)
{
	ssize_t came = recv(arrival->fd, (uint8_t *)into + arrival->have, length - arrival->have, MSG_DONTWAIT);

	if (came <= 0)
		return came == 0 || (errno != EAGAIN && errno != EINTR) ? -1 : 0;
	arrival->have += came;
	return arrival->have == length;
}

static int greet(struct arrival *arrival)
{
	int whole = gather(arrival, &arrival->hello, sizeof(arrival->hello));

	if (whole == 1) {
		arrival->pair = arrival->hello.to & 0xff;
		arrival->have = 0;
		if (!arrival->pair || arrival->hello.to >> 8 != shared->port)
			return -1;
	}
	return whole;
}

static int read_header(struct arrival *arrival)
{
	const struct header *header = &arrival->header;
	int whole = gather(arrival, &arrival->header, sizeof(arrival->header));

	if (whole == 1) {
		arrival->left = header->length;
		if (header->length && !is_registered(header->remote, header->length, header->key))
			arrival->status = IBV_WC_REM_ACCESS_ERR;
	}
	return whole;
}

static int read_bytes(struct arrival *arrival)
{
	static uint8_t bytes[STAGE];
	uint32_t part = arrival->left < sizeof(bytes) ? arrival->left : sizeof(bytes);
	ssize_t came = recv(arrival->fd, bytes, part, MSG_DONTWAIT);

	if (came <= 0)
		return came == 0 || (errno != EAGAIN && errno != EINTR) ? -1 : 0;
	if (!write_memory(arrival->header.remote + (arrival->header.length - arrival->left), bytes, came))
		arrival->status = IBV_WC_REM_ACCESS_ERR;
	arrival->left -= came;
	arrival->moved = 1;
	return came;
}

static void take_in(uint32_t index)
{
	struct arrival *arrival = &arrivals[index];
	int went = 1;

	for (int turn = 0; turn < TURN && went > 0; turn += went) {
		if (arrival->status != IBV_WC_SUCCESS)
			break;
		if (!arrival->pair)
			went = greet(arrival);
		else if (arrival->have < sizeof(arrival->header))
			went = read_header(arrival);
		else if (arrival->left)
			went = read_bytes(arrival);
		if (went > 0 && arrival->have == sizeof(arrival->header) && !arrival->left && arrival->status == IBV_WC_SUCCESS &&
		    !finish(arrival)) {
			arrival->waits = 1;
			watch(EPOLL_CTL_MOD, arrival->fd, 0, ARRIVAL, index);
			break;
		}
	}
	if (went < 0) {
		hang_up(index);
		return;
	}
	if (arrival->told != arrival->placed || arrival->status != IBV_WC_SUCCESS)
		answer(arrival, now_ns());
}

void arrival_event(uint32_t index)
{
	if (arrivals[index].fd && !arrivals[index].waits)
		take_in(index);
}

/* A receive may have been posted for what waits for one. */
void go_on(void)
{
	for (uint32_t index = 0; index < ARRIVALS; index++) {
		struct arrival *arrival = &arrivals[index];

		if (arrival->fd && arrival->waits && finish(arrival)) {
			arrival->waits = 0;
			watch(EPOLL_CTL_MOD, arrival->fd, EPOLLIN, ARRIVAL, index);
			take_in(index);
		}
	}
}

/* Who still takes bytes, or waits for a receive, says so: its far end is not to give up. */
void keep_alive(uint64_t now)
{
	for (uint32_t index = 0; index < ARRIVALS; index++) {
		struct arrival *arrival = &arrivals[index];

		if (arrival->fd && arrival->pair && now - arrival->told_ns > ALIVE_NS &&
		    (arrival->waits || arrival->moved || arrival->told != arrival->placed)) {
			arrival->moved = 0;
			answer(arrival, now);
		}
	}
}
