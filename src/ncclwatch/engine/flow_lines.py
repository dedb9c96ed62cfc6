"""What the wire says of the connections of a verdict's ranks: dead and slow ones, data that nobody reads, loss on the way."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ncclwatch.engine.evidence.sockets import FlowFact
from ncclwatch.engine.network import LOSSY_SEGMENTS
from ncclwatch.model.network import FlowState
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Culprit, Verdict

MAX_LINES = 3
"""Bound: connections that are told of."""
LOST = LOSSY_SEGMENTS
"""Unit: segments that a culprit's sockets sent again in 30 s. Fewer are not spoken of. From: :data:`network.LOSSY_SEGMENTS`."""
TIMES = 5.0
"""Unit: times what other sockets send again. From: chosen, as counts of ten differ by less than twofold by chance."""
WHERE_LOST = (
    "packets of {who} are lost on the way: look for errors and drops at the cable, the transceiver and the switch port "
    "(ethtool -S), and for queues that overflow"
)


def flow_lines(
    troubled: Sequence[FlowFact], lost: Sequence[FlowFact], verdict: Verdict, *, slow: bool
) -> tuple[list[str], list[str]]:
    """Lines of evidence, and next steps; of a job that stands still (not ``slow``) it says nothing that a connection was slow.

    ``troubled`` are facts of connections in trouble, ``lost`` of what connections have sent again.
    """
    culprits = {culprit.rank for culprit in verdict.culprits if culprit.rank is not None}
    ranks = culprits | set(verdict.victims)
    said: dict[str, list[FlowFact]] = {}
    for fact in troubled:
        flow = fact.flow
        blocked = flow.state is FlowState.BLOCKED and flow.global_rank in culprits
        trouble = flow.state.is_trouble and (slow or flow.state is not FlowState.SLOW)
        if blocked or (trouble and (not ranks or flow.global_rank in ranks)):
            said.setdefault(f"{flow.global_rank} {flow.direction} {flow.peer} {flow.state}", []).append(fact)
    together = list(said.values())
    if slow and culprits:
        # Others' connections may be slower than they were, too: who reads this asks why the culprit's are.
        together = sorted((group for group in together if _touches(group[0], verdict.culprits, culprits)), key=_severity)
    lines = [_line(group, verdict.culprits) for group in together[:MAX_LINES]]
    if not slow or (loss := _loss(lost, verdict.culprits, culprits)) is None:
        return lines, []
    who = f"rank {min(culprits)}" if len(culprits) == 1 else "these ranks"
    return [loss, *lines], [WHERE_LOST.format(who=who)]


def far_end(fact: FlowFact, culprits: Sequence[Culprit]) -> int | None:
    """The job's rank at the other end of a connection; ``None`` where it is not known, or several could be.

    Culprits are known by both ranks, also where nobody watches their hosts.
    """
    found = set(fact.far)
    if not fact.by_address:
        place = fact.flow.comm_hash, fact.flow.peer
        found |= {c.rank for c in culprits if c.rank is not None and _place(c) == place}
    return next(iter(found)) if len(found) == 1 else None


def _place(culprit: Culprit) -> tuple[int, int] | None:
    """Hash of the communicator that a culprit is accused in, and its rank in it."""
    if culprit.communicator is None or culprit.comm_rank is None:
        return None
    return int(culprit.communicator.hash, 16), culprit.comm_rank


def _touches(fact: FlowFact, named: Sequence[Culprit], culprits: Collection[int]) -> bool:
    return fact.flow.global_rank in culprits or far_end(fact, named) in culprits


def _severity(group: Sequence[FlowFact]) -> tuple[bool, float]:
    """The worst first: what it carries of what it used to (nothing where it stands); data that nobody reads last."""
    flows = [fact.flow for fact in group]
    carried = min(flow.bandwidth / flow.expected if flow.bandwidth is not None and flow.expected else 0.0 for flow in flows)
    return flows[0].state is FlowState.BLOCKED, carried


def _line(group: Sequence[FlowFact], named: Sequence[Culprit]) -> str:
    first = group[0].flow
    other = far_end(group[0], named)
    peer = f"rank {other}" if other is not None else f"rank {first.peer} of its communicator"
    way = "to" if first.direction is Direction.SEND else "from"
    channels = sorted({fact.flow.channel for fact in group if fact.flow.channel is not None})
    where = f" over {first.device}" if first.device else ""
    return (
        f"rank {first.global_rank} {way} {peer}{where}, "
        f"channel{'s' if len(channels) != 1 else ''} {', '.join(map(str, channels))}: {group[0].text}"
    )


def _loss(lost: Sequence[FlowFact], named: Sequence[Culprit], culprits: Collection[int]) -> str | None:
    """That segments of the culprits' sockets are sent again much more often than those of others, where they are."""
    sockets = {
        fact.flow.socket.local: (int(fact.value or 0), _touches(fact, named, culprits))
        for fact in lost
        if fact.flow.socket is not None
    }
    theirs = [count for count, near in sockets.values() if near]
    others = [count for count, near in sockets.values() if not near]
    total = sum(theirs)
    usual = sum(others) / len(others) if others else 0.0
    if total < LOST or total / len(theirs) < TIMES * usual:
        return None
    beside = f", {sum(others)} on {len(others)} others" if others else ""
    return (
        f"{total} segments retransmitted on {len(theirs)} connection{'s' * (len(theirs) > 1)}{beside}, in 30 s: packets are lost"
    )
