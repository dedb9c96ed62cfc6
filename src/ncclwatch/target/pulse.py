"""A pulse: whether NCCL moved in a process since it was looked at last, told from a few words of its memory.

A sample reads all of NCCL's structures and costs milliseconds; that a job goes on is told by any counter of it that moves. The
words are those that samples themselves are compared by: launches of a communicator (``opCount``, ``seqNumber``), head and tail of
shared memory, steps of network connections. So what a pulse calls moved, two samples would. It is never the other way round that
matters: a process whose words stand still is read as a whole.

Each word costs the kernel a third of a microsecond. Words that moved in each of several pulses on end speak for all from then on;
where no word does (a job whose iteration is longer than the time between two pulses), all are read.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from ncclwatch.target.memory import MemoryReader

MOST = 256
"""Words of one process."""
FEW = 8
"""Words that speak for all."""
SURE = 8
"""Pulses in each of which a word must have moved to be one of these."""


class Pulse:
    """The words of one process, as they were when they were read last."""

    def __init__(self, reader: MemoryReader) -> None:
        self._reader = reader
        self._places = np.zeros(0, np.uint64)
        self._words = np.zeros(0, np.uint64)
        self._lively = np.zeros(0, np.bool_)
        """Of the places those that moved in each of the last ``_pulses`` pulses."""
        self._pulses = 0
        self._speakers: NDArray[np.intp] | None = None
        """Which places are read alone, once it is known that they will do."""

    def follow(self, places: Collection[int]) -> None:
        """Read these words from now on (addresses, 8 bytes each); they count from what they are now. Of too many every n-th."""
        ordered = sorted(places)
        chosen = np.array(ordered[:: -(-len(ordered) // MOST) or 1], np.uint64)
        if not np.array_equal(chosen, self._places):
            known = self._places[self._lively]
            self._places, self._words, self._lively = chosen, np.zeros(len(chosen), np.uint64), np.isin(chosen, known)
            self._choose()
        self._read()

    def moved(self) -> bool:
        """Whether any word has changed since they were read last; one that cannot be read has not.

        Raises :class:`ncclwatch.errors.TargetGoneError` once the process is gone.
        """
        if self._speakers is None:
            changed = self._read()
            self._pulses += 1
            self._lively &= changed
            self._choose()
            return bool(changed.any())
        if self._read().any():
            return True
        # All count from now on: it is the others' turn to say that it goes on again.
        self._begin()
        self._read()
        return False

    def _read(self) -> NDArray[np.bool_]:
        """Read the words that tell enough; which of them have changed."""
        few = self._speakers
        if few is None:
            before, self._words = self._words, self._reader.probe(self._places)
            return np.not_equal(before, self._words)
        known = self._words[few]
        self._words[few] = found = self._reader.probe(self._places[few])
        return np.not_equal(known, found)

    def _choose(self) -> None:
        """Let a few words speak for all, where it is known which can."""
        lively = np.flatnonzero(self._lively)
        if not len(lively):
            self._begin()
        elif self._pulses >= SURE:
            self._speakers = lively[:: -(-len(lively) // FEW)]

    def _begin(self) -> None:
        """Which words can speak for all is not known."""
        self._lively = np.ones(len(self._places), np.bool_)
        self._pulses, self._speakers = 0, None
