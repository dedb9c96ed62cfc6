"""TCP sockets of a process with what the kernel measures on them (TCP_INFO), by netlink sock_diag.

Decoded here rather than by pyroute2, whose generic decoder takes 0.4 ms a socket: a node has thousands, and a job is looked at
every second. Layouts: include/uapi/linux/inet_diag.h and tcp.h; ``struct tcp_info`` only ever grew at its end, so fields are
read as far as the kernel's answer goes.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ncclwatch.errors import NcclwatchError
from ncclwatch.nic.namespaces import open_socket

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
INET_DIAG_INFO = 2
NLM_F_REQUEST_DUMP = 0x301
NLMSG_ERROR = 2
NLMSG_DONE = 3
TCP_ESTABLISHED = 1
RECEIVE_BYTES = 1 << 16

_REQUEST = struct.Struct("=IHHIIBBBBI48s")
_HEADER = struct.Struct("=IHHII")
_INODE_AT = struct.Struct("=I")
_ATTRIBUTE = struct.Struct("=HH")
_MESSAGE_SIZE = 72
"""``struct inet_diag_msg``: family, state, timer, retrans, id (ports and addresses in network order), expires, queues, uid,
inode."""

_INODE = 68
"""Offset of the inode in it."""

_STATES = [
    "?",
    "established",
    "syn-sent",
    "syn-recv",
    "fin-wait1",
    "fin-wait2",
    "time-wait",
    "close",
    "close-wait",
    "last-ack",
    "listen",
    "closing",
]


@dataclass(slots=True)
class TcpSocket:
    """One TCP socket at one moment. Times are in µs, rates in bytes a second, the rest in bytes, packets or a plain count; totals
    since it connected.

    Members that this kernel does not report are ``None``. Not frozen, for hundreds are made at every look; nobody changes one.
    """

    local: str
    local_port: int
    remote: str
    remote_port: int
    state: str
    inode: int
    receive_queue: int
    send_queue: int
    rtt_us: int | None = None
    rtt_variance_us: int | None = None
    congestion_window: int | None = None
    retransmits: int | None = None
    unacknowledged: int | None = None
    lost: int | None = None
    delivery_rate: int | None = None
    bytes_acknowledged: int | None = None
    bytes_received: int | None = None
    bytes_retransmitted: int | None = None
    receive_window_limited_us: int | None = None
    last_received_ms: int | None = None
    min_rtt_us: int | None = None
    timeouts: int | None = None
    """Retransmission timeouts in a row without an answer (``tcpi_backoff``)."""
    window_probes: int | None = None
    """Probes of the other end's closed window that were not answered (``tcpi_probes``)."""
    busy_us: int | None = None
    """Time in which there was something to send."""
    last_acknowledged_ms: int | None = None

    @property
    def peer(self) -> str:
        """``address:port`` of the other end."""
        return f"[{self.remote}]:{self.remote_port}" if ":" in self.remote else f"{self.remote}:{self.remote_port}"


_INFO: dict[str, tuple[int, str]] = {
    "window_probes": (3, "=B"),
    "timeouts": (4, "=B"),
    "unacknowledged": (24, "=I"),
    "lost": (32, "=I"),
    "last_received_ms": (52, "=I"),
    "last_acknowledged_ms": (56, "=I"),
    "rtt_us": (68, "=I"),
    "rtt_variance_us": (72, "=I"),
    "congestion_window": (80, "=I"),
    "retransmits": (100, "=I"),
    "bytes_acknowledged": (120, "=Q"),
    "bytes_received": (128, "=Q"),
    "min_rtt_us": (148, "=I"),
    "delivery_rate": (160, "=Q"),
    "busy_us": (168, "=Q"),
    "receive_window_limited_us": (176, "=Q"),
    "bytes_retransmitted": (208, "=Q"),
}
"""Offset and format of members of ``struct tcp_info``, ascending (the test compares them with the installed linux/tcp.h)."""


def _together(members: dict[str, tuple[int, str]]) -> struct.Struct:
    """All of them as one structure."""
    pattern, position = "=", 0
    for offset, form in members.values():
        pattern += f"{offset - position}x{form[1:]}"
        position = offset + struct.calcsize(form)
    return struct.Struct(pattern)


_WHOLE_INFO = _together(_INFO)
_SOCKET = struct.Struct("=BB2x48sIIIII")
"""``struct inet_diag_msg``: family and state, the identity (ports, addresses, interface, cookie), expires, queues, uid, inode."""

