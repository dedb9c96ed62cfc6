"""Which routers a running TCP flow passes: a bare segment under its five-tuple that dies on the way. Asked for by name only.

The ports of a running connection are taken, so :mod:`ncclwatch.pathprobe.hops` cannot send from them. Here an empty segment with
the flow's five-tuple and a time to live that ends before the destination is written by a raw socket: routers hash it as they
hash the flow, one of them answers, and the other host never sees it. The answer reaches this host's kernel too, which drops it:
its sequence number is not one of the connection's (``tcp_v4_err``, net/ipv4/tcp_ipv4.c: out of window); were it by chance, an
established connection only notes the error. Needs CAP_NET_RAW; IPv4 only.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import time
from collections.abc import Sequence

from ncclwatch.errors import PrivilegeError
from ncclwatch.pathprobe.hops import MOST_PATHS, TRIES, WAIT_S, Path, Trace

_TCP = struct.Struct("!HHIIBBHHH")
_ACK = 0x10
_TIME_EXCEEDED = 11


def traces(source: str, destination: str, paths: Sequence[Path], hops: int) -> list[Trace]:
    """Follow running flows over the ``hops`` routers that lie before the destination, as told by paths of our own.

    Raises :class:`PrivilegeError` where raw sockets are refused.
    """
    wanted = list(dict.fromkeys(paths))[:MOST_PATHS]
    try:
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP))
            back = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
            out.bind((source, 0))
            back.setblocking(False)
            found: dict[Path, list[str | None]] = {path: [] for path in wanted}
            for hop in range(1, hops + 1):
                out.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, hop)
                answers = _ask(out, back, source, destination, wanted)
                for path in wanted:
                    found[path].append(answers.get(path))
            return [Trace(path, tuple(found[path]), True) for path in wanted]
    except PermissionError:
        raise PrivilegeError("raw sockets are refused", "run as root, or with CAP_NET_RAW; or leave running flows out") from None


def _ask(out: socket.socket, back: socket.socket, source: str, destination: str, paths: Sequence[Path]) -> dict[Path, str]:
    found: dict[Path, str] = {}
    left = list(paths)
    for _ in range(TRIES):
        for port, source_port in left:
            with contextlib.suppress(BlockingIOError):
                out.sendto(segment(source, destination, source_port, port), (destination, 0))
        ends = time.monotonic() + WAIT_S
        while len(found) < len(paths) and (patience := ends - time.monotonic()) > 0:
            if not select.select([back], [], [], patience)[0]:
                break
            data, (router, *_) = back.recvfrom(2048)
            path = quoted(data, source, destination)
            if path is not None and path in paths:
                found[path] = router
        left = [path for path in left if path not in found]
        if not left:
            break
    return found


def segment(source: str, destination: str, source_port: int, port: int) -> bytes:
    """An empty segment with nothing but ACK set (RFC 9293, 3.1), checksum included."""
    # No secret: it must merely not be a number that the connection uses.
    sequence, acknowledged = random.getrandbits(32), random.getrandbits(32)
    header = _TCP.pack(source_port, port, sequence, acknowledged, 5 << 4, _ACK, 0, 0, 0)
    pseudo = socket.inet_aton(source) + socket.inet_aton(destination) + struct.pack("!HH", socket.IPPROTO_TCP, len(header))
    total = sum(struct.unpack(f"!{len(pseudo + header) // 2}H", pseudo + header))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return _TCP.pack(source_port, port, sequence, acknowledged, 5 << 4, _ACK, 0, ~total & 0xFFFF, 0)


def quoted(data: bytes, source: str, destination: str) -> Path | None:
    """The path of the segment that a message about exceeded time quotes (RFC 792); None for any other packet."""
    if len(data) < 20 or data[0] >> 4 != 4:
        return None
    start = (data[0] & 15) * 4
    inner = start + 8
    if len(data) < inner + 20 or data[start] != _TIME_EXCEEDED or data[inner] >> 4 != 4:
        return None
    ports = inner + (data[inner] & 15) * 4
    if data[inner + 9] != socket.IPPROTO_TCP or len(data) < ports + 4:
        return None
    if data[inner + 12 : inner + 20] != socket.inet_aton(source) + socket.inet_aton(destination):
        return None
    source_port, port = struct.unpack_from("!HH", data, ports)
    return port, source_port
