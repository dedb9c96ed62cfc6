"""Windows of work requests and sockets beside the samples of a node: who is counted, whose the queue pairs are, totals of ranks.

RDMA requests are counted by a process of its own (:mod:`ncclwatch.wire.process`), which is started when a watched process has an
RDMA device open; here it is only told and heard, without waiting. Of sockets the kernel counts, and nothing is probed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ncclwatch.collect.batch import PlaneState
from ncclwatch.collect.flows import FlowCollector, connection_key
from ncclwatch.collect.paths import key_of
from ncclwatch.collect.step_rates import ConnectionKey, StepRates
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.network import FlowKind, FlowRecord, RdmaCounts
from ncclwatch.model.state import Direction, ProcessSample
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow, added
from ncclwatch.target.session import TargetProcess
from ncclwatch.text import clean
from ncclwatch.wire.contexts import verbs_files
from ncclwatch.wire.governor import DEFAULT_BUDGET, Mode
from ncclwatch.wire.nccl_connections import NetConnection
from ncclwatch.wire.nccl_queues import pairs_of
from ncclwatch.wire.nccl_sockets import SOCKET_NETWORK
from ncclwatch.wire.orders import Bill, Order, Owner, User
from ncclwatch.wire.process import WireProcess

SOCKETS_EVERY_NS = 1_900_000_000
"""The length of a window of sockets at least: two samples, which come a little early or late on purpose."""
DEVICES_EVERY_S = 10.0, 60.0
"""How often processes that had no RDMA device open are asked again, at first and at last; a device is opened once, early."""
STALE_NS = 30_000_000_000
"""What a queue pair was seen to do longer ago says nothing of its connection now."""
MAX_SOCKETS = 1024
"""Connections over sockets with windows at most."""


class WorkWatch:
    """What the wire plane brings to the batches of a node."""

    def __init__(self, mode: Mode = Mode.BURSTS, budget: float = DEFAULT_BUDGET) -> None:
        self._wire = WireProcess(mode, budget)
        self._users: dict[int, User | None] = {}
        self._next_devices = 0.0
        self._devices_every_s = DEVICES_EVERY_S[0]
        self._gave_up = False
        self._looked: dict[int, Sequence[NetConnection]] = {}
        """Of each process the connections whose queue pairs were looked up."""
        self._owners: dict[int, dict[tuple[ConnectionKey, int], tuple[Owner, ...]]] = {}
        self._sockets: dict[ConnectionKey, tuple[int, int]] = {}
        """Time and bytes at the end of the last window of a connection over sockets."""
        self._totals: dict[tuple[int, int | None, int | None], WorkWindow] = {}
        """Newest total of a process, and of each (communicator, rank in it) of a process."""
        self._rates = StepRates()
        self._newest: dict[ConnectionKey, FlowWindow] = {}
        """The newest window of the queue pairs of a connection, the busiest of them."""

    @property
    def bill(self) -> Bill | None:
        """What bursts have cost; ``None`` where nothing was ever probed."""
        return self._wire.bill

    @property
    def plane(self) -> PlaneState:
        """Whether requests are counted, and why not."""
        wire = self._wire
        if wire.running and any(reason == "" for reason in wire.reasons.values()):
            return PlaneState("wire", True)
        reasons = sorted({reason for reason in wire.reasons.values() if reason})
        return PlaneState("wire", False, wire.reason or "; ".join(reasons[:3]))

    def order(self, order: Order) -> bool:
        """Have a burst run now, whatever the budget; whether there is anybody to run it."""
        return self._wire.order(order)

    def give_up(self, reason: str) -> None:
        """Take every probe away, and count no more."""
        self._wire.close()
        self._wire = WireProcess(Mode.STATE)
        self._wire.reason = clean(reason, 200)
        self._gave_up = True

    def close(self) -> None:
        """Take every probe away."""
        self._wire.close()

    # --- who is counted --------------------------------------------------------------------------------------------------

    def follow(self, flows: FlowCollector, targets: Iterable[TargetProcess]) -> None:
        """These processes run now; ``flows`` has looked at them."""
        if self._gave_up:
            return
        alive = {target.pid for target in targets}
        for pid in self._users.keys() - alive:
            self._forget(pid)
        now = time.monotonic()
        again = now >= self._next_devices
        if alive - self._users.keys():
            self._devices_every_s = DEVICES_EVERY_S[0]
            self._next_devices = min(self._next_devices, now + self._devices_every_s)
        if again:
            self._next_devices = now + self._devices_every_s
            self._devices_every_s = min(2 * self._devices_every_s, DEVICES_EVERY_S[1])
        networks: dict[int, tuple[str, ...]] = {}
        if again or alive - self._users.keys():
            # A process that has just ended is not looked at again.
            with contextlib.suppress(NcclwatchError, OSError):
                networks = flows.networks()
        for pid in alive:
            if pid not in self._users or (again and self._users[pid] is None):
                self._users[pid] = User(pid, networks.get(pid, ())) if verbs_files(pid) else None
        users = [user for user in self._users.values() if user is not None]
        self._wire.follow(users)
        if users and self._look_up(flows):
            owned = (owner for connections in self._owners.values() for owners in connections.values() for owner in owners)
            # Connections that share a queue pair: the first one names it.
            self._wire.own({owner.key: owner for owner in reversed(list(owned))}.values())

    def _forget(self, pid: int) -> None:
        del self._users[pid]
        self._owners.pop(pid, None)
        self._looked.pop(pid, None)
        self._newest = {key: window for key, window in self._newest.items() if key[0] != pid}
        self._sockets = {key: known for key, known in self._sockets.items() if key[0] != pid}
        self._totals = {key: total for key, total in self._totals.items() if key[0] != pid}

    def _look_up(self, flows: FlowCollector) -> bool:
        """Look up whose the queue pairs are, of processes whose connections were listed anew; whether anything changed.

        Until they are, the list is the same object: a sample costs one comparison a process. The queue pairs of a connection are
        looked up once, for they stay as long as it does.
        """
        changed = False
        for target, connections in flows.connections():
            pid = target.pid
            if self._looked.get(pid) is connections or self._users.get(pid) is None:
                continue
            self._looked[pid] = connections
            before, owners = self._owners.get(pid, {}), {}
            for one in connections:
                place = connection_key(pid, one), one.communicator
                owners[place] = before.get(place) or _owners_of(target, one)
            changed |= owners != before
            self._owners[pid] = owners
        return changed

    # --- what was counted ------------------------------------------------------------------------------------------------

    def take(self, flows: FlowCollector, host: str, *, looked: bool) -> tuple[FlowWindow, ...]:
        """The windows that are new, of this host. Sockets are counted where they were ``looked`` at."""
        if self._gave_up:
            return ()
        self._rates = flows.rates
        counted = [self._with_rates(window) for report in self._wire.reports() for window in report.windows]
        found = _with_slowest(counted) + (self._of_sockets(flows) if looked else [])
        for window in reversed(counted):
            # The busiest come first, and stay.
            if window.queue_pair and (key := _connection_of(window)) is not None:
                self._newest[key] = window
        for (pid, comm_hash, rank), windows in _by_rank(found).items():
            total = added(windows)
            if total is not None:
                self._totals[pid, comm_hash, rank] = total
        return tuple(replace(window, host=host) for window in found)

    def joined(self, records: Iterable[FlowRecord], now_ns: int) -> tuple[FlowRecord, ...]:
        """Connections with what their queue pairs were last seen to carry, unless that is long ago."""
        return tuple(self._joined(record, now_ns) for record in records)

    def _joined(self, record: FlowRecord, now_ns: int) -> FlowRecord:
        key = key_of(record) if record.kind is FlowKind.RDMA else None
        window = self._newest.get(key) if key is not None else None
        if window is None or window.work.end_ns < now_ns - STALE_NS:
            return record
        work = window.work
        counts = RdmaCounts(
            queue_pair=window.queue_pair,
            posted=work.posted or 0,
            completed=work.completed or 0,
            in_flight=work.in_flight or 0,
            exact=work.counting is Counting.EXACT,
            latency_p50_ns=work.latency_p50_ns,
            latency_p99_ns=work.latency_p99_ns,
        )
        return replace(record, rdma=counts, bandwidth=work.throughput, role=window.role, port=window.port)

    def of_rank(self, key: ProcessKey, sample: ProcessSample | None, *, alone: bool) -> WorkWindow | None:
        """The newest window of a rank, all its ports together; ``alone``: the process has no other ranks."""
        if alone or sample is None:
            return self._totals.get((key.pid, None, None))
        return added(
            total for c in sample.communicators if (total := self._totals.get((key.pid, c.hash, c.rank))) is not None
        )  # fmt: skip

    def _with_rates(self, window: FlowWindow) -> FlowWindow:
        """With CCL-D's rate of its connection, which the state plane has."""
        key = _connection_of(window)
        counted = self._rates.rate(key) if key is not None else None
        if counted is None:
            return window
        if window.direction is Direction.SEND:
            return replace(window, work=replace(window.work, send_rate=counted.rate))
        return replace(window, work=replace(window.work, recv_rate=counted.rate))

    def _of_sockets(self, flows: FlowCollector) -> list[FlowWindow]:
        found: list[FlowWindow] = []
        for target, connections in flows.connections():
            for one in connections:
                window = self._of_socket(flows, target, one) if one.network == SOCKET_NETWORK else None
                if window is not None:
                    found.append(self._with_rates(window))
        return [*_together(found, Scope.PORT), *_together(found, Scope.PEER), *found]

    def _of_socket(self, flows: FlowCollector, target: TargetProcess, one: NetConnection) -> FlowWindow | None:
        judged = flows.socket_of(target.pid, one)
        if judged is None or judged.facts is None:
            return None
        key = connection_key(target.pid, one)
        before = self._sockets.get(key)
        if before is None and len(self._sockets) >= MAX_SOCKETS:
            return None
        if before is None or judged.moved < before[1]:
            self._sockets[key] = judged.time_ns, judged.moved
            return None
        if judged.time_ns - before[0] < SOCKETS_EVERY_NS:
            return None
        self._sockets[key] = judged.time_ns, judged.moved
        sends = one.direction is Direction.SEND
        moved = judged.moved - before[1]
        rtt_ns = judged.facts.rtt_us * 1000.0 if judged.facts.rtt_us is not None and sends else None
        work = WorkWindow(
            counting=Counting.TCP,
            begin_ns=before[0],
            end_ns=judged.time_ns,
            seen_s=(judged.time_ns - before[0]) / 1e9,
            posted_bytes=moved if sends else 0,
            completed_bytes=moved if sends else 0,
            received_bytes=0 if sends else moved,
            latency_p50_ns=rtt_ns,
            throughput=judged.bandwidth if moved else None,
            uncertainty=0.0,
        )
        return FlowWindow(
            pid=target.pid,
            scope=Scope.FLOW,
            work=work,
            global_rank=target.info.rank,
            device=one.device,
            comm_hash=one.comm_hash,
            rank=one.rank,
            channel=one.channel,
            peer=one.peer,
            direction=one.direction,
            connection_index=one.index,
            remote=judged.facts.remote,
            role="data",
        )


