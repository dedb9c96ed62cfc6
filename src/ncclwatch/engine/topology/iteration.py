"""One process in full: the calls that repeat (one iteration), and how it uses each communicator within them.

Two equal periods in a row prove a period; it must hold each operation that is regular, as layers and micro-batches repeat inside.
Operations of a few bytes (barriers, norms) are set aside: they are what pauses and checkpoints add.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.cadence import INNER_S, Tokens
from ncclwatch.collect.functions import TYPES
from ncclwatch.collect.ledger import POINT_TO_POINT, mix
from ncclwatch.engine.topology.job_map import GATHER, SCATTER, SUM
from ncclwatch.model.events import Function
from ncclwatch.model.rows import both, distinct
from ncclwatch.model.topology import Pattern

TINY_BYTES = 1024
"""Unit: bytes. From: the generated jobs of ``score.topology``: from half to 16 times as many change no layout, none at all make
layouts unsure. A collective of at most so many carries a flag or a norm; activations and gradients of any model are larger.
"""
OFTEN = 2.0
"""Unit: ratio of calls. From: a layer has a pass forward and one backward, so that what it calls comes twice for each reduction
of gradients; each pass calls a tensor group twice for each time it exchanges (Megatron-LM). Sizes that come less often each
depend on the data (experts, padding).
"""
ENOUGH = 24
"""Unit: calls of a process, more than a layer makes in both passes: so many, on average, before anything is inferred; so many in
a row that must fit in one place of the pattern only, where none is unique; and what comes less than once in so many is no layer's
(barriers, checkpoints). From: two iterations of the smallest jobs of ``score.topology``; half as many name no layout wrong there.
"""
RAREST = 8
"""Bound: so many of the rarest operations propose periods: of those that come once an iteration there are fewer than that."""
DISTANCES = 48
"""Bound: occurrences apart: an operation that comes more often in an iteration proposes no period; the search stays linear."""
_LOOSE = (*POINT_TO_POINT, Function.ALL_TO_ALL)
"""Operations whose sizes and peers may depend on the data."""
_SIZES = np.array([*(size for _, size in TYPES), 4], np.int64)
"""Bytes of an element by ``ncclDataType_t``; the last of one that is not known."""


class Shape(StrEnum):
    """What Send and Recv on one communicator are for."""

    NONE = "no Send or Recv"
    CHAIN = "Send and Recv with neighbours, both ways"
    RING = "Send and Recv round a ring, one way"
    EVERYBODY = "grouped Send and Recv with every rank"
    PAIRS = "two ranks that always exchange both ways: experts or context"
    EITHER = "Send and Recv between so few ranks that all are neighbours"
    OTHER = "Send and Recv without a pattern that is known"


class Order(StrEnum):
    """In which order gathers and scatters come on one communicator."""

    TURNS = "in turns"
    RUNS = "gathers one after the other"
    ONE_WAY = "gathers in one pass and scatters in the other"


def shape_of(ways: Collection[tuple[int, int, bool]], size: int, paired: bool | None) -> Shape:
    """What Send and Recv on a communicator of ``size`` ranks are for; ``ways``: (rank, peer, whether it sends).

    ``paired``: whether the calls each send and receive, where calls were seen.
    """
    peers: dict[int, set[int]] = defaultdict(set)
    for rank, peer, _ in ways:
        peers[rank].add(peer)
    if not peers:
        return Shape.NONE
    if any(rank in own for rank, own in peers.items()):
        return Shape.EVERYBODY
    if any(len(own) > 2 for own in peers.values()):
        return Shape.OTHER if paired is False else Shape.EVERYBODY
    # A ring only ever sends one way round, and each of its ranks does; a chain of stages returns gradients.
    turns = {(peer - rank if sends else rank - peer) % size for rank, peer, sends in ways}
    if not turns <= {1, size - 1}:
        return Shape.OTHER
    if size == 2:
        return {True: Shape.PAIRS, False: Shape.CHAIN, None: Shape.EITHER}[paired]
    around = len(turns) == 1 and all(len(own) == 2 for own in peers.values())
    if around and paired is not False:
        return Shape.RING
    return Shape.EITHER if paired is None and size == 3 and len(turns) == 2 else Shape.CHAIN


@dataclass(slots=True)
class Usage:
    """How a communicator is used: by one process in its iteration (or all that was kept), by a group, by groups of one kind."""

    ways: frozenset[tuple[int, int, bool]] = frozenset()
    """(rank of the communicator, peer, whether it sends) of Send and Recv."""
    shape: Shape | None = None
    times: float = 0.0
    """How often the operation that comes most often does."""
    functions: frozenset[int] = frozenset()
    """Collectives; those of a few bytes only where nothing else is called. Empty where NCCL counts them together."""
    tiny: bool = False
    """Whether it has only collectives of a few bytes."""
    inside: bool | None = None
    """Whether it is used inside the passes (or else once an iteration), where exchanges of stages tell."""
    order: Order | None = None
    follows: bool = False
    """Whether it sums what a ReduceScatter of another group has just left: the replicas of a shard."""
    gradients: bool = False
    """Whether it moves gradients: sums of several sizes, as of buckets; runs of gathers or scatters, or these far apart."""


@dataclass(slots=True)
class Specimen:
    """One process: its operations (``specimens.OPERATION``), and the part of them that is one iteration, if found."""

    process: int
    rank: int
    operations: NDArray[Any]
    usages: dict[int, Usage] = field(default_factory=dict)
    """By row."""
    length: int = 0
    """Of its period, without tiny operations; ``repeats``: how often it was seen in full."""
    repeats: int = 0
    iteration: NDArray[Any] | None = None

    @property
    def pattern(self) -> NDArray[Any]:
        """The operations of one iteration, or all that were kept where no iteration was found."""
        return self.iteration if self.iteration is not None else self.operations


def examine(
    process: int, rank: int, operations: NDArray[Any], rows: dict[int, tuple[int, int]], known: Collection[int] = ()
) -> Specimen:
    """Examine the history of one process; ``rows``: rank and number of ranks of each; ``known``: lengths of others' periods."""
    ways = {row: _ways(operations[operations["row"] == row], *place) for row, place in rows.items()}
    shapes = {row: shape_of(own, rows[row][1], paired) for row, (own, paired) in ways.items()}
    merged = collapse(operations, [row for row, shape in shapes.items() if shape in (Shape.EVERYBODY, Shape.PAIRS)])
    result = Specimen(process, rank, merged)
    at = np.flatnonzero(np.isin(merged["function"], _LOOSE) | (_bytes(merged) > TINY_BYTES))
    at = at if len(at) else np.arange(len(merged))
    tokens = _raw_tokens(merged[at])
    if found := find_period(tokens, merged["row"][at].astype(np.int64), known):
        period = tokens[found[0] : sum(found)]
        places = occurrences(tokens, period)
        # One operation over and over: no iteration shows in it.
        if len(distinct(period)) > 1:
            result.length, result.repeats = len(period), len(places)
            result.iteration = _usual_iteration(merged, at, places, len(period))
    blocks = _blocks(result.pattern, [row for row, shape in shapes.items() if shape is Shape.CHAIN])
    for row, (own, _) in ways.items():
        result.usages[row] = _usage(result, row, blocks, own, shapes[row])
    return result


