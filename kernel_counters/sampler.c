/* Words of GPU memory, read at the reader's request by the copy engine: a thread of its own, a stream of its own, nothing that a kernel
 * or a graph capture could wait for.
 *
 * Everything that might make the driver synchronise (stream, event, pinned buffer) is made when the first communicator of a GPU is
 * made, before kernels run on it that could wait for each other. Afterwards a round is: check every address, start the copies, record
 * an event, ask for it now and then. A copy engine that does not answer stops nobody but this thread, and shows in the frame. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "cuda.h"
#include "shim.h"

#define MAX_GPUS 16
#define IDLE_NS 100000000u
#define TIMED_NS 20000000u /* while operations are timed by events */
#define SHORTEST_NS 1000000u
#define LONGEST_NS 1000000000u
#define LONGEST_LEASE_NS 60000000000u
#define NICE 5

struct gpu {
	void *context;
	int device;
	bool ready, failed;
	void *stream, *event;
	uint64_t *buffer; /* pinned, one place a word */
	bool used;        /* in this round */
};

static struct gpu gpus[MAX_GPUS];
static unsigned known;                                        /* contexts taken over */
static pthread_mutex_t taking = PTHREAD_MUTEX_INITIALIZER;
static bool running, ending;

/* The request as last taken over: the shared one may change under our hands. */
static struct nw_wanted_word wanted[NW_FRAME_WORDS];
static struct gpu *served_by[NW_FRAME_WORDS];
static uint32_t words, taken_seq;
static uint64_t period_ns, expires_ns;

static void pause_ns(uint64_t nanoseconds)
{
	struct timespec time = {(time_t)(nanoseconds / 1000000000u), (long)(nanoseconds % 1000000000u)};
	nanosleep(&time, NULL);
}

static bool on_its_way_out(void)
{
	return __atomic_load_n(&ending, __ATOMIC_ACQUIRE);
}

/* --- the request --- */

/* Takes over a new request, whole or not at all. */
static void take_request(struct nw_frame *frame)
{
	static struct nw_wanted_word fresh[NW_FRAME_WORDS]; /* only this thread */
	const struct nw_request *request = &frame->request;
	uint32_t seq = __atomic_load_n(&request->seq, __ATOMIC_ACQUIRE);
	if (seq == taken_seq || (seq & 1))
		return;
	uint32_t count = NW_GET(request->count), period_us = NW_GET(request->period_us);
	uint64_t expires = NW_GET(request->expires_ns), now = nw_now(CLOCK_MONOTONIC);
	bool sound = count <= NW_FRAME_WORDS && period_us >= SHORTEST_NS / 1000 && period_us <= LONGEST_NS / 1000 &&
		     (expires <= now || expires - now <= LONGEST_LEASE_NS);
	if (sound)
		memcpy(fresh, request->words, count * sizeof *fresh);
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	if (NW_GET(request->seq) != seq)
		return; /* being written: next time */
	taken_seq = seq;
	if (!sound) {
		NW_COUNT(frame, malformed_requests);
		words = 0;
	} else {
		bool same = count == words && !memcmp(wanted, fresh, count * sizeof *fresh);
		memcpy(wanted, fresh, count * sizeof *fresh);
		words = count;
		period_ns = (uint64_t)period_us * 1000;
		expires_ns = expires;
		for (uint32_t index = 0; index < NW_FRAME_WORDS && !same; index++) {
			struct nw_word *word = &frame->words[index];
			if (!nw_write_begin(frame, &word->seq))
				continue;
			word->status = NW_WORD_NONE;
			word->address = index < count ? wanted[index].address : 0;
			word->value = word->time_ns = word->changes = word->changed_ns = 0;
			nw_write_end(&word->seq);
		}
	}
	NW_SET(frame->header.words, words);
	NW_SET(frame->header.period_us, (uint32_t)(period_ns / 1000));
	__atomic_store_n(&frame->header.request_seen, taken_seq, __ATOMIC_RELEASE);
}