SPARE_NAMES = 1024
"""Addresses of sockets that are kept beyond twice those that are open: each is 450 bytes, and every job brings hundreds."""
DESCRIPTORS_S = 5.0
"""How long the sockets that a process has open are believed; one that is gone meanwhile is in the kernel's answer no longer."""


def tcp_sockets(pid: int, proc: Path = Path("/proc")) -> list[TcpSocket]:
    """The connected TCP sockets of a process, by local port, asked for in the network namespace it lives in.

    Raises :class:`NcclwatchError` when the kernel does not answer; a process that is gone has none.
    """
    found = tcp_sockets_by_descriptor([pid], proc)[pid].values()
    unique = {entry.inode: entry for entry in found}.values()
    return sorted(unique, key=lambda entry: (entry.local_port, entry.remote, entry.remote_port))


def tcp_sockets_by_descriptor(pids: Iterable[int], proc: Path = Path("/proc")) -> dict[int, dict[int, TcpSocket]]:
    """Process → descriptor → connected TCP socket, for a single look; raises as :func:`tcp_sockets`."""
    with SocketTable(proc) as table:
        return table.by_descriptor(pids)


@dataclass(frozen=True, slots=True)
class _Held:
    """The sockets a process has open: when they were listed, descriptor → inode, and the network namespace it lives in."""

    listed: float
    inodes: dict[int, int]
    space: tuple[int, int] | None


class SocketTable:
    """Asks the kernel for the TCP sockets of processes again and again, once a look for each network namespace they live in.

    It keeps a netlink socket in each: to make one in another namespace than our own takes a child process. A context manager.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._netlink: dict[tuple[int, int], socket.socket] = {}
        self._held: dict[int, _Held] = {}
        self._names: dict[bytes, _Ends] = {}

    def __enter__(self) -> SocketTable:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the netlink sockets."""
        for netlink in self._netlink.values():
            netlink.close()
        self._netlink.clear()

    def by_descriptor(self, pids: Iterable[int]) -> dict[int, dict[int, TcpSocket]]:
        """Process → descriptor → connected TCP socket; raises as :func:`tcp_sockets`."""
        descriptors = {pid: self._descriptors(pid) for pid in pids}
        for pid in self._held.keys() - descriptors.keys():
            del self._held[pid]
        spaces: dict[tuple[int, int], list[int]] = {}
        for pid, held in descriptors.items():
            if held and (space := self._held[pid].space) is not None:
                spaces.setdefault(space, []).append(pid)
        for space in [space for space in self._netlink if space not in spaces]:
            self._netlink.pop(space).close()
        found: dict[int, dict[int, TcpSocket]] = {pid: {} for pid in descriptors}
        open_now = 0
        for space, members in spaces.items():
            wanted = {inode for pid in members for inode in descriptors[pid].values()}
            by_inode = self._ask(space, members[0], wanted)
            open_now += len(by_inode)
            for pid in members:
                found[pid] = {fd: by_inode[inode] for fd, inode in descriptors[pid].items() if inode in by_inode}
        if len(self._names) > 2 * open_now + SPARE_NAMES:
            self._names.clear()
        return found

    def refresh(self) -> None:
        """Ask processes for their sockets anew at the next look: they have made connections."""
        self._held.clear()

    def _descriptors(self, pid: int) -> dict[int, int]:
        now, held = time.monotonic(), self._held.get(pid)
        if held is None or now - held.listed >= DESCRIPTORS_S:
            held = self._held[pid] = _Held(now, socket_descriptors(pid, self._proc), _network_namespace(pid, self._proc))
        return held.inodes

    def _ask(self, space: tuple[int, int], pid: int, inodes: Container[int]) -> dict[int, TcpSocket]:
        """Inode → socket, of those wanted among all of the network namespace that a process lives in."""
        netlink = self._netlink.get(space)
        if netlink is None:
            path = self._proc / str(pid) / "ns/net"
            netlink = self._netlink[space] = open_socket(path, socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_SOCK_DIAG)
            netlink.settimeout(5)
        try:
            families = (socket.AF_INET, socket.AF_INET6)
            return {entry.inode: entry for family in families for entry in _dump(netlink, family, inodes, self._names)}
        except NcclwatchError:
            # An answer that was not read to its end would be taken for the next one's.
            self._netlink.pop(space).close()
            raise


