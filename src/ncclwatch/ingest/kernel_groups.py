"""Which ranks share a communicator, where a trace shows kernels and streams only.

Ranks of one collective leave it at about the same time. So two streams of two ranks are of one communicator where their
collectives are the same in the same order, and the times at which these end differ by the same each time (their clocks'
difference). Windows of ranks may differ by a few collectives at either end. What does not show that clearly is left out. Where
the communicator is known all that is looked for is which collective is which: the same in the same order, and nearest in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.kernels import Kernel, KernelRank

SAME_END_NS = 300_000
"""So little may the ends of one collective on two ranks differ beyond the difference of clocks, at the median (ns); chosen."""
FEWEST = 8
"""Collectives by which that is told; chosen."""
SHIFTS = 4
"""Bound: collectives by which the beginnings of two ranks' windows may differ."""
MOST_STREAMS = 64
"""Bound: streams of a rank that are compared, those with most kernels."""


class Stream(NamedTuple):
    """The collectives of one stream of one rank: functions and ends in order."""

    rank: int
    functions: tuple[int, ...]
    ends: NDArray[np.int64]


class Seen(NamedTuple):
    """One collective as a stream shows it; times in ns since the epoch. ``launched`` is when the host called it."""

    function: int
    begin: int
    end: int
    launched: int
    elements: int = 0
    datatype: int = -1


def join(streams: Sequence[tuple[KernelRank, Sequence[Seen]]], known: str = "") -> int:
    """Give ranks the kernels of their streams, where these share a communicator with another rank's; returns how many kernels are
    left out. ``known``: the name of the communicator that all of them are of, where that was told. O(streams x groups x kernels).
    """
    compared = [
        Stream(one.rank, tuple(kernel.function for kernel in own), np.array([kernel.end for kernel in own], np.int64))
        for one, own in streams
    ]
    left = sum(len(own) for _, own in streams)
    for number, members in enumerate(shared(compared, known=bool(known))):
        called = known or f"stream group {number}"
        ranks = tuple(compared[place].rank for place, _ in members)
        first = max(shift for _, shift in members)
        size = min(len(compared[place].functions) - first + shift for place, shift in members)
        left -= size * len(members)
        for place, shift in members:
            one, own = streams[place]
            one.kernels += (
                Kernel(
                    (called, ranks),
                    kernel.function,
                    at + 1,
                    kernel.elements,
                    kernel.datatype,
                    -1,
                    kernel.launched,
                    kernel.begin,
                    kernel.end,
                )
                for at, kernel in enumerate(own[first - shift : first - shift + size])
            )
    return left


def shared(streams: Sequence[Stream], *, known: bool = False) -> list[list[tuple[int, int]]]:
    """Sets of streams that are one communicator, which it is ``known`` that they are or not: (place, where its first collective
    stands among those of the set's first).
    """
    groups: list[list[tuple[int, int]]] = []
    order = sorted(range(len(streams)), key=lambda place: (-len(streams[place].functions), streams[place].rank))
    for place in order:
        one = streams[place]
        if len(one.functions) < FEWEST:
            continue
        for group in groups:
            if any(streams[other].rank == one.rank for other, _ in group):
                continue
            shift = together(streams[group[0][0]], one, known=known)
            if shift is not None:
                group.append((place, shift))
                break
        else:
            groups.append([(place, 0)])
    return [sorted(group, key=lambda member: streams[member[0]].rank) for group in groups if len(group) > 1]


def together(one: Stream, other: Stream, *, known: bool = False) -> int | None:
    """Where the first collective of ``other`` stands among those of ``one``, if they may be one communicator, or are ``known`` to
    be; else ``None``. Of several places that where their ends are nearest.
    """
    found: list[tuple[float, int, int]] = []
    # Windows of a known communicator may differ by much: then clocks tell about where the one begins in the other.
    apart_at = int(np.searchsorted(one.ends, other.ends[0]) - np.searchsorted(other.ends, one.ends[0])) if known else 0
    for shift in {*range(-SHIFTS, SHIFTS + 1), *range(apart_at - SHIFTS, apart_at + SHIFTS + 1)}:
        first, second = max(shift, 0), max(-shift, 0)
        size = min(len(one.functions) - first, len(other.functions) - second)
        if size < FEWEST or (not known and max(len(one.functions), len(other.functions)) - size > 2 * SHIFTS):
            continue
        if one.functions[first : first + size] != other.functions[second : second + size]:
            continue
        apart = (one.ends[first : first + size] - other.ends[second : second + size]).astype(np.float64)
        clocks = float(np.median(apart))
        if known or np.median(np.abs(apart - clocks)) <= SAME_END_NS:
            found.append((abs(clocks), abs(shift), shift))
    return min(found)[2] if found else None