/* Whether NCCL still keeps this very address where the request says. Any address may be asked for: the kernel checks the read. */
static bool is_held(const struct nw_wanted_word *word)
{
	uint64_t value = 0;
	struct iovec here = {&value, sizeof value}, there = {(void *)(uintptr_t)word->held_at, sizeof value};
	return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == (ssize_t)sizeof value && value == word->address;
}

/* --- GPUs --- */

static bool prepare(const struct nw_cuda *cuda, struct gpu *gpu, struct nw_frame *frame)
{
	int least = 0, greatest = 0;
	int error = cuda->set_context(gpu->context);
	if (!error)
		cuda->priority_range(&least, &greatest);
	if (!error)
		error = cuda->create_stream(&gpu->stream, NW_STREAM_NON_BLOCKING, least);
	if (!error)
		error = cuda->create_event(&gpu->event, NW_EVENT_DISABLE_TIMING);
	if (!error)
		error = cuda->allocate_host((void **)&gpu->buffer, NW_FRAME_WORDS * sizeof *gpu->buffer, 0);
	if (error)
		NW_SET(frame->header.last_error, error);
	return error == NW_CUDA_SUCCESS;
}

static unsigned prepare_all(const struct nw_cuda *cuda, struct nw_frame *frame)
{
	unsigned ready = 0;
	pthread_mutex_lock(&taking);
	unsigned count = known;
	pthread_mutex_unlock(&taking);
	for (unsigned index = 0; index < count; index++) {
		struct gpu *gpu = &gpus[index];
		if (!gpu->ready && !gpu->failed) {
			gpu->ready = prepare(cuda, gpu, frame);
			gpu->failed = !gpu->ready;
		}
		ready += gpu->ready;
	}
	return ready;
}

static bool is_gpu_memory(const struct nw_cuda *cuda, uint64_t address, int *device)
{
	unsigned type = 0;
	int managed = 0, mapped = 1;
	if (cuda->pointer_attribute(&type, NW_POINTER_MEMORY_TYPE, address) || type != NW_MEMORY_TYPE_DEVICE)
		return false;
	/* Managed memory could move because of the copy; reserved and unmapped addresses would be a fault of the whole context. */
	if (!cuda->pointer_attribute(&managed, NW_POINTER_IS_MANAGED, address) && managed)
		return false;
	if (!cuda->pointer_attribute(&mapped, NW_POINTER_MAPPED, address) && !mapped)
		return false;
	return !cuda->pointer_attribute(device, NW_POINTER_DEVICE_ORDINAL, address);
}

static struct gpu *gpu_of(int device)
{
	struct gpu *any = NULL;
	for (unsigned index = 0; index < MAX_GPUS; index++) {
		if (!gpus[index].ready)
			continue;
		if (gpus[index].device == device)
			return &gpus[index];
		any = any ? any : &gpus[index];
	}
	return any; /* a peer's memory, reached through a mapping */
}

static void set_status(struct nw_frame *frame, uint32_t index, enum nw_word_status status)
{
	struct nw_word *word = &frame->words[index];
	if (NW_GET(word->status) != status && nw_write_begin(frame, &word->seq)) {
		word->status = status;
		nw_write_end(&word->seq);
	}
}

/* Starts the copy of one word; what keeps it from being read otherwise. */
static enum nw_word_status begin_word(const struct nw_cuda *cuda, struct nw_frame *frame, uint32_t index)
{
	const struct nw_wanted_word *word = &wanted[index];
	int device = 0;
	served_by[index] = NULL;
	if (!word->address || !word->held_at || (word->size != 4 && word->size != 8) || word->address % word->size)
		return NW_WORD_MALFORMED;
	if (!is_held(word))
		return NW_WORD_NOT_HELD;
	struct gpu *gpu = is_gpu_memory(cuda, word->address, &device) ? gpu_of(device) : NULL;
	if (!gpu)
		return NW_WORD_NOT_DEVICE;
	int error = cuda->set_context(gpu->context);
	gpu->buffer[index] = 0;
	if (!error)
		error = cuda->copy_to_host(&gpu->buffer[index], word->address, word->size, gpu->stream);
	if (error) {
		NW_SET(frame->header.last_error, error);
		return NW_WORD_FAILED;
	}
	gpu->used = true;
	served_by[index] = gpu;
	return NW_WORD_IN_FLIGHT;
}

