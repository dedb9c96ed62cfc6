"""Circles of waits through several communicators: ranks called operations in different orders, or one left an operation out.

What stands in memory is the same for both, and for either side of the circle: each has called what the other has not. The calls
tell more. A training job calls the same things in the same order again and again: the rank that broke its own habit is at fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ncclwatch.engine import explain
from ncclwatch.engine.circles import is_begun
from ncclwatch.engine.counted import Lack, lacks
from ncclwatch.engine.culprits import observed_culprit
from ncclwatch.engine.edges import RankNode, Wait, Why
from ncclwatch.engine.habits import LEFT_OUT, Orders, deviation_line, find_deviations
from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.locate import Sink, victims_of
from ncclwatch.model.verdict import Verdict, VerdictClass

WHICH_ORDER = ("whether it left the call out or makes it in another order: memory does not keep the order of finished calls",)
WHICH_OTHER = ("what it has called instead, and so whether it or who waits for it is wrong: memory does not keep finished calls",)
ALONE_IN_IT = "is in an operation that its peers are not in: they have ended what they called in its place, and gone on"


def judge_deadlock(
    job: Job, cycles: Sequence[Sink], orders: Orders | None, still: float, time: float, confidence: float
) -> Verdict:
    """A verdict on ranks that wait for each other in a circle."""
    inside = [wait for sink in cycles for wait in sink.inside]
    if not any(is_of_orders(job, sink) for sink in cycles):
        return explain.ambiguous_cycle(job, inside, still, time)
    members = {node.index for sink in cycles for node in sink.nodes if isinstance(node, RankNode)}
    entered = _entered_first(inside)
    evidence = explain.order_lines(job, entered)
    deviations = find_deviations(job, members, orders)
    if not deviations and any(wait.why is Why.NO_MESSAGE for wait in inside):
        # A host may have run ahead of a message that its GPU does not wait for yet: then the circle is none.
        return explain.ambiguous_cycle(job, inside, still, time, "in a circle of calls")
    if not deviations:
        alone = _only_one_that_lacks_a_call(job, inside)
        if alone is not None:
            return _lacks_a_call(job, cycles, alone, inside, still, time)
    verdict_class = VerdictClass.DEADLOCK
    if deviations:
        odd = set(deviations)
        evidence += [deviation_line(job, job.member(index), deviation) for index, deviation in deviations.items()]
        if all(deviation.left_out for deviation in deviations.values()):
            verdict_class = VerdictClass.NOT_ENTERED
    unobserved: tuple[str, ...] = ()
    if not deviations:
        biggest = max(entered.values(), key=len)
        # One rank against many others: its order is the odd one. Otherwise nobody's order is more right than another's.
        odd = members - biggest if len(biggest) > len(members) - len(biggest) else members
        odd = odd or members
        if odd == members:
            # All that is proven is the circle: whoever broke the order, or left a call out, is one of them.
            confidence = min(confidence, 0.6)
            unobserved = ("which of them broke the order, or left a call out: memory does not keep the order of finished calls",)
    # Whom the others wait for (it has left out theirs), or what it waits in itself (its order is the odd one).
    left_out = verdict_class is VerdictClass.NOT_ENTERED
    reason = LEFT_OUT if left_out else "waits in a circle"
    culprits = [
        observed_culprit(
            job, member, [w for w in inside if (w.target if left_out else w.waiter) == RankNode(member.index)], (), reason
        )
        for member in job.members
        if member.index in odd
    ]
    victims = (victims_of(cycles) | members) - odd
    evidence += explain.wait_lines(inside)
    return explain.build(
        job, verdict_class, culprits, victims, evidence, still=still, time=time, confidence=confidence, unobserved=unobserved
    )


def is_of_orders(job: Job, sink: Sink) -> bool:
    """Whether ranks in a circle wait in more than one thing, and some of it is begun: inside one operation there is no order."""
    several = len({wait.key.group for wait in sink.inside}) > 1 or any(wait.key.point_to_point for wait in sink.inside)
    return several and any(is_begun(job, wait) for wait in sink.inside)


def _only_one_that_lacks_a_call(job: Job, inside: Sequence[Wait]) -> int | None:
    """The one member of a circle that has not called what it is waited for in, where all others have called all they are.

    Hosts that run ahead of their GPUs have called everything although their GPUs wait in a circle; hosts that do not have each
    left a call to make. Where only one has, it is the one that the others are ahead of.
    """
    lacking = _lacking(job, inside)
    missing = {wait.target for wait in lacking}
    if len(missing) != 1 or not isinstance(found := missing.pop(), RankNode):
        return None
    return found.index if all(lacks(job, wait) for wait in lacking) else None


def _lacking(job: Job, inside: Sequence[Wait]) -> list[Wait]:
    """The waits of a circle for somebody who has nothing open, or in shared memory nothing written, for want of a call."""
    return [wait for wait in inside if wait.why is Why.NO_OPERATION or (wait.why is Why.EMPTY and lacks(job, wait))]


def _lacks_a_call(job: Job, cycles: Sequence[Sink], index: int, inside: Sequence[Wait], still: float, time: float) -> Verdict:
    """A verdict on the one rank of a circle that has not called what the others have, or on who is alone in what it called."""
    lacking = _lacking(job, inside)
    why = Lack.LESS if any(lacks(job, wait) is Lack.LESS for wait in lacking) else Lack.OTHER
    verdict_class = VerdictClass.NOT_ENTERED if why is Lack.LESS else VerdictClass.INCONSISTENT
    alone = _alone_in_it(job, lacking[0]) if why is Lack.OTHER else []
    culprits = [observed_culprit(job, member, lacking, (), ALONE_IN_IT) for member in alone]
    culprits = culprits or [observed_culprit(job, job.member(index), lacking, (), str(why))]
    unobserved = WHICH_ORDER if why is Lack.LESS else () if alone else WHICH_OTHER
    inside_too = {node.index for sink in cycles for node in sink.nodes if isinstance(node, RankNode)}
    evidence = explain.wait_lines([*lacking, *(wait for wait in inside if wait not in lacking)])
    victims = (victims_of(cycles) | inside_too) - explain.accused(job, culprits)
    return explain.build(
        job, verdict_class, culprits, victims, evidence, still=still, time=time, confidence=0.7,
        unobserved=unobserved,
    )  # fmt: skip


def _alone_in_it(job: Job, wait: Wait) -> list[Member]:
    """Of a collective that a rank is waited for in and has ended as another: those who are in it, where more have ended it.

    Everybody has called as much, and some have ended theirs while others are in it: they called different things, and the fewer
    are at fault.
    """
    if wait.end is None:
        return []
    group, operation = job.groups[wait.key.group], wait.end.operation
    inside = [
        member for member, _ in group.members.values()
        if any((o.comm_hash, o.op_count) == (operation.comm_hash, operation.op_count) for o in member.last.operations)
    ]  # fmt: skip
    return inside if 2 * len(inside) < len(group.members) else []


def _entered_first(inside: Sequence[Wait]) -> dict[int, set[int]]:
    """Group → members that wait in it: whoever waits in one has entered it before the other."""
    orders: dict[int, set[int]] = defaultdict(set)
    known = {wait.waiter for wait in inside if not wait.weak}
    for wait in inside:
        if isinstance(wait.waiter, RankNode) and not (wait.weak and wait.waiter in known):
            orders[wait.key.group].add(wait.waiter.index)
    return dict(orders)
