"""How often a process calls NCCL: iterations and their times. Host call times, not GPU times.

An iteration ends with what comes back at a constant number of calls: a call, or a short run of calls where only a change of what
is called ends it, as in GPipe without data parallelism. Evaluations, barriers and checkpoints change that number: left out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.call_order import MARKS, MOST_CALLS, CallOrder, PerProcess, by_process
from ncclwatch.collect.ledger import POINT_TO_POINT, mix
from ncclwatch.model.events import Function
from ncclwatch.model.job import Job

KEPT_CALLS = 8192
"""Bound: calls a process in which a period is looked for; an iteration must be less than a third of that."""
ALL_CALLS, FEWEST_CALLS = 400_000, 96
"""Bound: calls whose order is kept of all processes together, and of each at least."""
KEPT_ITERATIONS = 40
"""Bound: iterations that are kept of a process."""
KEPT_TIMES = 8
"""Bound: iterations of which every call's time is kept."""
SEARCH_EVERY = 16
"""Bound: calls between two searches for a period at least, and an eighth of those at hand (cost)."""
SETTLED = 12
"""Unit: iterations. From: Chosen: a period that has held for so many in a row, each as long as ``INNER_S`` or all of them
``INNER_CALLS``, is the job's, and none is looked for any more, unless it breaks off. And the iterations of another length, more
than of the usual one, after which it is given up.
"""
INNER_S = 0.1
"""Unit: s. From: simulated and recorded jobs: a layer's calls come back within less, an iteration of training takes longer."""
TILED = 0.5
"""Of the time so much lies in iterations, since they follow one another. Unit: share of the time. From: Chosen: in a loop whose
calls the host makes at once it is a hundredth.
"""
AT_ONCE = 50.0
"""Where the mean of the newest iterations is so many times their median, a host makes several of them at once, and then waits.
Unit: ratio. From: Chosen: three micro-batches called at once have thousands; a job that pauses for half of its time has 2.
"""
INNER_CALLS = KEPT_CALLS // 2
"""Bound: calls of an inner loop after which nothing longer is looked for."""
RUNS = (1, 2, 4, 8, 16)
"""Bound: calls in a run that marks an end."""
GAPS = 2
"""Bound: equal gaps that make a period; a third occurrence is the first that could have contradicted the two before."""

_FACTOR = 0x9E3779B97F4A7C15
"""Fact: an odd number near 2^64 over the golden ratio (Fibonacci hashing): what differs in one call stays apart in the sum."""

CALL = np.dtype([("time", "<f8"), ("token", "<u8"), ("kind", "<u8")])
"""One call: seconds, and numbers for what is called: with communicator and peer, and without."""

Tokens = NDArray[np.uint64]
Times = NDArray[np.float64]
"""Seconds."""


class Period(NamedTuple):
    """An iteration of ``length`` calls ends with ``marker``, the fingerprint of a run of ``run`` calls; length 0: none.

    ``whole``: each of its calls has come three times. Before that some amid the iteration have, and what ends it has not.
    """

    length: int = 0
    run: int = 1
    marker: int = 0
    whole: bool = False


NONE = Period()


def fingerprints(tokens: Tokens, run: int) -> Tokens:
    """For each call a number for the run of so many calls that ends with it; at the beginning for as many as there are."""
    found = tokens.copy()
    for back in range(1, min(run, len(tokens))):
        found[back:] += tokens[:-back] * np.uint64(pow(_FACTOR, back, 1 << 64))
    return found


