"""A rank that stood still once, amid its layers, while the job waited for it, by rank logs.

Such a pause is one long wait and no slow rank: windows (:mod:`.rank_log_lateness`) leave it out, for a loader, a checkpoint or an
evaluation looks the same there. Those come between two iterations. Here only pauses count before which the rank's last call was
on the communicator that it calls most on, and so is the next: between two layers of a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.rank_log_groups import Chain, Shared
from ncclwatch.ingest.rank_log_layout import Layout
from ncclwatch.ingest.rank_log_waits import Called, Excuses
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from ncclwatch.text import compressed

SHORTEST_S = 0.5
"""A shorter pause is not told; chosen."""
BEYOND = 5.0
"""So many times as long as for any other rank must its fellows have waited; chosen: 12 times in Infrawaves' published logs."""
CONFIDENCE = 0.6


class Pause(NamedTuple):
    """A rank stood still from ``begin`` to ``end`` (s since the epoch) while ``fellows`` waited."""

    rank: int
    fellows: tuple[int, ...]
    begin: float
    end: float


def longest_pause(found: Sequence[Called], excuses: Excuses) -> Pause | None:
    """The one pause that is far longer than any wait for another rank; ``found``: the communicators that ranks call most on."""
    waits = sorted((wait for one in found for wait in _longest(one, excuses)), reverse=True)
    if not waits or waits[0][0] < max(SHORTEST_S, BEYOND * max((seconds for seconds, _, _ in waits[1:2]), default=0.0)):
        return None
    seconds, rank, number = waits[0]
    one = next(one for one in found if rank in one.ranks)
    place = one.ranks.index(rank)
    end = float(one.times[place][number])
    if not _amid(_chain_of(one.shared, rank), round(end * 1e9)):
        return None
    return Pause(rank, tuple(sorted(set(one.ranks) - {rank})), end - seconds, end)


def _longest(one: Called, excuses: Excuses) -> Iterator[tuple[float, int, int]]:
    """For each rank of a communicator the longest that all others waited for one call of it: (s, rank, number of the call)."""
    times = one.on_one_clock
    order = np.sort(times, axis=0)
    last = times.argmax(axis=0)
    for place, rank in enumerate(one.ranks):
        mine = np.flatnonzero(last == place)
        if not len(mine):
            continue
        begin, end = (order[row][mine] + one.ahead[place] for row in (-2, -1))
        wait: NDArray[np.float64] = end - begin - excuses.within(rank, begin, end)
        # Of operations in a row that waited for one pause the first.
        at = int(np.flatnonzero(wait >= 0.99 * wait.max())[0])
        yield float(wait[at]), rank, int(mine[at])


def _chain_of(one: Shared, rank: int) -> Chain:
    return next(chain for chain in one.chains.values() if chain.rank == rank)


def _amid(chain: Chain, time_ns: int) -> bool:
    """Whether the calls before and after the gap that ends at a time are on this communicator, with none on another between."""
    after = int(np.searchsorted(chain.lines["time_ns"], time_ns - 1000))
    return 0 < after < len(chain.rows) and int(chain.rows[after] - chain.rows[after - 1]) == 1


def tell_pause(verdict: Verdict, pause: Pause | None, layout: Layout | None, sources: Mapping[int, str], end: float) -> Verdict:
    """The last verdict on a job of which nobody is named, with the rank that stood still once, if one did."""
    over = verdict.time is not None and verdict.time >= end
    if pause is None or not over or verdict.verdict_class.accuses or verdict.culprits:
        return verdict
    stage = f"pipeline stage {layout.stage(pause.rank)}" if layout is not None and layout.pp > 1 else ""
    length = f"{pause.end - pause.begin:.1f} s"
    where = f" ({stage})" if stage else ""
    fellows = f"rank{'s' if len(pause.fellows) > 1 else ''} {compressed(pause.fellows)}"
    line = (
        f"rank {pause.rank}{where} called nothing for {length} between two layers, while {fellows} of its group had called the "
        "next operation"
    )
    return replace(
        verdict, verdict_class=VerdictClass.SLOW_COMPUTATION, stage=stage, since=pause.begin, confidence=CONFIDENCE,
        culprits=(Culprit(pause.rank, None, sources.get(pause.rank, ""), None, None, stage=stage),), victims=pause.fellows,
        summary=f"rank {pause.rank}{where} held the job up once, for {length}; then the job went on (estimated from rank logs)",
        evidence=(line, *verdict.evidence), rules=(*verdict.rules, "rank-log-pause"),
    )  # fmt: skip
