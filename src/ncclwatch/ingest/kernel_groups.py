"""Which ranks share a communicator, where a trace shows kernels and streams only.

Ranks of one collective leave it at about the same time. So two streams of two ranks are of one communicator where their
collectives are the same in the same order, and the times at which these end differ by the same each time (their clocks'
difference). What does not show that clearly is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SAME_END_NS = 300_000
"""So little may the ends of one collective on two ranks differ beyond the difference of clocks, at the median (ns); chosen."""
FEWEST = 8
"""Collectives by which that is told; chosen."""
MOST_STREAMS = 64
"""Bound: streams of a rank that are compared, those with most kernels."""


class Stream(NamedTuple):
    """The collectives of one stream of one rank: functions, begins and ends in order."""

    rank: int
    functions: tuple[int, ...]
    ends: NDArray[np.int64]


def shared(streams: Sequence[Stream]) -> list[list[int]]:
    """Sets of streams (by their places) that are one communicator. O(streams x groups)."""
    groups: list[list[int]] = []
    order = sorted(range(len(streams)), key=lambda place: (-len(streams[place].functions), streams[place].rank))
    for place in order:
        one = streams[place]
        if len(one.functions) < FEWEST:
            continue
        for group in groups:
            others = [streams[other] for other in group]
            if all(other.rank != one.rank for other in others) and together(others[0], one):
                group.append(place)
                break
        else:
            groups.append([place])
    return [sorted(group, key=lambda place: streams[place].rank) for group in groups if len(group) > 1]


def together(one: Stream, other: Stream) -> bool:
    """Whether two streams may be one communicator."""
    if one.functions != other.functions:
        return False
    apart = (one.ends - other.ends).astype(np.float64)
    return bool(np.median(np.abs(apart - np.median(apart))) <= SAME_END_NS)
