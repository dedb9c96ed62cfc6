"""What the collectors of a simulated job would have handed over: samples, call events, timings; with wrong clocks, losses and
late arrivals.

A :class:`~ncclwatch.simulate.wire.RecordSet` has the model's types and nothing else. Samples pass through bytes that are built
field by field from those types, so nothing of the scenario (its faults, its expectations, true time) can reach a diagnosis by
accident.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ncclwatch.gc_pause import collector_at_rest
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.network import NetworkLook
from ncclwatch.model.state import ProcessSample
from ncclwatch.simulate.layout import groups, node_of
from ncclwatch.simulate.observe import HOST_PREFIX, Cast
from ncclwatch.simulate.state_plane import StateReader
from ncclwatch.simulate.timeline import Block, Calling, Timeline
from ncclwatch.simulate.wire import TIMING_DTYPE, Events, RecordSet, Wire, decode, encode, sharing
from ncclwatch.simulate.wire_plane import listings

BATCH = 1024
"""Samples that are sent through bytes at once."""

_FUNCTIONS = {
    "AllReduce": Function.ALL_REDUCE,
    "AllGather": Function.ALL_GATHER,
    "ReduceScatter": Function.REDUCE_SCATTER,
}
_DATATYPES = {1: 0, 2: 6, 4: 7, 8: 8}
"""Element bytes to ``ncclDataType_t``: int8, float16, float32, float64."""
_OPAQUE = np.dtype((np.void, EVENT_DTYPE.itemsize))


def call_events(timeline: Timeline, cast: Cast) -> Iterator[tuple[Block, Events]]:
    """The call events of every block, in order of the blocks; times are each rank's own node's, observed nodes only."""
    for block in timeline.blocks:
        events = _block_events(block, cast)
        if len(events):
            yield block, events


def _block_events(block: Block, cast: Cast) -> Events:
    columns = cast.columns(block.role)
    ranks = block.ranks[np.isfinite(block.called) & columns.observed[block.ranks]]
    base = np.zeros(len(ranks), EVENT_DTYPE)
    if not len(ranks):
        return base
    n = groups(cast.scenario.layout, block.role).shape[1]
    base["time_ns"] = cast.monotonic_ns(ranks, block.called[ranks - block.ranks[0]])
    base["pid"] = base["tid"] = 10_000 + ranks
    base["kind"] = Kind.ENTER
    base["flags"] = Flag.COMM_READ
    base["comm"] = 0x7F00_0000_0000 + ranks * 0x1000_0000 + cast.roles.index(block.role) * 0x200_0000
    base["comm_hash"] = columns.hashes[ranks]
    counted = columns.proxy_work[ranks] | (not cast.counts_only_proxy_plans)
    base["op_count"] = np.where(counted, block.sequence, 0)
    base["stream"] = 0x5000 + cast.roles.index(block.role)
    base["rank"], base["nranks"] = columns.index[ranks], n
    base["peer"] = -1
    _ask(base, Calling(block.function, block.nbytes, block.element_bytes), n)
    for rank, own in block.callings.items():
        at = np.nonzero(ranks == rank)[0]
        if at.size:
            _ask(base[at[0] : at[0] + 1], own, n)
    if block.transfers:
        peers = [(Function.SEND if t.send else Function.RECV, t.peer) for t in block.transfers]
    elif block.function == "AlltoAll":
        peers = [(f, p) for p in range(n) for f in (Function.SEND, Function.RECV)]
    else:
        return base
    return _group(base, peers)


def _joined(parts: Sequence[Events]) -> Events:
    """One array of many: as bytes, since of records NumPy would compare every field of every part."""
    return np.concatenate([part.view(_OPAQUE) for part in parts]).view(EVENT_DTYPE)


def _ask(rows: Events, own: Calling, nranks: int) -> None:
    """Fill in what was asked for; NCCL's callers count elements of one rank for AllGather (sent) and ReduceScatter (received)."""
    whole = own.function in ("AllReduce", "SendRecv")
    rows["count"] = own.nbytes // own.element_bytes // (1 if whole else nranks)
    rows["datatype"] = _DATATYPES.get(own.element_bytes, 7)
    rows["function"] = _FUNCTIONS.get(own.function, Function.SEND)


