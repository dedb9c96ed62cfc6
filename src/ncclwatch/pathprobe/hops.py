"""Which routers each source port passes: traceroute by port, with sockets of our own and without any privilege.

A packet whose time to live ends on the way makes the router there answer (RFC 792, time exceeded). Switches hash the five-tuple,
so a connection attempt from source port S passes the routers that NCCL's own from port S would pass. Linux hands the answer to
the socket (``IP_RECVERR``; for TCP since 5.9: ``tcp_v4_err`` of net/ipv4/tcp_ipv4.c, commit 45af29ca761c).

TCP attempts are ended when the destination answers. To RoCE's port nothing is ever sent that could arrive: how far the
destination is, is asked on another port first. Routers limit how often they answer; who is silent is asked again, for a while.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ncclwatch.errors import TargetError
from ncclwatch.model.paths import Protocol
from ncclwatch.paths.ports import ROCE_PORT

MOST_HOPS = 16
"""Bound: routers on a path."""
MOST_PATHS = 256
"""Bound: paths of one look."""
BURST = 32
"""Bound: attempts that are open at once."""
WAIT_S = 0.25
"""Patience with one answer; round trips in a datacentre are far below, and a SYN is sent again after 1 s only."""
TRIES = 4
"""Times that a silent router is asked."""
SILENT = 4
"""Routers that do not answer, one after the other, after which a path is followed no further."""
LONGEST_S = 60.0
"""Bound: seconds of one look."""
TRACEROUTE_PORT = 33434
"""Fact: first port of traceroute; nobody listens there."""
_IP_RECVERR = 11
_IPV6_RECVERR = 25
_EXTENDED = struct.Struct("=IBBBxII")
"""``struct sock_extended_err`` (include/uapi/linux/errqueue.h): errno, origin, type, code, info, data."""
_BY_ICMP = {2: (11, 0), 3: (3, 0)}
"""``SO_EE_ORIGIN_ICMP`` and ``_ICMP6``: type and code of time exceeded in transit."""
_NOT_YET = (errno.EINPROGRESS, errno.EAGAIN)
_THERE = (0, errno.ECONNREFUSED)
"""How an attempt ends whose packet arrived: by the listener, or by the kernel of a host where nobody listens."""

Path = tuple[int, int]
"""(destination port, source port)."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The routers of one path, in order; None for one that does not answer. ``arrived``: the destination was reached, or the
    path was followed to the last router before it."""

    path: Path
    hops: tuple[str | None, ...]
    arrived: bool
    reason: str = ""
    """Why it could not be asked at all, else empty: a port that is taken, say."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a look may take: each router is asked ``tries`` times, ``wait_s`` seconds each; ``hops`` at most."""

    tries: int = TRIES
    wait_s: float = WAIT_S
    hops: int = MOST_HOPS


@dataclass(frozen=True, slots=True)
class _Answer:
    """``router`` that answered; or the destination did (``there``); or nothing can be sent (``reason``)."""

    router: str = ""
    there: bool = False
    reason: str = ""


THOROUGH = Effort()
LATE = Effort(tries=1, wait_s=2.0)
"""For an answer that may stand in a queue: what a switch holds for a port is sent well within."""


def traces(destination: str, paths: Sequence[Path], protocol: Protocol = Protocol.TCP, effort: Effort = THOROUGH) -> list[Trace]:
    """Follow each path once, a minute at most. Raises :class:`TargetError` where datagrams may not be sent towards RoCE's port.

    A TCP port that a listener has gets a connection that is reset at once; give ports that nobody but the job will use.
    """
    ends = time.monotonic() + LONGEST_S
    wanted = list(dict.fromkeys(paths))[:MOST_PATHS]
    most = effort.hops
    quiet = protocol is Protocol.UDP and any(port == ROCE_PORT for port, _ in wanted)
    if quiet:
        most = min(most, distance(destination, ends) - 1)
    found: dict[Path, list[str | None]] = {path: [] for path in wanted}
    done: dict[Path, Trace] = {}
    for hop in range(1, most + 1):
        open_ = [path for path in wanted if path not in done and not _is_lost(found[path])]
        if not open_ or time.monotonic() >= ends:
            break
        answers = _ask(destination, open_, protocol, hop, ends, effort)
        for path in open_:
            answer = answers.get(path, _Answer())
            if answer.there or answer.reason:
                done[path] = Trace(path, tuple(found[path]), answer.there, answer.reason)
            else:
                found[path].append(answer.router or None)
    # What did not arrive ends with routers that never answered: they say nothing.
    return [done.get(path) or Trace(path, _trimmed(found[path], keep=quiet), quiet) for path in wanted]


def _is_lost(hops: Sequence[str | None]) -> bool:
    return len(hops) >= SILENT and not any(hops[-SILENT:])


def _trimmed(hops: Sequence[str | None], *, keep: bool) -> tuple[str | None, ...]:
    last = max((number for number, hop in enumerate(hops) if hop is not None), default=-1)
    return tuple(hops if keep else hops[: last + 1])


def distance(destination: str, until: float) -> int:
    """Hops to a host, itself counted, by datagrams to a port of traceroute's. Raises :class:`TargetError` where it is silent.

    A hop before it that was silent is asked again with more patience: it may be the host itself, whose answer stood in a queue,
    and one hop too many would let a packet arrive at RoCE's port.
    """
    silent = 0
    for hop in range(1, MOST_HOPS + 1):
        answer = _at(destination, hop, until, THOROUGH)
        if answer.there:
            late = (before for before in range(hop - 1, hop - 1 - silent, -1))
            return next((before + 1 for before in late if not _at(destination, before, until, LATE).there), hop - silent)
        silent = 0 if answer.router else silent + 1
        if answer.reason:
            raise TargetError(f"{destination} cannot be reached: {answer.reason}", "look at routes and firewalls")
    raise TargetError(
        f"how far {destination} is could not be told: it answers no datagram",
        f"let it answer UDP on ports from {TRACEROUTE_PORT} (ICMP port unreachable); without, nothing is sent to RoCE's port",
    )


