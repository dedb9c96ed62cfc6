"""Where every rank stands in the pattern of its stage, call by call; one pointer a rank, found again after lost records.

A call that is what the pattern has next moves the pointer. Another one is a gap (records were lost) or does not belong to the
iteration (a barrier, an evaluation phase): then the pointer waits for an operation that occurs once in the pattern, or for a run
of calls that fits in one place only.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.model import Pattern

AHEAD = 64
"""After a gap the pattern is searched so far ahead for the calls that follow."""
RUN = 4
"""So many calls in a row must fit before a place ahead is believed."""
CONTEXT = 24
"""Without an operation that is unique, so many of the latest calls must fit in one place of the pattern only."""
EVERY = 8
"""That search is made once in so many calls: it compares with the whole pattern."""


@dataclass(slots=True)
class _Calls:
    """Calls that are being placed: one entry a call in every column."""

    tokens: NDArray[np.uint64]
    positions: NDArray[np.int32]
    iterations: NDArray[np.int64]
    exact: NDArray[np.bool_]


@dataclass(slots=True)
class Track:
    """The pointer of one process: ``position`` is the step its latest call was, −1 when lost."""

    pattern: Pattern
    unique: dict[int, int]
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

    def follow(self, tokens: NDArray[np.uint64]) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
        """Take calls in order; returns their positions (−1: none), iterations, and whether these are certain."""
        n = len(tokens)
        calls = _Calls(tokens, np.full(n, -1, np.int32), np.full(n, self.iteration, np.int64), np.zeros(n, np.bool_))
        at, self.found_at = 0, -1
        while at < n:
            if self.position >= 0:
                at += self._advance(calls, at)
                if at >= n:
                    break
            at += self._search(calls, at)
        return calls.positions, calls.iterations, calls.exact

    def _advance(self, calls: _Calls, at: int) -> int:
        """Follow the pattern as far as it fits; returns how many calls did."""
        tokens, word = calls.tokens, self.pattern.tokens
        length, taken = len(word), 0
        while at + taken < len(tokens):
            begin = (self.position + 1) % length
            piece = min(length - begin, len(tokens) - at - taken)
            same = tokens[at + taken : at + taken + piece] == word[begin : begin + piece]
            fits = piece if same.all() else int(same.argmin())
            if fits:
                if begin == 0:
                    self.iteration += 1
                where = slice(at + taken, at + taken + fits)
                calls.positions[where] = np.arange(begin, begin + fits)
                calls.iterations[where] = self.iteration
                if not self.exact and self._passed_unique(begin, begin + fits):
                    self.exact = True
                calls.exact[where] = self.exact
                self.position = begin + fits - 1
                taken += fits
            if fits < piece:
                break
        return taken

    def _passed_unique(self, begin: int, end: int) -> bool:
        return any(begin <= position < end for position in self.unique.values())

    def _search(self, calls: _Calls, at: int) -> int:
        """One call that does not fit: find the place again, or leave it without. Returns 1."""
        tokens = calls.tokens
        token = int(tokens[at])
        found, certain = self.unique.get(token, -1), True
        if found < 0 and self.position >= 0:
            found, certain = self._ahead(tokens, at), False
        if found < 0:
            self.recent = [*self.recent[-(CONTEXT - 1) :], token]
            self.astray += 1
            if self.position < 0 and len(self.recent) == CONTEXT and self.astray % EVERY == 0:
                # Passes of an evaluation look like those of an iteration: certain is what is unique, where anything is.
                found, certain = self._by_context(), not self.unique
        if found < 0:
            if self.position >= 0 and self._is_stranger(tokens, at):
                calls.iterations[at] = self.iteration
                return 1
            self.position, self.exact = -1, False
            return 1
        if found <= self.position or (self.position < 0 and found == 0):
            self.iteration += 1
        if self.position < 0:
            self.found_at = at
        self.position, self.exact, self.placed, self.recent = found, certain, True, []
        calls.positions[at], calls.iterations[at], calls.exact[at] = found, self.iteration, certain
        return 1

    def _is_stranger(self, tokens: NDArray[np.uint64], at: int) -> bool:
        """Whether the pattern goes on right after this call: then it was put in between (a barrier), and nothing is lost.

        What goes from stage to stage is never put in between: there another pass begins than the pattern has next.
        """
        if int(tokens[at]) in self._exchanges:
            return False
        if at + 1 >= len(tokens):
            return int(tokens[at]) not in self._known
        return bool(tokens[at + 1] == self.pattern.tokens[(self.position + 1) % len(self.pattern)])

    @property
    def _exchanges(self) -> set[int]:
        steps = zip(self.pattern.tokens.tolist(), self.pattern.steps, strict=True)
        return {token for token, step in steps if step.towards}

    @property
    def _known(self) -> set[int]:
        return set(self.pattern.tokens.tolist())

    def _ahead(self, tokens: NDArray[np.uint64], at: int) -> int:
        """The next place, not far ahead, where this call and those after it fit; −1 if there is none."""
        word = self.pattern.tokens
        following = tokens[at : at + RUN]
        for skip in range(2, min(AHEAD, len(word)) + 1):
            begin = self.position + skip
            if np.array_equal(following, word[(begin + np.arange(len(following))) % len(word)]):
                return begin % len(word) if len(following) == RUN else -1
        return -1

    def _by_context(self) -> int:
        """The only place where the latest calls end; −1 where there is none or several."""
        word = self.pattern.tokens
        recent = np.array(self.recent, np.uint64)
        cyclic = np.concatenate([word, word[: CONTEXT - 1]]) if len(word) >= CONTEXT else np.resize(word, len(word) + CONTEXT - 1)
        windows = np.lib.stride_tricks.sliding_window_view(cyclic, CONTEXT)
        found = np.flatnonzero((windows == recent).all(axis=1))
        return int(found[0] + CONTEXT - 1) % len(word) if len(found) == 1 else -1


def unique_tokens(pattern: Pattern) -> dict[int, int]:
    """Tokens that occur once in the pattern, with their positions."""
    numbers = Counter(pattern.tokens.tolist())
    return {token: position for position, token in enumerate(pattern.tokens.tolist()) if numbers[token] == 1}
