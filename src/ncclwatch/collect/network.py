"""The network of a node as a running collector looks at it: NICs and their counters, changes of links, the kernel's log.

Changes of links are heard by a thread of their own, which sleeps in the kernel until there is one: they carry the time at which
they were heard, whatever the pace of the looks. What cannot be looked at is said once, and everything else goes on.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from ncclwatch.collect.flows import FlowCollector
from ncclwatch.collect.kernel_log import KernelNews
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.network import FlowRecord, FlowState, LinkChange, NetworkLook, NicRecord
from ncclwatch.model.state import ProcessSample
from ncclwatch.nic.identity import bond_of, rdma_driver
from ncclwatch.nic.links import POLL_S, LinkEvent, LinkMonitor, NetDevice, read_devices
from ncclwatch.nic.rdma import PORT_COUNTERS, RETRY_COUNTERS, SYS, RdmaPort, read_ports
from ncclwatch.target.session import TargetProcess

_Item = TypeVar("_Item")

MAX_NICS = 128
MAX_WAITING = 1000
"""Changes kept between two looks."""
MAX_NAMESPACES = 8
"""Network namespaces other than our own that are watched: one for each container of a job, normally one or none."""
FLOWS_EVERY_S = 2.0
AFTER_ERROR_S = 60.0
MAX_FLOWS = 256
"""Flows told at once, those in trouble first; ``ncclwatch flows`` lists all."""
ALL_FLOWS_EVERY_S = 30.0
MAX_ALL_FLOWS = 16_384
"""Flows told at once for the flow map of a recording, in columns, where there are more than :data:`MAX_FLOWS`."""
FOREIGN_EVERY_S = 10.0
"""How often counters of another network namespace are read; whether its links are up is heard at once."""

LOSS_STATISTICS = ("rx_errors", "tx_errors", "tx_carrier_errors", "rx_crc_errors", "rx_frame_errors", "rx_fifo_errors")
"""Errors of a network device (IFLA_STATS64). Dropped packets are not among them: idle machines drop what nobody wants."""

PORT_ERRORS = tuple(name for name in PORT_COUNTERS if name not in ("port_xmit_data", "port_rcv_data", "port_xmit_wait"))


NicPlace = tuple[int, str]
"""(inode of a network namespace, name); 0 is our own."""

Users = Mapping[NicPlace, tuple[int, ...]]
"""Ranks of the job by the NIC that their connections name."""


class NetworkWatch:
    """Watches the NICs of this node, and of the network namespaces the watched processes live in.

    ``host`` is the name that records carry. Make it early: errors are counted from then on. Without
    ``listens`` it hears of changes once :meth:`listen` is called. Nothing it cannot do raises.
    """

    def __init__(
        self,
        host: str | None = None,
        *,
        sys: Path = SYS,
        kernel_log: bool = True,
        on_news: Callable[[], None] = lambda: None,
        listens: bool = True,
    ) -> None:
        self._on_news = on_news
        self.host = host or socket.gethostname()
        self.reason = ""
        """Why links are not watched; empty while they are."""
        self._sys = sys
        self._changes: deque[tuple[int, LinkEvent]] = deque(maxlen=MAX_WAITING)
        self._notes: deque[str] = deque(maxlen=MAX_NAMESPACES + 2)
        self._first: dict[tuple[int, str], Mapping[str, int]] = {}
        self._before: dict[tuple[int, str], tuple[int, int, int]] = {}
        self._own = 0
        self._namespaces: dict[int, str | None] = {0: None}
        self._places: dict[int, int] = {}
        self._flows = FlowCollector((), sys=sys)
        self._next_flows = self._rests_until = self._next_all = 0.0
        self._all: tuple[FlowRecord, ...] = ()
        self._users: dict[NicPlace, set[int]] = {}
        self._foreign: dict[int, tuple[float, list[NetDevice]]] = {}
        self._monitors: dict[int, LinkMonitor] = {}
        self._log: KernelNews | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread: threading.Thread | None = None
        with contextlib.suppress(OSError):
            self._own = Path("/proc/self/ns/net").stat().st_ino
        self._watch_namespace(0)
        if kernel_log:
            try:
                self._log = KernelNews(self.host)
            except NcclwatchError as error:
                self._notes.append(f"kernel log not watched: {error}")
        if listens:
            self.listen()

    def listen(self) -> None:
        """Hear of changes as they come, by a thread of its own. What came before waits in the kernel.

        A thread that is there before keeps the privileges that its process gives up: an agent begins it after that.
        """
        if self._thread is None and not self._stop.is_set():
            self._thread = threading.Thread(target=self._listen, name="ncclwatch-links", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread is not None:
            os.eventfd_write(self._wake, 1)
            self._thread.join(timeout=10)
            self._thread = None
        os.close(self._wake)
        self._flows.close()
        with self._lock:
            for monitor in self._monitors.values():
                monitor.close()
            self._monitors.clear()
            if self._log is not None:
                self._log.close()
                self._log = None

    @property
    def flows(self) -> FlowCollector:
        """Who looks at the connections of the watched processes."""
        return self._flows

    @property
    def running(self) -> bool:
        """Whether links are watched."""
        return not self.reason

    def follow(self, pids: Iterable[int]) -> None:
        """Watch the network namespaces of these processes, where they are not our own, and of no others."""
        alive: dict[int, str] = {}
        for pid in pids:
            path = f"/proc/{pid}/ns/net"
            try:
                inode = Path(path).stat().st_ino
            except OSError:
                continue
            self._places[pid] = 0 if inode == self._own else inode
            alive.setdefault(self._places[pid], path)
        for inode in [inode for inode in self._namespaces if inode and inode not in alive]:
            self._leave_namespace(inode)
        for inode, path in alive.items():
            if inode in self._namespaces:
                # By way of a process that still lives.
                self._namespaces[inode] = path if inode else None
            elif len(self._namespaces) <= MAX_NAMESPACES:
                self._namespaces[inode] = path
                self._watch_namespace(inode)

    def _watch_namespace(self, inode: int) -> None:
        """Listen in a known namespace. One where that fails stays known: it is not tried again at every look."""
        try:
            monitor = LinkMonitor(self._namespaces[inode], self._sys)
        except (NcclwatchError, OSError) as error:
            if not inode:
                self.reason = str(error)
            self._notes.append(f"links not watched: {error}")
            return
        with self._lock:
            self._monitors[inode] = monitor
        os.eventfd_write(self._wake, 1)

    def _leave_namespace(self, inode: int) -> None:
        """All processes of a namespace are gone; others may need its place."""
        del self._namespaces[inode]
        self._foreign.pop(inode, None)
        with self._lock:
            monitor = self._monitors.pop(inode, None)
            if monitor is not None:
                monitor.close()
        for known in (self._users, self._first, self._before):
            for place in [place for place in known if place[0] == inode]:
                del known[place]
        os.eventfd_write(self._wake, 1)

    # --- listening -----------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while not self._stop.is_set():
            with self._lock:
                monitors, log = dict(self._monitors), self._log
            # Ports without a network device have to be asked: nothing tells of their changes.
            polled = any(monitor.polls for monitor in monitors.values())
            try:
                watched: list[LinkMonitor | KernelNews | int] = [self._wake, *monitors.values(), *([log] if log else [])]
                ready = select.select(watched, [], [], POLL_S if polled else None)[0]
            except (OSError, ValueError):
                continue
            if self._wake in ready:
                os.eventfd_read(self._wake)
            for inode, monitor in monitors.items():
                if monitor in ready or monitor.polls:
                    with contextlib.suppress(NcclwatchError, OSError, ValueError):
                        self._changes.extend((inode, event) for event in monitor.events())
            if log is not None and log in ready:
                try:
                    log.listen()
                except (NcclwatchError, OSError, ValueError) as error:
                    self._notes.append(f"kernel log no longer watched: {error}")
                    with self._lock:
                        self._log = None
            if self.has_news:
                self._on_news()

    # --- looking -------------------------------------------------------------------------------------------------------------

    def look(
        self,
        samples: Iterable[ProcessSample] = (),
        looks: Iterable[tuple[TargetProcess, ProcessSample]] = (),
        *,
        calm: bool = False,
    ) -> NetworkLook:
        """The NICs now, and what was heard since the last look.

        ``samples`` tell which NICs the job uses, ``looks`` are those of running processes, whose flows are listed now and then;
        ``calm``: all is well with them.
        """
        samples = list(samples)
        self.follow({sample.process.pid for sample in samples if sample.run_state != "X"})
        users = self._remember(used_devices(samples, self._places))
        self._places = {sample.process.pid: self._places.get(sample.process.pid, 0) for sample in samples}
        if (log := self._log) is not None:
            log.watch(samples)
        nics = {nic.key: nic for nic in self._net_devices(users)}
        nics.update((nic.key, nic) for nic in self._ports(users))
        shown = sorted(nics.values(), key=lambda nic: (not nic.used_by, nic.kind != "rdma", nic.name, nic.namespace))[:MAX_NICS]
        return replace(self.news(), nics=tuple(shown), flows=self._list_flows(looks, calm))

    def nics_behind(self, flows: Iterable[FlowRecord]) -> tuple[list[NicRecord], dict[int, int]]:
        """The NICs now, among them those that these connections name, and the network namespace of each of their processes (0:
        our own).
        """
        flows = list(flows)
        self.follow({flow.pid for flow in flows})
        users: dict[NicPlace, set[int]] = {}
        for flow in flows:
            ranks = users.setdefault((self._places.get(flow.pid, 0), flow.device), set())
            ranks.update(() if flow.global_rank is None else (flow.global_rank,))
        named = {place: tuple(sorted(ranks)) for place, ranks in users.items()}
        return [*self._net_devices(named), *self._ports(named)], {pid: self._places.get(pid, 0) for pid in {f.pid for f in flows}}

    def _list_flows(self, looks: Iterable[tuple[TargetProcess, ProcessSample]], calm: bool) -> tuple[FlowRecord, ...]:
        """Flows by memory and sockets alone, without probes; nothing between two times."""
        now = time.monotonic()
        if now < self._rests_until:
            return ()
        try:
            self._flows.observe(looks, calm=calm)
        except Exception as error:
            # What lies in a target's memory can be anything: it must not end the session.
            if os.environ.get("NCCLWATCH_DEBUG") == "1":
                raise
            self._notes.append(f"flows could not be listed ({type(error).__name__}: {error})")
            self._flows.close()
            self._flows = FlowCollector((), sys=self._sys)
            self._rests_until = time.monotonic() + AFTER_ERROR_S
            return ()
        if now < self._next_flows:
            return ()
        self._next_flows = now + FLOWS_EVERY_S
        found = sorted(self._flows.flows(), key=lambda flow: (not flow.state.is_trouble, flow.state is FlowState.IDLE))
        if len(found) > MAX_FLOWS and now >= self._next_all:
            self._next_all = now + ALL_FLOWS_EVERY_S
            self._all = tuple(found[:MAX_ALL_FLOWS])
        return tuple(found[:MAX_FLOWS])

    def take_all(self) -> tuple[FlowRecord, ...]:
        """Every flow, where a look could not hold them and it is time again; nothing otherwise."""
        every, self._all = self._all, ()
        return every

    def _remember(self, users: Users) -> Users:
        """Between two operations nobody is seen to use a NIC, and over a dead link nothing begins: who once did still does."""
        for place, ranks in users.items():
            if place in self._users or len(self._users) < MAX_NICS:
                self._users.setdefault(place, set()).update(ranks)
        return {place: tuple(sorted(ranks)) for place, ranks in self._users.items()}

    @property
    def has_news(self) -> bool:
        """Whether a link changed or the kernel logged something since the last look."""
        return bool(self._changes or (self._log is not None and self._log.waiting))

    def news(self) -> NetworkLook:
        """What was heard since the last look, without looking."""
        log = self._log
        return NetworkLook(
            changes=tuple(self._change(inode, event) for inode, event in _drain(self._changes)),
            kernel=log.lines() if log is not None else (),
            notes=tuple(_drain(self._notes)),
        )

    def _net_devices(self, users: Users) -> list[NicRecord]:
        found = []
        for inode, path in self._namespaces.items():
            devices = self._devices_of(inode, path)
            found += [self._net_device(inode, device, users) for device in devices if _is_of_interest(inode, device, users)]
        return found

    def _devices_of(self, inode: int, path: str | None) -> list[NetDevice]:
        """The network devices of a namespace; of another than our own, which takes a child process, only now and then."""
        now = time.monotonic()
        due, known = self._foreign.get(inode, (0.0, []))
        if not inode or now >= due:
            try:
                known = read_devices(path, self._sys)
            except (NcclwatchError, OSError):
                known = []
            if inode:
                self._foreign[inode] = (now + FOREIGN_EVERY_S, known)
        with self._lock:
            monitor = self._monitors.get(inode)
            states = monitor.states if monitor is not None else {}
        return [replace(device, up=states.get(device.name, device.up)) for device in known]

    def _net_device(self, inode: int, device: NetDevice, users: Users) -> NicRecord:
        totals, place = device.statistics, (inode, device.name)
        receive, send = self._rates(place, totals.get("rx_bytes"), totals.get("tx_bytes"))
        # Our sysfs shows our own namespace.
        bond = bond_of("" if inode else device.name, self._sys)
        return NicRecord(
            host=self.host,
            name=device.name,
            kind="netdev",
            up=device.up,
            state=device.operstate if device.up and device.operstate else "up" if device.up else "down",
            rate_gbps=device.speed_mbps / 1000 if device.speed_mbps else None,
            receive_rate=receive,
            send_rate=send,
            errors=self._rises(place, {name: totals[name] for name in LOSS_STATISTICS if name in totals}),
            used_by=users.get(place, ()),
            namespace=inode,
            bond=bond.members,
            bond_active=bond.active,
        )

    def _ports(self, users: Users) -> list[NicRecord]:
        """RDMA ports, which are called the same in every namespace."""
        found = []
        by_name: dict[str, set[int]] = {}
        for (_, name), ranks in users.items():
            by_name.setdefault(name, set()).update(ranks)
        for port in read_ports(self._sys):
            words = port.counters.get("port_rcv_data")
            receive, send = self._rates((0, port.name), None if words is None else words * 4, port.sent_bytes)
            congestion = self._rises((0, f"{port.name} congestion"), {"notifications": port.congestion_notifications})
            bond = bond_of(port.netdev, self._sys)
            found.append(
                NicRecord(
                    host=self.host,
                    name=port.name,
                    kind="rdma",
                    up=port.is_up,
                    state=port.state if port.physical in ("", "link-up") else f"{port.state} ({port.physical})",
                    rate_gbps=port.rate_gbps,
                    netdev=port.netdev,
                    link_layer=port.link_layer,
                    receive_rate=receive,
                    send_rate=send,
                    errors=self._rises((0, port.name), _loss_counters(port)),
                    congestion=sum(congestion.values()),
                    used_by=tuple(sorted(by_name.get(port.name, ()) or by_name.get(port.device, ()))),
                    driver=rdma_driver(port.device, self._sys),
                    kernel=os.uname().release,
                    bond=bond.members,
                    bond_active=bond.active,
                )
            )
        return found

    def _rises(self, place: NicPlace, totals: Mapping[str, int]) -> dict[str, int]:
        """Which of these counters rose since they were first seen, and by how much; one that was reset begins anew."""
        first = self._first.setdefault(place, dict(totals))
        if any(total < first.get(counter, 0) for counter, total in totals.items()):
            first = self._first[place] = dict(totals)
        return {counter: total - first.get(counter, 0) for counter, total in totals.items() if total > first.get(counter, 0)}

    def _rates(self, place: NicPlace, received: int | None, sent: int | None) -> tuple[float | None, float | None]:
        if received is None or sent is None:
            return None, None
        now = time.monotonic_ns()
        before = self._before.get(place)
        self._before[place] = (now, received, sent)
        if before is None or now <= before[0] or received < before[1] or sent < before[2]:
            return None, None
        elapsed = (now - before[0]) / 1e9
        return (received - before[1]) / elapsed, (sent - before[2]) / elapsed

    def _change(self, inode: int, event: LinkEvent) -> LinkChange:
        since = time.clock_gettime_ns(time.CLOCK_MONOTONIC) - event.time_ns
        return LinkChange(self.host, event.name, event.up, event.detail, event.time_ns, time.time_ns() - since, inode)


def used_devices(samples: Iterable[ProcessSample], namespaces: Mapping[int, int]) -> Users:
    """NIC as NCCL names it → ranks of the job whose proxies were seen using it; several devices merged into one are split.

    ``namespaces`` tells the network namespace of each pid.
    """
    users: dict[NicPlace, set[int]] = {}
    for sample in samples:
        rank = sample.process.rank
        for operation in sample.operations:
            for sub in operation.subs:
                # NCCL names devices that it merges "mlx5_0+mlx5_1" (src/transport/net_ib.cc, v2.21.5-1).
                for name in filter(None, sub.net_device_name.split("+")):
                    place = namespaces.get(sample.process.pid, 0), name
                    users.setdefault(place, set()).update(() if rank is None else (rank,))
    return {place: tuple(sorted(ranks)) for place, ranks in users.items()}


def _is_of_interest(inode: int, device: NetDevice, users: Users) -> bool:
    """Loopback only where the job uses it, and none of the virtual ends that a container host has by the hundred."""
    if (inode, device.name) in users:
        return True
    return device.name != "lo" and not device.name.startswith(("veth", "docker", "cali", "lxc", "br-"))


def _loss_counters(port: RdmaPort) -> dict[str, int]:
    errors = {name: port.counters[name] for name in PORT_ERRORS if name in port.counters}
    return errors | {name: port.hw_counters[name] for name in RETRY_COUNTERS if name in port.hw_counters}


def _drain(queue: deque[_Item]) -> list[_Item]:
    found: list[_Item] = []
    while queue:
        found.append(queue.popleft())
    return found
