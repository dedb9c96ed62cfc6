/* libmlx5.so.1 for a test of path_pins/live.c on a machine without such a NIC: a STAND-IN that moves nothing. It says what it was
 * asked, and that queue pair 7 cannot. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

int mlx5dv_modify_qp_udp_sport(void *pair, uint16_t port) {
  uint32_t number;
  memcpy(&number, (char *)pair + 52, sizeof number);
  if (number == 7) return EOPNOTSUPP;
  printf("moved %u %u\n", number, port);
  fflush(stdout);
  return 0;
}