def _ways(part: NDArray[Any], own: int, size: int) -> tuple[frozenset[tuple[int, int, bool]], bool | None]:
    """Whom one rank sends to and receives from on one communicator, and whether its calls each do both."""
    part = part[np.isin(part["function"], POINT_TO_POINT)]
    send, call = part["function"] == Function.SEND, part["call"]
    ways = frozenset((own, peer, sends) for peer, sends in zip(part["peer"].tolist(), send.tolist(), strict=True))
    # The oldest call may be cut off by the end of what is kept, the newest by the end of what arrived.
    whole = (call > call[:1]) & (call < call[-1:])
    numbers, index = np.unique(call[whole], return_inverse=True)
    if not len(numbers):
        return ways, None
    sent, received = (np.bincount(index, way[whole], len(numbers)) for way in (send, ~send))
    # Of an uneven exchange some parts are empty.
    most = 2 * np.count_nonzero((sent > 0) & (received > 0)) > len(numbers)
    return ways, bool(np.all(sent == received) if size == 2 else most)


def _blocks(word: NDArray[Any], chains: Sequence[int]) -> NDArray[np.int64] | None:
    """For each operation of a cyclic pattern its stretch between exchanges of stages; ``None``: fewer than three."""
    starts = np.isin(word["function"], POINT_TO_POINT) & np.isin(word["row"], chains)
    starts[1:] &= ~(starts[:-1] & (word["call"][1:] == word["call"][:-1]))
    number = int(starts.sum())
    return np.cumsum(starts) % number if number > 2 else None


