"""Where every rank is in the pattern of its stage, call by call; one pointer a rank, found again after lost records.

A call that is what the pattern has next moves the pointer. Another one is a gap (records were lost) or does not belong to the
iteration (a barrier, an evaluation phase): then the pointer waits for an operation that occurs once in the pattern, or for a run
of calls that fits in one place only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.model import Learned, Pattern
from ncclwatch.engine.topology.patterns import Encoding
from ncclwatch.engine.topology.record import KnownJob

AHEAD = 64
"""After a gap the pattern is searched so far ahead for the calls that follow."""
RUN = 4
"""So many calls in a row must fit before a place ahead is believed."""
CONTEXT = 24
"""Without an operation that is unique, so many of the latest calls must fit in one place of the pattern only."""
EVERY = 8
"""That search is made once in so many calls: it compares with the whole pattern."""
BOUNDARIES = 256
"""Iterations over which the pace of the reference is taken."""

Places = tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]
"""Of calls: positions in the pattern (−1: none), iterations, and whether these are certain."""


@dataclass(slots=True)
class Track:
    """The pointer of one process: ``position`` is the step its latest call was, −1 when lost."""

    pattern: Pattern
    position: int = -1
    iteration: int = 0
    exact: bool = False
    placed: bool = False
    """Whether it ever had a place."""
    found_at: int = -1
    """Index, in the calls taken last, at which it found its place after it had none; the number of the iteration is open then."""
    astray: int = 0
    """Calls without a place, in all."""
    recent: list[int] = field(default_factory=list)
    """Tokens since the pointer was lost, at most ``CONTEXT``."""

    def follow(self, tokens: NDArray[np.uint64]) -> Places:
        """Take calls in order and say where they are."""
        n = len(tokens)
        places: Places = np.full(n, -1, np.int32), np.full(n, self.iteration, np.int64), np.zeros(n, np.bool_)
        at, self.found_at = 0, -1
        while at < n:
            if self.position >= 0:
                at = self._advance(tokens, places, at)
            if at < n:
                self._search(tokens, places, at)
                at += 1
        return places

    def _advance(self, tokens: NDArray[np.uint64], places: Places, at: int) -> int:
        """Follow the pattern as far as it fits; returns the index of the first call that does not."""
        positions, iterations, exact = places
        word = self.pattern.tokens
        while at < len(tokens):
            begin = (self.position + 1) % len(word)
            piece = min(len(word) - begin, len(tokens) - at)
            same = tokens[at : at + piece] == word[begin : begin + piece]
            fits = piece if same.all() else int(same.argmin())
            if fits:
                self.iteration += begin == 0
                self.exact = self.exact or any(begin <= position < begin + fits for position in self.pattern.unique.values())
                where = slice(at, at + fits)
                positions[where], iterations[where], exact[where] = np.arange(begin, begin + fits), self.iteration, self.exact
                self.position = begin + fits - 1
                at += fits
            if fits < piece:
                break
        return at

    def _search(self, tokens: NDArray[np.uint64], places: Places, at: int) -> None:
        """One call that does not fit: find the place again, or leave it without."""
        token = int(tokens[at])
        found, certain = self.pattern.unique.get(token, -1), True
        if found < 0 and self.position >= 0:
            found, certain = self._ahead(tokens, at), False
        if found < 0:
            self.recent = [*self.recent[-(CONTEXT - 1) :], token]
            self.astray += 1
            if self.position < 0 and len(self.recent) == CONTEXT and self.astray % EVERY == 0:
                # Passes of an evaluation look like those of an iteration: certain is what is unique, where anything is.
                found, certain = self._by_context(), not self.pattern.unique
        positions, iterations, exact = places
        if found < 0:
            if self.position >= 0 and self._is_stranger(tokens, at):
                iterations[at] = self.iteration
            else:
                self.position, self.exact = -1, False
            return
        if found <= self.position or (self.position < 0 and found == 0):
            self.iteration += 1
        if self.position < 0:
            self.found_at = at
        self.position, self.exact, self.placed, self.recent = found, certain, True, []
        positions[at], iterations[at], exact[at] = found, self.iteration, certain

    def _is_stranger(self, tokens: NDArray[np.uint64], at: int) -> bool:
        """Whether the pattern goes on right after this call: then it was put in between (a barrier), and nothing is lost.

        What goes from stage to stage is never put in between: there another pass begins than the pattern has next.
        """
        if int(tokens[at]) in self.pattern.exchanges:
            return False
        if at + 1 >= len(tokens):
            return bool((self.pattern.tokens != tokens[at]).all())
        return bool(tokens[at + 1] == self.pattern.tokens[(self.position + 1) % len(self.pattern)])

    def _ahead(self, tokens: NDArray[np.uint64], at: int) -> int:
        """The next place, not far ahead, where this call and those after it fit; −1 if there is none."""
        word, following = self.pattern.tokens, tokens[at : at + RUN]
        for skip in range(2, min(AHEAD, len(word)) + 1) if len(following) == RUN else ():
            begin = self.position + skip
            if np.array_equal(following, np.take(word, range(begin, begin + RUN), mode="wrap")):
                return begin % len(word)
        return -1

    def _by_context(self) -> int:
        """The only place where the latest calls end; −1 where there is none or several."""
        word = self.pattern.tokens
        cyclic = np.resize(word, len(word) + CONTEXT - 1)
        windows = np.lib.stride_tricks.sliding_window_view(cyclic, CONTEXT)
        found = np.flatnonzero((windows == np.array(self.recent, np.uint64)).all(axis=1))
        return int(found[0] + CONTEXT - 1) % len(word) if len(found) == 1 else -1


@dataclass(slots=True)
class Followed:
    """One job whose pattern was learned: a pointer for every process, and whose iterations the others are counted by."""

    job: KnownJob
    learned: Learned
    encoding: Encoding
    tracks: dict[int, Track] = field(default_factory=dict)
    """process → pointer"""
    tracked: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    """Whether a process has one, by its number."""
    reference: int = -1
    """The process whose iterations the others are counted by."""
    boundaries: deque[int] = field(default_factory=lambda: deque(maxlen=BOUNDARIES))
    """Times at which the reference began its latest iterations."""
    phase: tuple[int, float] | None = None
    """(time, iterations and part of one) of the reference's latest call"""

    def expected_phase(self, time: int) -> float:
        """Where the reference would be at a time by its own pace."""
        if self.phase is None:
            return 0.0
        at, phase = self.phase
        if len(self.boundaries) < 2:
            return phase
        span = (self.boundaries[-1] - self.boundaries[0]) / (len(self.boundaries) - 1)
        return phase + (time - at) / max(span, 1.0)

    def follow(self, process: int, tokens: NDArray[np.uint64], times: NDArray[np.uint64]) -> Places:
        """Let a process's pointer run over its calls."""
        track = self.tracks[process]
        positions, iterations, exact = track.follow(tokens)
        if self.reference < 0 and track.placed:
            self.reference = process
        placed = np.flatnonzero(positions >= 0)
        if len(placed):
            latest, part = int(times[placed[-1]]), (track.position + 1) / len(track.pattern)
            if process == self.reference:
                self.boundaries.extend(times[placed[positions[placed] == 0]].tolist())
                self.phase = (latest, track.iteration + part)
            elif track.found_at >= 0 and self.phase is not None:
                shift = round(self.expected_phase(latest) - track.iteration - part)
                track.iteration += shift
                iterations[track.found_at :] += shift
        return positions, iterations, exact
