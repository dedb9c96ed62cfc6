"""Where a rank is in the pattern of its stage, call by call: one pointer a rank, found again after lost records.

A call that is what the pattern has next moves the pointer. Another one is a gap (records were lost) or does not belong to the
iteration (a barrier, an evaluation phase): then the pointer waits for an operation that occurs once in the pattern, or for a run
of calls that fits in one place only.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.model import Pattern

AHEAD = 64
"""Calls: after a gap the pattern is searched so far ahead. A buffer that overflows loses more, and then the place is open."""
RUN = 4
"""Calls in a row that must fit before a place ahead is believed: a layer makes no more of them in one pass."""
CONTEXT = 24
"""Without an operation that is unique, so many of the latest calls must fit in one place of the pattern only."""
EVERY = 8
"""That search is made once in so many calls: it compares with the whole pattern."""


@dataclass(slots=True)
class Track:
    """The pointer of one process: ``position`` is the step its latest call was, −1 when lost."""

    pattern: Pattern
    position: int = -1
    exact: bool = False
    """Whether it has passed an operation that is unique since it was lost."""
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=CONTEXT))
    """The latest calls, while the pointer is lost."""
    astray: int = 0
    """Calls without a place, in all."""

    def follow(self, tokens: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Take calls in order; returns their positions, −1 where they have none."""
        positions = np.full(len(tokens), -1, np.int32)
        at = 0
        while at < len(tokens):
            if self.position >= 0:
                at = self._advance(tokens, positions, at)
            if at < len(tokens):
                positions[at] = self._search(tokens, at)
                at += 1
        return positions

    def _advance(self, tokens: NDArray[np.uint64], positions: NDArray[np.int32], at: int) -> int:
        """Follow the pattern as far as it fits; returns the index of the first call that does not."""
        word = self.pattern.tokens
        while at < len(tokens):
            begin = (self.position + 1) % len(word)
            piece = min(len(word) - begin, len(tokens) - at)
            same = tokens[at : at + piece] == word[begin : begin + piece]
            fits = piece if same.all() else int(same.argmin())
            if fits:
                self.exact = self.exact or any(begin <= position < begin + fits for position in self.pattern.unique.values())
                positions[at : at + fits] = np.arange(begin, begin + fits)
                self.position = begin + fits - 1
                at += fits
            if fits < piece:
                break
        return at

    def _search(self, tokens: NDArray[np.uint64], at: int) -> int:
        """The place of a call that does not fit; where there is none it is passed over, or the pointer is lost."""
        token, unique = int(tokens[at]), self.pattern.unique
        found, certain = unique.get(token, -1), True
        if found < 0 and self.position >= 0:
            found, certain = self._ahead(tokens, at), False
        if found < 0:
            self.recent.append(token)
            self.astray += 1
            if self.position < 0 and len(self.recent) == CONTEXT and self.astray % EVERY == 0:
                # Passes of an evaluation look like those of an iteration: certain is what is unique, where anything is.
                found, certain = self._by_context(), not unique
        if found >= 0:
            self.position, self.exact = found, certain
            self.recent.clear()
        elif not self._is_stranger(tokens, at):
            self.position, self.exact = -1, False
        return found

    def _is_stranger(self, tokens: NDArray[np.uint64], at: int) -> bool:
        """Whether the pattern goes on right after this call: then it was put in between (a barrier), and nothing is lost.

        What goes from stage to stage is never put in between: there another pass begins than the pattern has next.
        """
        if self.position < 0 or int(tokens[at]) in self.pattern.exchanges:
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
        windows = np.lib.stride_tricks.sliding_window_view(np.resize(word, len(word) + CONTEXT - 1), CONTEXT)
        found = np.flatnonzero((windows == np.array(self.recent, np.uint64)).all(axis=1))
        return int(found[0] + CONTEXT - 1) % len(word) if len(found) == 1 else -1
