"""One process in full: what its Send and Recv are for, the pattern that repeats (one iteration), numbers by communicator.

A stretch of two equal periods proves a period. Layers and micro-batches repeat inside an iteration, so a period counts only when
it holds every operation that is regular: first all that occurred twice, and if there is no such period, those that are more
frequent, as long as every communicator is still among them. Operations of a few bytes (barriers, norms) are set aside for the
search: they are what pauses and checkpoints add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.record import POINT_TO_POINT, KnownGroup, element_bytes, mix
from ncclwatch.model.events import Function

TINY_BYTES = 1024
"""Unit: bytes. From: the generated jobs of ``score.topology``: from half to 16 times as many change no layout, none at all make
layouts unsure. A collective of at most so many carries a flag or a norm; activations and gradients of any model are larger.
"""
VARIABLE = 0.25
"""Unit: share of the calls of one function that differ in count. From: the same jobs: half or twice as much changes none.
Above it sizes depend on the data (experts, padding); a model has a few sizes, its layers' and its buckets'.
"""
RAREST = 8
"""Bound: so many of the rarest operations propose periods: of those that come once an iteration there are fewer than that."""
DISTANCES = 48
"""Bound: occurrences apart: an operation that comes more often in an iteration proposes no period; the search stays linear."""

Tokens = NDArray[np.uint64]


class Shape(StrEnum):
    """The pattern of point-to-point calls on one communicator."""

    NONE = "none"
    CHAIN = "sends and receives between neighbours, in both directions"
    RING = "every call sends to one neighbour and receives from the other"
    ALL_TO_ALL = "grouped sends and receives with every rank"
    PAIRS = "every call sends to and receives from the only other rank"
    OTHER = "point-to-point calls without a pattern that is known"


@dataclass(frozen=True, slots=True)
class Period:
    """``tokens[start:start + length]`` is followed by itself; ``repeats`` is how often it was seen in full, in all."""

    start: int
    length: int
    repeats: int


@dataclass(slots=True)
class Usage:
    """What one process does on one communicator, within the pattern (or in all that was kept, without one)."""

    row: int
    group: KnownGroup
    comm_rank: int
    shape: Shape
    """What its point-to-point calls are for."""
    peers: set[int]
    """Whom it sends to or receives from."""
    total: int
    """Operations in all that was kept."""
    functions: dict[int, int] = field(default_factory=dict)
    """Function → operations."""
    order: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Functions, in order."""
    sizes: set[int] = field(default_factory=set)
    """Bytes of the collectives, as given in the call."""
    multiplicity: int = 0
    """How often the most frequent operation occurs."""

    @property
    def tiny(self) -> bool:
        """Whether its collectives carry no more than flags."""
        return bool(self.sizes) and max(self.sizes) <= TINY_BYTES

    @property
    def collective(self) -> bool:
        """Whether collectives of some size are called on it."""
        return bool(self.sizes) and not self.tiny


@dataclass(slots=True)
class Specimen:
    """One process. ``operations`` are those of ``record.OPERATION``; ``iteration`` is the part that is one, if found."""

    process: int
    rank: int
    operations: NDArray[Any]
    usages: dict[int, Usage]
    period: Period | None = None
    iteration: NDArray[Any] | None = None

    @property
    def pattern(self) -> NDArray[Any]:
        """The operations of one iteration, or all that were kept where no iteration was found."""
        return self.iteration if self.iteration is not None else self.operations


def examine(
    process: int, rank: int, operations: NDArray[Any], rows: dict[int, tuple[KnownGroup, int]], known: Collection[int] = ()
) -> Specimen:
    """Examine the history of one process; ``rows`` maps its rows to (group, rank in it), ``known`` are periods of other ranks."""
    shapes = {row: _shape(operations[operations["row"] == row], own, group.nranks) for row, (group, own) in rows.items()}
    merged = collapse(operations, {row for row, shape in shapes.items() if shape in (Shape.ALL_TO_ALL, Shape.PAIRS)})
    result = Specimen(process, rank, merged, {})
    at = np.flatnonzero(_substantial(merged))
    at = at if len(at) else np.arange(len(merged))
    tokens = _raw_tokens(merged[at])
    period = find_period(tokens, merged["row"][at].astype(np.int64), known)
    # One operation over and over: no iteration shows in it.
    if period is not None and len(np.unique(tokens[period.start :][: period.length])) > 1:
        result.period, result.iteration = period, _usual_iteration(merged, at, tokens, period)
    point = np.isin(operations["function"], POINT_TO_POINT)
    for row, (group, own) in rows.items():
        peers = set(np.unique(operations["peer"][point & (operations["row"] == row)]).tolist())
        usage = Usage(row, group, own, shapes[row], peers, int(np.count_nonzero(merged["row"] == row)))
        _count(usage, result.pattern[result.pattern["row"] == row])
        result.usages[row] = usage
    return result


