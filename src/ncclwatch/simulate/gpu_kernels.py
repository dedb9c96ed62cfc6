"""SIMULATED kernels of NCCL: what the GPUs of a simulated job were in, and when."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from ncclwatch.simulate.layout import groups
from ncclwatch.simulate.observe import Cast, Membership
from ncclwatch.simulate.timeline import Timeline


class Kernel(NamedTuple):
    """One operation of one rank, true times in seconds. ``number`` counts those of its rank, ``sequence`` those of its
    communicator.
    """

    rank: int
    number: int
    called: float
    begin: float
    end: float
    function: str
    sequence: int
    nbytes: int
    element_bytes: int
    own: Membership


def kernels_of(timeline: Timeline, cast: Cast) -> dict[int, list[Kernel]]:
    """Kernels that ended, by observed rank, in the order in which hosts called them. None of communicators of one rank."""
    found: dict[int, list[Kernel]] = defaultdict(list)
    for block in timeline.blocks:
        if groups(timeline.scenario.layout, block.role).shape[1] < 2:
            continue
        rows = zip(block.ranks.tolist(), block.called.tolist(), block.started.tolist(), block.finished.tolist(), strict=True)
        for rank, called, begin, end in rows:
            if math.isfinite(end) and cast.observed(rank):
                function, nbytes, element_bytes = block.calling(rank)
                own = cast.membership(rank, block.role)
                kernel = Kernel(rank, 0, called, begin, end, function, block.sequence, nbytes, element_bytes, own)
                found[rank].append(kernel)
    return {
        rank: [kernel._replace(number=at) for at, kernel in enumerate(sorted(own, key=lambda one: one.called))]
        for rank, own in found.items()
    }  # fmt: skip