def _connection_of(window: FlowWindow) -> ConnectionKey | None:
    """The connection of a queue pair that is NCCL's; ports and peers are of none."""
    return key_of(window) if window.scope is Scope.FLOW else None


def _owners_of(target: TargetProcess, one: NetConnection) -> tuple[Owner, ...]:
    try:
        pairs = pairs_of(target.decoder, one)
    except (NcclwatchError, OSError):
        return ()
    place = (one.comm_hash, one.rank, one.channel, one.peer, one.direction, target.info.rank, one.index)
    return tuple(Owner(target.pid, pair.context, pair.number, *place) for pair in pairs)


def _with_slowest(windows: Sequence[FlowWindow]) -> list[FlowWindow]:
    """Ports and peers with CCL-D's rates of the slowest of their connections."""
    members: dict[tuple[object, ...], list[WorkWindow]] = {}
    for window in windows:
        if window.scope is Scope.FLOW:
            for scope in Scope.PORT, Scope.PEER:
                members.setdefault(_group_of(window, scope), []).append(window.work)
    found = []
    for window in windows:
        slowest = added(members.get(_group_of(window, window.scope), ())) if window.scope is not Scope.FLOW else None
        if slowest is not None:
            work = replace(window.work, send_rate=slowest.send_rate, recv_rate=slowest.recv_rate)
            window = replace(window, work=work)  # noqa: PLW2901
        found.append(window)
    return found


