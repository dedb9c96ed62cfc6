"""One probe of one path, in a process of its own: ``python -m ncclwatch.pathprobe.child NAMESPACE ADDRESS PORT DEVICE SECONDS``.

It enters the network namespace of who is to be stood in for (``/proc/PID/ns/net``; a process with threads never could), probes
the address from there, and prints the outcome as JSON. The token comes by standard input. With an RDMA ``DEVICE`` it makes
zero-payload writes, by a queue pair of its own, to a listener there; where the ends cannot agree on that, or without a device,
it asks by TCP.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from dataclasses import asdict, replace

from ncclwatch.errors import NcclwatchError
from ncclwatch.pathprobe.outcome import Answer, Outcome
from ncclwatch.pathprobe.rdma import probe_rdma
from ncclwatch.pathprobe.tcp import probe_tcp

COUNT = 3
CLONE_NEWNET = 0x40000000


def enter(namespace: str) -> None:
    """Live in a network namespace from now on. Raises OSError."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_ino == os.stat("/proc/self/ns/net").st_ino:  # noqa: PTH116 - beside fstat
            return
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "its network namespace cannot be entered")
    finally:
        os.close(descriptor)


def probe(address: str, port: int, device: str, token: bytes, seconds: float) -> Outcome:
    """By RDMA where that is possible, else by TCP, with what forbade RDMA."""
    if not device:
        return probe_tcp(address, port, token=token, count=COUNT, timeout_s=seconds)
    by_rdma = probe_rdma(address, port, device, token=token, count=COUNT, timeout_s=seconds)
    if by_rdma.answer is not Answer.UNAVAILABLE:
        return by_rdma
    by_tcp = probe_tcp(address, port, token=token, count=COUNT, timeout_s=seconds)
    return replace(by_tcp, detail=f"{by_tcp.detail}; not probed by RDMA: {by_rdma.detail}")


def main() -> int:
    """Exit status 0 when the outcome was printed."""
    namespace, address, port, device, seconds = sys.argv[1:]
    token = sys.stdin.buffer.read()
    try:
        enter(namespace)
        outcome = probe(address, int(port), device, token, float(seconds))
    except (NcclwatchError, OSError) as error:
        outcome = Outcome("rdma" if device else "tcp", Answer.UNAVAILABLE, str(error), device)
    print(json.dumps(asdict(outcome)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
