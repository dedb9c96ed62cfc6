/* Queue pairs that a live request may move (live.c): kept when ready to send, let go of before they are destroyed. One that is ready to
 * send is given a port of its bond, from 1, where the provider can. */
#ifndef NCCLWATCH_LIVE_H
#define NCCLWATCH_LIVE_H
#include <stdint.h>
void live_keep(void *pair);
void live_drop(void *pair);
void live_bond(void *pair, uint8_t port);
#endif
