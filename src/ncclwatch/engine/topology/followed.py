"""One job whose pattern was learned: a pointer into it for every process, and whose iterations the others are counted by."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.jobmap import JobFacts
from ncclwatch.engine.topology.model import Learned
from ncclwatch.engine.topology.patterns import Encoding
from ncclwatch.engine.topology.tracker import Track

BOUNDARIES = 256


@dataclass(slots=True)
class Followed:
    """What is kept of one job besides its recorder."""

    facts: JobFacts
    learned: Learned
    encoding: Encoding
    tracks: dict[int, Track] = field(default_factory=dict)
    """process → pointer"""
    reference: int = -1
    """The process whose iterations the others are counted by."""
    boundaries: deque[int] = field(default_factory=lambda: deque(maxlen=BOUNDARIES))
    """Times at which the reference began its latest iterations."""
    phase: tuple[int, float] | None = None
    """(time, iterations and part of one) of the reference's latest call"""

    _exchange: NDArray[np.bool_] | None = None
    _tracked: NDArray[np.bool_] | None = None

    def exchange(self) -> NDArray[np.bool_]:
        """Rows whose grouped sends and receives are one operation; the last stands for no row. Made once: batches are many."""
        if self._exchange is None:
            self._exchange = np.r_[self.encoding.all_to_all(), False]
        return self._exchange

    def tracked(self, processes: int) -> NDArray[np.bool_]:
        """Which of that many processes have a pointer; one more for no process. Made once the pointers are there."""
        if self._tracked is None or len(self._tracked) != processes + 1:
            self._tracked = np.zeros(processes + 1, np.bool_)
            self._tracked[list(self.tracks)] = True
        return self._tracked

    def expected_phase(self, time: int) -> float:
        """Where the reference would be at a time by its own pace."""
        if self.phase is None:
            return 0.0
        at, phase = self.phase
        if len(self.boundaries) < 2:
            return phase
        span = (self.boundaries[-1] - self.boundaries[0]) / (len(self.boundaries) - 1)
        return phase + (time - at) / max(span, 1.0)

    def follow(
        self, process: int, track: Track, tokens: NDArray[np.uint64], times: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
        """Let a process's pointer run over its calls: position, iteration and whether that is exact, for each of them."""
        positions, iterations, exact = track.follow(tokens)
        if self.reference < 0 and track.placed:
            self.reference = process
        placed = np.flatnonzero(positions >= 0)
        if not len(placed):
            return positions, iterations, exact
        latest = int(times[placed[-1]])
        if process == self.reference:
            for i in placed[positions[placed] == 0].tolist():
                self.boundaries.append(int(times[i]))
            self.phase = (latest, track.iteration + (track.position + 1) / len(track.pattern))
        elif track.found_at >= 0 and self.phase is not None:
            shift = round(self.expected_phase(latest) - track.iteration - (track.position + 1) / len(track.pattern))
            track.iteration += shift
            iterations[track.found_at :] += shift
        return positions, iterations, exact