def _group_of(window: FlowWindow, scope: Scope) -> tuple[object, ...]:
    """The port or the peer of a window: what its connections have in common."""
    return (window.pid, window.device) if scope is Scope.PORT else (window.pid, window.comm_hash, window.rank, window.peer)


def _by_rank(windows: Iterable[FlowWindow]) -> dict[tuple[int, int | None, int | None], list[WorkWindow]]:
    """Windows whose sum is a process's (its ports), or a communicator's in it (its peers)."""
    found: dict[tuple[int, int | None, int | None], list[WorkWindow]] = {}
    for window in windows:
        if window.scope is Scope.PORT:
            found.setdefault((window.pid, None, None), []).append(window.work)
        elif window.scope is Scope.PEER:
            found.setdefault((window.pid, window.comm_hash, window.rank), []).append(window.work)
    # Several reports may have come at once: the newest counts.
    newest = {key: max(work.end_ns for work in works) for key, works in found.items()}
    return {key: [work for work in works if work.end_ns == newest[key]] for key, works in found.items()}


def _together(flows: Iterable[FlowWindow], scope: Scope) -> list[FlowWindow]:
    """Connections over sockets by port, or by peer."""
    groups: dict[tuple[object, ...], list[FlowWindow]] = {}
    for flow in flows:
        groups.setdefault(_group_of(flow, scope), []).append(flow)
    found = []
    for members in groups.values():
        work, one = added(member.work for member in members), members[0]
        assert work is not None  # noqa: S101 - a group has members
        if scope is Scope.PORT:
            found.append(FlowWindow(one.pid, scope, work, one.global_rank, one.device, one.port, role="data"))
        else:
            found.append(
                FlowWindow(
                    one.pid, scope, work, one.global_rank, comm_hash=one.comm_hash, rank=one.rank, peer=one.peer, role="data"
                )
            )
    return found
