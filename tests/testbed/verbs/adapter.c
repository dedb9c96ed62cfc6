/* The stand-in for a network adapter: testbed-adapter MEMORY DOORBELL CONTROL PID DEVICE INTERFACE (numbers of inherited descriptors; whose
 * memory; the names of the RDMA device and of the network device it sends by).
 *
 * It does what hardware does for one opened device: takes posted requests, reads and writes the process's memory by itself
 * (process_vm_readv, process_vm_writev), completes requests in order once the far end has acknowledged them, and goes on while the
 * process is stopped. What goes over a wire goes over TCP, a connection for each direction of a queue pair, from the address of the
 * device: whatever limits, delays, loses or cuts the host's link acts on it. No far end for as long as the queue pair's timeout and
 * tries allow is an error, as with a reliable connection of RDMA; no posted receive is waited for. It ends with the process.
 *
 * Where adapters.py has put a folder of the device where sysfs has them, the state of its port there follows the network device. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <limits.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "queues.h"

#define STAGE (64 << 10)
#define ARRIVALS 512
#define TURN (1 << 20) /* bytes of one connection before the others have their turn */
#define TICK_MS 200
#define ALIVE_NS 1000000000ull

/* Over the wire, before the bytes themselves. */
struct header {
	uint64_t remote;
	uint32_t opcode, immediate, key, length;
};

struct hello {
	uint32_t from, to;
};

/* Back over the same connection: how many messages have been placed so far, and how the newest went. */
struct answer {
	uint32_t placed, status;
};

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

static struct shared *shared;
static struct departure departures[PAIRS];
static struct arrival arrivals[ARRIVALS];
static int poller, listener, doorbell;
static pid_t whose;
static struct ifreq interface;
static char state_file[PATH_MAX];

enum { LISTENER, DOORBELL, CONTROL, DEPARTURE, ARRIVAL };

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static void watch(int how, int fd, uint32_t events, uint32_t kind, uint32_t index)
{
	struct epoll_event event = {.events = events, .data.u64 = (uint64_t)kind << 32 | index};

	epoll_ctl(poller, how, fd, &event);
}

static void fail(const char *what)
{
	fprintf(stderr, "testbed-adapter: %s: %s\n", what, strerror(errno));
	exit(1);
}

/* --- the process's memory --- */

static int is_registered(uint64_t address, uint64_t length, uint32_t key)
{
	const struct region *region = &shared->regions[key % REGIONS];

	return key < REGIONS && region->valid && address >= region->address && length <= region->length &&
	       address - region->address <= region->length - length;
}

static int read_memory(uint64_t address, void *into, size_t length)
{
	struct iovec local = {into, length}, remote = {(void *)address, length};

	return process_vm_readv(whose, &local, 1, &remote, 1, 0) == (ssize_t)length;
}

static int write_memory(uint64_t address, void *from, size_t length)
{
	struct iovec local = {from, length}, remote = {(void *)address, length};

	return process_vm_writev(whose, &local, 1, &remote, 1, 0) == (ssize_t)length;
}

/* --- completions --- */

static void complete(uint32_t queue_index, struct completion completion)
{
	struct queue *queue = &shared->queues[queue_index];

	if (queue->tail - queue->head == ENTRIES)
		return; /* overrun, which NCCL's sizes rule out */
	queue->entries[queue->tail % ENTRIES] = completion;
	queue->tail++;
}

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

/* --- what leaves --- */

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

/* --- what arrives --- */

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

static void accept_all(void)
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

/* --- the whole --- */

/* A receive may have been posted for what waits for one. */
static void go_on(void)
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

static void look_at_pairs(void)
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

