"""Ranks of which another tool recorded calls or kernels over time, as batches: one node a rank, for their clocks are not known
alike.

What is not recorded stays out: such a rank has no pid, no host name, no run state and no proxies. A look holds its
communicators and whatever its tool recorded by then; two looks without a record between them are a standstill.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.batch import NodeBatch, PlaneState
from ncclwatch.model.device import DeviceSample
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Communicator, ProcessInfo, ProcessSample, Transport, VersionSource
from ncclwatch.model.verdict import Verdict, VerdictClass

FIRST_PID = 10_000
"""Stands, with the rank added, where a record must have a pid and nobody recorded one; :func:`without_pids` takes it out."""
UNKNOWN_STATE = "?"
"""Run state of a process of which nothing is known but what it called."""
LOOK_S = 1.0
"""Seconds between two looks of a short recording; of a long one there are so many that looks times ranks stay
``MOST_SAMPLES``, of more than ``MANY_RANKS`` ranks ``SAMPLES_OF_MANY``: each look at them costs as much as many of their
calls.
"""
MOST_SAMPLES, SAMPLES_OF_MANY, MANY_RANKS = 1000, 400, 32
FEWEST_LOOKS, MOST_LOOKS = 6, 120
LONGEST_QUIET_S = 700.0
"""Bound: seconds that are looked at behind the last record; the engine's patience ends before that."""
SECOND = 1_000_000_000


@dataclass(slots=True)
class TracedRank:
    """One rank. ``events`` (``EVENT_DTYPE``) in the order of their times, ``breaks``: (records before it, lost at least) where
    some are missing. ``until_ns``: up to when it was recorded, where that is before the end of the job's; ``ended`` says why,
    in words. ``device`` gives what is known of its GPU by a moment. Times are ns of CLOCK_REALTIME where it ran.
    """

    rank: int
    source: str
    world: int | None
    communicators: tuple[Communicator, ...]
    events: NDArray[Any]
    breaks: Sequence[tuple[int, int]] = ()
    until_ns: int | None = None
    ended: str = ""
    device: Callable[[int], DeviceSample] | None = None
    info: ProcessInfo = field(init=False)

    @property
    def whole(self) -> bool:
        """Whether all that it called is there, up to the end of the job's records."""
        return not self.breaks and self.until_ns is None

    def __post_init__(self) -> None:
        key = ProcessKey(self.source, FIRST_PID + self.rank, 0, "")
        self.events["pid"] = self.events["tid"] = key.pid
        self.info = ProcessInfo(
            key=key, host=self.source, name="", command=(), library="", version=None, version_source=VersionSource.UNKNOWN,
            rank=self.rank, world_size=self.world, rank_source="trace",
        )  # fmt: skip

    def sample(self, time_ns: int) -> ProcessSample:
        """What is known of it by a moment."""
        device = self.device(time_ns) if self.device is not None else None
        return ProcessSample(self.info, time_ns, time_ns, 0, UNKNOWN_STATE, self.communicators, device=device)


def communicator(address: int, number: int, rank: int, nranks: int, name: str = "") -> Communicator:
    """A communicator as calls or kernels show it: what joins its ranks is not known."""
    others = (peer for peer in range(min(nranks, 1024)) if peer != rank)
    transports = tuple((0, peer, "send", Transport.UNKNOWN) for peer in others)
    return Communicator(address, number, rank, nranks, name=name, finder="trace", transports=transports)


def call_records(size: int) -> NDArray[Any]:
    """So many records of calls of a rank, with nothing filled in but what all have alike."""
    records = np.zeros(size, EVENT_DTYPE)
    records["kind"], records["flags"], records["peer"] = Kind.ENTER, Flag.COMM_READ, -1
    return records


def birth(time_ns: int, own: Communicator) -> NDArray[Any]:
    """The record that says that a communicator's calls are known from its first operation on."""
    record = call_records(1)
    record["time_ns"], record["kind"], record["function"] = time_ns, Kind.LEAVE, Function.COMM_INIT_RANK
    record["comm"], record["comm_hash"], record["rank"], record["nranks"] = own.address, own.hash, own.rank, own.nranks
    return record


