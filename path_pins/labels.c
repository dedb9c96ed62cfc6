/* Flow labels of NCCL's queue pairs over RoCE v2, as the plan says ("roce" lines of plan.h).
 *
 * NCCL leaves the flow label at 0, so that the driver makes the UDP source port of the numbers of both queue pairs. A label that is
 * not 0 gives the port instead: rdma_flow_label_to_udp_sport, include/rdma/ib_verbs.h of Linux. It is set when a queue pair becomes
 * ready to receive (INIT to RTR), for that call; of a failure NCCL hears as ever.
 *
 * NCCL looks verbs up by dlopen and dlvsym (src/misc/ibvsymbols.cc), which no symbol of ours stands before: so it is dlvsym that is.
 * Every other look-up goes on to the next dlvsym as a jump, so that RTLD_NEXT means what it means to the caller.
 *
 * Which queue pairs send data is not said by verbs. A sender makes its queue pairs, registers memory and waits for the other end; a
 * receiver has each ready at once (ncclIbConnect and ncclIbAccept, src/transport/net_ib.cc of v2.27.5-1). So one is a sender's when
 * memory was registered between the two steps. What is taken for one wrongly leaves by a port of the plan, and nothing else.
 *
 * Where the plan names ports of a bond too ("bond" lines), the queue pair gets its own by mlx5dv_modify_qp_lag_port as soon as it is
 * ready to send: before that the call says EOPNOTSUPP, and a later change of state may undo it (providers/mlx5/mlx5.c and the manual
 * page in rdma-core; the device needs rts2rts_lag_tx_port_affinity). Where it is refused, the adapter chooses as ever. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stdint.h>

#include "live.h"
#include "plan.h"

#define IBV_QP_STATE 1
#define IBV_QP_AV (1 << 7)
#define IBV_QPS_INIT 1
#define IBV_QPS_RTR 2
#define IBV_QPS_RTS 3
#define LOWEST_PORT 0xC000
#define MOST_PEERS 1024
#define MOST_STARTED 256
#define MOST_BOND 15 /* num_lag_ports has four bits (providers/mlx5/mlx5_ifc.h of rdma-core) */

/* The beginning of struct ibv_qp_attr (infiniband/verbs.h), which is the same in all releases of rdma-core. */
struct qp_attr {
  int state, current_state, mtu, migration;
  uint32_t qkey, receive_number, send_number, peer;
  unsigned access;
  uint32_t capacity[5];
  struct {
    union {
      uint8_t raw[16];
      uint64_t words[2];
    } dgid;
    uint32_t flow_label;
    uint8_t sgid_index, hop_limit, traffic_class;
  } grh;
  uint16_t dlid;
  uint8_t sl, source_path, rate, is_global, port;
};
_Static_assert(sizeof(struct qp_attr) == 88, "struct ibv_qp_attr up to ah_attr");

typedef void *(*lookup_t)(void *, const char *, const char *);
typedef int (*modify_t)(void *, void *, int);
typedef int (*destroy_t)(void *);
typedef void *(*reg_t)(void *, void *, size_t, int);
typedef void *(*reg_iova_t)(void *, void *, size_t, uint64_t, unsigned);
typedef void *(*reg_dmabuf_t)(void *, uint64_t, size_t, uint64_t, int, int);

static lookup_t real_lookup;
static modify_t real_modify;
static destroy_t real_destroy;
static reg_t real_reg;
static reg_iova_t real_reg_iova;
static reg_dmabuf_t real_reg_dmabuf;

/* Of this thread: how often memory was registered, and how often it had been when each queue pair was made ready to begin; the port of
 * a bond that it is to have once it is ready to send. */
static _Thread_local unsigned registered;
static _Thread_local struct start {
  void *pair;
  unsigned registered;
  int bond;
} started[MOST_STARTED];
static _Thread_local unsigned next_started;

/* How many queue pairs have gone to each destination. */
static atomic_flag busy = ATOMIC_FLAG_INIT;
static struct {
  uint8_t gid[16];
  unsigned number;
} peers[MOST_PEERS];
static unsigned known_peers;

static struct start *start_of(const void *pair) {
  for (unsigned i = 0; i < MOST_STARTED; i++)
    if (started[i].pair == pair) return &started[i];
  return NULL;
}

static void begins(void *pair) {
  struct start *one = start_of(pair);
  if (one == NULL) one = &started[next_started++ % MOST_STARTED];
  *one = (struct start){pair, registered, 0};
}

static int sends_data(const struct start *one) { return one != NULL && one->registered != registered; }

/* How many there were before to this destination; none is counted where too many are known. */
static unsigned number_of(const uint8_t *gid) {
  unsigned number = 0, i = 0;
  while (atomic_flag_test_and_set_explicit(&busy, memory_order_acquire)) continue;
  while (i < known_peers && memcmp(peers[i].gid, gid, 16) != 0) i++;
  if (i < MOST_PEERS) {
    if (i == known_peers) memcpy(peers[known_peers++].gid, gid, 16);
    number = peers[i].number++;
  }
  atomic_flag_clear_explicit(&busy, memory_order_release);
  return number;
}

/* The address that a RoCE v2 GID is: IPv4 in its mapped form (::ffff:a.b.c.d), else IPv6. */
static void address_of(const uint8_t *gid, struct sockaddr_storage *address) {
  static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  memset(address, 0, sizeof *address);
  if (memcmp(gid, mapped, sizeof mapped) == 0) {
    address->ss_family = AF_INET;
    memcpy(&((struct sockaddr_in *)address)->sin_addr, gid + 12, 4);
  } else {
    address->ss_family = AF_INET6;
    memcpy(&((struct sockaddr_in6 *)address)->sin6_addr, gid, 16);
  }
}