/* Whether the copies of one GPU have ended; waits as long as it takes, asking less and less often. */
static bool await(const struct nw_cuda *cuda, struct gpu *gpu, struct nw_frame *frame)
{
	int error = cuda->set_context(gpu->context);
	if (!error)
		error = cuda->record_event(gpu->event, gpu->stream);
	for (uint64_t wait = 20000; !error; wait = wait < 50000000u ? wait * 2 : wait) {
		error = cuda->query_event(gpu->event);
		if (error != NW_CUDA_NOT_READY)
			break;
		error = 0;
		if (on_its_way_out())
			return false;
		NW_SET(frame->header.heartbeat_ns, nw_now(CLOCK_MONOTONIC));
		pause_ns(wait);
	}
	if (error)
		NW_SET(frame->header.last_error, error);
	return error == NW_CUDA_SUCCESS;
}

static void publish(struct nw_frame *frame, uint32_t index, uint64_t now)
{
	struct nw_word *word = &frame->words[index];
	uint64_t value = served_by[index]->buffer[index];
	if (!nw_write_begin(frame, &word->seq))
		return;
	if (word->time_ns && word->value != value) {
		word->changes++;
		word->changed_ns = now;
	}
	word->status = NW_WORD_OK;
	word->value = value;
	word->time_ns = now;
	nw_write_end(&word->seq);
	NW_COUNT(frame, copies);
}

static void round_of_copies(const struct nw_cuda *cuda, struct nw_frame *frame)
{
	uint64_t begun = nw_now(CLOCK_MONOTONIC);
	/* Said before the first call: the driver itself may not come back. */
	__atomic_store_n(&frame->header.copy_begun_ns, begun, __ATOMIC_RELEASE);
	for (unsigned index = 0; index < MAX_GPUS; index++)
		gpus[index].used = false;
	for (uint32_t index = 0; index < words; index++) {
		enum nw_word_status status = begin_word(cuda, frame, index);
		if (status != NW_WORD_IN_FLIGHT)
			set_status(frame, index, status);
	}
	for (unsigned number = 0; number < MAX_GPUS; number++) {
		if (!gpus[number].used)
			continue;
		bool done = await(cuda, &gpus[number], frame);
		uint64_t now = nw_now(CLOCK_MONOTONIC);
		for (uint32_t index = 0; index < words; index++) {
			if (served_by[index] != &gpus[number])
				continue;
			if (done)
				publish(frame, index, now);
			else
				set_status(frame, index, NW_WORD_FAILED);
		}
	}
	if (on_its_way_out())
		return;
	NW_SET(frame->header.round_duration_ns, nw_now(CLOCK_MONOTONIC) - begun);
	NW_COUNT(frame, rounds);
	__atomic_store_n(&frame->header.copy_begun_ns, 0, __ATOMIC_RELEASE);
}

static void add_gpu(void *context, int device)
{
	pthread_mutex_lock(&taking);
	unsigned index = 0;
	while (index < known && gpus[index].context != context)
		index++;
	if (index == known && known < MAX_GPUS) {
		gpus[known].context = context;
		gpus[known].device = device;
		known++;
	}
	pthread_mutex_unlock(&taking);
}

/* The context of the thread that makes a communicator. */
static void take_context(void)
{
	const struct nw_cuda *cuda = nw_cuda_get();
	void *context = NULL;
	int device = 0;
	if (cuda && !cuda->get_context(&context) && context && !cuda->get_device(&device))
		add_gpu(context, device);
}

