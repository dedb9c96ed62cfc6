// A network plugin for NCCL that is none of NCCL's own and uses no verbs: messages over loopback TCP, one connection each way.
//
// Interface 8 of NCCL's external networks (ncclNetPlugin_v8; NCCL 2.20 and later take it, see ext-net/README.md of NVIDIA/nccl).
// Load it with NCCL_NET_PLUGIN=/path/to/this.so. A message is its length (8 bytes) and its bytes; requests of one connection are
// done in their order, by whoever tests one of them.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef int result;  // ncclResult_t
enum { SUCCESS = 0, SYSTEM_ERROR = 2, INTERNAL_ERROR = 3 };
enum { HOST_POINTERS = 1, REQUESTS = 64 };

typedef struct {
  char* name;
  char* pciPath;
  uint64_t guid;
  int ptrSupport, regIsGlobal, speed, port;
  float latency;
  int maxComms, maxRecvs, netDeviceType, netDeviceVersion;
} properties;

typedef struct connection connection;
typedef struct {
  connection* on;
  char* data;
  uint64_t length, size, moved;  // length as it travels; size: what the receiver has room for; moved: header and data
  int used, done;
} request;

struct connection {
  int fd, sending;
  unsigned first, next;  // of the requests, in order
  request requests[REQUESTS];
};

static result make_connection(int fd, int sending, void** made) {
  connection* c = calloc(1, sizeof *c);
  int on = 1;
  if (!c) return SYSTEM_ERROR;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  c->fd = fd;
  c->sending = sending;
  *made = c;
  return SUCCESS;
}

static result init(void* log) {
  (void)log;
  return SUCCESS;
}

static result devices(int* count) {
  *count = 1;
  return SUCCESS;
}

static result get_properties(int device, properties* p) {
  (void)device;
  memset(p, 0, sizeof *p);
  p->name = "plain0";
  p->guid = 1;
  p->ptrSupport = HOST_POINTERS;
  p->speed = 10000;
  p->maxComms = 65536;
  p->maxRecvs = 1;
  return SUCCESS;
}

static result listen_on(int device, void* handle, void** made) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t length = sizeof address;
  int* fd = malloc(sizeof *fd);
  (void)device;
  if (!fd || (*fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) < 0 ||
      bind(*fd, (struct sockaddr*)&address, sizeof address) || listen(*fd, 16) ||
      getsockname(*fd, (struct sockaddr*)&address, &length))
    return SYSTEM_ERROR;
  memcpy(handle, &address, sizeof address);
  *made = fd;
  return SUCCESS;
}

static result connect_to(int device, void* handle, void** made, void** offload) {
  struct sockaddr_in address;
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  (void)device;
  (void)offload;
  memcpy(&address, handle, sizeof address);
  if (fd < 0 || connect(fd, (struct sockaddr*)&address, sizeof address)) return SYSTEM_ERROR;  // loopback: at once
  return make_connection(fd, 1, made);
}

static result accept_from(void* listening, void** made, void** offload) {
  int fd = accept4(*(int*)listening, NULL, NULL, SOCK_CLOEXEC);
  (void)offload;
  *made = NULL;
  if (fd < 0) return errno == EAGAIN ? SUCCESS : SYSTEM_ERROR;
  return make_connection(fd, 0, made);
}

static result reg_mr(void* on, void* data, size_t size, int type, void** handle) {
  (void)on, (void)data, (void)size, (void)type;
  *handle = NULL;
  return SUCCESS;
}

static result reg_dma_buf(void* on, void* data, size_t size, int type, uint64_t offset, int fd, void** handle) {
  (void)on, (void)data, (void)size, (void)type, (void)offset, (void)fd, (void)handle;
  return INTERNAL_ERROR;
}

static result dereg_mr(void* on, void* handle) {
  (void)on, (void)handle;
  return SUCCESS;
}

