"""How often a process calls NCCL: iterations, their times, and the pace of calls within one. Host call times, not GPU times.

A call says when the host asked, not when the GPU did it. But a host cannot run ahead of its GPU for long, so over an iteration
the cadence of calls is that of the work; and what a host does between iterations (loading data) shows as it is.

An iteration is what lies between two calls of the operation that occurs least often and at a constant number of calls (in
training: the last operation on the gradients or parameters). Evaluation phases, barriers and checkpoints that call something
change that number, and such stretches are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.order import OPERATIONS, CallOrders
from ncclwatch.model.events import Flag, Kind

KEPT_CALLS = 8192
"""Calls a process that are searched for the pattern; an iteration must be less than a third of that."""
KEPT_ITERATIONS = 40
KEPT_TIMES = 8
"""Iterations of which every call's time is kept."""
SEARCH_EVERY = 16
SETTLED = 12
"""Iterations after which the pattern is no longer searched for."""
BREAKS, LONGEST_CONTEXT = 6, 16
"""Iterations of an unusual length after which a pattern that never held was that of an inner loop: then a call counts together
with twice as many of those before it, up to so many.
"""
PATTERNLESS_CALLS = 256
"""The same after so many calls without any pattern, and after twice as many each time."""
INNER_S, INNER_CALLS = 0.1, KEPT_CALLS // 2
"""What comes back sooner may be an inner loop (the layers' tensor-parallel calls): it is searched on for so many calls."""

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of one process: seconds (CLOCK_MONOTONIC of its node) of its first call and of the first call of the next."""

    begin: float
    end: float
    number: int
    """Counts the iterations of this process, gaps included."""

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.end - self.begin


@dataclass(slots=True)
class Cadence:
    """The calls of one process. Memory is bounded: ``KEPT_CALLS`` tokens until the pattern is known, then one iteration."""

    iterations: deque[Iteration] = field(default_factory=lambda: deque(maxlen=KEPT_ITERATIONS))
    """Those with the usual number of calls, oldest first."""
    profiles: deque[Times] = field(default_factory=lambda: deque(maxlen=KEPT_TIMES))
    """For the newest of them the call times, seconds since the first call, shape (calls,)."""
    baseline: list[Times] = field(default_factory=list)
    """The same of the first iterations, warm-up left out."""
    first: list[Iteration] = field(default_factory=list)
    """The first iterations since records were last lost: from there on their numbers count what was called."""
    generation: int = 0
    """Rises when another pattern was found: durations before and after must not be compared."""
    calls: int = 0
    last_call: float = 0.0
    marker: int = 0
    """Token of the operation that ends an iteration; 0 while it is not known."""
    usual: int = 0
    """Calls in an iteration."""
    program: int = 0
    """Fingerprint of what the iteration calls in which order, whichever communicator: equal on ranks that do equal work."""
    _times: list[float] = field(default_factory=list)
    _tokens: list[int] = field(default_factory=list)
    _kinds: list[int] = field(default_factory=list)
    _since_search: int = 0
    _cut: bool = False
    _done: int = 0
    _number: int = 0
    _unusual: int = 0
    _steady: int = 0
    _breaks: int = 0
    _longest: int = 0
    """Iterations of other lengths since the pattern was found, and the most in a row of the usual one."""
    _context: int = 1
    """A call is told by so many tokens, its own and those before: where an iteration ends by nothing but a change of what is
    called (GPipe without data parallelism), no operation comes once in it.
    """
    _found_at: int = 0
    """Calls that had been made when the pattern was found."""

    def add(self, times: Times, tokens: NDArray[np.uint64], kinds: NDArray[np.uint64]) -> None:
        """Take calls in the order of their times; ``kinds`` are tokens that leave out the communicator and the peer."""
        if not len(times):
            return
        self.calls += len(times)
        self.last_call = float(times[-1])
        self._times += times.tolist()
        self._tokens += tokens.tolist()
        self._kinds += kinds.tolist()
        if not self._settled:
            self._since_search += len(times)
            # The more there is to search, the rarer: of a job that was just taken up every rank is searched at once.
            enough = max(SEARCH_EVERY, self.usual, len(self._tokens) // 8)
            # With less than three iterations at hand an inner loop would be taken for one.
            if self._since_search >= enough and len(self._tokens) >= 3 * self.usual:
                self._since_search = 0
                self._search()
        if self.marker:
            self._split()
        if len(self._times) > KEPT_CALLS:
            if self._settled:
                self._forget_pattern()
            drop = len(self._times) - KEPT_CALLS // 2
            del self._times[:drop], self._tokens[:drop], self._kinds[:drop]
            self._done = max(0, self._done - drop)

    def lose(self) -> None:
        """Records were lost: the iteration at hand is not whole."""
        self._times.clear()
        self._tokens.clear()
        self._kinds.clear()
        self.first.clear()
        self._done = 0
        self._cut = False

    @property
    def is_beat(self) -> bool:
        """Whether single calls, one like another, come within a tenth of a second: layers rather than iterations. Forward and
        backward have beats of their own, and neither is slow.
        """
        return (
            self.usual == 1
            and bool(self.iterations)
            and self.iterations[-1].end - self.iterations[0].begin < (INNER_S * len(self.iterations))
        )

    @property
    def begins(self) -> dict[int, float]:
        """When iterations began, by their numbers, as far back as those can be compared with other processes' numbers."""
        return (
            {i.number: i.begin for i in (*self.first, *self.iterations) if i.number >= self.first[0].number} if self.first else {}
        )

    @property
    def open_since(self) -> float | None:
        """When the iteration at hand began, seconds; ``None`` where that is not known, or it has more calls than an iteration."""
        calls = len(self._times) - self._done
        if not self.marker or not self._cut or not 0 < calls <= self.usual:
            return None
        return self._times[self._done]

    @property
    def _settled(self) -> bool:
        """Whether the pattern has held for so long that nothing rarer will be found in it."""
        if not self.marker or self._steady < SETTLED:
            return False
        return self.calls - self._found_at >= INNER_CALLS or self.iterations[-1].begin - self.iterations[-SETTLED].begin >= (
            INNER_S * (SETTLED - 1)
        )

    def _search(self) -> None:
        """Find the rarest operation that comes at a constant number of calls; what was cut by a commoner one is cut anew."""
        tokens = self._in_context(0)
        distinct, kind, numbers = np.unique(tokens, return_inverse=True, return_counts=True)
        often = numbers[kind]
        best: tuple[int, int, int] | None = None
        # Rarest first: an operation of the inner loop has constant distances too, but occurs more often.
        rarest = np.argsort(numbers, kind="stable")
        for at in rarest[numbers[rarest] >= 3][:16].tolist():
            if best is not None and numbers[at] > best[1]:
                break
            places = np.flatnonzero(kind == at)
            gaps = places[-2] - places[-3], places[-1] - places[-2]
            if gaps[0] != gaps[1] or len(tokens) - places[-1] > 2 * gaps[0]:
                continue
            # Of several that occur once an iteration, the last of the cluster: the one farthest from the next of them.
            following = np.flatnonzero(often[places[-2] + 1 :] == numbers[at])
            distance = int(following[0]) + 1 if len(following) else 0
            if best is None or distance > best[2]:
                best = (int(distinct[at]), int(numbers[at]), distance)
        patternless = best is None and not self.marker and len(tokens) >= PATTERNLESS_CALLS * self._context
        if patternless and self._context < LONGEST_CONTEXT:
            self._context *= 2
        if best is None or best[0] == self.marker:
            return
        if self.marker and np.count_nonzero(tokens == np.uint64(self.marker)) <= best[1]:
            return
        self._forget_pattern()
        self.marker = best[0]
        self.generation += 1
        self._found_at = self.calls

    def _split(self) -> None:
        """Cut what is kept at the markers; while the pattern is not settled the calls stay, to be searched again."""
        tokens = self._in_context(self._done)
        ends = np.flatnonzero(tokens == np.uint64(self.marker))
        ends = ends[ends + 1 < len(tokens)]
        if len(ends):
            times = np.array(self._times[self._done :])
            start = 0
            rest = ends.tolist()
            if self._settled and self._cut and len(rest) > 2 * KEPT_ITERATIONS:
                start, rest = self._skip(ends)
            for end in rest:
                if self._cut:
                    at = self._done + start
                    self._close(times[start : end + 2], self._kinds[at : self._done + end + 1])
                    if not self.marker:
                        return
                self._cut = True
                start = end + 1
            self._done += start
        past = self._done - (self._context - 1)
        if self._settled and past > 0:
            del self._times[:past], self._tokens[:past], self._kinds[:past]
            self._done -= past

    def _in_context(self, begin: int) -> NDArray[np.uint64]:
        """The calls from ``begin`` on, each by its token and those before it."""
        before = max(0, begin - (self._context - 1))
        tokens = np.array(self._tokens[before:], np.uint64)
        found = tokens.copy()
        for back in range(1, min(self._context, len(tokens))):
            found[back:] += tokens[:-back] * np.uint64(pow(_CONTEXT_FACTOR, back, 1 << 64))
        return found[begin - before :]

    def _skip(self, ends: NDArray[np.int64]) -> tuple[int, list[int]]:
        """Of a great many iterations alike only the newest are kept: where those begin, and their ends."""
        usual = np.diff(ends, prepend=-1) == self.usual
        if not usual.all():
            return 0, ends.tolist()
        skipped = len(ends) - KEPT_ITERATIONS
        self._number += skipped
        self._steady += skipped
        self._unusual = 0
        return int(ends[skipped - 1]) + 1, ends[skipped:].tolist()

    def _close(self, times: Times, kinds: Sequence[int]) -> None:
        """``times`` holds the calls of one iteration and the first of the next, ``kinds`` what is called in it."""
        self._number += 1
        calls = len(times) - 1
        if not self.usual:
            self.usual, self.program = calls, hash(tuple(kinds))
        if calls != self.usual:
            self._unusual += 1
            self._breaks += 1
            self._steady = 0
            inner = self._breaks >= BREAKS and self._longest < SETTLED and self._context < LONGEST_CONTEXT
            if inner:
                self._context *= 2
            if inner or self._unusual > KEPT_TIMES:
                self._forget_pattern()
            return
        self._unusual = 0
        self._steady += 1
        self._longest = max(self._longest, self._steady)
        self.iterations.append(Iteration(float(times[0]), float(times[-1]), self._number))
        profile = times - times[0]
        self.profiles.append(profile)
        if len(self.first) < KEPT_TIMES:
            self.first.append(self.iterations[-1])
        if self._number > 1 and len(self.baseline) < KEPT_TIMES:
            self.baseline.append(profile)

    def _forget_pattern(self) -> None:
        """The job does something else now, or the pattern was taken for a part of it."""
        self.marker = self.usual = self._unusual = self._done = self._number = self._steady = self._breaks = self._longest = 0
        self._cut = False
        self.profiles.clear()
        self.baseline.clear()
        self.first.clear()
        self.iterations.clear()


