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
#include <limits.h>
#include <net/if.h>
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

#include "adapter.h"

#define TICK_MS 200

struct shared *shared;
static int poller, listener, doorbell;
static pid_t whose;
static struct ifreq interface;
static char state_file[PATH_MAX];

uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

void watch(int how, int fd, uint32_t events, enum kind kind, uint32_t index)
{
	struct epoll_event event = {.events = events, .data.u64 = (uint64_t)kind << 32 | index};

	epoll_ctl(poller, how, fd, &event);
}

static void fail(const char *what)
{
	fprintf(stderr, "testbed-adapter: %s: %s\n", what, strerror(errno));
	exit(1);
}

int is_registered(uint64_t address, uint64_t length, uint32_t key)
{
	const struct region *region = &shared->regions[key % REGIONS];

	return key < REGIONS && region->valid && address >= region->address && length <= region->length &&
	       address - region->address <= region->length - length;
}

int read_memory(uint64_t address, void *into, size_t length)
{
	struct iovec local = {into, length}, remote = {(void *)address, length};

	return process_vm_readv(whose, &local, 1, &remote, 1, 0) == (ssize_t)length;
}

int write_memory(uint64_t address, void *from, size_t length)
{
	struct iovec local = {from, length}, remote = {(void *)address, length};

	return process_vm_writev(whose, &local, 1, &remote, 1, 0) == (ssize_t)length;
}

void complete(uint32_t queue_index, struct completion completion)
{
	struct queue *queue = &shared->queues[queue_index];

	if (queue->tail - queue->head == ENTRIES)
		return; /* overrun, which NCCL's sizes rule out */
	queue->entries[queue->tail % ENTRIES] = completion;
	queue->tail++;
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
	if (bind(listener, (struct sockaddr *)&near, sizeof(near)) || listen(listener, SOMAXCONN) ||
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

static int handle(const struct epoll_event *event)
{
	uint32_t index = (uint32_t)event->data.u64;
	uint64_t rung;

	switch (event->data.u64 >> 32) {
	case LISTENER:
		accept_all(listener);
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
		arrival_event(index);
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
			look_for_silence(now_ns());
			keep_alive(now_ns());
			tell_state();
		}
	}
}
