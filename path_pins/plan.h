/* The plan that a job follows: LD_PRELOAD=libncclwatch_pins.so NCCLWATCH_PATH_PINS=FILE.
 *
 * The file is read anew for each connection, so that the next communicator follows a new plan:
 *
 *     ncclwatch-path-pins 1
 *     listen  RANK ADDRESS PORT [PORT ...]          a socket that listens on ADDRESS takes the first of these that is free
 *     connect RANK DESTINATION PORT SOURCE_PORT     a connection to DESTINATION:PORT leaves by SOURCE_PORT
 *     roce    RANK DESTINATION PORT [PORT ...]      queue pairs that send data to DESTINATION leave by these, in turns
 *     bond    RANK DESTINATION NUMBER [NUMBER ...]  and by these ports of a bond, from 1, in the same turns
 *
 * RANK and the addresses may be "*"; RANK is the variable of that name. */
#ifndef NCCLWATCH_PLAN_H
#define NCCLWATCH_PLAN_H
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <unistd.h>

#define MOST_BYTES 65536
#define HEADING "ncclwatch-path-pins 1\n"
#define SERVICE "NCCL Service"

static int is_service_thread(void) {
  char name[17] = "";
  return prctl(PR_GET_NAME, name) == 0 && strncmp(name, SERVICE, strlen(SERVICE)) == 0;
}

/* The whole file, ended by 0; 0 where there is none, or it is not ours. */
static size_t read_plan(char *text) {
  const char *path = getenv("NCCLWATCH_PATH_PINS");
  if (path == NULL || *path == '\0') return 0;
  int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return 0;
  size_t length = 0;
  for (;;) {
    ssize_t got = read(fd, text + length, MOST_BYTES - 1 - length);
    if (got <= 0) break;
    length += (size_t)got;
  }
  close(fd);
  text[length] = '\0';
  return strncmp(text, HEADING, strlen(HEADING)) == 0 ? length : 0;
}

static int names_me(const char *rank) {
  const char *mine = getenv("RANK");
  return strcmp(rank, "*") == 0 || (mine != NULL && strcmp(rank, mine) == 0);
}

static int names_address(const char *text, const struct sockaddr_storage *address) {
  char bytes[16];
  if (strcmp(text, "*") == 0) return 1;
  if (inet_pton(address->ss_family, text, bytes) != 1) return 0;
  if (address->ss_family == AF_INET) return memcmp(bytes, &((const struct sockaddr_in *)address)->sin_addr, 4) == 0;
  return memcmp(bytes, &((const struct sockaddr_in6 *)address)->sin6_addr, 16) == 0;
}
#endif