Key = tuple[str, int]
"""(host that the records come from, pid)"""


class Cadences:
    """The cadence of every process."""

    def __init__(self) -> None:
        self.of: dict[Key, Cadence] = {}
        self.orders = CallOrders()

    def add_calls(self, events: NDArray[Any], lost: int = 0, source: str = "") -> None:
        """Take a batch of ``EVENT_DTYPE`` records of one node, in the order of their times."""
        if lost:
            for (host, _), cadence in self.of.items():
                if host == source:
                    cadence.lose()
            self.orders.lose(source)
        self.orders.add_calls(events, source)
        known = (events["flags"] & np.uint16(Flag.COMM_READ)) != 0
        chosen = events[(events["kind"] == Kind.ENTER) & known & np.isin(events["function"], OPERATIONS)]
        if not len(chosen):
            return
        order = np.lexsort((chosen["time_ns"], chosen["pid"]))
        chosen = chosen[order]
        tokens, kinds = _tokens(chosen)
        times = chosen["time_ns"].astype(np.float64) / 1e9
        pids = chosen["pid"]
        starts = np.flatnonzero(np.r_[True, pids[1:] != pids[:-1]])
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(pids)], strict=True):
            key = (source, int(pids[start]))
            self.of.setdefault(key, Cadence()).add(times[start:end], tokens[start:end], kinds[start:end])

    def find(self, host: str, pid: int) -> Cadence | None:
        """The cadence of a process; records without a source belong to the only host there is."""
        return self.of.get((host, pid)) or self.of.get(("", pid))

    def keep_only(self, wanted: set[Key]) -> None:
        """Forget processes that are watched no longer."""
        for key in [key for key in self.of if key not in wanted and ("", key[1]) not in wanted]:
            del self.of[key]
            self.orders.of.pop(key, None)


