"""Ranks of Flight Recorder dumps that have called operations of several groups in orders that wait for each other in a circle.

Without timing a dump does not say which of a rank's open operations its GPU is in. Operations that are called one after the other
mostly run so: the oldest that is open is taken for the one that a rank is in. Where each of some ranks is in an operation that
the next has called only behind another one, none of them ends. That the order of calls must be one for all communicators is
NCCL's rule (user guide, "Using multiple NCCL communicators concurrently").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ncclwatch.collect.functions import function
from ncclwatch.ingest.flight_recorder_job import FlightJob, Group
from ncclwatch.ingest.flight_recorder_rank import State

MOST_STEPS = 1_000_000
"""Bound: waits that are followed."""


class OpenCall(NamedTuple):
    """An operation that a rank has called and not ended."""

    group: Group
    sequence: int
    function: int

    @property
    def text(self) -> str:
        """``AllReduce #3 of process group 1 (tp)``."""
        return f"{function(self.function).name} #{self.sequence} of {self.group.label}"

    @property
    def key(self) -> tuple[int, int]:
        """What tells it from others of the job."""
        return self.group.number, self.sequence


def circle(job: FlightJob) -> list[tuple[int, OpenCall]]:
    """Ranks that wait for each other by the order of their calls, with the operation that each is in; empty where there are none.

    Only collectives of backends whose ends are known; a rank whose oldest open operation is a message is followed no further.
    """
    calls = {one.rank: list(_open(job, one.rank)) for one in job.ranks}
    first = {rank: own[0] for rank, own in calls.items() if own and own[0].sequence >= 0}
    called = {rank: {one.key for one in own} for rank, own in calls.items()}
    done: set[int] = set()
    steps = 0
    for start in first:
        path: dict[int, Iterator[int]] = {start: _behind(start, first, called)} if start not in done else {}
        while path and steps < MOST_STEPS:
            steps += 1
            rank = next(reversed(path))
            following = next(path[rank], None)
            if following is None:
                done.add(rank)
                del path[rank]
            elif following in path:
                ranks = list(path)
                return [(one, first[one]) for one in ranks[ranks.index(following) :]]
            elif following not in done:
                path[following] = _behind(following, first, called)
    return []


def _behind(rank: int, first: Mapping[int, OpenCall], called: Mapping[int, set[tuple[int, int]]]) -> Iterator[int]:
    """Ranks that have called what this one is in, and are in something that they called before."""
    own = first[rank]
    for other in own.group.ranks:
        if other != rank and other in first and first[other].key != own.key and own.key in called[other]:
            yield other


def _open(job: FlightJob, rank: int) -> Iterator[OpenCall]:
    """What a rank has called and not ended, the oldest call first; a message has the number -1."""
    one = next(one for one in job.ranks if one.rank == rank)
    known = [number for number, backend in enumerate(one.backends) if backend in job.ended_known]
    found: list[tuple[int, int, OpenCall]] = []
    for part in job.parts[rank]:
        for rows, message in ((part.rows, False), (part.messages, True)):
            still = rows[(rows["state"] != State.COMPLETED) & np.isin(rows["backend"], known)]
            for row in still:
                number = -1 if message else int(row["sequence"])
                found.append((int(row["created_ns"]), len(found), OpenCall(part.group, number, int(row["function"]))))
    yield from (call for _, _, call in sorted(found, key=lambda item: item[:2]))
