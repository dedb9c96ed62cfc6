"""What the wire says of the connections of a verdict's ranks: dead and slow ones, data that nobody reads, loss on the way."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ncclwatch.engine.far_ends import FarEnds
from ncclwatch.model.network import FlowRecord, FlowState
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Verdict

MAX_LINES = 3
LOST, TIMES = 10, 5.0
"""Segments that the sockets of a culprit send again before loss is spoken of, and how many times as many as others do."""
WHERE_LOST = (
    "packets of {who} are lost on the way: look for errors and drops at the cable, the transceiver and the switch port "
    "(ethtool -S), and for queues that overflow"
)


def flow_lines(flows: Sequence[FlowRecord], verdict: Verdict, *, slow: bool) -> tuple[list[str], list[str]]:
    """Lines of evidence, and next steps; of a job that stands still (not ``slow``) it says nothing that a connection was slow."""
    culprits = {culprit.rank for culprit in verdict.culprits if culprit.rank is not None}
    ranks = culprits | set(verdict.victims)
    said: dict[str, list[FlowRecord]] = {}
    for flow in flows:
        blocked = flow.state is FlowState.BLOCKED and flow.global_rank in culprits
        trouble = flow.state.is_trouble and (slow or flow.state is not FlowState.SLOW)
        if flow.reason and (blocked or (trouble and (not ranks or flow.global_rank in ranks))):
            said.setdefault(f"{flow.global_rank} {flow.direction} {flow.peer} {flow.state}", []).append(flow)
    if not slow and not said:
        return [], []
    ends = FarEnds(flows, verdict.culprits)
    together = list(said.values())
    if slow and culprits:
        # Others' connections may be slower than they were, too: who reads this asks why the culprit's are.
        together = sorted((group for group in together if _touches(group[0], ends, culprits)), key=_severity)
    lines = [_line(group, ends) for group in together[:MAX_LINES]]
    if not slow or (loss := _loss(flows, ends, culprits)) is None:
        return lines, []
    who = f"rank {min(culprits)}" if len(culprits) == 1 else "these ranks"
    return [loss, *lines], [WHERE_LOST.format(who=who)]


def _touches(flow: FlowRecord, ends: FarEnds, culprits: Collection[int]) -> bool:
    return flow.global_rank in culprits or ends.rank_of(flow) in culprits


def _severity(group: Sequence[FlowRecord]) -> tuple[bool, float]:
    """The worst first: what it carries of what it used to (nothing where it stands); data that nobody reads last."""
    carried = min(flow.bandwidth / flow.expected if flow.bandwidth is not None and flow.expected else 0.0 for flow in group)
    return group[0].state is FlowState.BLOCKED, carried


def _line(group: Sequence[FlowRecord], ends: FarEnds) -> str:
    first = group[0]
    other = ends.rank_of(first)
    peer = f"rank {other}" if other is not None else f"rank {first.peer} of its communicator"
    way = "to" if first.direction is Direction.SEND else "from"
    channels = sorted({flow.channel for flow in group if flow.channel is not None})
    where = f" over {first.device}" if first.device else ""
    return (
        f"rank {first.global_rank} {way} {peer}{where}, "
        f"channel{'s' if len(channels) != 1 else ''} {', '.join(map(str, channels))}: {first.reason}"
    )


def _loss(flows: Sequence[FlowRecord], ends: FarEnds, culprits: Collection[int]) -> str | None:
    """That segments of the culprits' sockets are sent again much more often than those of others, where they are."""
    sockets = {
        flow.socket.local: (flow.retries, _touches(flow, ends, culprits))
        for flow in flows
        if flow.socket is not None and flow.retries is not None and flow.direction is Direction.SEND
    }
    theirs = [count for count, near in sockets.values() if near]
    others = [count for count, near in sockets.values() if not near]
    lost = sum(theirs)
    usual = sum(others) / len(others) if others else 0.0
    if lost < LOST or lost / len(theirs) < TIMES * usual:
        return None
    beside = f", {sum(others)} on {len(others)} others" if others else ""
    return (
        f"{lost} segments retransmitted on {len(theirs)} connection{'s' * (len(theirs) > 1)}{beside}, in 30 s: packets are lost"
    )
