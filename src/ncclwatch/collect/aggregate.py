"""From records of the planes to one window per rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclwatch.collect.calls import FIELDS, Call, CallTracker
from ncclwatch.collect.ranks import ranks_of
from ncclwatch.collect.rates import BUCKET_NS
from ncclwatch.collect.state import OpenOperation, StateTracker
from ncclwatch.collect.windows import CurrentOperation, LastCall, RankWindow
from ncclwatch.model.events import EVENT_DTYPE, Flag
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.rows import by_value, distinct, joined, narrowed
from ncclwatch.model.state import ProcessInfo, ProcessSample

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_WAITING = 16384
"""Calls that wait to be counted: a megabyte."""
COUNTED = np.dtype([(name, EVENT_DTYPE[name]) for name in (*FIELDS, "pid", "comm")], align=True)
"""What of them is counted."""
MAX_PROCESSES = 4096
"""More NCCL processes than any node runs; records of further ones are counted as strangers."""


@dataclass(slots=True)
class _Rank:
    info: ProcessInfo
    calls: CallTracker
    state: StateTracker
    begun_ns: int
    torn: int = 0
    problem: str = ""


@dataclass(slots=True)
class _Process:
    """The ranks of one process: one, unless it drives several GPUs."""

    ranks: dict[int, _Rank]
    """By ``ProcessKey.part``; the first is always there."""
    by_address: dict[int, _Rank] = field(default_factory=dict)
    """Communicators of a process with several ranks, by their addresses."""

    def concerns(self, rank: _Rank, comms: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which calls, by the communicators they name, concern a rank: those of its own, and those of no rank that is known."""
        others = [address for address, owner in self.by_address.items() if owner is not rank]
        return ~np.isin(comms, np.array(others, np.uint64))


@dataclass(slots=True)
class Strangers:
    """Records of processes that nobody added: a process that has just begun, or one that is already gone."""

    records: int = 0
    pids: set[int] = field(default_factory=set)

    def take(self) -> set[int]:
        """Pids seen since the last time, for a look at what they are."""
        pids, self.pids = self.pids, set()
        return pids