def _tokens(events: NDArray[Any]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Numbers for what is called: with communicator and peer, and without. Odd multipliers keep different calls apart."""
    kinds = np.zeros(len(events), np.uint64)
    for name, factor in _FACTORS.items():
        kinds = (kinds ^ (kinds >> np.uint64(29))) + (events[name].astype(np.int64) + 2).astype(np.uint64) * np.uint64(factor)
    peers = (events["peer"].astype(np.int64) + 2).astype(np.uint64)
    places = events["comm"].astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + peers * np.uint64(0x85EBCA77C2B2AE63)
    return (kinds ^ (places ^ (places >> np.uint64(32)))) | np.uint64(1), kinds


_CONTEXT_FACTOR = 0x9E3779B97F4A7C15
_FACTORS = {
    "function": 0xC2B2AE3D27D4EB4F,
    "count": 0x165667B19E3779F9,
    "datatype": 0x27D4EB2F165667C5,
    "nranks": 0x94D049BB133111EB,
}


def mean_profile(profiles: Sequence[Times]) -> Times:
    """Median call times over iterations of equal length, shape (calls,); empty without any."""
    if not profiles:
        return np.zeros(0)
    length = len(profiles[-1])
    same = [profile for profile in profiles if len(profile) == length]
    result: Times = np.median(np.array(same), axis=0)
    return result
