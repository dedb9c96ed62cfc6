/* Queue pairs that a live request may move (live.c): kept when ready to send, let go of before they are destroyed. */
#ifndef NCCLWATCH_LIVE_H
#define NCCLWATCH_LIVE_H
void live_keep(void *pair);
void live_drop(void *pair);
#endif
