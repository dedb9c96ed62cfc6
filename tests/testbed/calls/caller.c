/* Calls the stub library on command: one command a line on standard input, "done" on standard output when it was carried out.
 *
 *   allreduce N     N AllReduces            threads T N   T threads make N AllReduces each at once
 *   bcast N         N Bcasts                fork N        a child makes N AllReduces and exits
 *   every           each function once, with arguments a test can recognise
 *   comm            the communicator's address, in hexadecimal
 *   time N          ns a call of N AllReduces         time-group N   likewise of GroupEnd
 *   pace R N        N AllReduces, R a second (what is late is made up for); seconds of all, median ns of one
 *   exec            replace the process by itself     exec-true      replace it by true(1)
 *   chaos N         N AllReduces at any time within the next seconds, while the test does what it likes
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct comm comm;
typedef struct {
	char internal[128];
} unique_id;

int ncclAllReduce(const void *, void *, size_t, int, int, comm *, void *);
int ncclBroadcast(const void *, void *, size_t, int, int, comm *, void *);
int ncclReduce(const void *, void *, size_t, int, int, int, comm *, void *);
int ncclAllGather(const void *, void *, size_t, int, comm *, void *);
int ncclReduceScatter(const void *, void *, size_t, int, int, comm *, void *);
int ncclAlltoAll(const void *, void *, size_t, int, comm *, void *);
int ncclGather(const void *, void *, size_t, int, int, comm *, void *);
int ncclScatter(const void *, void *, size_t, int, int, comm *, void *);
int ncclAllReduceConfig(const void *, void *, size_t, int, int, comm *, void *, void *);
int ncclBcast(void *, size_t, int, int, comm *, void *);
int ncclSend(const void *, size_t, int, int, comm *, void *);
int ncclRecv(void *, size_t, int, int, comm *, void *);
int ncclPutSignal(const void *, size_t, int, int, void *, size_t, int, int, unsigned, comm *, void *);
int ncclSignal(int, int, int, unsigned, comm *, void *);
int ncclWaitSignal(int, void *, comm *, void *);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclGroupSimulateEnd(void *);
int ncclGetUniqueId(unique_id *);
int ncclCommGetUniqueId(comm *, unique_id *);
int ncclCommInitRank(comm **, int, unique_id, int);
int ncclCommInitRankConfig(comm **, int, unique_id, int, void *);
int ncclCommInitRankScalable(comm **, int, int, int, unique_id *, void *);
int ncclCommInitAll(comm **, int, const int *);
int ncclCommSplit(comm *, int, int, comm **, void *);
int ncclCommShrink(comm *, int *, int, comm **, void *, int);
int ncclCommGrow(comm *, int, const unique_id *, int, comm **, void *);
int ncclCommFinalize(comm *);
int ncclCommDestroy(comm *);
int ncclCommAbort(comm *);
int ncclCommRevoke(comm *, int);
int ncclCommSuspend(comm *, int);
int ncclCommResume(comm *);
int ncclCommRegister(comm *, void *, size_t, void **);
int ncclCommDeregister(comm *, void *);
int ncclCommWindowRegister(comm *, void *, size_t, void **, int);
int ncclCommWindowDeregister(comm *, void *);
int ncclDevCommCreate(comm *, void *, void *);
int ncclDevCommDestroy(comm *, void *);

static comm *world;
static void *const S = (void *)0x1111, *const R = (void *)0x2222, *const STREAM = (void *)0x3333;

static double now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e9 + t.tv_nsec;
}

static void all_reduce(long n)
{
	for (long i = 0; i < n; i++)
		ncclAllReduce(S, R, 1000 + i, 7, 2, world, STREAM);
}

static int compare(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* Waits without sleeping: no sleep is as short as the time between two calls. */
static void pace(long rate, long n)
{
	double *took = n > 0 && n <= 50 * 1000 * 1000 ? malloc(n * sizeof(*took)) : NULL;
	double begun, start = now_ns();

	if (!took || rate <= 0)
		exit(2);
	for (long i = 0; i < n; i++) {
		do
			begun = now_ns();
		while (begun < start + i * 1e9 / rate);
		ncclAllReduce(S, R, 1000 + i, 7, 2, world, STREAM);
		took[i] = now_ns() - begun;
	}
	start = (now_ns() - start) / 1e9;
	qsort(took, n, sizeof(*took), compare);
	printf("seconds %.6f ns %.1f\n", start, took[n / 2]);
	free(took);
}

static void *thread(void *n)
{
	all_reduce((long)n);
	return NULL;
}