def _group(base: Events, peers: Sequence[tuple[Function, int]]) -> Events:
    """A grouped call of several sends and receives: GroupStart, the calls 100 ns apart, GroupEnd."""
    parts = []
    for at, (function, peer) in enumerate([(Function.GROUP_START, -1), *peers, (Function.GROUP_END, -1)]):
        part = base.copy()
        part["function"], part["peer"] = function, peer
        part["time_ns"] += 100 * at
        if function in (Function.GROUP_START, Function.GROUP_END):
            for name in ("comm", "comm_hash", "op_count", "count", "flags"):
                part[name] = 0
        parts.append(part)
    return _joined(parts)


def _init_events(timeline: Timeline, cast: Cast) -> dict[str, list[Events]]:
    """Creation of the communicators: entered by every rank that gets there, left when all have."""
    result: dict[str, list[Events]] = defaultdict(list)
    init = timeline.scenario.network.init_s
    for rank in range(timeline.scenario.layout.world):
        if rank in timeline.never_initialised or not cast.observed(rank):
            continue
        for n, member in enumerate(cast.memberships(rank)):
            rows = np.zeros(2, EVENT_DTYPE)
            rows["function"] = Function.COMM_INIT_RANK_CONFIG if n == 0 else Function.COMM_SPLIT
            rows["pid"] = rows["tid"] = 10_000 + rank
            rows["rank"], rows["nranks"] = member.rank, len(member.members)
            rows["unique_id"] = cast.communicator_hash("world", 0) & 0xFFFF_FFFF
            rows["kind"] = [Kind.ENTER, Kind.LEAVE]
            times = [init * (0.1 + 0.1 * n), init * (0.19 + 0.1 * n)]
            rows["time_ns"] = [cast.clock(rank).monotonic_ns(t) for t in times]
            rows["enter_time_ns"][1] = rows["time_ns"][0]
            rows["comm_hash"][1] = member.hash
            rows["flags"][1] = Flag.COMM_READ
            stuck = bool(timeline.never_initialised)
            result[_host(cast, rank)].append(rows[:1] if stuck else rows)
            if stuck:
                break
    return result


def _host(cast: Cast, rank: int) -> str:
    return f"{HOST_PREFIX}{node_of(cast.scenario.layout, rank)}"


