/* What NCCL's proxy service thread does with verbs, step by step, for a test of path_pins/labels.c: "s" makes a sender's queue pair
 * ready (memory is registered between its steps), "r" a receiver's, "S" one of another thread's. Each ends ready to send. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

static int (*modify)(void *, void *, int);
static void *(*reg)(void *, void *, size_t, int);

static int ready(uintptr_t pair, const char *gid, int sends) {
  unsigned char attr[144] = {0};
  int state = 1, done;
  memcpy(attr, &state, sizeof state);
  modify((void *)pair, attr, 1);
  if (sends) reg(NULL, attr, 1, 0);
  state = 2;
  memcpy(attr, &state, sizeof state);
  memset(attr + 56 + 10, 0xff, 2);
  sscanf(gid, "%hhu.%hhu.%hhu.%hhu", attr + 68, attr + 69, attr + 70, attr + 71);
  attr[85] = 1; /* is_global */
  done = modify((void *)pair, attr, 1 | 1 << 7);
  /* What NCCL passed is as it was. */
  if (done || attr[72] || attr[73] || attr[74]) return 1;
  state = 3;
  memcpy(attr, &state, sizeof state);
  return modify((void *)pair, attr, 1);
}

int main(int argc, char **argv) {
  void *verbs = dlopen(argv[1], RTLD_NOW);
  if (argc < 4 || verbs == NULL) return 2;
  prctl(PR_SET_NAME, "NCCL Service 0");
  modify = (int (*)(void *, void *, int))dlvsym(verbs, "ibv_modify_qp", "IBVERBS_1.1");
  reg = (void *(*)(void *, void *, size_t, int))dlvsym(verbs, "ibv_reg_mr", "IBVERBS_1.1");
  if (modify == NULL || reg == NULL || dlvsym(verbs, "ibv_none", "IBVERBS_1.1") != NULL) return 3;
  for (uintptr_t i = 0; argv[3][i]; i++) {
    prctl(PR_SET_NAME, argv[3][i] == 'S' ? "other" : "NCCL Service 0");
    if (ready(i, argv[2], argv[3][i] != 'r')) return 4;
  }
  return 0;
}