def _at(destination: str, hop: int, until: float, effort: Effort) -> _Answer:
    """Who answers a datagram of so many hops."""
    path = (TRACEROUTE_PORT + hop, 0)
    return _ask(destination, [path], Protocol.UDP, hop, until, effort).get(path, _Answer())


def _ask(
    destination: str, paths: Iterable[Path], protocol: Protocol, hop: int, until: float, effort: Effort
) -> dict[Path, _Answer]:
    """Who answers at this hop; paths that nobody answered for are missing."""
    left = list(paths)
    found: dict[Path, _Answer] = {}
    for _ in range(effort.tries):
        for start in range(0, len(left), BURST):
            if time.monotonic() < until:
                found |= _burst(destination, left[start : start + BURST], protocol, hop, effort.wait_s)
        left = [path for path in left if path not in found]
        if not left or time.monotonic() >= until:
            break
    return found


def _burst(destination: str, paths: Sequence[Path], protocol: Protocol, hop: int, wait_s: float) -> dict[Path, _Answer]:
    found: dict[Path, _Answer] = {}
    waiting: dict[int, tuple[Path, socket.socket]] = {}
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        for path in paths:
            end, answer = _send(destination, path, protocol, hop, stack)
            if answer is not None:
                found[path] = answer
            elif end is not None:
                waiting[end.fileno()] = (path, end)
                poll.register(end, select.POLLERR | (select.POLLOUT if protocol is Protocol.TCP else 0))
        ends = time.monotonic() + wait_s
        while waiting and (left := ends - time.monotonic()) > 0:
            for number, _ in poll.poll(left * 1000):
                path, end = waiting[number]
                answer = _heard(end, protocol)
                if answer is not None:
                    found[path] = answer
                    poll.unregister(number)
                    del waiting[number]
    return found


def _send(
    destination: str, path: Path, protocol: Protocol, hop: int, stack: contextlib.ExitStack
) -> tuple[socket.socket | None, _Answer | None]:
    """The socket that waits for an answer, or the answer where there is one at once."""
    six = ipaddress.ip_address(destination).version == 6
    tcp = protocol is Protocol.TCP
    end = stack.enter_context(
        socket.socket(socket.AF_INET6 if six else socket.AF_INET, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM)
    )
    end.setblocking(False)
    port, source_port = path
    try:
        level, error, lifetime = (
            (socket.IPPROTO_IPV6, _IPV6_RECVERR, socket.IPV6_UNICAST_HOPS)
            if six
            else (socket.IPPROTO_IP, _IP_RECVERR, socket.IP_TTL)
        )
        end.setsockopt(level, error, 1)
        end.setsockopt(level, lifetime, hop)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if tcp:
            # Reset at the end: a port in TIME_WAIT would be taken from the plan that is made of this.
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.bind(("", source_port))
    except OSError as problem:
        return None, _Answer(reason=f"source port {source_port}: {problem.strerror}")
    code = end.connect_ex((destination, port))
    if not tcp and code == 0:
        try:
            end.send(b"\0")
        except OSError as problem:
            code = problem.errno or errno.EIO
    if code == errno.ECONNREFUSED or (tcp and code == 0):
        return None, _Answer(there=True)
    if code not in (0, *_NOT_YET):
        words = "in use between these two ends" if code == errno.EADDRNOTAVAIL else os.strerror(code)
        return None, _Answer(reason=f"source port {source_port}: {words}")
    return end, None


def _heard(end: socket.socket, protocol: Protocol) -> _Answer | None:
    for router, code, type_and_code in _errors(end):
        if type_and_code in _BY_ICMP.values() and code == errno.EHOSTUNREACH:
            return _Answer(router=router)
        if code == errno.ECONNREFUSED:
            return _Answer(there=True)
    code = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code in _THERE:
        return _Answer(there=True) if code or protocol is Protocol.TCP else None
    return _Answer(reason=os.strerror(code))


def _errors(end: socket.socket) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """(who answered, errno, (type, code)) of each error that waits at a socket."""
    while True:
        try:
            _, parts, _, _ = end.recvmsg(512, 512, socket.MSG_ERRQUEUE)
        except OSError:
            return
        for level, kind, data in parts:
            if (level, kind) not in ((socket.IPPROTO_IP, _IP_RECVERR), (socket.IPPROTO_IPV6, _IPV6_RECVERR)):
                continue
            if len(data) < _EXTENDED.size + 8:
                continue
            code, origin, icmp_type, icmp_code, _, _ = _EXTENDED.unpack_from(data)
            if origin in _BY_ICMP and (router := _address(data[_EXTENDED.size :])):
                yield router, code, (icmp_type, icmp_code)


def _address(data: bytes) -> str:
    """Of a ``sockaddr_in`` or ``sockaddr_in6``; empty for any other."""
    (family,) = struct.unpack_from("=H", data)
    if family == socket.AF_INET and len(data) >= 8:
        return socket.inet_ntop(socket.AF_INET, data[4:8])
    if family == socket.AF_INET6 and len(data) >= 24:
        return socket.inet_ntop(socket.AF_INET6, data[8:24])
    return ""