def look_times(begin_ns: int, end_ns: int, quiet_until_ns: int, ranks: int = 1) -> list[int]:
    """When a recording is looked at (ns): evenly while it goes on, then at growing distances until it is known to be quiet."""
    most = MOST_SAMPLES if ranks <= MANY_RANKS else SAMPLES_OF_MANY
    looks_wanted = max(FEWEST_LOOKS, min(MOST_LOOKS, most // max(1, ranks)))
    step = max(int(LOOK_S * SECOND), (end_ns - begin_ns) // looks_wanted)
    looks = [*range(begin_ns + step, end_ns, step), end_ns]
    if len(looks) < 2:
        looks.insert(0, (begin_ns + end_ns) // 2)  # progress is told by two
    wait = SECOND
    last = min(quiet_until_ns, end_ns + int(LONGEST_QUIET_S * SECOND))
    while looks[-1] + wait < last:
        looks.append(looks[-1] + wait)
        wait *= 2
    if last - looks[-1] >= SECOND // 2:
        looks.append(last)
    return looks


def batches(ranks: Iterable[TracedRank], looks: Sequence[int], plane: str = "calls") -> Iterator[NodeBatch]:
    """The batches of all ranks, by time. Ranks of which nothing is missing come together: a batch costs more than its records.
    O(looks x ranks + records).
    """
    every, shown = list(ranks), (PlaneState(plane, True),)
    whole, others = ([one for one in every if one.whole is wanted] for wanted in (True, False))
    streams = [_together(whole, looks, shown) if whole else iter(()), *(_of_rank(one, looks, shown) for one in others)]
    yield from heapq.merge(*streams, key=lambda batch: batch.time_ns)


def _together(ranks: Sequence[TracedRank], looks: Sequence[int], shown: tuple[PlaneState, ...]) -> Iterator[NodeBatch]:
    """What these ranks have called since the look before, rank by rank, and how they look then. Without a host: they are found by
    their pids.
    """
    ends = [np.searchsorted(one.events["time_ns"], np.array(looks, np.uint64), "right").tolist() for one in ranks]
    intervals, sequence = _intervals(looks), count()
    for number, look in enumerate(looks):
        new = [one.events[end[number - 1] if number else 0 : end[number]] for one, end in zip(ranks, ends, strict=True)]
        samples = tuple(one.sample(look) for one in ranks)
        for last, calls in enumerate(new, 1 - len(new)):
            yield NodeBatch(
                host="", boot_id="", sequence=next(sequence), time_ns=look, wall_ns=look, interval_s=intervals[number],
                events=calls, looked=not last, samples=() if last else samples, planes=() if last else shown,
            )  # fmt: skip


def _intervals(looks: Sequence[int]) -> list[float]:
    """Seconds from each look to the next, one at least."""
    return [max(1.0, (after - before) / SECOND) for before, after in pairwise([*looks, looks[-1] + SECOND])]


def _of_rank(traced: TracedRank, looks: Sequence[int], shown: tuple[PlaneState, ...]) -> Iterator[NodeBatch]:
    until = traced.until_ns if traced.until_ns is not None else looks[-1]
    seen = [look for look in looks if look < until] + [min(until, looks[-1])]
    own = traced.events
    ends = np.searchsorted(own["time_ns"], np.array(seen, np.uint64), "right").tolist()
    sequence = lost = begin = 0
    breaks, intervals = list(traced.breaks), _intervals(looks)
    for number, (look, end) in enumerate(zip(seen, ends, strict=True)):
        while breaks and begin <= breaks[0][0] <= end:
            at, missing = breaks.pop(0)
            lost += missing
            yield NodeBatch(
                host=traced.source, boot_id=traced.source, sequence=sequence, time_ns=look, wall_ns=look, lost=lost,
                events=own[begin:at],
            )  # fmt: skip
            sequence, begin = sequence + 1, at
        yield NodeBatch(
            host=traced.source, boot_id=traced.source, sequence=sequence, time_ns=look, wall_ns=look, looked=True, lost=lost,
            interval_s=intervals[min(number, len(intervals) - 1)], samples=(traced.sample(look),), events=own[begin:end],
            planes=shown, finished=traced.ended if number == len(seen) - 1 else "",
        )  # fmt: skip
        sequence, begin = sequence + 1, end


_PID = re.compile(r", pid \d+\)")
_WITH_PID = re.compile(r"pid \d|/proc/\d")


def without_pids(verdict: Verdict) -> Verdict:
    """A verdict without the pids and the commands that need one: nobody recorded any."""
    evidence, unobserved = (tuple(_PID.sub(")", line) for line in lines) for lines in (verdict.evidence, verdict.unobserved))
    return replace(
        verdict, culprits=tuple(replace(one, pid=None) for one in verdict.culprits), summary=_PID.sub(")", verdict.summary),
        next_steps=tuple(step for step in verdict.next_steps if not _WITH_PID.search(step)), evidence=evidence,
        unobserved=unobserved,
    )  # fmt: skip


def without_certainty(verdict: Verdict) -> Verdict:
    """A verdict by calls alone that names several ranks, as one that accuses nobody: hosts run ahead of their GPUs, so who has
    called less may wait for an operation that it has called, as all ranks of a tensor group do when one of them, or a link, is
    dead.
    """
    if verdict.verdict_class is not VerdictClass.NOT_ENTERED or len(verdict.culprits) < 2:
        return verdict
    ranks = ", ".join("?" if one.rank is None else str(one.rank) for one in verdict.culprits[:8])
    more = " …" if len(verdict.culprits) > 8 else ""
    what = (
        f" {verdict.operation.name} #{verdict.operation.sequence}" if verdict.operation and verdict.operation.name else " a call"
    )
    doubt = "whether one of them holds the job up, or what they called last does not end on a GPU or in the network"
    return replace(
        verdict, verdict_class=VerdictClass.UNKNOWN, confidence=0.0, unobserved=(doubt, *verdict.unobserved),
        summary=f"ranks {ranks}{more} have not made{what} that others wait in; by calls alone it is not told {doubt}",
    )  # fmt: skip


def once_a_moment(amend: Callable[[Verdict], Verdict]) -> Callable[[Verdict], Verdict]:
    """What a whole trace tells, said once where its ranks look like several jobs (no communicator of all was recorded)."""
    said: set[float | None] = set()

    def first(verdict: Verdict) -> Verdict:
        amended = amend(verdict)
        if verdict.verdict_class.accuses or not amended.verdict_class.accuses:
            return amended
        if verdict.time in said:
            return without_pids(verdict)
        said.add(verdict.time)
        return amended

    return first
