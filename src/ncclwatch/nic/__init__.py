"""NICs and links of a node: RDMA ports and network devices (sysfs, netlink), TCP sockets (sock_diag), the kernel's log
(/dev/kmsg)."""
