"""Source ports of RoCE v2 as they are on the wire: packets that this host's kernel sends or hears, for a moment.

Only the head of each packet to UDP port 4791 is copied (a filter in the kernel decides), and the look ends as soon as every queue
pair that was asked for has been seen. A NIC that does RoCE in hardware shows its packets to no kernel, unless it is told to
(mlx5: a sniffer rule): there nothing is captured. Needs CAP_NET_RAW. IPv4.
"""

from __future__ import annotations

import contextlib
import ctypes
import select
import socket
import struct
import time
from collections import defaultdict
from collections.abc import Collection, Sequence

from ncclwatch.errors import PrivilegeError
from ncclwatch.paths.ports import ROCE_PORT

ETH_P_IP = 0x0800
SO_ATTACH_FILTER = 26
HEAD_BYTES = 96
"""Copied of a packet: IPv4 header (60 at most), UDP header (8), base transport header (12)."""
MAX_PACKETS = 200_000
"""Bound: packets of one look."""
AT_ONCE = 256
"""Bound: packets of one NIC before another is asked."""

QueuePairAt = tuple[str, int]
"""(address that sends, queue pair that it is sent to)."""

_FILTER = (
    (0x30, 0, 0, 9),  # ldb [9]: protocol
    (0x15, 0, 4, socket.IPPROTO_UDP),
    (0xB1, 0, 0, 0),  # ldxb 4 * ([0] & 15): length of the header
    (0x48, 0, 0, 2),  # ldh [x + 2]: destination port
    (0x15, 0, 1, ROCE_PORT),
    (0x06, 0, 0, HEAD_BYTES),
    (0x06, 0, 0, 0),
)
"""Classic BPF (linux/filter.h): code, jump if true, jump if false, constant. Packets begin with the IP header."""


def capture(netdevs: Sequence[str], wanted: Collection[QueuePairAt], seconds: float) -> dict[QueuePairAt, set[int]]:
    """UDP source ports by sender and queue pair, until each that is ``wanted`` was seen or the time is over.

    Raises :class:`PrivilegeError` without CAP_NET_RAW. A network device that does not exist shows nothing.
    """
    found: defaultdict[QueuePairAt, set[int]] = defaultdict(set)
    missing, ends = set(wanted), list[socket.socket]()
    with contextlib.ExitStack() as stack:
        for name in dict.fromkeys(netdevs):
            try:
                end = stack.enter_context(socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0))
            except PermissionError:
                raise PrivilegeError("packets cannot be captured", "run as root, or with CAP_NET_RAW") from None
            _attach(end)
            end.setblocking(False)
            with contextlib.suppress(OSError):
                end.bind((name, ETH_P_IP))
                ends.append(end)
        until, packets = time.monotonic() + seconds, 0
        while missing and ends and packets < MAX_PACKETS and (left := until - time.monotonic()) > 0:
            for end in select.select(ends, [], [], left)[0]:
                for _ in range(AT_ONCE):
                    try:
                        data = end.recv(HEAD_BYTES)
                    except OSError:
                        break
                    packets += 1
                    if (seen := parse(data)) is not None:
                        found[seen[0]].add(seen[1])
                        missing.discard(seen[0])
    return dict(found)


def parse(data: bytes) -> tuple[QueuePairAt, int] | None:
    """Who sends to which queue pair, and by which source port; ``None`` for what is no RoCE v2 over IPv4.

    The queue pair is bytes 5 to 7 of the base transport header, behind UDP (InfiniBand specification, 9.2).
    """
    start = (data[0] & 15) * 4 if data else 0
    if len(data) < start + 20 or start < 20 or data[0] >> 4 != 4 or data[9] != socket.IPPROTO_UDP:
        return None
    source_port, port = struct.unpack_from("!HH", data, start)
    if port != ROCE_PORT:
        return None
    return (socket.inet_ntoa(data[12:16]), int.from_bytes(data[start + 13 : start + 16], "big")), source_port


def _attach(end: socket.socket) -> None:
    code = b"".join(struct.pack("HBBI", *line) for line in _FILTER)
    kept = ctypes.create_string_buffer(code, len(code))
    end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(_FILTER), ctypes.addressof(kept)))
