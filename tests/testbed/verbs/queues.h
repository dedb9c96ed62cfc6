/* What the stand-in for libibverbs (library.c) and the process that stands for its network adapter (adapter.c) share: a piece of memory a
 * device that a process has opened. The library alone writes `posted`, `wanted`, requests, receives and `head`; the adapter alone writes
 * `done`, `taken`, completions and `tail`. A number that counts up goes round its ring. */
#pragma once

#include <stdatomic.h>
#include <stdint.h>

#define PAIRS 256
#define QUEUES 256
#define REGIONS 4096
#define REQUESTS 1024 /* of a queue pair, in either direction */
#define ENTRIES 8192  /* of a completion queue */
#define PIECES 2
#define INLINE 256

struct piece {
	uint64_t address;
	uint32_t length, key;
};

struct request {
	uint64_t id, remote;
	uint32_t opcode, immediate, key, signalled, pieces, inlined;
	struct piece piece[PIECES];
	uint8_t data[INLINE];
};

struct receive {
	uint64_t id;
};

enum pair_state { UNUSED, MADE, READY, FAILED };

struct pair {
	_Atomic uint32_t state;
	uint32_t send_queue, receive_queue;
	uint32_t far_address; /* network order */
	uint32_t far_number;
	uint64_t timeout_ns; /* without any sign of the far end; 0: none */
	_Atomic uint64_t posted, done, wanted, taken;
	struct request requests[REQUESTS];
	struct receive receives[REQUESTS];
};

struct completion {
	uint64_t id;
	uint32_t status, opcode, bytes, number, immediate, flags;
};

struct queue {
	_Atomic uint64_t tail, head;
	struct completion entries[ENTRIES];
};

struct region {
	_Atomic uint32_t valid;
	uint64_t address, length;
};

struct shared {
	uint32_t address; /* of the device's port, network order */
	uint32_t port;	  /* where the adapter listens: the upper 16 bits of its queue pairs' numbers */
	struct region regions[REGIONS];
	struct queue queues[QUEUES];
	struct pair pairs[PAIRS];
};

/* The number of a queue pair says where its adapter listens, and which of its pairs it is. */
static inline uint32_t number_of(const struct shared *shared, uint32_t pair)
{
	return shared->port << 8 | pair;
}
