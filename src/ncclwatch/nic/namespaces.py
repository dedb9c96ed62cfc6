"""Netlink sockets in another network namespace, made by a child: setns must never be called in a process that has threads."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ncclwatch.errors import NcclwatchError, PrivilegeError

_CHILD = """
import ctypes, os, socket, sys
namespace, channel, family, kind, protocol = sys.argv[1], *map(int, sys.argv[2:])
descriptor = os.open(namespace, os.O_RDONLY)
if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0x40000000):
    sys.exit(ctypes.get_errno())
made = socket.socket(family, kind, protocol)
with socket.socket(fileno=channel) as parent:
    socket.send_fds(parent, [b"x"], [made.fileno()])
"""


def open_socket(namespace: Path, family: int, kind: int, protocol: int) -> socket.socket:
    """A socket that lives in a network namespace (``/proc/PID/ns/net``); without a detour when that is our own.

    Raises :class:`PrivilegeError` when the namespace may not be entered, :class:`NcclwatchError` when it is gone.
    """
    try:
        theirs, ours = namespace.stat(), Path("/proc/self/ns/net").stat()
    except OSError as error:
        raise NcclwatchError(f"cannot look at {namespace}: {error.strerror}", "is the process still there?") from None
    if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
        return socket.socket(family, kind, protocol)
    here, there = socket.socketpair()
    with here, there:
        command = [sys.executable, "-I", "-c", _CHILD, str(namespace), str(there.fileno()), str(family), str(kind), str(protocol)]
        child = subprocess.run(command, pass_fds=[there.fileno()], capture_output=True, timeout=20, check=False)
        if child.returncode != 0:
            reason = os.strerror(child.returncode) if 0 < child.returncode < 133 else "the helper failed"
            raise PrivilegeError(
                f"cannot enter the network namespace {namespace}: {reason}", "run as root, or with CAP_SYS_ADMIN"
            )
        _, descriptors, _, _ = socket.recv_fds(here, 1, 1)
    if not descriptors:
        raise NcclwatchError(f"no socket came back from {namespace}", "try again")
    return socket.socket(fileno=descriptors[0])


def attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, value) of the attributes in the tail of a netlink message; ends at the first one that is damaged."""
    position = 0
    while position + 4 <= len(data):
        length, kind = struct.unpack_from("=HH", data, position)
        if length < 4 or position + length > len(data):
            return
        yield kind, data[position + 4 : position + length]
        position += length + 3 & ~3
