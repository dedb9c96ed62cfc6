"""Find the pattern that repeats: one iteration, in a sequence that also holds evaluation phases, checkpoints and gaps.

A stretch of two equal periods proves a period. Layers and micro-batches repeat inside an iteration, so a period counts only when
it holds every operation that is regular: first all that occurred twice, and if there is no such period, those that are more
frequent, as long as every communicator is still among them. Operations of a few bytes (barriers, norms) are set aside for the
search: they are what pauses and checkpoints add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint64]

RAREST = 8
"""So many of the rarest operations propose periods: the distances of their occurrences."""
DISTANCES = 48
NEAR = 1.25
"""Of periods that differ by no more than this factor the one that fits most of the sequence is believed."""


@dataclass(frozen=True, slots=True)
class Period:
    """``tokens[start:start + length]`` is followed by itself; ``repeats`` is how often it was seen in full, in all."""

    start: int
    length: int
    repeats: int


def find_period(tokens: Tokens, owners: NDArray[np.int64], known: Collection[int] = ()) -> Period | None:
    """The shortest period that holds every regular token; ``None`` where nothing repeats. O(candidates x tokens).

    ``owners`` names the communicator of each token. ``known`` are lengths that other ranks of the job showed: the shortest of
    them that holds here is taken without a search.
    """
    if len(tokens) < 2:
        return None
    _, first, inverse, numbers = np.unique(tokens, return_index=True, return_inverse=True, return_counts=True)
    owner = owners[first]
    thresholds = sorted({int(n) for n in numbers if n >= 2})
    everybody = set(owner[numbers >= 2].tolist())
    for threshold in thresholds[:RAREST]:
        regular = numbers >= threshold
        if set(owner[regular].tolist()) != everybody:
            break  # what is left is no iteration, but a part of one
        word = inverse.astype(np.int64)
        found = _first(word, known, regular) or _shortest(word, numbers, regular)
        if found is not None:
            return found
    return None


def _first(word: NDArray[np.int64], lengths: Collection[int], regular: NDArray[np.bool_]) -> Period | None:
    for length in sorted(lengths):
        start = _stretch(word, length, regular) if 2 * length <= len(word) else None
        if start is not None:
            return Period(start, length, _repeats(word, start, length))
    return None


def _shortest(word: NDArray[np.int64], numbers: NDArray[np.int64], regular: NDArray[np.bool_]) -> Period | None:
    best: Period | None = None
    fit = -1.0
    for length in _candidates(word, numbers, regular):
        if 2 * length > len(word) or (best is not None and length > NEAR * best.length):
            break
        start = _stretch(word, length, regular)
        if start is not None:
            # Two iterations that lost the same number of records may look alike; whole ones fit more of the sequence.
            share = float(np.mean(word[length:] == word[:-length]))
            if share > fit:
                best, fit = Period(start, length, _repeats(word, start, length)), share
    return best


def _candidates(word: NDArray[np.int64], numbers: NDArray[np.int64], regular: NDArray[np.bool_]) -> list[int]:
    needed = int(regular.sum())
    rarest = [token for token in np.argsort(numbers, kind="stable").tolist() if regular[token]][:RAREST]
    found: set[int] = set()
    for token in rarest:
        at = np.flatnonzero(word == token)
        for distance in range(1, min(DISTANCES, len(at))):
            # Over whole iterations an operation comes back at one distance; others occur by chance.
            found.update(length for length, _ in Counter((at[distance:] - at[:-distance]).tolist()).most_common(2))
    return sorted(length for length in found if length >= needed)


def _stretch(word: NDArray[np.int64], length: int, regular: NDArray[np.bool_]) -> int | None:
    """Start of the latest place where ``length`` tokens are followed by the same again, with all the regular ones among them."""
    same = word[length:] == word[:-length]
    if np.count_nonzero(same) < length:
        return None
    breaks = np.flatnonzero(~same)
    bounds = np.r_[-1, breaks, len(same)]
    for i in np.flatnonzero(np.diff(bounds) > length)[::-1].tolist():
        start = int(bounds[i + 1]) - length
        present = np.zeros(len(regular), np.bool_)
        present[word[start : start + length]] = True
        if present[regular].all():
            return start
    return None


def _repeats(word: NDArray[np.int64], start: int, length: int) -> int:
    """How often the period occurs in full without overlap."""
    pattern = word[start : start + length]
    first = np.flatnonzero(word == pattern[0])
    count, free = 0, 0
    for at in first.tolist():
        if at >= free and at + length <= len(word) and np.array_equal(word[at : at + length], pattern):
            count, free = count + 1, at + length
    return count


def canonical_start(tokens: Tokens) -> int:
    """Where the smallest rotation of a cyclic sequence begins (Booth): equal for all rotations of one pattern."""
    n = len(tokens)
    word = np.concatenate([tokens, tokens]).tolist()
    failure = [-1] * (2 * n)
    k = 0
    for j in range(1, 2 * n):
        i = failure[j - k - 1]
        while i != -1 and word[j] != word[k + i + 1]:
            if word[j] < word[k + i + 1]:
                k = j - i - 1
            i = failure[i]
        if i == -1 and word[j] != word[k + i + 1]:
            if word[j] < word[k + i + 1]:
                k = j
            failure[j - k] = -1
        else:
            failure[j - k] = i + 1
    return k % n