class Aggregator:
    """Windows of all watched processes of a node.

    ``calls_plane`` says whether call records can arrive at all: without them rates come from NCCL's own counters. Times are
    CLOCK_MONOTONIC in nanoseconds, given by the caller.
    """

    def __init__(self, *, calls_plane: bool = True) -> None:
        self.calls_plane = calls_plane
        self.strangers = Strangers()
        self.lost = 0
        """Call records lost so far, as last reported."""
        self._waiting: list[NDArray[Any]] = []
        """Calls that have not been counted."""
        self._ranks: dict[ProcessKey, _Rank] = {}
        self._by_pid: dict[int, _Process] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def add_process(self, info: ProcessInfo, now_ns: int) -> None:
        """Watch a process; one that took over the pid of another replaces it."""
        if info.key in self._ranks or len(self._ranks) >= MAX_PROCESSES:
            return
        self._count()
        former = self._by_pid.get(info.pid)
        if former is not None:
            self.remove_process(former.ranks[0].info.key)
        self._by_pid[info.pid] = _Process({0: self._add(info, now_ns)})

    def _add(self, info: ProcessInfo, now_ns: int) -> _Rank:
        rank = self._ranks[info.key] = _Rank(info, CallTracker(now_ns), StateTracker(now_ns), now_ns)
        return rank

    def remove_process(self, key: ProcessKey) -> None:
        """Forget a process and everything held for it."""
        self._count()
        process = self._by_pid.get(key.pid)
        if process is not None and process.ranks[0].info.key == key:
            del self._by_pid[key.pid]
            for rank in process.ranks.values():
                self._ranks.pop(rank.info.key, None)

    def feed_events(self, events: NDArray[Any]) -> None:
        """Take call records, a structured array in the layout of ``struct nw_event``, in the order of the ring."""
        # A process that is not on the tracer's list comes with its number in its own pid namespace, which may not be ours.
        foreign = (events["flags"] & int(Flag.UNKNOWN_PROCESS) != 0) & (events["pid_namespace"] != 0)
        self.strangers.records += int(foreign.sum())
        ours = events[~foreign] if foreign.any() else events
        for pid in set(distinct(ours["pid"]).tolist()) - self._by_pid.keys():
            self.strangers.records += int((ours["pid"] == pid).sum())
            if len(self.strangers.pids) < MAX_PROCESSES:
                self.strangers.pids.add(pid)
        self._waiting.append(narrowed(ours, COUNTED))
        if sum(map(len, self._waiting)) > MAX_WAITING:
            self._count()

    def _count(self) -> None:
        """Count the calls that wait: many together cost little more than a few."""
        if not self._waiting:
            return
        waiting, self._waiting = joined(self._waiting), []
        order, bounds = by_value(waiting["pid"])
        waiting = waiting.take(order)
        for begin, end in pairwise(bounds.tolist()):
            found = waiting[begin:end]
            process = self._by_pid.get(int(found["pid"][0]))
            if process is None:
                continue
            for rank in process.ranks.values():
                rank.calls.feed(found if not process.by_address else found[process.concerns(rank, found["comm"])])

    def feed_sample(self, sample: ProcessSample) -> None:
        """Take a look at a process that was added."""
        process = self._by_pid.get(sample.process.pid)
        if process is None or process.ranks[0].info.key != sample.process.key:
            return
        parts = ranks_of(sample)
        if len(parts) > 1 or len(process.ranks) > 1:
            # Which rank a call is of depends on the communicators that are known.
            self._count()
        for gone in process.ranks.keys() - {part.process.key.part for part in parts}:
            del self._ranks[process.ranks.pop(gone).info.key]
        for part in parts:
            number = part.process.key.part
            rank = process.ranks.get(number)
            if rank is None:
                rank = process.ranks[number] = self._add(part.process, sample.time_ns)
            rank.info = part.process
            rank.problem = ""
            rank.torn += part.torn
            rank.state.feed(part)
        process.by_address = (
            {c.address: process.ranks[part.process.key.part] for part in parts for c in part.communicators}
            if len(parts) > 1
            else {}
        )

    def feed_problem(self, key: ProcessKey, problem: str) -> None:
        """The newest look at a process failed."""
        process = self._by_pid.get(key.pid)
        if process is not None and process.ranks[0].info.key == key:
            for rank in process.ranks.values():
                rank.problem = problem

    def feed_losses(self, lost: int) -> None:
        """The number of call records lost since the beginning. When it rises, half-seen groups are closed."""
        if lost > self.lost:
            self._count()
            for rank in self._ranks.values():
                rank.calls.records_lost()
        self.lost = lost

    def windows(self, now_ns: int) -> list[RankWindow]:
        """One window a rank, by rank, then host and pid."""
        self._count()
        found = [self._window(rank, now_ns) for rank in self._ranks.values()]
        return sorted(found, key=lambda w: (w.rank is None, w.rank or 0, w.process.host, w.process.pid))

    def _window(self, rank: _Rank, now_ns: int) -> RankWindow:
        sample = rank.state.sample
        largest = sample.largest if sample else None
        launches, steps = rank.state.per_second(now_ns)
        operations, nbytes = rank.calls.per_second(now_ns)
        moved = rank.state.moved_ns
        # A rate over less than one bucket of time would be a guess.
        counted = now_ns - rank.begun_ns >= BUCKET_NS
        last = rank.calls.last
        return RankWindow(
            time_ns=now_ns,
            process=rank.info,
            rank=sample.rank if sample else rank.info.rank,
            gpu=largest.device if largest else None,
            run_state=sample.run_state if sample else "?",
            operation=_current(rank, now_ns),
            last_call=LastCall(last.name, last.comm_hash, _age(last.time_ns, now_ns), last.count, last.nbytes) if last else None,
            calls=rank.calls.totals.calls,
            operations=rank.calls.totals.operations,
            operations_per_s=None if not counted else operations if self.calls_plane else launches if sample else None,
            rate_plane="calls" if self.calls_plane else "state" if sample else "",
            bytes_per_s=nbytes if self.calls_plane and counted else None,
            steps_per_s=steps if sample and counted else None,
            still_s=_age(moved, now_ns) if moved is not None else _age(rank.begun_ns, now_ns) if sample else None,
            torn=rank.torn,
            problem=rank.problem,
        )


def _age(since_ns: int, now_ns: int) -> float:
    return max(now_ns - since_ns, 0) / 1e9


def _current(rank: _Rank, now_ns: int) -> CurrentOperation | None:
    """The oldest unfinished operation, else a call that has not returned."""
    unfinished = rank.state.open
    if unfinished:
        return _from_state(rank, unfinished[0], len(unfinished) - 1, now_ns)
    blocked = next(iter(rank.calls.blocked.values()), None)
    return _from_call(blocked, len(rank.calls.blocked) - 1, now_ns) if blocked else None


def _from_state(rank: _Rank, found: OpenOperation, others: int, now_ns: int) -> CurrentOperation:
    call = rank.calls.last_like(found.comm_hash, found.name)
    return CurrentOperation(
        name=found.name,
        plane="state",
        comm_hash=found.comm_hash,
        comm_rank=found.comm_rank,
        nranks=found.nranks,
        sequence=found.sequence,
        age_s=_age(found.since_ns, now_ns),
        at_least=found.since_before,
        count=call.count if call else None,
        nbytes=call.nbytes if call else None,
        protocol=found.protocol,
        algorithm=found.algorithm,
        steps_done=found.steps_done,
        steps_total=found.steps_total,
        begun=found.begun,
        others=others,
    )


def _from_call(call: Call, others: int, now_ns: int) -> CurrentOperation:
    return CurrentOperation(
        name=call.name,
        plane="calls",
        comm_hash=call.comm_hash,
        comm_rank=call.comm_rank if call.comm_rank >= 0 else None,
        nranks=call.nranks if call.nranks > 0 else None,
        sequence=None,
        age_s=_age(call.time_ns, now_ns),
        at_least=False,
        blocked_call=True,
        others=others,
    )
