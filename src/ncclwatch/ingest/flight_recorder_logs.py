"""Ranks of a job that wrote no Flight Recorder dump, from their rank logs: joined by group, sequence number and rank.

Both name a rank by its number in the job. A rank log has no process groups: each of its communicators is held against each group
that the rank is in, by the calls of a rank with a dump. What was called at the same time gives the difference between NCCL's
``opCount`` and PyTorch's ``collective_seq_id``; with it nearly all calls must be the same. What fits no group is left out, and so
are sends and receives. A rank log tells no states and no types: those of its peers stand there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.flight_recorder_job import FlightJob, Group, Part
from ncclwatch.ingest.flight_recorder_rank import ENTRY_DTYPE, LEAST_KEPT, GroupName, RankDump
from ncclwatch.ingest.rank_log_groups import POINT_TO_POINT, Chain, LoggedRanks
from ncclwatch.model.events import Function

FEWEST_ALIKE = 8
"""Calls that both must have, at least, to be taken for one communicator; chosen."""
ALIKE = 0.9
"""Part of them that must be the same: one that differs may be the fault; chosen."""
NEAR_S = 5.0
"""So far apart, at the median, may ranks call the same, clocks of their hosts included; chosen."""
BACKEND = "rank log"
"""Stands for the backend of a rank's calls: of none it is known whether it has ended."""


class _Match(NamedTuple):
    alike: int
    offset: int
    """``collective_seq_id`` less ``opCount``."""
    group: Group
    chain: Chain
    peer: Part


def with_logs(job: FlightJob, logged: LoggedRanks) -> tuple[FlightJob, list[str]]:
    """The job with those of its ranks that wrote no dump and have a log, and a line for each of what was joined."""
    more, lines = [], []
    for rank in job.missing:
        matches = _matches(job, rank, logged.chains.get(rank, ()))
        if matches:
            more.append(_as_dump(rank, matches, logged))
            groups = ", ".join(f"{match.group.label} (opCount {match.offset:+d})" for match in matches)
            lines.append(f"rank {rank} wrote no dump; its calls are from its rank log, joined by {groups}")
    return (FlightJob([*job.ranks, *more], job.unread) if more else job), lines


def _matches(job: FlightJob, rank: int, chains: Sequence[Chain]) -> list[_Match]:
    """Which communicator of a rank is which group: those that agree most first, each taken once."""
    found = [
        match for group in job.groups.values() if rank in group.ranks and (peer := _peer(job, group)) is not None
        for chain in chains if (match := _match(group, peer, chain)) is not None
    ]  # fmt: skip
    kept: list[_Match] = []
    for match in sorted(found, key=lambda one: -one.alike):
        if all(match.group is not one.group and match.chain is not one.chain for one in kept):
            kept.append(match)
    return kept


def _peer(job: FlightJob, group: Group) -> Part | None:
    """Of the ranks of a group that wrote dumps, the calls of the one that shows most."""
    parts = [part for rank in group.ranks for part in job.parts.get(rank, ()) if part.group is group and part.known]
    return max(parts, key=lambda part: len(part.rows), default=None)


def _match(group: Group, peer: Part, chain: Chain) -> _Match | None:
    own, rows = _collectives(chain), peer.rows
    if len(own) < FEWEST_ALIKE or len(rows) < FEWEST_ALIKE:
        return None
    after = np.clip(np.searchsorted(rows["created_ns"], own["time_ns"]), 1, len(rows) - 1)
    earlier = own["time_ns"] - rows["created_ns"][after - 1] < rows["created_ns"][after] - own["time_ns"]
    nearest = rows["sequence"][after - earlier] - own["op_count"]
    values, number = np.unique(nearest, return_counts=True)
    offset = int(values[np.argmax(number)])
    _, at, theirs = np.intersect1d(own["op_count"] + offset, rows["sequence"], return_indices=True)
    if len(at) < FEWEST_ALIKE:
        return None
    apart = np.abs(own["time_ns"][at] - rows["created_ns"][theirs]) / 1e9
    same = own["function"][at] == rows["function"][theirs]
    # Of other collectives PyTorch and NCCL count elements differently.
    same &= (own["function"][at] != Function.ALL_REDUCE) | (own["count"][at].astype(np.int64) == rows["count"][theirs])
    if same.mean() < ALIKE or np.median(apart) > NEAR_S:
        return None
    return _Match(int(same.sum()), offset, group, chain, peer)


def _collectives(chain: Chain) -> NDArray[np.void]:
    """The newest collectives of a communicator, one each."""
    own = chain.lines[~np.isin(chain.lines["function"], POINT_TO_POINT)]
    _, first = np.unique(own["op_count"], return_index=True)
    found: NDArray[np.void] = own[first][-LEAST_KEPT:]
    return found


def _as_dump(rank: int, matches: Sequence[_Match], logged: LoggedRanks) -> RankDump:
    parts = [_rows(number, match) for number, match in enumerate(matches)]
    rows = np.concatenate(parts)
    names: list[GroupName] = [match.group.name for match in matches]
    return RankDump(
        rank, logged.paths.get(rank, Path()), rows, names, {match.group.name.name: match.group.ranks for match in matches},
        whole=False, newest_ns=int(rows["created_ns"].max()), expires_ns=0, begun_known=False,
        written_ns=logged.written_ns.get(rank, 0), cut=frozenset(names), backends=[BACKEND], version="", partial=True,
    )  # fmt: skip


def _rows(number: int, match: _Match) -> NDArray[np.void]:
    own, theirs = _collectives(match.chain), match.peer.rows
    rows = np.zeros(len(own), ENTRY_DTYPE)
    rows["group"], rows["function"], rows["created_ns"] = number, own["function"], own["time_ns"]
    rows["sequence"], rows["peer"] = own["op_count"] + match.offset, -1
    like = np.clip(np.searchsorted(theirs["sequence"], rows["sequence"]), 0, len(theirs) - 1)
    rows["datatype"] = theirs["datatype"][like]
    counted = own["function"] == Function.ALL_REDUCE
    rows["count"] = np.where(counted, own["count"].astype(np.int64), theirs["count"][like])
    return rows