/* What of a line's numbers, from here on, is a queue pair's turn; 0 where there are none. */
static int in_turn(const char *numbers, unsigned turn) {
  int one, used, many = 0, at = 0;
  for (; sscanf(numbers + at, "%d%n", &one, &used) == 1; at += used) many++;
  if (many == 0) return 0;
  turn %= (unsigned)many;
  for (at = 0; sscanf(numbers + at, "%d%n", &one, &used) == 1; at += used)
    if (turn-- == 0) return one;
  return 0;
}

/* The source port that the plan gives this queue pair, and the port of a bond; each 0 for none. */
static void by_plan(const uint8_t *gid, int *port, int *bond) {
  char text[MOST_BYTES], *line, *lines = NULL;
  struct sockaddr_storage to;
  unsigned turn = 0;
  int counted = 0;
  *port = *bond = 0;
  if (read_plan(text) == 0) return;
  address_of(gid, &to);
  for (line = strtok_r(text, "\n", &lines); line != NULL; line = strtok_r(NULL, "\n", &lines)) {
    char kind[8], rank[32], host[64];
    int at = 0, *found;
    if (sscanf(line, "%7s %31s %63s%n", kind, rank, host, &at) != 3 || !names_me(rank) || !names_address(host, &to)) continue;
    found = strcmp(kind, "roce") == 0 ? port : strcmp(kind, "bond") == 0 ? bond : NULL;
    if (found == NULL || *found != 0) continue;
    if (!counted++) turn = number_of(gid);
    *found = in_turn(line + at, turn);
  }
  if (*port < LOWEST_PORT || *port > 65535) *port = 0;
  if (*bond < 1 || *bond > MOST_BOND) *bond = 0;
}

/* A label that gives this port. Its low 14 bits are the port's; 0 would mean none, and then bits 14 and 0 cancel out. */
static uint32_t label_of(int port) {
  uint32_t low = (uint32_t)port & 0x3fff;
  return low != 0 ? low : (1u << 14 | 1u);
}

/* A step of a queue pair of the service thread's. */
static int step(void *pair, struct qp_attr *attr, int mask) {
  int port, done;
  struct start *one;
  if (attr->state == IBV_QPS_INIT) begins(pair);
  if (attr->state != IBV_QPS_RTR || (mask & IBV_QP_AV) == 0 || !attr->is_global || attr->grh.flow_label != 0 ||
      !sends_data(one = start_of(pair)))
    return real_modify(pair, attr, mask);
  by_plan(attr->grh.dgid.raw, &port, &one->bond);
  if (port != 0) attr->grh.flow_label = label_of(port);
  done = real_modify(pair, attr, mask);
  attr->grh.flow_label = 0;
  return done;
}

static int modify(void *pair, void *given, int mask) {
  struct qp_attr *attr = given;
  if (attr == NULL || (mask & IBV_QP_STATE) == 0 || !is_service_thread()) return real_modify(pair, given, mask);
  int done = step(pair, attr, mask);
  if (done == 0 && attr->state == IBV_QPS_RTS) {
    struct start *one = start_of(pair);
    if (one != NULL && one->bond != 0) live_bond(pair, (uint8_t)one->bond);
    live_keep(pair);
  }
  return done;
}

static int destroy(void *pair) {
  live_drop(pair);
  return real_destroy(pair);
}

static void *reg(void *pd, void *address, size_t length, int access) {
  registered++;
  return real_reg(pd, address, length, access);
}

static void *reg_iova(void *pd, void *address, size_t length, uint64_t iova, unsigned access) {
  registered++;
  return real_reg_iova(pd, address, length, iova, access);
}

static void *reg_dmabuf(void *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access) {
  registered++;
  return real_reg_dmabuf(pd, offset, length, iova, fd, access);
}

static int is_set(const char *name) {
  const char *value = getenv(name);
  return value != NULL && *value != '\0';
}

/* What stands before a function of verbs; NULL where nothing does. The real one is kept beside. */
static void *before(void *handle, const char *name, const char *version) {
  static const struct {
    const char *name;
    void *ours;
    void **real;
  } known[] = {
      {"ibv_modify_qp", (void *)modify, (void **)&real_modify},
      {"ibv_destroy_qp", (void *)destroy, (void **)&real_destroy},
      {"ibv_reg_mr", (void *)reg, (void **)&real_reg},
      {"ibv_reg_mr_iova2", (void *)reg_iova, (void **)&real_reg_iova},
      {"ibv_reg_dmabuf_mr", (void *)reg_dmabuf, (void **)&real_reg_dmabuf},
  };
  if ((!is_set("NCCLWATCH_PATH_PINS") && !is_set("NCCLWATCH_PATH_LIVE")) || handle == RTLD_NEXT || handle == RTLD_DEFAULT) return NULL;
  for (unsigned i = 0; i < sizeof known / sizeof *known; i++)
    if (strcmp(name, known[i].name) == 0) {
      void *real = real_lookup(handle, name, version);
      if (real == NULL) return NULL;
      *known[i].real = real;
      return known[i].ours;
    }
  return NULL;
}

__attribute__((optimize("O2"))) void *dlvsym(void *handle, const char *name, const char *version) {
  if (real_lookup == NULL) real_lookup = (lookup_t)dlsym(RTLD_NEXT, "dlvsym");
  if (real_lookup == NULL) return NULL;
  if (strncmp(name, "ibv_", 4) == 0) {
    void *ours = before(handle, name, version);
    if (ours != NULL) return ours;
  }
  return real_lookup(handle, name, version);
}
