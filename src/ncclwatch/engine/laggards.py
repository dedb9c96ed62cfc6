"""Ranks that lag in a ring of shared memory, read off how much each has written."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ncclwatch.engine.connections import ConnectionKey
from ncclwatch.engine.edges import RankNode, Wait, Why
from ncclwatch.engine.job import Job
from ncclwatch.engine.ring_positions import ring_written


def laggards(job: Job) -> Iterator[Wait]:
    """Waits for ranks that lag in a ring of shared memory.

    All ranks of a ring write the same number of steps an operation, so one that has written less than the others has not come
    as far; and nobody ends a collective before the last has contributed.
    """
    for group in job.groups.values():
        if len(group.members) < group.nranks or group.nranks < 2:
            continue
        for channel, tails in ring_written(group).items():
            least = min(tails.values())
            if len(tails) < group.nranks or least == max(tails.values()):
                continue
            behind = [rank for rank, tail in tails.items() if tail == least]
            for rank, tail in tails.items():
                for other in behind if tail > least else ():
                    waiter, target = RankNode(group.members[rank][0].index), RankNode(group.members[other][0].index)
                    key = ConnectionKey(group.id, channel, other, rank, False)
                    name, peer = group.members[rank][0].label, job.rank_name(group.id, other)
                    text = f"{name} waits for {peer}, {Why.EMPTY}: shared memory, channel {channel}, {tail - least} steps behind"
                    yield Wait(waiter, target, Why.EMPTY, key, partial(str, text))
