"""Network devices: state and counters, and changes as they happen, by rtnetlink; ports without a network device by sysfs."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ncclwatch.errors import NcclwatchError
from ncclwatch.nic.namespaces import attributes, open_socket
from ncclwatch.nic.rdma import SYS, port_state, read_ports

RTMGRP_LINK = 1
RTM_NEWLINK = 16
RTM_DELLINK = 17
RTM_GETLINK = 18
IFLA_IFNAME = 3
IFLA_MTU = 4
IFLA_OPERSTATE = 16
IFLA_STATS64 = 23
NLM_F_REQUEST_DUMP = 0x301
NLMSG_ERROR = 2
NLMSG_DONE = 3
RECEIVE_BYTES = 1 << 16
_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")
_OPERSTATES = ("unknown", "notpresent", "down", "lowerlayerdown", "testing", "dormant", "up")
_STATISTICS = (
    "rx_packets", "tx_packets", "rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "multicast",
    "collisions", "rx_length_errors", "rx_over_errors", "rx_crc_errors", "rx_frame_errors", "rx_fifo_errors", "rx_missed_errors",
    "tx_aborted_errors", "tx_carrier_errors", "tx_fifo_errors", "tx_heartbeat_errors", "tx_window_errors", "rx_compressed",
    "tx_compressed", "rx_nohandler", "rx_otherhost_dropped",
)  # fmt: skip
"""``struct rtnl_link_stats64`` (include/uapi/linux/if_link.h), which only ever grew at its end."""

IFF_UP = 1
IFF_LOWER_UP = 1 << 16

DUMP_TIMEOUT_S = 5.0
"""The kernel answers in a millisecond; a socket that does not must not hold up a look for ever."""

POLL_S = 0.05
"""How often the state of ports without a network device is read: nothing tells of their changes."""


@dataclass(frozen=True, slots=True)
class NetDevice:
    """A network device at one moment. ``up`` means that it is switched on and has a carrier; ``speed_mbps`` is the driver's word.

    ``statistics`` are the kernel's running totals (``rx_bytes``, ``tx_dropped``, …).
    """

    name: str
    index: int
    up: bool
    operstate: str
    mtu: int
    speed_mbps: int | None
    statistics: dict[str, int]


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """A link changed: ``name`` is a network device, or ``device:port`` of an RDMA port without one.

    ``time_ns`` is CLOCK_MONOTONIC of the moment we heard of it.
    """

    name: str
    up: bool
    detail: str
    time_ns: int


class LinkMonitor:
    """Tells when links go up and down.

    ``namespace`` is the path of a network namespace (``/proc/PID/ns/net``) other than our own: netlink only speaks of its own.
    ``fileno`` can be polled. Raises :class:`NcclwatchError` when the namespace cannot be entered.
    """

    def __init__(self, namespace: str | None = None, sys: Path = SYS) -> None:
        self._sys = sys
        path = Path(namespace or "/proc/self/ns/net")
        self._socket = open_socket(path, socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        try:
            self._socket.setblocking(False)
            # Subscribe first, list afterwards: a change in between is heard, at worst twice.
            self._socket.bind((0, RTMGRP_LINK))
            self._up = {device.name: device.up for device in read_devices(namespace, sys)}
        except OSError as error:
            self._socket.close()
            raise NcclwatchError(f"cannot watch links: {error}", "run as root, in the network namespace of the job") from None
        self.lost = 0
        self.namespace = namespace
        # Ports without a network device are of no namespace: who watches our own tells of them.
        ports = read_ports(sys) if namespace is None else []
        self._ports = {(port.device, port.port): port.is_up for port in ports if not port.netdev}

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()

    def __enter__(self) -> LinkMonitor:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def fileno(self) -> int:
        """The netlink socket."""
        return self._socket.fileno()

    @property
    def polls(self) -> bool:
        """Whether there are ports whose changes nobody tells: ``events`` has to be called again and again."""
        return bool(self._ports)

    @property
    def states(self) -> dict[str, bool]:
        """Link → whether it is up, as last heard."""
        return dict(self._up) | {f"{device}:{port}": up for (device, port), up in self._ports.items()}

    def events(self, timeout_s: float = 0.0) -> list[LinkEvent]:
        """Changes since the last call; waits at most ``timeout_s`` for one."""
        deadline = time.monotonic() + timeout_s
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            found = self._poll_ports()
            if select.select([self.fileno()], [], [], min(left, POLL_S) if self._ports else left)[0]:
                found += self._receive()
            if found or time.monotonic() >= deadline:
                return found

    def _receive(self) -> list[LinkEvent]:
        found: list[LinkEvent] = []
        while True:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                return found
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise NcclwatchError(f"cannot watch links: {error.strerror}", "try again") from None
                # Notifications were lost: look at everything instead.
                self.lost += 1
                for device in read_devices(self.namespace, self._sys):
                    found += self._note(device.name, device.up, "")
                continue
            for kind, name, flags in _link_messages(data):
                if kind == RTM_DELLINK:
                    if self._up.pop(name, False):
                        found.append(LinkEvent(name, False, "removed", _now()))
                else:
                    found += self._note(name, _is_up(flags), _describe(flags))

    def _note(self, name: str, up: bool, detail: str) -> list[LinkEvent]:
        """The event in a link's present state, if it is news; a device that appears is so only when it is up already."""
        was = self._up.get(name)
        self._up[name] = up
        return [LinkEvent(name, up, detail, _now())] if was != up and (was is not None or up) else []

    def _poll_ports(self) -> list[LinkEvent]:
        found = []
        for (device, port), was in self._ports.items():
            state = port_state(device, port, self._sys)
            if (state == "active") != was:
                self._ports[device, port] = not was
                found.append(LinkEvent(f"{device}:{port}", not was, f"port {state or 'removed'}", _now()))
        return found


