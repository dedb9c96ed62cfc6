"""What the calls of Flight Recorder dumps show beyond who is behind: a circle in their order, the one operation that all wait
for, and a call that is unlike its peers'.

Without timing a dump does not say which of a rank's open operations its GPU is in. Operations that are called one after the other
mostly run so: the oldest that is open is taken for the one that a rank is in. Where each of some ranks is in an operation that
the next has called only behind another one, none of them ends. That the order of calls must be one for all communicators is
NCCL's rule (user guide, "Using multiple NCCL communicators concurrently").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ncclwatch.collect.functions import TYPES, function
from ncclwatch.ingest.flight_recorder_job import ALL_TAKE_PART, FlightJob, Group
from ncclwatch.ingest.flight_recorder_rank import RankDump, State

MOST_STEPS = 1_000_000
"""Bound: waits that are followed."""
NEWEST = 2
"""Bound: newest calls of a rank on a group that are compared with its peers': where sizes differ, the smaller side may go on."""


class OpenCall(NamedTuple):
    """An operation that a rank has called and not ended; a message has the number -1, and the rank it goes to or comes from."""

    group: Group
    sequence: int
    function: int
    peer: int = -1

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
    calls = _calls(job)
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


def end_of_waits(job: FlightJob) -> tuple[OpenCall, tuple[int, ...]] | None:
    """The operation that all its ranks are in, and for which all others wait in the end: with its ranks, in their order.

    ``None`` where there is none or more than one, where somebody waits for a rank that is in nothing or wrote no dump (that one
    is behind), and where it is one of all ranks (that tells nothing). A message that both its ranks are in is one, too.
    """
    first = {rank: own[0] for rank, own in _calls(job).items() if own}
    inside: dict[tuple[int, int], list[int]] = defaultdict(list)
    ends: dict[tuple[int, ...], OpenCall] = {}
    for rank, own in first.items():
        if own.sequence >= 0:
            inside[own.key].append(rank)
        elif own.peer not in first:
            return None
        elif first[own.peer].sequence < 0 and first[own.peer].peer == rank:
            ends.setdefault((min(rank, own.peer), max(rank, own.peer)), own)
    for ranks in inside.values():
        own = first[ranks[0]]
        if len(ranks) == len(own.group.ranks):
            ends[own.group.ranks] = own
        elif not all(rank in first for rank in own.group.ranks):
            return None
    if len(ends) != 1:
        return None
    [(members, call)] = ends.items()
    return (call, members) if len(members) < len(first) else None


def oldest_open(job: FlightJob, rank: int) -> OpenCall | None:
    """What a rank called first of all that it has not ended; ``None`` where nothing says what has ended."""
    one = next((one for one in job.ranks if one.rank == rank), None)
    return next(iter(_calls_of(job, one)), None) if one is not None else None


def left_inside(job: FlightJob, rank: int) -> OpenCall | None:
    """The oldest that a rank has not ended, where that is a collective that needs all ranks and has ended on another."""
    call = oldest_open(job, rank)
    if call is None or call.sequence < 0 or call.function not in ALL_TAKE_PART:
        return None
    peers = _peers_rows(job, call.group, rank, call.sequence)
    return call if any(row["state"] == State.COMPLETED for row in peers) else None


def _calls(job: FlightJob) -> dict[int, list[OpenCall]]:
    """What each rank has called and not ended, the oldest call first."""
    return {one.rank: _calls_of(job, one) for one in job.ranks}


def _calls_of(job: FlightJob, one: RankDump) -> list[OpenCall]:
    known = [number for number, backend in enumerate(one.backends) if backend in job.ended_known]
    own: list[tuple[int, int, OpenCall]] = []
    for part in job.parts[one.rank]:
        for rows in (part.rows, part.messages):
            for row in rows[(rows["state"] != State.COMPLETED) & np.isin(rows["backend"], known)]:
                own.append((int(row["created_ns"]), len(own), _call(part.group, row)))
    return [call for _, _, call in sorted(own, key=lambda item: item[:2])]


def _call(group: Group, row: Any) -> OpenCall:
    if not row["message"]:
        return OpenCall(group, int(row["sequence"]), int(row["function"]))
    peer = int(row["peer"])
    return OpenCall(group, -1, int(row["function"]), group.ranks[peer] if 0 <= peer < len(group.ranks) else -1)


def unlike(job: FlightJob, rank: int) -> tuple[OpenCall, str, str] | None:
    """A newest call of a rank that its peers have all made with another size or type, and alike: the call, what it asked for, and
    what they did.
    """
    for part in job.parts.get(rank, ()):
        for row in part.rows[-NEWEST:]:
            own, number = _asked(row), int(row["sequence"])
            others = map(_asked, _peers_rows(job, part.group, rank, number))
            peer = next(others, own)
            if own[0] and _differ(own, peer) and all(other == peer for other in others):
                return OpenCall(part.group, number, own[0]), _text(own), _text(peer)
    return None


def _peers_rows(job: FlightJob, group: Group, rank: int, number: int) -> Iterator[Any]:
    for peer in group.ranks:
        part = next((part for part in job.parts.get(peer, ()) if part.group is group), None) if peer != rank else None
        if part is not None:
            at = int(np.searchsorted(part.rows["sequence"], number))
            if at < len(part.rows) and part.rows["sequence"][at] == number:
                yield part.rows[at]


def _asked(row: Any) -> tuple[int, int, int]:
    """Function, elements (0: ranks may differ), type."""
    return int(row["function"]), int(row["count"]), int(row["datatype"])


def _differ(own: tuple[int, int, int], peer: tuple[int, int, int]) -> bool:
    # Another function comes of a call that was left out, or one too many: the engine weighs that.
    if own[0] != peer[0]:
        return False
    return bool(own[1] and peer[1] and own[1] != peer[1]) or (own[2] >= 0 <= peer[2] and own[2] != peer[2])


def _text(asked: tuple[int, int, int]) -> str:
    """``AllReduce of 1024 x float32``."""
    name, elements, datatype = function(asked[0]).name, asked[1], asked[2]
    typed = f" x {TYPES[datatype][0]}" if 0 <= datatype < len(TYPES) else " elements"
    return f"{name} of {elements}{typed}" if elements else name
