"""The state plane of a simulated job: what NCCL's memory would show in each process at a moment.

Which counter counts what, and what a transport hides, follows the measured facts: network connections have proxy operations
with steps, shared memory has head and tail, NVLink has nothing; ``opCount`` counts every plan, or only those with proxy work,
by version.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from ncclwatch.model.state import (
    Communicator,
    Direction,
    HostConnection,
    OpPhase,
    PendingOperation,
    ProcessSample,
    ProxyOperation,
    ProxySub,
    Transport,
)
from ncclwatch.simulate.disturbance import live
from ncclwatch.simulate.geometry import Cut, cut
from ncclwatch.simulate.layout import ACROSS_STAGES, groups, membership
from ncclwatch.simulate.machine import Machine
from ncclwatch.simulate.observe import Cast, Membership
from ncclwatch.simulate.steps import Counters, End, Trace, counters
from ncclwatch.simulate.timeline import Block, Indices, Timeline
from ncclwatch.simulate.vector import VectorExecutor

_LINGER_S = 0.02
"""A proxy may still wait for acknowledgements after the kernel ended; blocks are looked at this long after."""


@dataclass(slots=True)
class _Side:
    """One rank's side of one transfer of one open operation."""

    block: Block
    role: str
    peer: int
    direction: Direction
    transport: Transport
    pieces: Cut
    base: int
    launched: float
    end: End
    counts: Counters
    point_to_point: bool


_Shared = dict[tuple[str, int, int], list[_Side]]
"""Open transfers through shared memory, of either end, by role, sender and receiver (global ranks)."""


_Message = tuple[int, int, int, tuple[float, float], tuple[float, float]]
"""Source and destination (global ranks), bytes, and when each of them started and launched it, seconds."""
KEPT_MESSAGES = 4096
"""Bound: messages of which it is kept how they go, as many as hosts that run ahead have open at a time."""


@dataclass(slots=True)
class _Totals:
    """Operations called so far, by role: plans, plans with proxy work, collectives, and by function; arrays by global rank."""

    plans: dict[str, Indices] = field(default_factory=dict)
    proxy_plans: dict[str, Indices] = field(default_factory=dict)
    collectives: dict[str, Indices] = field(default_factory=dict)
    functions: dict[tuple[str, str], Indices] = field(default_factory=dict)
    steps: dict[tuple[str, str], Indices] = field(default_factory=dict)

    def copy(self) -> _Totals:
        return _Totals(*({k: v.copy() for k, v in table.items()} for table in self._tables()))  # type: ignore[arg-type]

    def _tables(self) -> tuple[dict[object, Indices], ...]:
        return self.plans, self.proxy_plans, self.collectives, self.functions, self.steps  # type: ignore[return-value]