def _usage(
    specimen: Specimen, row: int, blocks: NDArray[np.int64] | None, ways: frozenset[tuple[int, int, bool]], shape: Shape
) -> Usage:
    word = specimen.pattern
    own = word["row"] == row
    part = word[own]
    collective = part[~np.isin(part["function"], _LOOSE)]
    large = collective[_bytes(collective) > TINY_BYTES]
    tiny = len(collective) > 0 and not len(large) and not ways
    functions = frozenset((collective if tiny else large)["function"].tolist())
    _, numbers = np.unique(_raw_tokens(part), return_counts=True)
    order = None
    if {GATHER, SCATTER} <= functions:
        runs = [(function, len([*run])) for function, run in groupby(large["function"].tolist())]
        gathers, scatters = (max((n for f, n in runs if f == function), default=0) for function in (GATHER, SCATTER))
        in_blocks = [set(blocks[own & (word["function"] == f)].tolist()) for f in (GATHER, SCATTER)] if blocks is not None else []
        one_way = scatters >= 2 or (blocks is not None and in_blocks[0] != in_blocks[1])
        order = Order.ONE_WAY if one_way else Order.RUNS if gathers > 2 else Order.TURNS
    before = word[np.flatnonzero(own) - 1]
    scattered = specimen.operations[(specimen.operations["row"] == row) & (specimen.operations["function"] == SCATTER)]
    gaps = np.diff(scattered["time_ns"].astype(np.int64))
    return Usage(
        ways=ways,
        shape=shape,
        times=int(numbers.max(initial=0)),
        functions=functions,
        tiny=tiny,
        inside=None if blocks is None else 2 * len(distinct(blocks[own])) >= int(blocks.max()) + 1,
        order=order,
        follows=functions == {SUM} and bool(np.all((before["function"] == SCATTER) & (before["row"] != row))),
        gradients=order in (Order.RUNS, Order.ONE_WAY)
        or (functions == {SUM} and len(distinct(_bytes(large))) > 2)
        or (len(gaps) > 2 and bool(np.quantile(gaps, 0.25) >= INNER_S * 1e9)),
    )


def _bytes(operations: NDArray[Any]) -> NDArray[np.int64]:
    types = operations["datatype"]
    return operations["count"].astype(np.int64) * _SIZES[np.where((types >= 0) & (types < len(TYPES)), types, -1)]


def collapse(operations: NDArray[Any], rows: Sequence[int] | NDArray[np.intp]) -> NDArray[Any]:
    """Make one ``ALL_TO_ALL`` of each grouped call of sends and receives on these rows; its count and peer mean nothing."""
    chosen = np.isin(operations["row"], rows) & np.isin(operations["function"], POINT_TO_POINT)
    result = operations.copy()
    result["function"][chosen], result["peer"][chosen], result["count"][chosen] = Function.ALL_TO_ALL, -1, 0
    again = np.zeros(len(result), np.bool_)
    again[1:] = chosen[1:] & chosen[:-1] & (result["call"][1:] == result["call"][:-1]) & (result["row"][1:] == result["row"][:-1])
    return result[~again]


def find_period(tokens: Tokens, owners: NDArray[np.int64], known: Collection[int] = ()) -> tuple[int, int] | None:
    """(start, length) of the shortest period with every regular token; ``known`` lengths first. O(candidates x tokens)."""
    if len(tokens) < 2:
        return None
    _, first, word, numbers = np.unique(tokens, return_index=True, return_inverse=True, return_counts=True)
    everybody = set(owners[first][numbers >= 2].tolist())
    for threshold in distinct(numbers[numbers >= 2])[:RAREST].tolist():
        regular = numbers >= threshold
        if set(owners[first][regular].tolist()) != everybody:
            break  # what is left is no iteration, but a part of one
        found = _shortest(word, sorted(known), regular) or _shortest(word, _candidates(word, numbers, regular), regular)
        if found is not None:
            return found
    return None


def _shortest(word: NDArray[np.int64], lengths: Sequence[int], regular: NDArray[np.bool_]) -> tuple[int, int] | None:
    """The shortest length that is a period; of those less than twice as long the one that fits best."""
    found: list[tuple[float, int, int]] = []
    for length in lengths:
        if found and length >= 2 * found[0][2]:
            break
        if (start := _stretch(word, length, regular)) is not None:
            found.append((float(np.mean(word[length:] == word[:-length])), start, length))
    return max(found, key=lambda one: one[0])[1:] if found else None


