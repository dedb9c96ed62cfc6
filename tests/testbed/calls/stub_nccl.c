/* A library that exports what NCCL exports and does nothing but count: the probes' own test target.
 *
 * Arguments, nesting, namespaces, losses and costs of probes can be tested on it exactly and fast; that the same holds for the real
 * NCCL is what the tests with real jobs are for. Signatures as in nccl.h.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int result;
typedef struct comm comm;
typedef struct {
	char internal[128];
} unique_id;

/* The tests tell the tracer these offsets. */
struct comm {
	uint64_t magic;
	uint64_t commHash;
	int32_t rank, nRanks;
	uint64_t opCount;
};

#define API(name, ...)                                                                                                             \
	__attribute__((visibility("default"), noinline)) result pnccl##name(__VA_ARGS__);                                          \
	__attribute__((weak, alias("pnccl" #name), visibility("default"))) result nccl##name(__VA_ARGS__);                         \
	__attribute__((visibility("default"), noinline)) result pnccl##name(__VA_ARGS__)

static result count(comm *c)
{
	if (c)
		__atomic_fetch_add(&c->opCount, 1, __ATOMIC_RELAXED);
	__asm__ volatile("" ::: "memory"); /* no tail call */
	return 0;
}

/* With FRAMES a function begins with a push, as those of NVIDIA's builds do: a probe there costs a tenth of one on other instructions. */
#ifdef FRAMES
#define FRAME() __asm__ volatile("" : : "r"(__builtin_frame_address(0)))
#else
#define FRAME()
#endif

/* ncclX must leave through a return instruction of its own. */
#define DONE(c)                                                                                                                    \
	do {                                                                                                                       \
		FRAME();                                                                                                           \
		result r_ = count(c);                                                                                              \
		__asm__ volatile("" : "+r"(r_));                                                                                   \
		return r_;                                                                                                         \
	} while (0)

static comm *make(uint64_t hash, int rank, int nranks)
{
	comm *c = calloc(1, sizeof(*c));
	c->magic = 0x0280028002800280;
	c->commHash = hash;
	c->rank = rank;
	c->nRanks = nranks;
	return c;
}

API(AllReduce, const void *s, void *r, size_t n, int type, int op, comm *c, void *stream) { DONE(c); }
API(Broadcast, const void *s, void *r, size_t n, int type, int root, comm *c, void *stream) { DONE(c); }
API(Reduce, const void *s, void *r, size_t n, int type, int op, int root, comm *c, void *stream) { DONE(c); }
API(AllGather, const void *s, void *r, size_t n, int type, comm *c, void *stream) { DONE(c); }
API(ReduceScatter, const void *s, void *r, size_t n, int type, int op, comm *c, void *stream) { DONE(c); }
API(AlltoAll, const void *s, void *r, size_t n, int type, comm *c, void *stream) { DONE(c); }
API(Gather, const void *s, void *r, size_t n, int type, int root, comm *c, void *stream) { DONE(c); }
API(Scatter, const void *s, void *r, size_t n, int type, int root, comm *c, void *stream) { DONE(c); }
API(AllReduceConfig, const void *s, void *r, size_t n, int type, int op, comm *c, void *stream, void *config) { DONE(c); }
API(Send, const void *s, size_t n, int type, int peer, comm *c, void *stream) { DONE(c); }
API(Recv, void *r, size_t n, int type, int peer, comm *c, void *stream) { DONE(c); }
API(PutSignal, const void *s, size_t n, int type, int peer, void *w, size_t o, int sig, int ctx, unsigned f, comm *c, void *stream) { DONE(c); }
API(Signal, int peer, int sig, int ctx, unsigned flags, comm *c, void *stream) { DONE(c); }
API(WaitSignal, int n, void *descriptors, comm *c, void *stream) { DONE(c); }
API(GroupStart, void) { DONE(NULL); }
API(GroupEnd, void) { DONE(NULL); }
API(GroupSimulateEnd, void *info) { DONE(NULL); }
API(CommFinalize, comm *c) { DONE(c); }
API(CommRevoke, comm *c, int flags) { DONE(c); }
API(CommSuspend, comm *c, int flags) { DONE(c); }
API(CommResume, comm *c) { DONE(c); }
API(CommRegister, comm *c, void *buffer, size_t size, void **handle) { DONE(c); }
API(CommDeregister, comm *c, void *handle) { DONE(c); }
API(CommWindowRegister, comm *c, void *buffer, size_t size, void **window, int flags) { DONE(c); }
API(CommWindowDeregister, comm *c, void *window) { DONE(c); }
API(DevCommCreate, comm *c, void *requirements, void *out) { DONE(c); }
API(DevCommDestroy, comm *c, void *dev) { DONE(c); }

/* As in NCCL, one exported function calls another: the user made one call. */
API(Bcast, void *b, size_t n, int type, int root, comm *c, void *stream)
{
	result r = ncclBroadcast(b, b, n, type, root, c, stream);
	__asm__ volatile("" : "+r"(r));
	return r;
}

API(GetUniqueId, unique_id *id)
{
	memset(id, 0, sizeof(*id));
	*(uint64_t *)id->internal = 0xfeedface00000000u + (uint32_t)getpid();
	DONE(NULL);
}

API(CommGetUniqueId, comm *c, unique_id *id)
{
	memset(id, 0, sizeof(*id));
	*(uint64_t *)id->internal = 0xfeedface11111111u;
	DONE(c);
}

API(CommInitRank, comm **out, int nranks, unique_id id, int rank)
{
	*out = make(*(uint64_t *)id.internal ^ 0x5555, rank, nranks);
	DONE(NULL);
}

API(CommInitRankConfig, comm **out, int nranks, unique_id id, int rank, void *config)
{
	*out = make(*(uint64_t *)id.internal ^ 0x5555, rank, nranks);
	DONE(NULL);
}

API(CommInitRankScalable, comm **out, int nranks, int rank, int ids, unique_id *id, void *config)
{
	*out = make(*(uint64_t *)id->internal ^ 0x5555, rank, nranks);
	DONE(NULL);
}

API(CommInitAll, comm **out, int devices, const int *list)
{
	ncclGroupStart();
	for (int i = 0; i < devices; i++)
		out[i] = make(0xa11, i, devices);
	ncclGroupEnd();
	DONE(NULL);
}

API(CommSplit, comm *c, int color, int key, comm **out, void *config)
{
	*out = color < 0 ? NULL : make(c->commHash + color, key, c->nRanks / 2);
	DONE(NULL);
}

API(CommShrink, comm *c, int *excluded, int n, comm **out, void *config, int flags)
{
	*out = make(c->commHash + 100, c->rank, c->nRanks - n);
	DONE(NULL);
}

API(CommGrow, comm *c, int nranks, const unique_id *id, int rank, comm **out, void *config)
{
	*out = make(c->commHash + 200, rank, nranks);
	DONE(NULL);
}

API(CommDestroy, comm *c)
{
	c->magic = 0;
	free(c);
	DONE(NULL);
}

API(CommAbort, comm *c)
{
	c->magic = 0;
	free(c);
	result r = 6;
	__asm__ volatile("" : "+r"(r));
	return r;
}
