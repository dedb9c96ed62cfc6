/* libmlx5.so.1 for tests of path_pins/ on a machine without such a NIC: a STAND-IN that moves nothing. It says what it was asked, that
 * queue pair 7 cannot leave by another source port, and that the second queue pair of use_verbs.c cannot by another port of a bond. */
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

int mlx5dv_modify_qp_lag_port(void *pair, uint8_t port) {
  printf("bond %u %u\n", (unsigned)(uintptr_t)pair, port);
  fflush(stdout);
  return (uintptr_t)pair == 1 ? EOPNOTSUPP : 0;
}