class Observer:
    """Collects everything from a simulated run once, and then says what would have been there by any moment."""

    def __init__(self, timeline: Timeline, sample_times: Sequence[float]) -> None:
        self.timeline = timeline
        self.cast = Cast(timeline.scenario)
        self._planes = timeline.scenario.observe.planes
        self._rng = np.random.default_rng([timeline.scenario.seed, 99])
        self._samples: dict[int, list[tuple[float, ProcessSample]]] = defaultdict(list)
        if "state" in self._planes:
            with collector_at_rest():
                self._take_samples(sample_times)
        self._calls: dict[str, tuple[NDArray[np.float64], Events]] = {}
        self._lost: dict[str, tuple[NDArray[np.float64], NDArray[np.int64]]] = {}
        """When lost records would have come, and how many that came were before each."""
        if "calls" in self._planes:
            self._take_calls()
        self._timings: dict[str, tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], Events]] = {}
        if "timing" in self._planes:
            self._take_timings()
        self._network: list[tuple[float, tuple[str, int, int, NetworkLook]]] = []
        if "wire" in self._planes:
            self._take_network()

    def _take_samples(self, times: Sequence[float]) -> None:
        """Every sample goes through bytes: what is handed out was rebuilt from the model's fields alone."""
        reader = StateReader(self.timeline, self.cast)
        observe, wire = self.timeline.scenario.observe, Wire()
        for time in sorted(times):
            looks = reader.looks(time)
            while batch := list(islice(looks, BATCH)):
                taken: list[tuple[float, ProcessSample]] = []
                for sample in batch:
                    if observe.loss and self._rng.random() < observe.loss:
                        continue
                    late = observe.late_ms / 1e3 if self._rng.random() < observe.late_fraction else 0.0
                    taken.append((time + late, sample))
                for (arrived, _), sample in zip(taken, wire.send([sample for _, sample in taken]), strict=True):
                    series = self._samples[sample.process.rank or 0]
                    series.append((arrived, sharing(series[-1][1], sample) if series else sample))

    def _take_calls(self) -> None:
        observe = self.timeline.scenario.observe
        true: dict[str, list[NDArray[np.float64]]] = defaultdict(list)
        rows: dict[str, list[Events]] = defaultdict(list)
        for host, parts in _init_events(self.timeline, self.cast).items():
            for part in parts:
                rows[host].append(part)
                true[host].append(np.full(len(part), 0.2 * self.timeline.scenario.network.init_s))
        called, made = [], []
        for block, events in call_events(self.timeline, self.cast):
            called.append(block.called[events["pid"].astype(np.int64) - 10_000 - int(block.ranks[0])])
            made.append(events)
        if made:
            every, times = _joined(made), np.concatenate(called)
            nodes = (every["pid"].astype(np.int64) - 10_000) // self.timeline.scenario.layout.ranks_per_node
            for node in np.unique(nodes):
                rows[f"{HOST_PREFIX}{node}"].append(every[nodes == node])
                true[f"{HOST_PREFIX}{node}"].append(times[nodes == node])
        for host, parts in rows.items():
            events, times = _joined(parts), np.concatenate(true[host])
            kept = self._rng.random(len(events)) >= observe.loss
            late = (self._rng.random(len(events)) < observe.late_fraction) * observe.late_ms / 1e3
            # The ring keeps the order: a record that comes late holds back those behind it of its process.
            arrival = times + late
            for pid in np.unique(events["pid"]):
                own = np.flatnonzero(events["pid"] == pid)
                own = own[np.argsort(times[own], kind="stable")]
                arrival[own] = np.maximum.accumulate(arrival[own])
            order, lost = np.argsort(arrival[kept], kind="stable"), np.sort(arrival[~kept])
            self._calls[host] = (arrival[kept][order], events[kept][order])
            self._lost[host] = lost, np.searchsorted(self._calls[host][0], lost)

    def _take_timings(self) -> None:
        rows: dict[str, list[tuple[float, float, float, tuple[int, ...]]]] = defaultdict(list)
        for block in self.timeline.blocks:
            for i, rank in enumerate(block.ranks.tolist()):
                if not math.isfinite(block.called[i]) or not self.cast.observed(rank):
                    continue
                member, clock, own = self.cast.membership(rank, block.role), self.cast.clock(rank), block.calling(rank)
                times = [float(t[i]) for t in (block.called, block.started, block.finished)]
                stamps = [clock.wall_ns(t) if math.isfinite(t) else 0 for t in times]
                send = block.transfers[0].send if block.transfers else True
                function = _FUNCTIONS.get(own.function, Function.SEND if send else Function.RECV)
                peer = block.transfers[0].peer if block.transfers else -1
                fixed = (
                    10_000 + rank,
                    member.rank,
                    len(member.members),
                    int(function),
                    member.hash,
                    block.sequence,
                    own.nbytes,
                    peer,
                )
                rows[_host(self.cast, rank)].append((times[0], times[1], times[2], (*fixed, *stamps)))
        for host, entries in rows.items():
            entries.sort(key=lambda e: e[0])
            called, started, finished = (np.array([e[k] for e in entries]) for k in range(3))
            self._timings[host] = (called, started, finished, np.array([e[3] for e in entries], TIMING_DTYPE))

    def _take_network(self) -> None:
        times: list[float] = []
        records = RecordSet()
        clocks = {self.cast.info(rank).host: self.cast.clock(rank) for rank in range(self.timeline.scenario.layout.world)}
        for time, host, look in listings(self.timeline, self.cast):
            times.append(time)
            records.network.append((host, clocks[host].monotonic_ns(time), clocks[host].wall_ns(time), look))
        self._network = list(zip(times, decode(encode(records)).network, strict=True))

    def until(self, time: float, *, history_s: float = math.inf) -> RecordSet:
        """What has arrived by true time ``time``; state samples of the last ``history_s`` only."""
        # At the end of time nothing is old: infinity less infinity is no number.
        oldest = time - history_s if math.isfinite(history_s) else -math.inf
        samples = [[s for arrived, s in series if oldest <= arrived <= time] for _, series in sorted(self._samples.items())]
        calls = {host: events[: np.searchsorted(arrival, time, "right")] for host, (arrival, events) in self._calls.items()}
        timings = {}
        for host, (called, started, finished, rows) in self._timings.items():
            n = int(np.searchsorted(called, time, "right"))
            part = rows[:n].copy()
            part["started_ns"][started[:n] > time] = 0
            part["finished_ns"][finished[:n] > time] = 0
            timings[host] = part
        lost = {host: int(np.searchsorted(times, time, "right")) for host, (times, _) in self._lost.items()}
        network = [said for arrived, said in self._network if arrived <= time]
        lost_after = {host: after[: lost[host]] for host, (_, after) in self._lost.items()}
        return RecordSet([s for s in samples if s], calls, timings, lost, self._planes, network, lost_after)