def _count(usage: Usage, part: NDArray[Any]) -> None:
    if not len(part):
        return
    usage.order = part["function"].astype(np.int64)
    usage.functions = dict(Counter(usage.order.tolist()))
    collective = part[~np.isin(part["function"], (*POINT_TO_POINT, int(Function.ALL_TO_ALL)))]
    usage.sizes = set(_bytes(collective).tolist())
    _, numbers = np.unique(_raw_tokens(part), return_counts=True)
    usage.multiplicity = int(numbers.max())


def _bytes(operations: NDArray[Any]) -> NDArray[np.int64]:
    return operations["count"].astype(np.int64) * element_bytes(operations["datatype"])


def _substantial(operations: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether an operation carries data rather than a flag; point-to-point and all-to-all always count."""
    result: NDArray[np.bool_] = np.isin(operations["function"], (*POINT_TO_POINT, int(Function.ALL_TO_ALL)))
    return result | (_bytes(operations) > TINY_BYTES)


def _shape(operations: NDArray[Any], own: int, nranks: int) -> Shape:
    """What the point-to-point operations of one row of rank ``own`` are for."""
    part = operations[np.isin(operations["function"], POINT_TO_POINT)]
    if not len(part):
        return Shape.NONE
    peers = set(part["peer"].tolist())
    # The oldest call may be cut off by the end of what is kept, the newest by the end of what arrived.
    part = part[(part["call"] > part["call"][0]) & (part["call"] < part["call"][-1])]
    if not len(part):
        return Shape.OTHER
    send = part["function"] == Function.SEND
    numbers, index = np.unique(part["call"], return_inverse=True)
    sent, received = np.bincount(index, send, len(numbers)), np.bincount(index, ~send, len(numbers))
    both = 2 * np.count_nonzero((sent > 0) & (received > 0)) > len(numbers)  # of an uneven exchange some parts are empty
    if both and (own in peers or 2 < len(peers) == nranks - 1):
        return Shape.ALL_TO_ALL
    if nranks == 2:
        return Shape.PAIRS if np.all(sent == received) else Shape.CHAIN
    if len(peers) > 2:
        return Shape.OTHER
    # At most two peers: a ring only ever sends one way round, a chain of stages returns gradients.
    ahead = {(peer - own) % nranks for peer in part["peer"][send].tolist()}
    behind = {(own - peer) % nranks for peer in part["peer"][~send].tolist()}
    return Shape.RING if both and ahead == behind and ahead in ({1}, {nranks - 1}) else Shape.CHAIN


def collapse(operations: NDArray[Any], rows: set[int]) -> NDArray[Any]:
    """Make one ``ALL_TO_ALL`` of each grouped call of sends and receives on these rows; its count and peer mean nothing."""
    chosen = np.isin(operations["row"], list(rows)) & np.isin(operations["function"], POINT_TO_POINT)
    if not chosen.any():
        return operations
    result = operations.copy()
    result["function"][chosen] = Function.ALL_TO_ALL
    result["peer"][chosen] = -1
    result["count"][chosen] = 0
    again = np.zeros(len(result), np.bool_)
    again[1:] = chosen[1:] & chosen[:-1] & (result["call"][1:] == result["call"][:-1]) & (result["row"][1:] == result["row"][:-1])
    return result[~again]


def find_period(tokens: Tokens, owners: NDArray[np.int64], known: Collection[int] = ()) -> Period | None:
    """The shortest period that holds every regular token; ``None`` where nothing repeats. O(candidates x tokens).

    ``owners`` names the communicator of each token. ``known`` are lengths that other ranks of the job showed: the shortest of
    them that holds here is taken without a search.
    """
    if len(tokens) < 2:
        return None
    _, first, inverse, numbers = np.unique(tokens, return_index=True, return_inverse=True, return_counts=True)
    owner, word = owners[first], inverse.astype(np.int64)
    everybody = set(owner[numbers >= 2].tolist())
    for threshold in sorted({int(n) for n in numbers if n >= 2})[:RAREST]:
        regular = numbers >= threshold
        if set(owner[regular].tolist()) != everybody:
            break  # what is left is no iteration, but a part of one
        found = _shortest(word, sorted(known), regular) or _shortest(word, _candidates(word, numbers, regular), regular)
        if found is not None:
            return found
    return None


def _shortest(word: NDArray[np.int64], lengths: Sequence[int], regular: NDArray[np.bool_]) -> Period | None:
    """Of the lengths, which rise, the shortest that is a period; of those not twice as long the one that fits best.

    Two iterations that lost the same number of records may look alike; whole ones fit more of the sequence.
    """
    best: Period | None = None
    fit = -1.0
    for length in lengths:
        if best is not None and length >= 2 * best.length:
            break
        start = _stretch(word, length, regular)
        if start is not None and (share := float(np.mean(word[length:] == word[:-length]))) > fit:
            best, fit = Period(start, length, len(occurrences(word, word[start : start + length]))), share
    return best


def _candidates(word: NDArray[np.int64], numbers: NDArray[np.int64], regular: NDArray[np.bool_]) -> list[int]:
    """Lengths at which one of the rarest operations comes back."""
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
    same = word[length:] == word[:-length]  # empty where the sequence is no longer than that
    bounds = np.r_[-1, np.flatnonzero(~same), len(same)]
    for i in np.flatnonzero(np.diff(bounds) > length)[::-1].tolist():
        start = int(bounds[i + 1]) - length
        present = np.bincount(word[start : start + length], minlength=len(regular)) > 0
        if present[regular].all():
            return start
    return None


def occurrences(word: NDArray[Any], pattern: NDArray[Any]) -> list[int]:
    """Where a pattern occurs in full, without overlap."""
    found: list[int] = []
    for at in np.flatnonzero(word == pattern[0]).tolist():
        if (not found or at >= found[-1] + len(pattern)) and np.array_equal(word[at : at + len(pattern)], pattern):
            found.append(at)
    return found


def _usual_iteration(merged: NDArray[Any], at: NDArray[np.int64], tokens: Tokens, period: Period) -> NDArray[Any]:
    """The iteration with its tiny operations: of all places where the period occurs, what is most often there."""
    everything = _raw_tokens(merged)
    versions: dict[bytes, list[slice]] = {}
    for first in occurrences(tokens, tokens[period.start : period.start + period.length]):
        after = first + period.length
        place = slice(int(at[first]), int(at[after]) if after < len(at) else int(at[after - 1]) + 1)
        versions.setdefault(everything[place].tobytes(), []).append(place)
    return merged[max(versions.values(), key=lambda places: (len(places), places[-1].start))[-1]]


def after_update(once: NDArray[np.bool_], passing: NDArray[np.bool_]) -> int:
    """Where an iteration begins: after the longest (cyclic) run of what is called once, with nothing of a pass between."""
    start = int(np.argmax(passing))
    turned = np.roll(passing, -start)
    run = np.bincount(np.cumsum(turned), np.roll(once & ~passing, -start))
    return (start + int(np.r_[np.flatnonzero(turned), len(turned)][run.argmax()])) % len(turned)


def _raw_tokens(operations: NDArray[Any]) -> Tokens:
    """64-bit fingerprints of operations within one process: communicator, function, size, type, peer; lone calls and parts of
    grouped ones differ.
    """
    point = np.isin(operations["function"], POINT_TO_POINT)
    count = np.where(point, 0, operations["count"].astype(np.uint64))
    for row, function in np.unique(operations[["row", "function"]]).tolist():
        own = (operations["row"] == row) & (operations["function"] == function)
        if varies(len(np.unique(count[own])), int(np.count_nonzero(own))):
            count[own] = 0
    joined = np.zeros(len(operations), np.bool_)
    joined[1:] = operations["call"][1:] == operations["call"][:-1]
    return mix(
        operations["row"].astype(np.uint64),
        operations["function"].astype(np.uint64),
        count,
        operations["datatype"].astype(np.int64).astype(np.uint64),
        np.where(point, operations["peer"], 0).astype(np.int64).astype(np.uint64),
        joined.astype(np.uint64),
    )


def varies(sizes: int, calls: int) -> bool:
    """Whether so many different sizes in so many calls depend on the data; a few, as of layers, are a model's."""
    return sizes > max(8, VARIABLE * calls)