static void every(void)
{
	unique_id id;
	comm *made[3] = {NULL, NULL, NULL}, *other;
	int list[3] = {0, 1, 2};
	void *handle = NULL;

	ncclGetUniqueId(&id);
	ncclCommInitRankConfig(&other, 4, id, 3, NULL);
	ncclCommDestroy(other);
	ncclCommInitRankScalable(&other, 4, 2, 1, &id, NULL);
	ncclCommAbort(other);
	ncclCommInitAll(made, 3, list);
	ncclCommSplit(world, 5, 1, &other, NULL);
	ncclCommSplit(world, -1, 0, &other, NULL);
	ncclCommShrink(world, list, 1, &other, NULL, 0);
	ncclCommGrow(world, 9, &id, 8, &other, NULL);
	ncclCommGetUniqueId(world, &id);
	ncclAllReduce(S, R, 101, 7, 1, world, STREAM);
	ncclAllReduceConfig(S, R, 102, 7, 1, world, STREAM, NULL);
	ncclBroadcast(S, R, 103, 1, 6, world, STREAM);
	ncclBcast(R, 104, 2, 5, world, STREAM);
	ncclReduce(S, R, 105, 3, 4, 2, world, STREAM);
	ncclAllGather(S, R, 106, 4, world, STREAM);
	ncclReduceScatter(S, R, 107, 5, 3, world, STREAM);
	ncclAlltoAll(S, R, 108, 6, world, STREAM);
	ncclGather(S, R, 109, 7, 1, world, STREAM);
	ncclScatter(S, R, 110, 8, 0, world, STREAM);
	ncclGroupStart();
	ncclSend(S, 111, 9, 3, world, STREAM);
	ncclRecv(R, 112, 10, 4, world, STREAM);
	ncclGroupEnd();
	ncclGroupSimulateEnd(NULL);
	ncclPutSignal(S, 113, 7, 2, NULL, 0, 0, 0, 0, world, STREAM);
	ncclSignal(6, 0, 0, 0, world, STREAM);
	ncclWaitSignal(1, NULL, world, STREAM);
	ncclCommRegister(world, S, 4096, &handle);
	ncclCommDeregister(world, handle);
	ncclCommWindowRegister(world, S, 8192, &handle, 0);
	ncclCommWindowDeregister(world, handle);
	ncclDevCommCreate(world, NULL, NULL);
	ncclDevCommDestroy(world, NULL);
	ncclCommSuspend(world, 0);
	ncclCommResume(world);
	ncclCommRevoke(world, 0);
	ncclCommFinalize(world);
}

int main(int argc, char **argv)
{
	char line[256], command[32];
	unique_id id;

	setvbuf(stdout, NULL, _IOLBF, 0);
	ncclGetUniqueId(&id);
	ncclCommInitRank(&world, 4, id, argc > 1 ? atoi(argv[1]) : 0);
	printf("ready %d\n", getpid());
	while (fgets(line, sizeof(line), stdin)) {
		long a = 0, b = 0;
		sscanf(line, "%31s %ld %ld", command, &a, &b);
		if (!strcmp(command, "allreduce")) {
			all_reduce(a);
		} else if (!strcmp(command, "bcast")) {
			while (a-- > 0)
				ncclBcast(R, 1, 0, 0, world, STREAM);
		} else if (!strcmp(command, "threads")) {
			pthread_t threads[64];
			for (long i = 0; i < a && i < 64; i++)
				pthread_create(&threads[i], NULL, thread, (void *)b);
			for (long i = 0; i < a && i < 64; i++)
				pthread_join(threads[i], NULL);
		} else if (!strcmp(command, "fork")) {
			pid_t child = fork();
			if (child == 0) {
				all_reduce(a);
				_exit(0);
			}
			waitpid(child, NULL, 0);
			printf("child %d\n", child);
		} else if (!strcmp(command, "every")) {
			every();
		} else if (!strcmp(command, "comm")) {
			printf("comm %lx\n", (unsigned long)world);
		} else if (!strcmp(command, "time") || !strcmp(command, "time-group")) {
			int group = !strcmp(command, "time-group");
			double start = now_ns();
			for (long i = 0; i < a; i++) {
				if (group)
					ncclGroupEnd();
				else
					ncclAllReduce(S, R, 1, 7, 0, world, STREAM);
			}
			printf("ns %.1f\n", (now_ns() - start) / a);
		} else if (!strcmp(command, "pace")) {
			pace(a, b);
		} else if (!strcmp(command, "exec")) {
			execl("/proc/self/exe", argv[0], "1", (char *)NULL);
		} else if (!strcmp(command, "exec-true")) {
			execl("/bin/true", "true", (char *)NULL);
		} else if (!strcmp(command, "chaos")) {
			for (long i = 0; i < a; i++) {
				all_reduce(1);
				ncclGroupEnd();
				usleep(500);
			}
		} else {
			return 2;
		}
		puts("done");
	}
	return 0;
}