/* Loaded by the driver, we see no communicator being made: take over what contexts the process has made for itself, and make none. */
static void take_primary_contexts(const struct nw_cuda *cuda)
{
	int count = 0;
	if (!cuda->device_count || !cuda->primary_state || !cuda->retain_primary || cuda->device_count(&count))
		return;
	for (int device = 0; device < count; device++) {
		unsigned flags = 0;
		int active = 0;
		void *context = NULL;
		bool have = false;
		for (unsigned index = 0; index < known; index++)
			have = have || gpus[index].device == device;
		if (!have && !cuda->primary_state(device, &flags, &active) && active && !cuda->retain_primary(&context, device))
			add_gpu(context, device);
	}
}

/* --- the thread --- */

static void *sample(void *argument)
{
	struct nw_frame *frame = argument;
	int relaxed = NW_CAPTURE_MODE_RELAXED;
	bool capture_mode_set = false;
	/* Not SCHED_IDLE: a thread that is never scheduled while it holds a lock of the driver would stop the job. */
	setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), NICE);
	while (!on_its_way_out()) {
		uint64_t now = nw_now(CLOCK_MONOTONIC), sleep = IDLE_NS;
		NW_SET(frame->header.heartbeat_ns, now);
		const struct nw_cuda *cuda = nw_cuda_get();
		if (cuda && !capture_mode_set)
			/* Of this thread only: a capture in another thread is not disturbed by what we call. */
			capture_mode_set = cuda->exchange_capture_mode(&relaxed) == NW_CUDA_SUCCESS;
		if (cuda && NW_GET(frame->header.entry) == NW_ENTRY_INJECTION)
			take_primary_contexts(cuda);
		unsigned ready = cuda && capture_mode_set ? prepare_all(cuda, frame) : 0;
		if (nw_preload_poll())
			sleep = TIMED_NS;
		take_request(frame);
		bool asked = words && now < expires_ns;
		NW_SET(frame->header.sampler, !cuda			? NW_SAMPLER_NO_DRIVER
					      : !ready && known		? NW_SAMPLER_FAILED
					      : !ready			? NW_SAMPLER_NO_CONTEXT
					      : asked			? NW_SAMPLER_RUNNING
									: NW_SAMPLER_IDLE);
		if (asked && ready) {
			round_of_copies(cuda, frame);
			uint64_t took = nw_now(CLOCK_MONOTONIC) - now;
			/* At most half of this thread's time, however many words are asked for. */
			uint64_t rest = period_ns > 2 * took ? period_ns - took : took;
			sleep = rest < sleep || sleep == IDLE_NS ? rest : sleep;
		}
		pause_ns(sleep < LONGEST_NS ? sleep : LONGEST_NS);
	}
	NW_SET(frame->header.sampler, NW_SAMPLER_GONE);
	return NULL;
}

/* The driver shuts down after this; a thread that calls it then could hang or crash. Only said, not waited for. */
__attribute__((destructor)) static void say_it_ends(void)
{
	__atomic_store_n(&ending, true, __ATOMIC_RELEASE);
}

static void start_thread(struct nw_frame *frame)
{
	sigset_t all, before;
	pthread_attr_t attributes;
	pthread_t thread;
	/* The job's signal handlers are not run by our thread. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	if (!pthread_attr_init(&attributes)) {
		pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
		pthread_attr_setstacksize(&attributes, 256 * 1024);
		if (!pthread_create(&thread, &attributes, sample, frame))
			pthread_setname_np(thread, "ncclwatch");
		pthread_attr_destroy(&attributes);
	}
	pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void nw_sampler_start(struct nw_frame *frame)
{
	if (!nw_enabled("NCCLWATCH_SAMPLER", true)) {
		NW_SET(frame->header.sampler, NW_SAMPLER_OFF);
		return;
	}
	int error = errno;
	take_context();
	if (!__atomic_exchange_n(&running, true, __ATOMIC_ACQ_REL))
		start_thread(frame);
	errno = error;
}

void nw_sampler_after_fork(void)
{
	/* Threads and the driver's contexts stay with the parent. */
	memset(gpus, 0, sizeof gpus);
	known = words = taken_seq = 0;
	running = false;
	pthread_mutex_init(&taking, NULL);
}
