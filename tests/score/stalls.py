"""Where a GPU that stalls does so, and what must be said of it.

The rule (docs/scenarios.md): ``not-entered`` means that the rank has not started the operation that others wait in, since its
host has not called it or its GPU has not started it; ``hardware`` that it is in the operation and does not go on. So a stall
between two operations is ``not-entered``, and one inside an operation ``hardware``. A kernel that runs and has not moved anything
looks from outside like one that has not started (nothing but its own registers tells them apart): either is right.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

import numpy as np

from ncclwatch.model.verdict import VerdictClass
from ncclwatch.simulate.layout import groups
from ncclwatch.simulate.scenario import FaultKind, Scenario
from ncclwatch.simulate.timeline import Block, Timeline


class Stalled(StrEnum):
    """Where a GPU came to stand."""

    BETWEEN = "between"
    AT_BEGIN = "at-begin"
    INSIDE = "inside"


VERDICTS = {
    Stalled.BETWEEN: (VerdictClass.NOT_ENTERED,),
    Stalled.AT_BEGIN: (VerdictClass.HARDWARE, VerdictClass.NOT_ENTERED),
    Stalled.INSIDE: (VerdictClass.HARDWARE,),
}


def where_it_stalled(scenario: Scenario, stalled: str) -> Scenario:
    """The scenario with the one class that is right for a GPU that stalled there; ``stalled`` empty: as it is."""
    if not stalled or not any(fault.kind is FaultKind.GPU_STALL for fault in scenario.faults):
        return scenario
    return replace(scenario, expect=replace(scenario.expect, verdicts=VERDICTS[Stalled(stalled)]))


def stalled_in(timeline: Timeline) -> str:
    """Where the GPU stalled in a simulated run; empty where none did."""
    ranks = {fault.rank for fault, _ in timeline.disturbance.onsets if fault.kind is FaultKind.GPU_STALL}
    if not ranks or not timeline.hung:
        return ""
    inside = [
        (block, int(place))
        for block in timeline.blocks
        for place in np.flatnonzero(np.isin(block.ranks, list(ranks)) & np.isfinite(block.started) & ~np.isfinite(block.finished))
    ]
    if not inside:
        return Stalled.BETWEEN
    return Stalled.INSIDE if any(_moved(timeline, block, place) for block, place in inside) else Stalled.AT_BEGIN


def _moved(timeline: Timeline, block: Block, place: int) -> bool:
    """Whether the GPU has sent or taken a slice in the operation that it is in."""
    rank, group = int(block.ranks[place]), int(block.groups[place])
    ends = list(block.streams.get(rank, ()))
    if group in block.traces:
        members = groups(timeline.scenario.layout, block.role)[group].tolist()
        ends += block.traces[group].ends[members.index(rank)]
    return any(len(end.connection.produced if end.send else end.connection.consumed) > end.first for end in ends)
