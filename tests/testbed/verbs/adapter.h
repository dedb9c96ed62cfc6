/* The parts of testbed-adapter: adapter.c (the process's memory, completions, the loop), departures.c (what leaves), arrivals.c (what
 * comes). Connections of queue pairs are TCP's. */
#pragma once

#include <stdint.h>
#include <sys/types.h>

#include "queues.h"

#define STAGE (64 << 10)

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

enum kind { LISTENER, DOORBELL, CONTROL, DEPARTURE, ARRIVAL };

extern struct shared *shared;

uint64_t now_ns(void);
void watch(int how, int fd, uint32_t events, enum kind kind, uint32_t index);

int is_registered(uint64_t address, uint64_t length, uint32_t key);
int read_memory(uint64_t address, void *into, size_t length);
int write_memory(uint64_t address, void *from, size_t length);
void complete(uint32_t queue_index, struct completion completion);

/* What leaves: something happened on a pair's connection; a pair may have changed; time has gone by. */
void departure_event(uint32_t index, uint32_t events);
void look_at_pairs(void);
void look_for_silence(uint64_t now);

/* What comes: a connection; bytes on one; a receive may have been posted for what waits for one; time has gone by. */
void accept_all(int listener);
void arrival_event(uint32_t index);
void go_on(void);
void keep_alive(uint64_t now);
