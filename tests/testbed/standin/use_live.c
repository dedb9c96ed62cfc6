/* What NCCL's proxy service thread does with verbs, for a test of path_pins/live.c: makes queue pairs 5, 6 and 7 ready to send, says
 * so, and destroys number 6 when a line comes; the end of the input ends it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

int main(int argc, char **argv) {
  static unsigned char pairs[3][64];
  void *verbs = dlopen(argv[1], RTLD_NOW);
  int word;
  if (argc < 2 || verbs == NULL) return 2;
  prctl(PR_SET_NAME, "NCCL Service 0");
  int (*modify)(void *, void *, int) = (int (*)(void *, void *, int))dlvsym(verbs, "ibv_modify_qp", "IBVERBS_1.1");
  int (*destroy)(void *) = (int (*)(void *))dlvsym(verbs, "ibv_destroy_qp", "IBVERBS_1.1");
  if (modify == NULL || destroy == NULL) return 3;
  for (uint32_t i = 0; i < 3; i++) {
    unsigned char attr[144] = {3};
    uint32_t number = 5 + i;
    memcpy(pairs[i] + 52, &number, sizeof number);
    if (modify(pairs[i], attr, 1) != 0) return 4;
  }
  for (puts("ready"), fflush(stdout); (word = getchar()) != EOF;)
    if (word == '\n') printf("destroyed %d\n", destroy(pairs[1])), fflush(stdout);
  return 0;
}
