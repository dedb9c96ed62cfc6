/* Source ports of NCCL's data connections over sockets, as a file says (plan.h). Only NCCL's proxy service thread is obeyed, which makes
 * data connections and nothing else (src/proxy.cc of v2.21.5-1, ncclProxyService); it is known by its name, which NCCL gives it
 * if NCCL_SET_THREAD_NAME is set. Without a file, without a fitting line, and whenever a port cannot be had, everything is as
 * without this library: no error is made here. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "plan.h"

typedef int (*call_t)(int, const struct sockaddr *, socklen_t);

static call_t next_function(const char *name, call_t *kept) {
  if (*kept == NULL) *kept = (call_t)dlsym(RTLD_NEXT, name);
  return *kept;
}

static call_t real_bind, real_connect;

__attribute__((constructor)) static void begin(void) {
  const char *file = getenv("NCCLWATCH_PATH_PINS"), *folder = getenv("NCCLWATCH_PATH_LIVE");
  if ((file != NULL && *file != '\0') || (folder != NULL && *folder != '\0')) setenv("NCCL_SET_THREAD_NAME", "1", 0);
}

static in_port_t *port_of(struct sockaddr_storage *address) {
  if (address->ss_family == AF_INET) return &((struct sockaddr_in *)address)->sin_port;
  if (address->ss_family == AF_INET6) return &((struct sockaddr_in6 *)address)->sin6_port;
  return NULL;
}

/* A copy of the address, where this call is one that a plan may speak of. */
static int is_ours(int fd, const struct sockaddr *address, socklen_t length, struct sockaddr_storage *copy) {
  int type = 0;
  socklen_t size = sizeof type;
  if (address == NULL || length > sizeof *copy || length < sizeof(struct sockaddr_in)) return 0;
  if (!is_service_thread()) return 0;
  memset(copy, 0, sizeof *copy);
  memcpy(copy, address, length);
  if (copy->ss_family == AF_INET6 && length < sizeof(struct sockaddr_in6)) return 0;
  return port_of(copy) != NULL && getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM;
}

int bind(int fd, const struct sockaddr *address, socklen_t length) {
  call_t go = next_function("bind", &real_bind);
  struct sockaddr_storage copy;
  char text[MOST_BYTES], *line, *lines = NULL;
  int saved = errno;
  if (go == NULL) return errno = ENOSYS, -1;
  if (is_ours(fd, address, length, &copy) && *port_of(&copy) == 0 && read_plan(text) > 0) {
    for (line = strtok_r(text, "\n", &lines); line != NULL; line = strtok_r(NULL, "\n", &lines)) {
      char rank[32], host[64];
      int at = 0, port, used;
      if (sscanf(line, "listen %31s %63s%n", rank, host, &at) != 2 || !names_me(rank) || !names_address(host, &copy)) continue;
      while (sscanf(line + at, "%d%n", &port, &used) == 1) {
        at += used;
        if (port <= 0 || port > 65535) continue;
        *port_of(&copy) = htons((uint16_t)port);
        if (go(fd, (const struct sockaddr *)&copy, length) == 0) return errno = saved, 0;
      }
    }
  }
  errno = saved;
  return go(fd, address, length);
}

/* Give a socket that cannot use its port another one behind the same descriptor. */
static int start_anew(int fd, int family) {
  int fresh = socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0), flags = fcntl(fd, F_GETFL), ok;
  if (fresh < 0) return 0;
  /* Sizes of buffers are left to the kernel, as NCCL leaves them unless told otherwise: reading them back would double them. */
  int value = 0;
  socklen_t size = sizeof value;
  if (getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, &size) == 0) setsockopt(fresh, IPPROTO_TCP, TCP_NODELAY, &value, size);
  if (flags >= 0) fcntl(fresh, F_SETFL, flags);
  ok = dup2(fresh, fd) == fd;
  close(fresh);
  return ok;
}

/* Bind a socket to the port a plan gives this connection; whether it was. */
static int pin(int fd, const struct sockaddr_storage *to) {
  struct sockaddr_storage here, copy = *to;
  socklen_t size = sizeof here;
  char text[MOST_BYTES], *line, *lines = NULL;
  int wanted = ntohs(*port_of(&copy)), on = 1;
  if (getsockname(fd, (struct sockaddr *)&here, &size) != 0 || port_of(&here) == NULL || *port_of(&here) != 0) return 0;
  if (read_plan(text) == 0) return 0;
  for (line = strtok_r(text, "\n", &lines); line != NULL; line = strtok_r(NULL, "\n", &lines)) {
    char rank[32], host[64];
    int port, source;
    if (sscanf(line, "connect %31s %63s %d %d", rank, host, &port, &source) != 4) continue;
    if (port != wanted || source <= 0 || source > 65535 || !names_me(rank) || !names_address(host, to)) continue;
    memset(&here, 0, sizeof here);
    here.ss_family = to->ss_family;
    *port_of(&here) = htons((uint16_t)source);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    size = to->ss_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);
    call_t go = next_function("bind", &real_bind);
    if (go != NULL && go(fd, (const struct sockaddr *)&here, size) == 0) return 1;
  }
  return 0;
}

int connect(int fd, const struct sockaddr *address, socklen_t length) {
  call_t go = next_function("connect", &real_connect);
  struct sockaddr_storage copy;
  int saved = errno, pinned, done;
  if (go == NULL) return errno = ENOSYS, -1;
  pinned = is_ours(fd, address, length, &copy) && pin(fd, &copy);
  errno = saved;
  done = go(fd, address, length);
  /* The same two ends have been connected a moment ago: another port is better than none. */
  if (done != 0 && pinned && errno == EADDRNOTAVAIL && start_anew(fd, copy.ss_family)) done = go(fd, address, length);
  return done;
}
