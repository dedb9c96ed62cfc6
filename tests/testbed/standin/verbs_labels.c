/* Verbs as NCCL asks for them, for tests of path_pins/labels.c and live.c on a machine without RDMA: a STAND-IN that sends nothing. It says
 * which flow label each queue pair was given when it became ready to receive, and when it is ready to send. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int ibv_modify_qp_1(void *pair, void *attr, int mask) {
  uint32_t label;
  int state;
  memcpy(&state, attr, sizeof state);
  memcpy(&label, (char *)attr + 72, sizeof label); /* ah_attr.grh.flow_label */
  if (state == 2) printf("label %u %u\n", (unsigned)(uintptr_t)pair, label);
  if (state == 3 && getenv("SAY_SENDS")) printf("sends %u\n", (unsigned)(uintptr_t)pair);
  fflush(stdout);
  return mask & 1 << 30 ? 22 : 0;
}
int ibv_destroy_qp_1(void *pair) { return pair == NULL; }
void *ibv_reg_mr_1(void *pd, void *address, size_t length, int access) {
  (void)pd, (void)length, (void)access;
  return address;
}
__asm__(".symver ibv_modify_qp_1,ibv_modify_qp@@IBVERBS_1.1");
__asm__(".symver ibv_destroy_qp_1,ibv_destroy_qp@@IBVERBS_1.1");
__asm__(".symver ibv_reg_mr_1,ibv_reg_mr@@IBVERBS_1.1");
