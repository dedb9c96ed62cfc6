/* The shared segment: made once a process, found by the agent among the process's descriptors and mappings. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shim.h"

/* By this symbol the agent knows that a library which exports NCCL's functions is not NCCL. */
NW_EXPORT const unsigned ncclwatchCounters = NW_FRAME_VERSION;

static struct nw_frame *current;
static bool refused; /* it could not be made: not tried again */
static int descriptor = -1;
static pthread_mutex_t making = PTHREAD_MUTEX_INITIALIZER;

bool nw_enabled(const char *variable, bool otherwise)
{
	const char *value = getenv(variable);
	if (!value || !*value)
		return otherwise;
	return strcmp(value, "0") != 0;
}

/* Field 22 of /proc/self/stat: with the pid it names this life of this process. */
static uint64_t start_time(void)
{
	char text[1024];
	int file = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return 0;
	ssize_t length = read(file, text, sizeof text - 1);
	close(file);
	if (length <= 0)
		return 0;
	text[length] = 0;
	char *at = strrchr(text, ')'); /* the name may hold blanks and parentheses */
	for (int field = 2; at && field < 22; field++)
		at = strchr(at + 1, ' ');
	return at ? strtoull(at + 1, NULL, 10) : 0;
}

/* A file in memory without a name: no path that could be linked elsewhere, and gone with the last process that maps it. It is
 * sealed: nobody can make it shorter under the job's mapping. */
static int nameless(void)
{
	int file = memfd_create("ncclwatch-frame", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (file < 0)
		return -1;
	if (fchmod(file, 0600) || posix_fallocate(file, 0, sizeof(struct nw_frame)) ||
	    fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
		close(file);
		return -1;
	}
	return file;
}

/* A named file, where the user asks for one (NCCLWATCH_FRAME_DIR): stays when the process dies, for a look afterwards. The folder
 * must be the user's own or root's and not writable by others (or sticky); the name must be new, and a link is not followed. */
static int named(const char *folder, uint64_t started)
{
	struct stat about;
	int file = -1;
	int parent = open(folder, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (parent < 0)
		return -1;
	if (fstat(parent, &about) || (about.st_uid != geteuid() && about.st_uid != 0) ||
	    ((about.st_mode & 0022) && !(about.st_mode & 01000)))
		goto out;
	char name[64];
	snprintf(name, sizeof name, "ncclwatch-%d-%llu.frame", (int)getpid(), (unsigned long long)started);
	file = openat(parent, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
	if (file < 0)
		goto out;
	/* All of it at once: a full file system shows here, not as SIGBUS later. */
	if (fchmod(file, 0600) || posix_fallocate(file, 0, sizeof(struct nw_frame)) || fstat(file, &about) || !S_ISREG(about.st_mode) ||
	    about.st_uid != geteuid() || about.st_nlink != 1 || about.st_size != sizeof(struct nw_frame)) {
		unlinkat(parent, name, 0);
		close(file);
		file = -1;
	}
out:
	close(parent);
	return file;
}

static void after_fork_in_child(void)
{
	/* The frame is the parent's. A child that uses NCCL itself gets its own. */
	struct nw_frame *old = current;
	current = NULL;
	refused = false;
	if (old)
		munmap(old, sizeof *old);
	if (descriptor >= 0)
		close(descriptor);
	descriptor = -1;
	pthread_mutex_init(&making, NULL);
	nw_record_after_fork();
	nw_sampler_after_fork();
}

static struct nw_frame *make(void)
{
	_Static_assert(sizeof(struct nw_frame) % 4096 == 0 && offsetof(struct nw_frame, request) % 4096 == 0, "pages");
	static bool watching_forks;
	if (!watching_forks) {
		if (pthread_atfork(NULL, NULL, after_fork_in_child))
			return NULL;
		watching_forks = true;
	}
	uint64_t started = start_time();
	const char *folder = getenv("NCCLWATCH_FRAME_DIR");
	int file = folder && *folder ? named(folder, started) : nameless();
	if (file < 0)
		return NULL;
	struct nw_frame *frame = mmap(NULL, sizeof *frame, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (frame == MAP_FAILED) {
		close(file);
		return NULL;
	}
	/* What the reader writes the shim only reads: that no bug of ours reaches it. */
	mprotect(&frame->request, sizeof frame->request, PROT_READ);
	struct nw_frame_header *header = &frame->header;
	header->version = NW_FRAME_VERSION;
	header->size = sizeof *frame;
	header->pid = (uint32_t)getpid();
	header->start_time = started;
	header->created_ns = nw_now(CLOCK_MONOTONIC);
	header->created_wall_ns = nw_now(CLOCK_REALTIME);
	header->sampler = NW_SAMPLER_NO_CONTEXT;
	__atomic_store_n(&header->magic, NW_FRAME_MAGIC, __ATOMIC_RELEASE);
	descriptor = file; /* kept open: the agent reaches the frame through it */
	return frame;
}

struct nw_frame *nw_frame_current(void)
{
	return __atomic_load_n(&current, __ATOMIC_ACQUIRE);
}

struct nw_frame *nw_frame_get(void)
{
	struct nw_frame *frame = nw_frame_current();
	if (frame || __atomic_load_n(&refused, __ATOMIC_ACQUIRE))
		return frame;
	int error = errno;
	pthread_mutex_lock(&making);
	frame = current;
	if (!frame && !refused) {
		frame = nw_enabled("NCCLWATCH_SHIM", true) ? make() : NULL;
		__atomic_store_n(&refused, frame == NULL, __ATOMIC_RELEASE);
		__atomic_store_n(&current, frame, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&making);
	errno = error;
	return frame;
}
