"""Lines of a rank log as records of calls: what the calls plane would have written, where records are missing, who ended
early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.rank_log_groups import POINT_TO_POINT, Chain, Shared
from ncclwatch.ingest.traced import SECOND, birth, call_records, communicator
from ncclwatch.model.events import Function
from ncclwatch.model.state import Communicator

RUNS_ON_S = 5.0
"""So long peers go on calling where a rank is alive and its log was not saved: a host that runs ahead of a rank that hangs
waits for its GPU well before that. Unit: seconds. Chosen: the engine's shortest patience."""
AT_ONCE_NS = 10_000_000
"""Logs whose last lines are that close end at once (ns); chosen: their published logs end within 3 ms, one lacks the last
line.
"""
UNKNOWN_TYPE = -1
"""Stands for the type of elements, which the lines do not have."""


def events_of(
    rank: int, lines: NDArray[np.void], shared: Sequence[Shared], peers: Mapping[int, NDArray[np.int32]] | None
) -> tuple[tuple[Communicator, ...], NDArray[Any], list[tuple[int, int]]]:
    """Communicators, records of calls by time, and where records are missing: (place among the records, how many at least).

    ``peers``: for each chain of sends and receives (by its ``id``) the peer of every line.
    """
    events = call_records(len(lines))
    for name in ("time_ns", "count", "stream", "op_count", "function"):
        events[name] = lines[name]
    events["datatype"] = events["redop"] = UNKNOWN_TYPE
    held: list[Communicator] = []
    starts: list[NDArray[Any]] = []
    known = np.zeros(len(lines), np.bool_)
    first, last = np.zeros((2, len(lines)), np.bool_)
    breaks: dict[int, int] = {}
    own_places = [(one, place) for one in shared for place, chain in one.chains.items() if chain.rank == rank]
    for number, (one, place) in enumerate(own_places):
        chain = one.chains[place]
        own = communicator(number + 1 << 20, one.hash, place, len(one.ranks))
        held.append(own)
        rows = chain.rows
        known[rows] = True
        events["comm"][rows], events["comm_hash"][rows] = own.address, own.hash
        events["rank"][rows], events["nranks"][rows] = own.rank, own.nranks
        if peers is not None and id(chain) in peers:
            events["peer"][rows] = peers[id(chain)]
        _mark_groups(chain, first, last)
        for at, missing in _missing(chain, lines["save"]):
            breaks[at] = breaks.get(at, 0) + missing
        if chain.lines["op_count"][0] == 0:
            starts.append(birth(int(lines["time_ns"][0]), own))
    made, places = _with_groups(events, known, first, last)
    born = len(starts)
    return tuple(held), np.concatenate([*starts, made]), sorted((born + int(places[at]), n) for at, n in breaks.items())


def _mark_groups(chain: Chain, first: NDArray[np.bool_], last: NDArray[np.bool_]) -> None:
    """Sends and receives under one ``opCount`` are one grouped call: mark its first and its last line."""
    paired = np.isin(chain.lines["function"], POINT_TO_POINT)
    counts, rows = chain.lines["op_count"][paired], chain.rows[paired]
    same = np.diff(counts) == 0
    begins = rows[np.flatnonzero(np.r_[False, same] < np.r_[same, False])]
    ends = rows[np.flatnonzero(np.r_[False, same] > np.r_[same, False])]
    first[begins], last[ends] = True, True


def _with_groups(
    events: NDArray[Any], known: NDArray[np.bool_], first: NDArray[np.bool_], last: NDArray[np.bool_]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The records of known communicators with the starts and ends of groups among them; and where each record has come to."""
    if known.all() and not first.any():
        return events, np.arange(len(events))
    width = known + np.int64(0) + first + last
    ends = np.cumsum(width)
    places = ends - width
    made = call_records(int(ends[-1]) if len(ends) else 0)
    made[(places + first)[known]] = events[known]
    for marked, function, at in ((first, Function.GROUP_START, places), (last, Function.GROUP_END, ends - 1)):
        made["function"][at[marked]], made["flags"][at[marked]] = function, 0
        made["time_ns"][at[marked]] = events["time_ns"][marked]
    return made, places


def _missing(chain: Chain, saves: NDArray[np.uint32]) -> list[tuple[int, int]]:
    """Rows before which calls of a chain are missing, and how many: where the lines before a save were overwritten."""
    counts, rows = chain.lines["op_count"], chain.rows
    found = []
    for at in np.flatnonzero(np.diff(counts) > 1).tolist():
        between = saves[rows[at] : rows[at + 1] + 1]
        saved = np.flatnonzero(np.diff(between.astype(np.int64)))
        row = int(rows[at]) + 1 + int(saved[-1]) if len(saved) else int(rows[at + 1])
        found.append((row, int(counts[at + 1] - counts[at] - 1)))
    return found


def ends_early(lines: Mapping[int, NDArray[np.void]], shared: Sequence[Shared]) -> list[int | None]:
    """For each rank when its log ends (ns), where it was alive after that: on each of its communicators others went on for long
    beyond what it called last. ``None`` where nothing says so. A job of one stage cannot go on without any of its ranks.
    """
    spans: dict[int, list[float]] = {rank: [] for rank in lines}
    for one in shared:
        chains = [chain for chain in one.chains.values() if not chain.exchanges]
        if len(chains) < 2:
            continue
        for chain in chains:
            beyond = [other.lines["time_ns"][other.lines["op_count"] > chain.lines["op_count"][-1]] for other in chains]
            own = max((float(times[-1] - times[0]) / SECOND for times in beyond if len(times)), default=0.0)
            spans[chain.rank].append(own)
    return [int(lines[rank]["time_ns"][-1]) if own and min(own) > RUNS_ON_S else None for rank, own in spans.items()]


def last_call_lacking(shared: Sequence[Shared], end_ns: int) -> tuple[Shared, int, list[int]] | None:
    """Where all logs of a job end alike, at once, but for one call that a minority of ranks lacks: its communicator, its
    ``opCount`` and those ranks (of the job). Whether they hang before it, or it was made when the last lines had been saved, is
    not told.
    """
    found: list[tuple[Shared, int, list[int]]] = []
    for one in shared:
        chains = [chain for chain in one.chains.values() if len(chain.rows)]
        newest = max(int(chain.lines["op_count"][-1]) for chain in chains)
        behind = [chain for chain in chains if int(chain.lines["op_count"][-1]) < newest and not chain.exchanges]
        if not behind:
            continue
        ahead = [int(chain.lines["time_ns"][-1]) for chain in chains if int(chain.lines["op_count"][-1]) == newest]
        by_one = all(int(chain.lines["op_count"][-1]) == newest - 1 for chain in behind)
        if not by_one or len(behind) >= len(ahead) or min(ahead) < end_ns - AT_ONCE_NS:
            return None
        if any(int(chain.lines["time_ns"][-1]) < end_ns - AT_ONCE_NS for chain in behind):
            return None
        found.append((one, newest, [chain.rank for chain in behind]))
    return found[0] if len(found) == 1 else None