def find(tokens: Tokens, times: NDArray[np.float64]) -> Period:
    """The period that has held for most of a sequence up to its end; of such the longest: an inner loop's breaks off with it.
    Where nothing else says which call is an iteration's last, the longest pause is after it. O(n log n).
    """
    best, held = NONE, 0
    for run in RUNS:
        # A longer run must show a period that has held for an iteration longer.
        if held + best.length >= len(tokens):
            break
        marks = fingerprints(tokens, run)
        _, kind, numbers = np.unique(marks, return_inverse=True, return_counts=True)
        places = np.argsort(kind, kind="stable")
        last = np.cumsum(numbers) - 1
        first = last - numbers + 1
        gaps = np.diff(places, prepend=0)
        gap = gaps[last]
        # Where the newest equal gaps of each kind begin; before the first of a kind there is no gap.
        odd = gaps != np.repeat(gap, numbers)
        odd[first] = True
        begin = np.maximum.reduceat(np.where(odd, np.arange(len(places)), 0), first)
        live = np.flatnonzero((last - begin >= GAPS) & (len(tokens) - places[last] <= 2 * gap))
        if not len(live):
            continue
        end, gap = places[last[live]], gap[live]
        reach = np.minimum(end + gap, len(tokens)) - np.maximum(places[begin[live]] - gap + 1, 0)
        if reach.max() <= held + best.length:
            continue
        # Nobody saw where between two calls of a kind its period began.
        length, held = int(gap[reach + gap > reach.max()].max()), int(reach.max())
        # Of what comes once an iteration the last of the cluster: the one with the most calls from it to the next.
        ends = end[(gap == length) & (reach + gap > held)]
        ends = ends[np.argsort(ends % length)]
        after = np.diff(ends % length, append=ends[0] % length + length)
        ends = ends[after == after.max()]
        pause = times[ends - length + 1] - times[ends - length]
        best = Period(length, run, int(marks[ends[np.argmax(pause)]]), held >= (GAPS + 1) * length)
    return best


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of a process: seconds (its node's CLOCK_MONOTONIC) of its first call and of the next's; and its number."""

    begin: float
    end: float
    number: int

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.end - self.begin


@dataclass(slots=True)
class Cadence:
    """The calls of one process. Memory is bounded: ``KEPT_CALLS`` tokens until the period is settled, then one iteration."""

    iterations: deque[Iteration] = field(default_factory=lambda: deque(maxlen=KEPT_ITERATIONS))
    """Those with the usual number of calls, oldest first."""
    profiles: deque[Times] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    """For the newest of them the call times, seconds since the first call, shape (calls,)."""
    first: list[Iteration] = field(default_factory=list)
    """The first iterations since records were last lost: from there on their numbers count what was called."""
    called: bool = False
    """Whether the process calls NCCL itself. Launches of graphs count only where it does not: most hold other work."""
    generation: int = 0
    """Rises when another period was found: durations before and after must not be compared."""
    period: Period = NONE
    program: int = 0
    """Fingerprint of what the iteration calls in which order: equal on ranks that do equal work; 0 while none is known."""
    _calls: NDArray[Any] = field(default_factory=lambda: np.zeros(0, CALL))
    _since_search: int = 0
    _done: int = -1
    """Up to where calls are cut into iterations, the begin of the one at hand; −1 where no begin is known."""
    _number: int = 0
    _steady: int = 0
    """Iterations of the usual length in a row; ``_odd``: of another length, less those of the usual one since."""
    _odd: int = 0
    _broken: int = 0
    """Most iterations of the usual length in a row before one of another."""
    _covered_s: float = 0.0
    """Seconds from when the first iteration began to when the last ended, without those in which records were lost."""
    _in_iterations_s: float = 0.0
    """Of these, seconds in iterations of the usual length."""
    _cut_s: float = 0.0
    """When the last ended; 0 where none has since records were lost."""

    def add(self, calls: NDArray[Any]) -> None:
        """Take calls (``CALL``) in the order of their times."""
        self._calls = np.concatenate([self._calls, calls])
        self._since_search += len(calls)
        # The more there is to search, the rarer: of a job that was just taken up every rank is searched at once.
        if self._since_search >= max(SEARCH_EVERY, len(self._calls) // 8) and not self._settled:
            self._since_search = 0
            found = find(self._calls["token"], self._calls["time"])
            ends_there = found.length == self.period.length and found.whole and not self.period.whole
            if found.length > self.period.length or ends_there:
                self._forget_period()
                self.period = found
                self.generation += 1
        if self.period.length:
            self._split()
        if len(self._calls) > KEPT_CALLS:
            if self._settled:
                self._forget_period()
            self._drop(len(self._calls) - KEPT_CALLS // 2)

    def lose(self) -> None:
        """Records were lost: the iteration at hand is not whole. How long that took is not held against the others."""
        self._calls, self._done = self._calls[:0].copy(), -1
        self._cut_s = 0.0
        self.first.clear()

    def is_inner(self, until: float) -> bool:
        """Whether what comes back may be a loop inside an iteration. Then its times say nothing.

        Either it is single calls, of which a quarter is as quick as those of layers. Or most of the time lies outside of it: a
        host may call a whole iteration at once, and then wait. The time since the last one, ``until`` now (seconds), counts only
        where most are quick: else the one at hand may just be slow. Or several (micro-batches) are called at once.
        """
        if not self.iterations:
            return False
        quick, newest = self._quick_share, self._newest
        if sum(newest) > AT_ONCE * len(newest) * sorted(newest)[len(newest) // 2]:
            return True
        open_s = max(0.0, until - self._cut_s) if quick > 0.5 and self._cut_s else 0.0
        single = self.period.length == 1 and quick > 0.25
        return single or self._in_iterations_s < TILED * (self._covered_s + open_s)

    def whole_program(self, until: float) -> int:
        """``program``; 0 while it may be that of an inner loop, around which ranks with equal ones may do other work."""
        return 0 if self.is_inner(until) else self.program

    @property
    def begins(self) -> dict[int, float]:
        """When iterations began, by their numbers, as far back as those can be compared with other processes' numbers."""
        return {i.number: i.begin for i in (*self.first, *self.iterations) if self.first and i.number >= self.first[0].number}

    @property
    def open_since(self) -> float | None:
        """When the iteration at hand began, seconds; ``None`` where that is not known, or it has more calls than an iteration."""
        known = self._done >= 0 and len(self._calls) - self._done <= self.period.length
        return float(self._calls["time"][self._done]) if known else None

    @property
    def _settled(self) -> bool:
        """Whether nothing longer will be found: the period has held for long, and for longer than before it last broke off."""
        long = self._steady * self.period.length >= INNER_CALLS
        return self._steady >= SETTLED and (long or (self._steady > 2 * self._broken and self._quick_share <= 0.5))

    @property
    def _quick_share(self) -> float:
        """Of the newest iterations, those so short that they may be of an inner loop: 0 to 1."""
        newest = self._newest
        return sum(duration < INNER_S for duration in newest) / len(newest)

    @property
    def _newest(self) -> list[float]:
        """Durations of the newest iterations, seconds."""
        return [one.duration for one in islice(reversed(self.iterations), SETTLED)]

    def _split(self) -> None:
        """Cut what is kept where iterations end; while the period is not settled the calls stay, to be searched again."""
        before = max(0, self._done - (self.period.run - 1))
        marks = fingerprints(self._calls["token"][before:], self.period.run)
        begins = before + 1 + np.flatnonzero(marks == np.uint64(self.period.marker))
        begins = begins[(begins > self._done) & (begins < len(self._calls))]
        if not len(begins):
            return
        bounds = np.r_[self._done, begins] if self._done >= 0 else begins
        self._done = int(bounds[-1])
        whole = np.diff(bounds) == self.period.length
        odd, times = np.flatnonzero(~whole), self._calls["time"][bounds]
        self._covered_s += float(times[-1]) - (self._cut_s or float(times[0]))
        self._cut_s = float(times[-1])
        self._in_iterations_s += float(np.diff(times)[whole].sum())
        runs = np.diff(np.r_[-1 - self._steady, odd, len(whole)]) - 1
        self._broken, self._steady = max([self._broken, *runs[:-1].tolist()]), int(runs[-1])
        self._odd = max(0, self._odd + 2 * len(odd) - len(whole))
        if self._odd > SETTLED:
            self._forget_period()
            return
        # Of a great many iterations only the newest are kept.
        for at in np.flatnonzero(whole)[-KEPT_ITERATIONS:].tolist():
            self._keep(bounds[at], self._number + at + 1)
        self._number += len(whole)
        if self._settled:
            self._drop(self._done - (self.period.run - 1))

    def _keep(self, begin: int, number: int) -> None:
        end = begin + self.period.length
        times = self._calls["time"][begin : end + 1]
        self.program = self.program or hash(tuple(self._calls["kind"][begin:end].tolist()))
        self.iterations.append(Iteration(float(times[0]), float(times[-1]), number))
        self.profiles.append(times - times[0])
        if len(self.first) < KEPT_TIMES:
            self.first.append(self.iterations[-1])

    def _drop(self, calls: int) -> None:
        if calls > 0:
            # A copy: what is kept must not keep all there was.
            self._calls = self._calls[calls:].copy()
            self._done = max(-1, self._done - calls)

    def _forget_period(self) -> None:
        """The job does something else now, or the period was that of a part of it."""
        self.period, self._done = NONE, -1
        self.program = self._odd = self._number = self._steady = self._broken = 0
        self._covered_s = self._cut_s = self._in_iterations_s = 0.0
        for kept in (self.profiles, self.first, self.iterations):
            kept.clear()


class Cadences:
    """The cadence of every process, and the order of its calls. Records may be in no order, or say nothing by their times."""

    def __init__(self, *, ordered: bool = True, timed: bool = True) -> None:
        self.ordered, self.timed = ordered, timed
        self.of: PerProcess[Cadence] = PerProcess()
        self.orders: PerProcess[CallOrder] = PerProcess()

    def add_calls(self, events: NDArray[Any], lost: int = 0, source: str = "") -> None:
        """Take a batch of ``EVENT_DTYPE`` records of one node by their times, of which so many were ``lost``."""
        if lost:
            # What is open can no longer be told from calls, and where in the batch records are missing is not known.
            for key in [key for key in self.of.keys() | self.orders.keys() if key[0] == source]:
                self.orders.pop(key, None)
                if key in self.of:
                    self.of[key].lose()
            return
        calls, bounds = by_process(events if self.ordered else events[:0])
        made, launches = _calls(calls), calls["function"] == Function.GRAPH_LAUNCH
        operations = ~launches & ~np.isin(calls["function"], MARKS)
        for start, end in pairwise(bounds):
            key, own, launched = (source, int(calls["pid"][start])), operations[start:end], launches[start:end]
            order = self.orders.setdefault(key, CallOrder())
            order.room = min(MOST_CALLS, max(FEWEST_CALLS, ALL_CALLS // len(self.orders)))
            order.add(calls[start:end][~launched])
            if self.timed and (own | launched).any():
                known = self.of.setdefault(key, Cadence())
                if own.any() and not known.called:
                    known = self.of[key] = Cadence(called=True, generation=known.generation)
                known.add(made[start:end][own if known.called else launched])

    def of_members(self, job: Job) -> list[Cadence | None]:
        """The cadences of a job's processes, in their order."""
        return [self.of.find(member.info.host, member.info.pid) for member in job.members]

    def forget(self, host: str, pid: int) -> None:
        """Forget a process that is watched no longer: its pid may be another's by now."""
        for key in ((host, pid), ("", pid)):
            self.of.pop(key, None)
            self.orders.pop(key, None)


def _calls(events: NDArray[Any]) -> NDArray[Any]:
    """Records as ``CALL``. Sizes of messages count for nothing: they may depend on the data (experts)."""
    made = np.zeros(len(events), CALL)
    count = np.where(np.isin(events["function"], POINT_TO_POINT), 0, events["count"])
    made["time"] = events["time_ns"] / 1e9
    made["kind"] = mix(events["function"], count, events["datatype"], events["nranks"])
    made["token"] = mix(made["kind"], events["comm"], events["peer"]) | np.uint64(1)
    return made