def socket_descriptors(pid: int, proc: Path = Path("/proc")) -> dict[int, int]:
    """Descriptor → inode of the sockets a process has open; empty when it is gone or may not be looked at."""
    found: dict[int, int] = {}
    folder = f"{proc}/{pid}/fd"
    try:
        entries = os.listdir(folder)  # noqa: PTH208 - names only
    except OSError:
        return found
    for name in entries:
        try:
            target = os.readlink(f"{folder}/{name}")  # noqa: PTH115 - thousands of them: a Path each costs more
        except OSError:
            continue
        if target.startswith("socket:[") and name.isdigit():
            found[int(name)] = int(target[8:-1])
    return found


def _network_namespace(pid: int, proc: Path) -> tuple[int, int] | None:
    try:
        status = (proc / str(pid) / "ns/net").stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


_Ends = tuple[str, int, str, int]
"""Address and port of this end and of the other."""


def _dump(netlink: socket.socket, family: int, inodes: Container[int], names: dict[bytes, _Ends]) -> Iterator[TcpSocket]:
    """The established TCP sockets of the namespace with these inodes; a node has thousands of others, which are passed over."""
    extensions = 1 << (INET_DIAG_INFO - 1)
    request = _REQUEST.pack(
        _REQUEST.size,
        SOCK_DIAG_BY_FAMILY,
        NLM_F_REQUEST_DUMP,
        1,
        0,
        family,
        socket.IPPROTO_TCP,
        extensions,
        0,
        1 << TCP_ESTABLISHED,
        b"",
    )
    try:
        netlink.sendto(request, (0, 0))
        while True:
            data = netlink.recv(RECEIVE_BYTES)
            position = 0
            while position + _HEADER.size <= len(data):
                length, kind, _, _, _ = _HEADER.unpack_from(data, position)
                if kind == NLMSG_DONE or length < _HEADER.size:
                    return
                if kind == NLMSG_ERROR:
                    code = -int.from_bytes(data[position + _HEADER.size :][:4], "little", signed=True)
                    raise NcclwatchError(f"the kernel does not list TCP sockets (error {code})", "load the module tcp_diag")
                start, end = position + _HEADER.size, min(position + length, len(data))
                if end - start >= _MESSAGE_SIZE and _INODE_AT.unpack_from(data, start + _INODE)[0] in inodes:
                    yield _decode(data, start, end, family, names)
                position += length + 3 & ~3
    except OSError as error:
        raise NcclwatchError(f"cannot ask the kernel for TCP sockets: {error}", "load the module tcp_diag") from None


def _decode(data: bytes, start: int, end: int, family: int, names: dict[bytes, _Ends]) -> TcpSocket:
    _, state, identity, _, receive_queue, send_queue, _, inode = _SOCKET.unpack_from(data, start)
    ends = names.get(identity)
    if ends is None:
        ends = names[identity] = _ends(identity, family)
    name = _STATES[state] if state < len(_STATES) else str(state)
    one = TcpSocket(*ends, name, inode, receive_queue, send_queue)
    position = start + _MESSAGE_SIZE
    while position + 4 <= end:
        length, kind = _ATTRIBUTE.unpack_from(data, position)
        if length < 4 or position + length > end:
            break
        if kind == INET_DIAG_INFO:
            _take_info(one, data, position + 4, position + length)
        position += length + 3 & ~3
    return one


def _ends(identity: bytes, family: int) -> _Ends:
    local_port, remote_port = struct.unpack_from(">HH", identity)
    size = 4 if family == socket.AF_INET else 16
    local, remote = (socket.inet_ntop(family, identity[at : at + size]).removeprefix("::ffff:") for at in (4, 20))
    return local, local_port, remote, remote_port


def _take_info(one: TcpSocket, data: bytes, start: int, end: int) -> None:
    """What an answer holds of ``struct tcp_info``, as far as this kernel goes."""
    if end - start >= _WHOLE_INFO.size:
        (
            one.window_probes, one.timeouts, one.unacknowledged, one.lost, one.last_received_ms, one.last_acknowledged_ms,
            one.rtt_us, one.rtt_variance_us, one.congestion_window, one.retransmits, one.bytes_acknowledged, one.bytes_received,
            one.min_rtt_us, one.delivery_rate, one.busy_us, one.receive_window_limited_us, one.bytes_retransmitted,
        ) = _WHOLE_INFO.unpack_from(data, start)  # fmt: skip
        return
    for name, (offset, form) in _INFO.items():
        if start + offset + struct.calcsize(form) <= end:
            setattr(one, name, struct.unpack_from(form, data, start + offset)[0])