static void enqueue(connection* c, void* data, uint64_t size, void** made) {
  request* r = &c->requests[c->next % REQUESTS];
  *made = NULL;
  if (r->used) return;  // NCCL asks again
  *r = (request){.on = c, .data = data, .length = c->sending ? size : 0, .size = size, .used = 1};
  c->next++;
  *made = r;
}

static result isend(void* on, void* data, int size, int tag, void* handle, void** made) {
  (void)tag, (void)handle;
  enqueue(on, data, (uint64_t)size, made);
  return SUCCESS;
}

static result irecv(void* on, int n, void** data, int* sizes, int* tags, void** handles, void** made) {
  (void)tags, (void)handles;
  if (n != 1) return INTERNAL_ERROR;
  enqueue(on, data[0], (uint64_t)sizes[0], made);
  return SUCCESS;
}

static result iflush(void* on, int n, void** data, int* sizes, void** handles, void** made) {
  (void)on, (void)n, (void)data, (void)sizes, (void)handles;
  *made = NULL;
  return SUCCESS;
}

// Moves what it can of one request; the header first.
static result move(request* r) {
  const connection* c = r->on;
  while (!r->done) {
    const int in_header = r->moved < sizeof r->length;
    char* place = in_header ? (char*)&r->length + r->moved : r->data + (r->moved - sizeof r->length);
    const uint64_t left = in_header ? sizeof r->length - r->moved : r->length + sizeof r->length - r->moved;
    if (!in_header && left == 0) {
      r->done = 1;
      break;
    }
    const ssize_t got = c->sending ? send(c->fd, place, left, MSG_NOSIGNAL) : recv(c->fd, place, left, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return SUCCESS;
    if (got <= 0) return SYSTEM_ERROR;
    r->moved += (uint64_t)got;
    if (in_header && r->moved == sizeof r->length && r->length > r->size) return INTERNAL_ERROR;
  }
  return SUCCESS;
}

static result test(void* asked, int* done, int* size) {
  request* r = asked;
  connection* c = r->on;
  *done = 0;
  while (c->first != c->next) {
    request* head = &c->requests[c->first % REQUESTS];
    const result status = move(head);
    if (status != SUCCESS) return status;
    if (!head->done) break;
    c->first++;
  }
  if (r->done) {
    *done = 1;
    if (size) *size = (int)r->length;
    r->used = 0;
  }
  return SUCCESS;
}

static result close_connection(void* on) {
  connection* c = on;
  if (c) close(c->fd);
  free(c);
  return SUCCESS;
}

static result close_listening(void* listening) {
  if (listening) close(*(int*)listening);
  free(listening);
  return SUCCESS;
}

const struct {
  const char* name;
  result (*init)(void*);
  result (*devices)(int*);
  result (*get_properties)(int, properties*);
  result (*listen)(int, void*, void**);
  result (*connect)(int, void*, void**, void**);
  result (*accept)(void*, void**, void**);
  result (*reg_mr)(void*, void*, size_t, int, void**);
  result (*reg_dma_buf)(void*, void*, size_t, int, uint64_t, int, void**);
  result (*dereg_mr)(void*, void*);
  result (*isend)(void*, void*, int, int, void*, void**);
  result (*irecv)(void*, int, void**, int*, int*, void**, void**);
  result (*iflush)(void*, int, void**, int*, void**, void**);
  result (*test)(void*, int*, int*);
  result (*close_send)(void*);
  result (*close_recv)(void*);
  result (*close_listen)(void*);
  result (*get_device_mr)(void*, void*, void**);
  result (*recv_consumed)(void*, int, void*);
} ncclNetPlugin_v8 = {
    "PlainTCP", init, devices,  get_properties,   listen_on,        connect_to,      accept_from, reg_mr, reg_dma_buf, dereg_mr,
    isend,      irecv, iflush, test, close_connection, close_connection, close_listening, NULL,   NULL,
};