def _candidates(word: NDArray[np.int64], numbers: NDArray[np.int64], regular: NDArray[np.bool_]) -> list[int]:
    """Lengths at which one of the rarest operations comes back."""
    found: set[int] = set()
    for token in [token for token in np.argsort(numbers, kind="stable").tolist() if regular[token]][:RAREST]:
        at = np.flatnonzero(word == token)
        for distance in range(1, min(DISTANCES, len(at))):
            # Over whole iterations an operation comes back at one distance; others occur by chance.
            found.update(length for length, _ in Counter((at[distance:] - at[:-distance]).tolist()).most_common(2))
    return sorted(length for length in found if length >= int(regular.sum()))


def _stretch(word: NDArray[np.int64], length: int, regular: NDArray[np.bool_]) -> int | None:
    """Start of the latest place where ``length`` tokens are followed by the same again, with all the regular ones among them."""
    same = word[length:] == word[:-length]  # empty where the sequence is no longer than that
    if np.count_nonzero(same) < length:  # most lengths end here
        return None
    bounds = np.r_[-1, np.flatnonzero(~same), len(same)]
    for i in np.flatnonzero(np.diff(bounds) > length)[::-1].tolist():
        start = int(bounds[i + 1]) - length
        if np.bincount(word[start : start + length], minlength=len(regular))[regular].all():
            return start
    return None


def occurrences(word: NDArray[Any], pattern: NDArray[Any]) -> list[int]:
    """Where a pattern occurs in full, without overlap."""
    found: list[int] = []
    for at in np.flatnonzero(word == pattern[0]).tolist():
        if (not found or at >= found[-1] + len(pattern)) and np.array_equal(word[at : at + len(pattern)], pattern):
            found.append(at)
    return found


def _usual_iteration(merged: NDArray[Any], at: NDArray[np.int64], places: Sequence[int], length: int) -> NDArray[Any]:
    """The iteration with its tiny operations: of all places where the period occurs, what is most often there."""
    everything = _raw_tokens(merged)
    versions: dict[bytes, list[slice]] = {}
    for first in places:
        after = first + length
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
    """Fingerprints of operations within one process; lone calls and parts of grouped ones differ."""
    point = np.isin(operations["function"], POINT_TO_POINT)
    count = np.where(point, 0, operations["count"])
    kind = both(operations["row"], operations["function"])
    for one in distinct(kind).tolist():
        own = kind == one
        if varies(len(distinct(count[own])), int(np.count_nonzero(own))):
            count[own] = 0
    joined = np.zeros(len(operations), np.bool_)
    joined[1:] = operations["call"][1:] == operations["call"][:-1]
    peer = np.where(point, operations["peer"], 0)
    return mix(operations["row"], operations["function"], count, operations["datatype"], peer, joined)


def varies(sizes: int, calls: int) -> bool:
    """Whether so many different sizes in so many calls depend on the data; a few, as of layers, are a model's."""
    return sizes * OFTEN > max(calls, ENOUGH)


# --- where a rank is ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Track:
    """The pointer of one process: ``position`` is the step its latest call was, −1 when lost."""

    pattern: Pattern
    position: int = -1
    recent: list[int] = field(default_factory=list)
    """Calls since the pointer was lost."""

    def follow(self, tokens: NDArray[np.uint64]) -> None:
        """Take calls in order: follow the pattern as far as they fit."""
        word = self.pattern.word
        for token in tokens.tolist():
            coming = (self.position + 1) % len(word)
            if self.position >= 0 and word[coming] == token:
                self.position = coming
            else:
                self._search(token)

    def _search(self, token: int) -> None:
        """The place of a call that does not fit; what the pattern does not hold is passed over, else the pointer may be lost."""
        lost = self.position < 0
        self.position = self.pattern.positions.get(token, self.position)
        # Passes of an evaluation equal those of an iteration: a run of calls only counts where nothing is unique.
        if max(self.pattern.positions.values(), default=-1) >= 0:
            return
        self.recent = [*self.recent, token] if lost else []
        if len(self.recent) == ENOUGH:
            # The only place where the latest calls end.
            word = self.pattern.word
            cyclic = [*word, *(word * ENOUGH)[: ENOUGH - 1]]
            found = [at for at in range(len(word)) if cyclic[at : at + ENOUGH] == self.recent]
            self.position, self.recent = (found[0] + ENOUGH - 1) % len(word) if len(found) == 1 else -1, []
