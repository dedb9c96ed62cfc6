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
from typing import Any

from ncclwatch.errors import NcclwatchError
from ncclwatch.nic.namespaces import attributes, open_socket
from ncclwatch.nic.rdma import SYS, port_state, read_ports

RTMGRP_LINK = 1
RTM_NEWLINK = 16
RTM_DELLINK = 17
IFLA_IFNAME = 3
RECEIVE_BYTES = 1 << 16
_HEADER = struct.Struct("=IHHII")
_LINK = struct.Struct("=BxHiII")

IFF_UP = 1
IFF_LOWER_UP = 1 << 16

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
    ``fileno`` can be polled. Its notifications are decoded here (``struct ifinfomsg`` of linux/rtnetlink.h): pyroute2 reads ahead
    into a queue of its own, so that a poll of its descriptor misses what is already there. Raises :class:`NcclwatchError` when
    the namespace cannot be entered.
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
    from pyroute2 import IPRoute

    try:
        with IPRoute(netns=namespace) if namespace else IPRoute() as route:
            messages = [message for message in route.get_links() if wanted(_name(message))]
    except OSError as error:
        raise NcclwatchError(f"cannot list network devices: {error}", "run as root") from None
    # Our sysfs shows our own namespace: another one's eth0 is not the eth0 found there.
    return sorted((_device(message, None if namespace else sys) for message in messages), key=lambda device: device.name)


def _device(message: Any, sys: Path | None) -> NetDevice:
    name = _name(message)
    totals = message.get_attr("IFLA_STATS64") or {}
    speed = -1
    if sys is not None:
        with contextlib.suppress(OSError, ValueError):
            speed = int((sys / "class/net" / name / "speed").read_text())
    return NetDevice(
        name=name,
        index=int(message["index"]),
        up=_is_up(int(message["flags"])),
        operstate=str(message.get_attr("IFLA_OPERSTATE") or "").lower(),
        mtu=int(message.get_attr("IFLA_MTU") or 0),
        speed_mbps=speed if speed > 0 else None,
        statistics={key: int(value) for key, value in totals.items() if isinstance(value, int)},
    )


def _name(message: Any) -> str:
    return str(message.get_attr("IFLA_IFNAME") or "")


def _is_up(flags: int) -> bool:
    """Switched on, and with a carrier."""
    return bool(flags & IFF_UP and flags & IFF_LOWER_UP)


def _describe(flags: int) -> str:
    if not flags & IFF_UP:
        return "switched off"
    return "carrier" if flags & IFF_LOWER_UP else "no carrier"


def _link_messages(data: bytes) -> Iterator[tuple[int, str, int]]:
    """(message type, name, flags) of the link messages in a netlink datagram."""
    position = 0
    while position + _HEADER.size + _LINK.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, position)
        if length < _HEADER.size or position + length > len(data):
            return
        if kind in (RTM_NEWLINK, RTM_DELLINK):
            _, _, _, flags, _ = _LINK.unpack_from(data, position + _HEADER.size)
            for attribute, value in attributes(data[position + _HEADER.size + _LINK.size : position + length]):
                if attribute == IFLA_IFNAME:
                    yield kind, value.split(b"\0", 1)[0].decode("ascii", "replace"), flags
        position += length + 3 & ~3


def _now() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)