def read_devices(
    namespace: str | None = None, sys: Path = SYS, wanted: Callable[[str], bool] = lambda _: True
) -> list[NetDevice]:
    """All network devices of our own or the given network namespace, by name; raises :class:`NcclwatchError`."""
    try:
        with open_socket(
            Path(namespace or "/proc/self/ns/net"), socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE
        ) as route:
            route.settimeout(DUMP_TIMEOUT_S)
            messages = [link for link in _dump(route) if wanted(_name(link.attributes))]
    except OSError as error:
        raise NcclwatchError(f"cannot list network devices: {error}", "run as root") from None
    # Our sysfs shows our own namespace: another one's eth0 is not the eth0 found there.
    return sorted((_device(message, None if namespace else sys) for message in messages), key=lambda device: device.name)


@dataclass(frozen=True, slots=True)
class _Link:
    """One link message (``struct ifinfomsg`` of linux/rtnetlink.h, and the attributes behind it)."""

    kind: int
    index: int
    flags: int
    attributes: dict[int, bytes]


def _dump(route: socket.socket) -> Iterator[_Link]:
    """Every link of the namespace that the socket lives in; raises :class:`OSError`."""
    size = _HEADER.size + _LINK.size
    route.sendto(_HEADER.pack(size, RTM_GETLINK, NLM_F_REQUEST_DUMP, 1, 0) + bytes(_LINK.size), (0, 0))
    while True:
        data = route.recv(RECEIVE_BYTES)
        for kind, message in _messages(data):
            if kind == NLMSG_DONE:
                return
            if kind == NLMSG_ERROR:
                code = -struct.unpack_from("=i", message)[0] if len(message) >= 4 else errno.EBADMSG
                raise OSError(code, f"the kernel does not list them ({errno.errorcode.get(code, code)})")
            if kind == RTM_NEWLINK and (link := _link(kind, message)) is not None:
                yield link
        if len(data) < _HEADER.size:
            raise OSError(errno.EBADMSG, "the kernel's answer ended early")


def _device(link: _Link, sys: Path | None) -> NetDevice:
    name = _name(link.attributes)
    speed = -1
    if sys is not None:
        with contextlib.suppress(OSError, ValueError):
            speed = int((sys / "class/net" / name / "speed").read_text())
    state = link.attributes.get(IFLA_OPERSTATE, b"\0")[0]
    totals = link.attributes.get(IFLA_STATS64, b"")
    known = min(len(totals) // 8, len(_STATISTICS))
    return NetDevice(
        name=name,
        index=link.index,
        up=_is_up(link.flags),
        operstate=_OPERSTATES[state] if state < len(_OPERSTATES) else "",
        mtu=int.from_bytes(link.attributes.get(IFLA_MTU, b"")[:4], "little"),
        speed_mbps=speed if speed > 0 else None,
        statistics=dict(zip(_STATISTICS, struct.unpack_from(f"={known}Q", totals), strict=False)),
    )


def _name(attributes: dict[int, bytes]) -> str:
    return attributes.get(IFLA_IFNAME, b"").split(b"\0", 1)[0].decode("ascii", "replace")


def _is_up(flags: int) -> bool:
    """Switched on, and with a carrier."""
    return bool(flags & IFF_UP and flags & IFF_LOWER_UP)


def _describe(flags: int) -> str:
    if not flags & IFF_UP:
        return "switched off"
    return "carrier" if flags & IFF_LOWER_UP else "no carrier"


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(type, content) of the messages in a netlink datagram; ends at the first one that is damaged."""
    position = 0
    while position + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, position)
        if length < _HEADER.size or position + length > len(data):
            return
        yield kind, data[position + _HEADER.size : position + length]
        position += length + 3 & ~3


def _link(kind: int, message: bytes) -> _Link | None:
    if len(message) < _LINK.size:
        return None
    _, _, index, flags, _ = _LINK.unpack_from(message)
    return _Link(kind, index, flags, dict(attributes(message[_LINK.size :])))


def _link_messages(data: bytes) -> Iterator[tuple[int, str, int]]:
    """(message type, name, flags) of the link messages in a netlink datagram."""
    for kind, message in _messages(data):
        link = _link(kind, message) if kind in (RTM_NEWLINK, RTM_DELLINK) else None
        if link is not None and IFLA_IFNAME in link.attributes:
            yield kind, _name(link.attributes), link.flags


def _now() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
