"""Who is scored: the interface, and ncclwatch behind it. A diagnoser sees records and a clock, never a scenario."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from typing import Protocol

import numpy as np

from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.slow.watch import Observer
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict
from ncclwatch.simulate.scenario import ScoreClass
from ncclwatch.simulate.wire import RecordSet

HANG_CLASSES = frozenset({ScoreClass.H1, ScoreClass.H2, ScoreClass.H3, ScoreClass.INIT_HANG, ScoreClass.DEADLOCK})


class Diagnoser(Protocol):
    """Anything that can be scored. ``note`` says what it stands for; ``not_yet`` are classes it has nothing for yet."""

    name: str
    note: str
    not_yet: frozenset[ScoreClass]

    def diagnose(self, records: RecordSet, clock_s: float) -> list[Verdict]:
        """Verdicts at ``clock_s`` on what was recorded by then; those that accuse nobody may be left out."""
        ...


class Ncclwatch:
    """The engine as the live session runs it, fed the records in the order they arrived. One instance judges one case: records
    of a later moment go on where those of an earlier one ended.
    """

    name = "ncclwatch"
    note = "this project: state and calls planes, sockets where hosts list them"
    not_yet: frozenset[ScoreClass] = frozenset()

    def __init__(self, observer: Observer | None = None, every: int = 1) -> None:
        """``observer`` is told of all that the slowness estimate weighs. Of the samples in the records every so many-th is taken
        (``every``), and all of them while the engine looks for a culprit, as an agent does then.
        """
        self._every, self._rounds = every, 0
        self._live = LiveDiagnosis()
        self._live.slow.observer = observer
        self._done: dict[str, int] = defaultdict(int)
        """Records of calls that were given, by host."""
        self._told: dict[str, int] = defaultdict(int)
        """Lost ones that were told of."""
        self._heard = 0
        """Words of hosts on their network that were given."""
        self._latest = -1
        """Time of the newest sample that was given."""
        self._standing: list[Verdict] = []

    def diagnose(self, records: RecordSet, clock_s: float) -> list[Verdict]:
        for _, verdict in self.said(records):
            self._standing = [verdict]
        return self._standing

    def said(self, records: RecordSet) -> Iterator[tuple[float, Verdict]]:
        """What is said at every sample that is new and taken: its time (seconds of CLOCK_MONOTONIC) and the verdict."""
        self._live.known.complete_hosts = frozenset(s[-1].process.host for s in records.samples)
        for round_ in rounds(records):
            latest = max(sample.time_ns for sample in round_)
            if latest <= self._latest:
                continue
            self._latest = latest
            self._rounds += 1
            searches = any(self._live.slow.searches(job, {}) for job, _ in self._live.judged)
            if (self._rounds - 1) % self._every and not searches:
                continue
            for host, events in records.calls.items():
                upto = int(np.searchsorted(np.maximum.accumulate(events["time_ns"]), latest, "right"))
                if upto > self._done[host]:
                    # An agent tells with a batch what was lost in it. Where no record says when, they are told evenly.
                    after, evenly = records.lost_after.get(host), -(-records.lost.get(host, 0) * upto // len(events))
                    known = max(evenly if after is None else int(np.searchsorted(after, upto)), self._told[host])
                    self._live.add_calls(events[self._done[host] : upto], known - self._told[host])
                    self._told[host], self._done[host] = known, upto
            network = self._live.known.network
            for host, time_ns, wall_ns, look in records.network[self._heard :]:
                if time_ns > latest:
                    break
                network.feed(host, look, wall_ns)
                self._heard += 1
            self._live.slow.delays, self._live.slow.network = network.delays(), network
            yield latest / 1e9, self._live.update(round_)


def rounds(records: RecordSet) -> list[list[ProcessSample]]:
    """The samples as a session hands them over: one round a period, each with the last one of every process by then."""
    series = [s for s in records.samples if s]
    if not series:
        return []
    longest = max(series, key=len)
    marks = [s.time_ns for s in longest]
    gaps = [b - a for a, b in itertools.pairwise(marks)] or [1_000_000_000]
    tolerance = max(1, min(gaps) // 2)
    result: list[list[ProcessSample]] = [[] for _ in marks]
    for one in series:
        times = [sample.time_ns for sample in one]
        for at, mark in enumerate(marks):
            by_then = bisect_right(times, mark + tolerance)
            if by_then:
                result[at].append(one[by_then - 1])
    return [r for r in result if r]