class StateReader:
    """Reads samples at rising times. ``sample`` gives one :class:`ProcessSample` per observed process, in order of rank."""

    def __init__(self, timeline: Timeline, cast: Cast | None = None) -> None:
        self.timeline, self.scenario = timeline, timeline.scenario
        self.cast = cast or Cast(self.scenario)
        self.machine = Machine(self.scenario, timeline.disturbance)
        self._blocks = list(timeline.blocks)
        self._first_call = np.array([b.called.min() for b in self._blocks])
        self._cursor = 0
        self._unsettled: list[Block] = []
        self._settled = _Totals()
        self._parts: dict[tuple[str, int], list[Block]] = defaultdict(list)
        """Blocks of operations that have members on several stages, one of each, by role and number."""
        for block in timeline.blocks:
            if block.role in ACROSS_STAGES:
                self._parts[block.role, block.sequence].append(block)
        self._messages: dict[_Message, Trace] = {}
        """Those of the last samples: a message is open in many of them."""
        self._last_time = -math.inf
        self._last_seen: dict[int, tuple[Communicator, ...]] = {}
        """Communicators of each rank that can end, at the last look."""

    def sample(self, time: float, ranks: Iterable[int] | None = None) -> list[ProcessSample]:
        """What would be read at ``time`` (true seconds); times must not fall from one call to the next (``ValueError``)."""
        return list(self.looks(time, ranks))

    def looks(self, time: float, ranks: Iterable[int] | None = None) -> Iterator[ProcessSample]:
        """As :meth:`sample`, one after the other; all are to be taken before the next time."""
        if time < self._last_time:
            raise ValueError("samples must be taken in order of time")
        self._last_time = time
        self._advance(time)
        totals = self._count(time)
        wanted = [r for r in (range(self.scenario.layout.world) if ranks is None else ranks) if self.cast.observed(r)]
        sides = self._open_sides(time, set(wanted))
        shared = _in_shared_memory(sides)
        for rank in wanted:
            yield self._process(rank, time, totals, sides.get(rank, []), shared)

    # -- counters of communicators ------------------------------------------------------------------------------------------

    def _advance(self, time: float) -> None:
        """Take blocks that have begun by ``time`` and settle those that are over for every rank."""
        while self._cursor < len(self._blocks) and self._first_call[self._cursor] <= time:
            self._unsettled.append(self._blocks[self._cursor])
            self._cursor += 1
        # A later block of another stage may have been called earlier: look at all that are left with an early call.
        rest = np.nonzero(self._first_call[self._cursor :] <= time)[0]
        for i in rest[::-1]:
            at = self._cursor + int(i)
            self._unsettled.append(self._blocks.pop(at))
            self._first_call = np.delete(self._first_call, at)
        keep = []
        for block in self._unsettled:
            if (block.finished <= time - _LINGER_S).all() and (block.called <= time).all():
                self._add(self._settled, block, np.ones(len(block.ranks), bool))
                block.traces.clear()
            else:
                keep.append(block)
        self._unsettled = keep

    def _add(self, totals: _Totals, block: Block, called: np.ndarray) -> None:
        world = self.scenario.layout.world

        def add(table: dict[object, Indices], key: object, mask: np.ndarray, amount: int = 1) -> None:
            if key not in table:
                table[key] = np.zeros(world, np.int64)
            table[key][block.ranks[mask]] += amount

        add(totals.plans, block.role, called)  # type: ignore[arg-type]
        add(totals.proxy_plans, block.role, called & self._proxy_work(block))  # type: ignore[arg-type]
        if block.transfers:
            return
        if block.function != "AlltoAll":
            add(totals.collectives, block.role, called)  # type: ignore[arg-type]
            as_planned = called & ~np.isin(block.ranks, list(block.callings)) if block.callings else called
            add(totals.functions, (block.role, block.function), as_planned)  # type: ignore[arg-type]
            for rank, own in block.callings.items():
                add(totals.functions, (block.role, own.function), called & (block.ranks == rank))  # type: ignore[arg-type]
        nranks = groups(self.scenario.layout, block.role).shape[1]
        steps = cut(self.scenario.network, block.function, nranks, block.nbytes).steps
        done = called & np.isfinite(block.finished) & (block.finished <= self._last_time)
        add(totals.steps, (block.role, block.function), done, steps)  # type: ignore[arg-type]

    def _proxy_work(self, block: Block) -> np.ndarray:
        return self.cast.columns(block.role).proxy_work[block.ranks]

    def _count(self, time: float) -> _Totals:
        totals = self._settled.copy()
        for block in self._unsettled:
            self._add(totals, block, block.called <= time)
        return totals

    # -- open operations ----------------------------------------------------------------------------------------------------

    def _open_sides(self, time: float, wanted: set[int]) -> dict[int, list[_Side]]:
        sides: dict[int, list[_Side]] = defaultdict(list)
        for block in self._unsettled:
            if not block.transfers and not self.cast.columns(block.role).visible[block.ranks].any():
                continue  # nothing of such an operation lies in host memory
            mask = (block.launched <= time) & ~(block.finished <= time - _LINGER_S)
            for i in np.nonzero(mask)[0]:
                rank = int(block.ranks[i])
                if rank in wanted:
                    sides[rank] += self._sides(block, int(i), time)
        return sides

    def _sides(self, block: Block, i: int, time: float) -> Iterator[_Side]:
        rank = int(block.ranks[i])
        member = self.cast.membership(rank, block.role)
        launched = float(block.launched[i])
        if block.transfers:
            yield from self._message_sides(block, i, member, time)
            return
        own = block.calling(rank)
        pieces = cut(self.scenario.network, own.function, len(member.members), own.nbytes)
        if rank in block.streams:
            ends, base = block.streams[rank], block.base
        else:
            ends, base = self._trace(block, int(block.groups[i])).ends[member.rank], block.base
        for end in ends:
            peer = end.connection.destination if end.send else end.connection.source
            yield _Side(
                block=block,
                role=block.role,
                peer=member.members.index(peer),
                direction=Direction.SEND if end.send else Direction.RECV,
                transport=end.connection.path.transport,
                pieces=pieces,
                base=base + end.first * pieces.slice_steps,
                launched=launched,
                end=end,
                counts=counters(end, pieces.slice_steps, launched, time),
                point_to_point=own.function == "AlltoAll",
            )

    def _trace(self, block: Block, group: int) -> Trace:
        if group not in block.traces:
            members = groups(self.scenario.layout, block.role)[group]
            started, launched = np.full(len(members), math.inf), np.full(len(members), math.inf)
            _, index = membership(self.scenario.layout, block.role)
            for part in self._parts[block.role, block.sequence] if block.role in ACROSS_STAGES else (block,):
                here = part.groups == group
                started[index[part.ranks[here]]] = part.started[here]
                launched[index[part.ranks[here]]] = part.launched[here]
            block.traces[group] = self.machine.run(
                block.role, group, block.function, block.nbytes, started.tolist(), launched.tolist()
            )
        return block.traces[group]

    def _message_sides(self, block: Block, i: int, member: Membership, time: float) -> Iterator[_Side]:
        pieces = cut(self.scenario.network, "SendRecv", 2, block.nbytes)
        rank, launched = int(block.ranks[i]), float(block.launched[i])
        for transfer, number in zip(block.transfers, block.message, strict=True):
            peer = member.members[transfer.peer]
            key = VectorExecutor.link_key(block.stage, transfer.send, transfer.peer, transfer.forward)
            queue = (self.timeline.receives if transfer.send else self.timeline.sends).get(key, [])
            other = (math.inf, math.inf)
            if number < len(queue):
                at = int(np.nonzero(queue[number].ranks == peer)[0][0])
                other = (float(queue[number].started[at]), float(queue[number].launched[at]))
            own = (float(block.started[i]), launched)
            first, second = (own, other) if transfer.send else (other, own)
            source, destination = (rank, peer) if transfer.send else (peer, rank)
            trace = self._message((source, destination, block.nbytes, (first[0], second[0]), (first[1], second[1])))
            end = trace.ends[0 if transfer.send else 1][0]
            yield _Side(
                block=block,
                role="pp",
                peer=transfer.peer,
                direction=Direction.SEND if transfer.send else Direction.RECV,
                transport=end.connection.path.transport,
                pieces=pieces,
                base=number * pieces.steps,
                launched=launched,
                end=end,
                counts=counters(end, 1, launched, time),
                point_to_point=True,
            )

    def _message(self, message: _Message) -> Trace:
        """How a message goes, step by step: it follows from these alone."""
        if message not in self._messages:
            if len(self._messages) >= KEPT_MESSAGES:
                self._messages.clear()
            self._messages[message] = self.machine.message(*message)
        return self._messages[message]

    # -- records ------------------------------------------------------------------------------------------------------------

    def _process(self, rank: int, time: float, totals: _Totals, sides: list[_Side], shared: _Shared) -> ProcessSample:
        clock = self.cast.clock(rank)
        d = self.timeline.disturbance
        dead = d.died.get(rank, math.inf) <= time
        stopped = any(start <= time < end for start, end in d.stopped.get(rank, ()))
        rested = sum(max(0.0, min(time, end) - start) for start, end in d.stopped.get(rank, ()) if start < time)
        communicators = self._last_seen.get(rank, ())
        operations: tuple[ProxyOperation, ...] = ()
        pending: tuple[PendingOperation, ...] = ()
        if not dead:
            net = [s for s in sides if s.transport is Transport.NET and s.counts.done < s.end.count * s.pieces.slice_steps]
            communicators = tuple(self._communicators(rank, time, totals, shared))
            if rank in d.died:
                self._last_seen[rank] = communicators
            operations = tuple(self._operations(rank, [s for s in net if not self._in_pool(rank, s, time)]))
            pending = tuple(self._pending(rank, [s for s in net if self._in_pool(rank, s, time)]))
        return ProcessSample(
            process=self.cast.info(rank),
            time_ns=clock.monotonic_ns(time),
            wall_ns=clock.wall_ns(time),
            duration_ns=1_000_000,
            run_state="X" if dead else "T" if stopped else "S",
            communicators=communicators,
            operations=operations,
            pending=pending,
            cpu_time_ns=round((time - rested) * 0.9e9),
            context_switches=round((time - rested) * 2_000),
        )

    def _in_pool(self, rank: int, side: _Side, time: float) -> bool:
        """A proxy thread that stands still leaves new operations in the pool."""
        return live(self.timeline.disturbance.proxy.get(rank), side.launched) > time

    def _communicators(self, rank: int, time: float, totals: _Totals, shared: _Shared) -> Iterator[Communicator]:
        scenario, cast = self.scenario, self.cast
        if rank in self.timeline.never_initialised or time < 0.1 * scenario.network.init_s:
            return
        in_progress = bool(self.timeline.never_initialised) or time < scenario.network.init_s
        for m in cast.memberships(rank):
            if in_progress and m.role != "world":
                continue
            plans = totals.proxy_plans if cast.counts_only_proxy_plans else totals.plans
            counted = {f: int(a[rank]) for (role, f), a in totals.functions.items() if role == m.role}
            yield Communicator(
                address=0x7F00_0000_0000 + rank * 0x1000_0000 + cast.roles.index(m.role) * 0x200_0000,
                hash=m.hash,
                rank=m.rank,
                nranks=len(m.members),
                device=rank % scenario.layout.ranks_per_node,
                node=m.nodes.index(rank // scenario.layout.ranks_per_node),
                nnodes=len(m.nodes),
                op_count=int(plans[m.role][rank]) if m.role in plans else 0,
                collective_count=int(totals.collectives[m.role][rank]) if m.role in totals.collectives else 0,
                sequence_numbers=counted if cast.version >= (2, 26, 0) else {},
                async_result=self._async_result(m, time),
                init_state="ncclInProgress" if in_progress else "ncclSuccess",
                aborted=False,
                finalize_called=False,
                destroyed=False,
                peers=() if in_progress else m.peers,
                rings=() if in_progress else m.rings,
                host_connections=() if in_progress else tuple(self._host_connections(rank, m, totals, shared, time)),
                transports=() if in_progress else m.transports,
            )

    def _async_result(self, m: Membership, time: float) -> str:
        """A neighbour on the network whose process ended closes its sockets; NCCL notes that as an asynchronous error."""
        died = self.timeline.disturbance.died
        near = {m.members[peer] for _, peer, _, t in m.transports if t is Transport.NET}
        return "ncclRemoteError" if any(died.get(r, math.inf) + 0.01 <= time for r in near) else "ncclSuccess"

    def _host_connections(
        self, rank: int, m: Membership, totals: _Totals, shared: _Shared, time: float
    ) -> Iterator[HostConnection]:
        """Head and tail lie in memory that both ends see: what one has written shows on the other."""
        connections = [(c, p, d) for c, p, d, t in m.transports if t is Transport.SHM]
        past = sum(int(a[rank]) for (role, function), a in totals.steps.items() if role == m.role and function != "AlltoAll")
        for channel, peer, direction in connections:
            ends = (rank, m.members[peer]) if direction == str(Direction.SEND) else (m.members[peer], rank)
            sides = shared.get((m.role, *ends), ())
            head = tail = min((side.base for side in sides), default=past)
            for side in sides:
                link, s = side.end.connection, side.pieces.slice_steps
                produced = bisect_right(link.produced, time) - side.end.first
                consumed = bisect_right(link.consumed, time) - side.end.first
                # An operation that waits behind another has moved neither yet.
                tail = max(tail, side.base + s * produced) if produced > 0 else tail
                head = max(head, side.base + s * consumed) if consumed > 0 else head
            yield HostConnection(channel, peer, Direction(direction), 1 if m.role == "pp" else 0, head, tail)

    def _operations(self, rank: int, sides: list[_Side]) -> Iterator[ProxyOperation]:
        ahead: dict[tuple[object, ...], int] = defaultdict(int)
        for number, side in enumerate(sorted(sides, key=lambda s: s.launched)):
            m = self.cast.membership(rank, side.role)
            own = side.block.calling(rank)
            key = (side.role, side.peer, side.direction, side.point_to_point)
            behind = ahead[key]
            ahead[key] += 1
            running = side.counts.live and behind == 0
            for channel in range(side.pieces.channels):
                yield ProxyOperation(
                    address=0x7E00_0000_0000 + rank * 0x100_0000 + number * 0x8000 + channel * 0x200,
                    comm_hash=m.hash,
                    direction=side.direction,
                    transport=Transport.NET,
                    phase=OpPhase.PROGRESS if running else OpPhase.READY,
                    op_count=self._op_count(side),
                    collective=_name(own.function, side),
                    protocol=side.pieces.protocol,
                    algorithm=side.pieces.algorithm,
                    slice_steps=side.pieces.slice_steps,
                    subs=(self._sub(side, channel, m),),
                    queued_behind=behind,
                    net_name="Socket" if self.scenario.network.net == "socket" else "IB",
                )

    @staticmethod
    def _op_count(side: _Side) -> int:
        return side.base // max(1, side.pieces.steps) << 1 | 1 if side.point_to_point else side.block.sequence << 1

    @staticmethod
    def _sub(side: _Side, channel: int, m: Membership) -> ProxySub:
        c = side.counts
        simple = side.pieces.protocol == "Simple"
        return ProxySub(
            channel=channel,
            peer=side.peer,
            nsteps=side.end.count * side.pieces.slice_steps,
            base=side.base,
            posted=c.posted,
            received=c.received,
            transmitted=c.transmitted,
            done=c.done,
            rank=m.rank,
            nbytes=round(side.pieces.slice_bytes),
            gpu_ready=c.gpu_ready if simple else None,
            connection_index=1 if side.point_to_point else 0,
            net_device=0,
        )

    def _pending(self, rank: int, sides: list[_Side]) -> Iterator[PendingOperation]:
        for side in sides:
            m = self.cast.membership(rank, side.role)
            own = side.block.calling(rank)
            for channel in range(side.pieces.channels):
                yield PendingOperation(
                    comm_hash=m.hash,
                    direction=side.direction,
                    op_count=self._op_count(side),
                    channel=channel,
                    peer=side.peer,
                    nsteps=side.end.count * side.pieces.slice_steps,
                    collective=_name(own.function, side),
                    protocol=side.pieces.protocol,
                    nbytes=round(side.pieces.slice_bytes),
                    rank=m.rank,
                )


def _in_shared_memory(sides: dict[int, list[_Side]]) -> _Shared:
    shared: _Shared = defaultdict(list)
    for side in (side for own in sides.values() for side in own):
        if side.transport is Transport.SHM:
            shared[side.role, side.end.connection.source, side.end.connection.destination].append(side)
    return shared


def _name(function: str, side: _Side) -> str:
    if side.point_to_point:
        return "Send" if side.direction is Direction.SEND else "Recv"
    return function
