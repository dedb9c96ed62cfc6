"""One process in full: its operations with all-to-all exchanges made one, its repeating pattern, numbers by communicator."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.exchange import Exchanges, Shape, classify
from ncclwatch.engine.topology.iteration import Period, find_period
from ncclwatch.engine.topology.jobmap import Facts
from ncclwatch.engine.topology.record import element_bytes
from ncclwatch.model.events import Function

TINY_BYTES = 1024
"""A collective of at most that many bytes carries a flag or a norm, no activations and no gradients."""

POINT_TO_POINT = (int(Function.SEND), int(Function.RECV))

VARIABLE = 0.25
"""A communicator on which more than this share of the calls of one function differ in count has sizes that depend on data."""


@dataclass(slots=True)
class Usage:
    """What one process does on one communicator. ``word`` are its operations within the pattern (or all kept, without one)."""

    row: int
    group: Facts
    comm_rank: int
    exchanges: Exchanges
    total: int
    """Operations in all that was kept."""
    functions: dict[int, int] = field(default_factory=dict)
    """Function → operations in the word."""
    order: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Functions in the word, in order."""
    sizes: set[int] = field(default_factory=set)
    """Bytes of the collectives, as given in the call."""
    multiplicity: int = 0
    """How often the most frequent operation occurs in the word."""
    tiny: bool = False

    @property
    def shape(self) -> Shape:
        """What its point-to-point calls are for."""
        return self.exchanges.shape

    @property
    def collective(self) -> bool:
        """Whether collectives of some size are called on it."""
        return bool(self.sizes) and not self.tiny


@dataclass(slots=True)
class Specimen:
    """One process. ``operations`` are those of ``record.OPERATION``; ``word`` is the part that is one iteration, if found."""

    process: int
    rank: int
    operations: NDArray[Any]
    usages: dict[int, Usage]
    period: Period | None = None
    word: NDArray[Any] | None = None

    @property
    def pattern(self) -> NDArray[Any]:
        """The operations of one iteration, or all that were kept where no iteration was found."""
        return self.word if self.word is not None else self.operations


def examine(
    process: int, rank: int, operations: NDArray[Any], rows: dict[int, tuple[Facts, int]], known: Collection[int] = ()
) -> Specimen:
    """Look at the history of one process; ``rows`` maps its rows to (group, rank in it), ``known`` are periods of other ranks."""
    exchanges = {row: classify(operations[operations["row"] == row], own, group.nranks) for row, (group, own) in rows.items()}
    merged = collapse(operations, {row for row, one in exchanges.items() if one.shape in (Shape.ALL_TO_ALL, Shape.PAIRS)})
    result = Specimen(process, rank, merged, {})
    kept = substantial(merged)
    part = merged[kept] if kept.any() else merged
    tokens = raw_tokens(part)
    result.period = find_period(tokens, part["row"].astype(np.int64), known)
    if result.period is not None and len(np.unique(tokens[result.period.start :][: result.period.length])) < 2:
        result.period = None  # one operation over and over: no iteration shows in it
    if result.period is not None:
        at = np.flatnonzero(kept) if kept.any() else np.arange(len(merged))
        result.word = _modal_word(merged, at, tokens, result.period)
    for row, (group, own) in rows.items():
        usage = Usage(row, group, own, exchanges[row], int(np.count_nonzero(merged["row"] == row)))
        _fill(usage, result.pattern[result.pattern["row"] == row])
        result.usages[row] = usage
    return result


def _modal_word(merged: NDArray[Any], at: NDArray[np.int64], tokens: NDArray[np.uint64], period: Period) -> NDArray[Any]:
    """The iteration with its tiny operations: of all places where the period occurs, what is most often there."""
    pattern = tokens[period.start : period.start + period.length]
    everything = raw_tokens(merged)
    best: dict[bytes, list[int]] = {}
    free = 0
    for first in np.flatnonzero(tokens == pattern[0]).tolist():
        if first < free or first + period.length > len(tokens):
            continue
        if not np.array_equal(tokens[first : first + period.length], pattern):
            continue
        free = first + period.length
        begin = int(at[first])
        end = int(at[free]) if free < len(at) else int(at[free - 1]) + 1
        found = best.setdefault(everything[begin:end].tobytes(), [0, begin, end])
        found[0] += 1
        found[1:] = [begin, end]
    _, begin, end = max(best.values())
    return merged[begin:end]


def _fill(usage: Usage, part: NDArray[Any]) -> None:
    if not len(part):
        return
    usage.order = part["function"].astype(np.int64)
    values, numbers = np.unique(usage.order, return_counts=True)
    usage.functions = dict(zip(values.tolist(), numbers.tolist(), strict=True))
    collective = part[~np.isin(part["function"], (*POINT_TO_POINT, int(Function.ALL_TO_ALL)))]
    sizes = collective["count"].astype(np.int64) * element_bytes(collective["datatype"])
    usage.sizes = set(np.unique(sizes).tolist())
    usage.tiny = bool(len(sizes)) and int(sizes.max()) <= TINY_BYTES
    _, numbers = np.unique(raw_tokens(part), return_counts=True)
    usage.multiplicity = int(numbers.max())


def substantial(operations: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether an operation carries data rather than a flag; point-to-point and all-to-all always count."""
    size = operations["count"].astype(np.int64) * element_bytes(operations["datatype"])
    result: NDArray[np.bool_] = (size > TINY_BYTES) | np.isin(operations["function"], (*POINT_TO_POINT, int(Function.ALL_TO_ALL)))
    return result


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


def raw_tokens(operations: NDArray[Any]) -> NDArray[np.uint64]:
    """64-bit fingerprints of operations within one process: communicator, function, size, type, peer; lone calls and parts of
    grouped ones differ.
    """
    count = operations["count"].astype(np.uint64)
    point = np.isin(operations["function"], POINT_TO_POINT)
    count = np.where(point, 0, count)
    for row, function in np.unique(operations[["row", "function"]]).tolist():
        own = (operations["row"] == row) & (operations["function"] == function)
        if len(np.unique(count[own])) > max(8, VARIABLE * np.count_nonzero(own)):
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


def mix(*columns: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A hash over columns of equal length (multiply and shift, as in splitmix64)."""
    result = np.full(len(columns[0]), 0x9E3779B97F4A7C15, np.uint64)
    with np.errstate(over="ignore"):
        for column in columns:
            result = (result ^ column) * np.uint64(0xBF58476D1CE4E5B9)
            result ^= result >> np.uint64(29)
    return result
