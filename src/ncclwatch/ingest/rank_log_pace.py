"""Which tensor groups of a job take longer between their operations than those that do the same work, by rank logs.

Replicas of a pipeline stage call the same. A tensor group of one in which a GPU, or the way between its GPUs, is slow takes
longer from one of its operations to the next, while the others do not, and wait for it where gradients are summed up. Which of
its ranks it is calls do not tell: all of them leave an operation together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.rank_log_groups import Shared, fit
from ncclwatch.ingest.rank_log_layout import Layout
from ncclwatch.ingest.rank_log_waits import Windows
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from ncclwatch.text import compressed

FEWEST = 20
"""Operations of a group in a window by which its pace is told; chosen."""
LONGER = 1.3
"""So many times as long between operations as the groups that do the same, at the median; chosen: healthy simulated ones differ
by 3 %.
"""
AT_ONCE_S = 1e-4
"""Operations that follow each other faster were called ahead, at a host's pace; chosen."""
LASTS = 2
"""Windows in a row; chosen."""
NAMED = 16
"""Bound: ranks that are told."""


class Pace(NamedTuple):
    """A tensor group that takes ``factor`` times as long as the ``others`` that do the same; times in s since the epoch."""

    ranks: tuple[int, ...]
    factor: float
    others: int
    begin: float
    end: float


def slow_groups(shared: Sequence[Shared], layout: Layout | None, windows: Windows) -> list[Pace]:
    """Groups that are slower than those that do the same for two windows or more, the slowest first."""
    found = []
    for groups in _alike(shared, layout):
        paces = np.stack([_pace(one, windows) for one in groups])
        for at, one in enumerate(groups):
            others = np.delete(paces, at, axis=0)
            known = np.isfinite(others).all(axis=0)
            usual = np.median(np.where(known, others, 1.0), axis=0)
            factor = np.where(known & np.isfinite(paces[at]), paces[at] / usual, 0.0)
            ranks = tuple(sorted(chain.rank for chain in one.chains.values()))
            for slow, run in groupby(range(windows.number), key=lambda number: bool(factor[number] >= LONGER)):
                numbers = list(run)
                if slow and len(numbers) >= LASTS:
                    begin, end = (windows.begin + windows.length * number for number in (numbers[0], numbers[-1] + 1))
                    found.append(Pace(ranks, float(np.median(factor[numbers])), len(others), begin, end))
    return sorted(found, key=lambda pace: -pace.factor)


def _alike(shared: Sequence[Shared], layout: Layout | None) -> list[list[Shared]]:
    """Tensor groups that do the same work: of one pipeline stage, where that is known, and with the same calls."""
    busiest: dict[int, tuple[int, Shared]] = {}
    for one in shared:
        chains = list(one.chains.values())
        if len(chains) != len(one.ranks) or len(chains) < 2 or any(chain.exchanges for chain in chains):
            continue
        for chain in chains:
            busiest[chain.rank] = max(busiest.get(chain.rank, (0, one)), (len(chain.rows), one), key=lambda own: own[0])
    world = {chain.rank for one in shared for chain in one.chains.values()}
    kinds: dict[tuple[int, int], list[list[Shared]]] = defaultdict(list)
    for one in {id(one): one for _, one in busiest.values()}.values():
        if len(one.chains) == len(world):
            continue
        chain = one.chains[0]
        stage = layout.stage(chain.rank) if layout is not None else 0
        same = kinds[len(one.ranks), stage]
        for groups in same:
            if fit([groups[0].chains[0], chain], tight=False):
                groups.append(one)
                break
        else:
            same.append([one])
    return [groups for same in kinds.values() for groups in same if len(groups) > 1]


def _pace(one: Shared, windows: Windows) -> NDArray[np.float64]:
    """Seconds between a group's operations by window, at the median; NaN where there are few. Its first rank's clock."""
    counts, _, times = one.chains[0].signature
    seconds = times / 1e9
    steps = np.diff(seconds)
    told = (np.diff(counts) == 1) & (steps > AT_ONCE_S)
    at = windows.of(seconds[1:])
    found = np.full(windows.number, np.nan)
    for number in range(windows.number):
        own = steps[told & (at == number)]
        if len(own) >= FEWEST:
            found[number] = np.median(own)
    return found


def unexplained(paces: Sequence[Pace], replica: Callable[[int], int]) -> list[Pace]:
    """Those, slowest first, that are not slow because another stage of their replica is more so: a pipeline goes as its slowest
    stage. Nor those that are less than half as slow as the slowest.
    """
    kept: list[Pace] = []
    for pace in paces:
        own = {replica(rank) for rank in pace.ranks}
        beside = any(own & {replica(rank) for rank in other.ranks} and other.ranks != pace.ranks for other in kept)
        if not beside and pace.factor >= 1 + (paces[0].factor - 1) / 2:
            kept.append(pace)
    return kept


def tell_pace(verdict: Verdict, slow: Sequence[Pace], layout: Layout | None, sources: Mapping[int, str], end: float) -> Verdict:
    """The last verdict on a job of which nobody is named, with the tensor groups that are slower than others."""
    over = verdict.time is not None and verdict.time >= end
    if not slow or not over or verdict.verdict_class.accuses or verdict.culprits:
        return verdict
    ranks = sorted({rank for pace in slow for rank in pace.ranks})
    stages = {layout.stage(rank) for rank in ranks} if layout is not None and layout.pp > 1 else set()
    stage = f"pipeline stage {stages.pop()}" if len(stages) == 1 else ""
    culprits = tuple(Culprit(rank, None, sources.get(rank, ""), None, None, stage=stage) for rank in ranks[:NAMED])
    lines = tuple(
        f"ranks {compressed(pace.ranks)} take {pace.factor:.1f} times as long from one operation of their tensor group to the "
        f"next as {pace.others} other groups that call the same, for {pace.end - pace.begin:.0f} s" for pace in slow
    )  # fmt: skip
    where = f" ({stage})" if stage else ""
    return replace(
        verdict, verdict_class=VerdictClass.UNKNOWN, stage=stage, culprits=culprits, since=slow[0].begin,
        summary=f"ranks {compressed(ranks)}{where} are slower than others that do the same; which of them, and whether they "
        "compute or communicate slowly, calls do not tell (estimated from rank logs)",
        evidence=(*lines, *verdict.evidence), confidence=0.0, rules=(*verdict.rules, "rank-log-pace"),
    )  # fmt: skip