/* Who still takes bytes, or waits for a receive, says so: its far end is not to give up. */
static void look_at_clocks(void)
{
	uint64_t now = now_ns();

	for (uint32_t index = 1; index < PAIRS; index++) {
		const struct pair *pair = &shared->pairs[index];

		if (pair->state == READY && pair->done != pair->posted && pair->timeout_ns && departures[index].fd &&
		    now - departures[index].alive_ns > pair->timeout_ns)
			break_off(index, IBV_WC_RETRY_EXC_ERR);
	}
	for (uint32_t index = 0; index < ARRIVALS; index++) {
		struct arrival *arrival = &arrivals[index];

		if (arrival->fd && arrival->pair && now - arrival->told_ns > ALIVE_NS &&
		    (arrival->waits || arrival->moved || arrival->told != arrival->placed)) {
			arrival->moved = 0;
			answer(arrival, now);
		}
	}
}

static void tell_state(void)
{
	static int told = -1;
	int up = !ioctl(listener, SIOCGIFFLAGS, &interface) && (interface.ifr_flags & IFF_UP) && (interface.ifr_flags & IFF_RUNNING);
	const char *words = up ? "4: ACTIVE\n" : "1: DOWN  \n";
	int fd = up == told ? -1 : open(state_file, O_WRONLY | O_CLOEXEC);

	told = up;
	if (fd < 0)
		return;
	(void)!pwrite(fd, words, strlen(words), 0);
	close(fd);
}

/* Connections of the process's own, which would outlive it here. */
static void close_others(int a, int b, int c)
{
	for (int fd = 3; fd < 4096; fd++)
		if (fd != a && fd != b && fd != c)
			close(fd);
}

static void start(char **arguments)
{
	struct sockaddr_in near = {.sin_family = AF_INET};
	socklen_t length = sizeof(near);
	int control = atoi(arguments[3]);

	doorbell = atoi(arguments[2]);
	whose = atoi(arguments[4]);
	snprintf(state_file, sizeof(state_file), "/sys/class/infiniband/%s/ports/1/state", arguments[5]);
	snprintf(interface.ifr_name, sizeof(interface.ifr_name), "%s", arguments[6]);
	close_others(atoi(arguments[1]), doorbell, control);
	shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED, atoi(arguments[1]), 0);
	if (shared == MAP_FAILED)
		fail("the shared memory");
	near.sin_addr.s_addr = shared->address;
	listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (bind(listener, (struct sockaddr *)&near, sizeof(near)) || listen(listener, ARRIVALS) ||
	    getsockname(listener, (struct sockaddr *)&near, &length))
		fail("the device's address");
	shared->port = ntohs(near.sin_port);
	poller = epoll_create1(EPOLL_CLOEXEC);
	watch(EPOLL_CTL_ADD, listener, EPOLLIN, LISTENER, 0);
	watch(EPOLL_CTL_ADD, doorbell, EPOLLIN, DOORBELL, 0);
	watch(EPOLL_CTL_ADD, control, EPOLLIN, CONTROL, 0);
	if (write(control, "", 1) != 1)
		fail("the process");
}

static void departure_event(uint32_t index, uint32_t events)
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

static int handle(const struct epoll_event *event)
{
	uint32_t index = (uint32_t)event->data.u64;
	uint64_t rung;

	switch (event->data.u64 >> 32) {
	case LISTENER:
		accept_all();
		break;
	case DOORBELL:
		(void)!read(doorbell, &rung, sizeof(rung));
		look_at_pairs();
		go_on();
		break;
	case CONTROL:
		return 0;
	case DEPARTURE:
		departure_event(index, event->events);
		break;
	case ARRIVAL:
		if (arrivals[index].fd && !arrivals[index].waits)
			take_in(index);
		break;
	}
	return 1;
}

int main(int count, char **arguments)
{
	struct epoll_event events[64];
	uint64_t looked = 0;

	if (count != 7) {
		fprintf(stderr, "testbed-adapter: it is started by the stand-in for libibverbs\n");
		return 2;
	}
	start(arguments);
	for (;;) {
		int found = epoll_wait(poller, events, 64, TICK_MS);

		for (int i = 0; i < found; i++)
			if (!handle(&events[i]))
				return 0;
		if (now_ns() - looked > TICK_MS * 1000000ull) {
			looked = now_ns();
			look_at_pairs();
			look_at_clocks();
			tell_state();
		}
	}
}
