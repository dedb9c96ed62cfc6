/* Source ports of running queue pairs, by request: NCCLWATCH_PATH_LIVE=FOLDER, with a secret in FOLDER/key (16 bytes at least, of this
 * user and readable by nobody else).
 *
 * A thread of ours listens on FOLDER/PID.sock for a line "KEY NUMBER PORT", and has the queue pair of that number leave by that UDP
 * source port: mlx5dv_modify_qp_udp_sport, which takes RC and UC queue pairs that are ready to send, of devices that can, and
 * changes nothing where it says EOPNOTSUPP (providers/mlx5/verbs.c of rdma-core). It is asked for only where that provider is loaded.
 * Without the variable or the key there is no thread, and no queue pair is kept. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "live.h"

#define NUMBER_AT 52 /* of qp_num in struct ibv_qp (infiniband/verbs.h), the same in all releases of rdma-core */
#define MOST_PAIRS 4096
#define MOST_LINE 256
#define LEAST_KEY 16
#define PATIENCE_S 2

typedef int (*move_t)(void *, uint16_t);
typedef int (*bond_t)(void *, uint8_t);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static void *pairs[MOST_PAIRS];
static unsigned kept;
static int is_live, entrance;
static char key[MOST_LINE], place[sizeof((struct sockaddr_un *)0)->sun_path];

static uint32_t number_of(const void *pair) {
  uint32_t number;
  memcpy(&number, (const char *)pair + NUMBER_AT, sizeof number);
  return number;
}

/* A function of the provider's, where that is loaded. */
static void *provided(const char *name) {
  void *provider = dlopen("libmlx5.so.1", RTLD_NOW | RTLD_NOLOAD);
  return provider != NULL ? dlsym(provider, name) : NULL;
}

void live_bond(void *pair, uint8_t port) {
  bond_t go = (bond_t)provided("mlx5dv_modify_qp_lag_port");
  if (go != NULL) go(pair, port);
}

/* Returns what the provider says: 0 or an errno. While it is asked no queue pair is destroyed. */
static int move(uint32_t number, uint16_t port) {
  move_t go = (move_t)provided("mlx5dv_modify_qp_udp_sport");
  int said = ENOENT;
  if (go == NULL) return EOPNOTSUPP;
  pthread_mutex_lock(&lock);
  for (unsigned i = 0; i < kept; i++)
    if (number_of(pairs[i]) == number) {
      said = go(pairs[i], port);
      break;
    }
  pthread_mutex_unlock(&lock);
  return said;
}

static int is_key(const char *given) {
  size_t length = strlen(key), differs = strlen(given) ^ length;
  for (size_t i = 0; i < length && given[i] != '\0'; i++) differs |= (size_t)(given[i] ^ key[i]);
  return differs == 0;
}

/* One request, and its answer: "0", or an errno. */
static void answer(int caller) {
  char line[2 * MOST_LINE] = "", given[MOST_LINE], said[16];
  struct timeval patience = {PATIENCE_S, 0};
  unsigned number, port;
  size_t length = 0;
  setsockopt(caller, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  while (length < sizeof line - 1 && strchr(line, '\n') == NULL) {
    ssize_t got = recv(caller, line + length, sizeof line - 1 - length, 0);
    if (got <= 0) return;
    length += (size_t)got;
    line[length] = '\0';
  }
  if (sscanf(line, "%255s %u %u", given, &number, &port) != 3 || !is_key(given))
    snprintf(said, sizeof said, "%d\n", EACCES);
  else
    snprintf(said, sizeof said, "%d\n", port < 0xC000 || port > 65535 ? EINVAL : move(number, (uint16_t)port));
  send(caller, said, strlen(said), MSG_NOSIGNAL);
}

static void *listens(void *nothing) {
  for (;;) {
    int caller = accept4(entrance, NULL, NULL, SOCK_CLOEXEC);
    if (caller < 0) {
      sleep(1); /* out of descriptors, say */
      continue;
    }
    answer(caller);
    close(caller);
  }
  return nothing;
}

/* Whether there is a key that only this user can read. */
static int read_key(const char *folder) {
  char path[sizeof place + 8];
  struct stat file;
  snprintf(path, sizeof path, "%s/key", folder);
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return 0;
  ssize_t got = -1;
  if (fstat(fd, &file) == 0 && S_ISREG(file.st_mode) && file.st_uid == geteuid() && (file.st_mode & 077) == 0)
    got = read(fd, key, sizeof key - 1);
  close(fd);
  key[got > 0 ? got : 0] = '\0';
  key[strcspn(key, " \t\r\n")] = '\0';
  return strlen(key) >= LEAST_KEY;
}

static int open_entrance(void) {
  struct sockaddr_un at = {.sun_family = AF_UNIX};
  memcpy(at.sun_path, place, sizeof place);
  unlink(place);
  entrance = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (entrance >= 0 && bind(entrance, (struct sockaddr *)&at, sizeof at) == 0 && chmod(place, 0600) == 0 && listen(entrance, 8) == 0)
    return 1;
  if (entrance >= 0) close(entrance);
  return 0;
}

static void begin(void) {
  const char *folder = getenv("NCCLWATCH_PATH_LIVE");
  pthread_t thread;
  sigset_t all, before;
  if (folder == NULL || *folder == '\0' || (size_t)snprintf(place, sizeof place, "%s/%d.sock", folder, getpid()) >= sizeof place) return;
  if (!read_key(folder) || !open_entrance()) return;
  /* Signals are the job's. */
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  is_live = pthread_create(&thread, NULL, listens, NULL) == 0 && pthread_detach(thread) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

__attribute__((destructor)) static void end(void) {
  if (is_live) unlink(place);
}

void live_keep(void *pair) {
  unsigned i = 0;
  pthread_once(&once, begin);
  if (!is_live) return;
  pthread_mutex_lock(&lock);
  while (i < kept && pairs[i] != pair) i++;
  if (i == kept && kept < MOST_PAIRS) pairs[kept++] = pair;
  pthread_mutex_unlock(&lock);
}

void live_drop(void *pair) {
  if (!is_live) return;
  pthread_mutex_lock(&lock);
  for (unsigned i = 0; i < kept; i++)
    if (pairs[i] == pair) pairs[i] = pairs[--kept];
  pthread_mutex_unlock(&lock);
}
