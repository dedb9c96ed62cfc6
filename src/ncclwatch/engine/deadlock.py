"""Circles of waits through several communicators: ranks called operations in different orders, or one left an operation out.

What stands in memory is the same for both, and for either side of the circle: each has called what the other has not. The calls
tell more. A training job calls the same things in the same order again and again: the rank that broke its own habit is at fault.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ncclwatch.engine import explain
from ncclwatch.engine.circles import is_begun
from ncclwatch.engine.counted import Lack, lacks
from ncclwatch.engine.culprits import observed_culprit
from ncclwatch.engine.edges import RankNode, Wait, Why
from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.locate import Sink, victims_of
from ncclwatch.engine.slow.order import CallOrder, Place
from ncclwatch.model.verdict import Verdict, VerdictClass

RECENT = 48
"""Calls back from the newest in which a broken habit is looked for: a host can run so far ahead of its GPU."""

SHORTEST_CONTEXT = 3
LONGEST_CONTEXT = 48
"""Calls before a call that are compared with earlier ones to say what used to follow."""

LEFT_OUT = "has left out an operation that its calls always had here"

Token = tuple[int, tuple[int, int, int], tuple[Place, ...]]


class Orders(Protocol):
    """Where the order of a process's calls is kept."""

    def find(self, host: str, pid: int) -> CallOrder | None:
        """The order of a process's last calls, where they were recorded."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """A call that is not what used to follow: ``due`` was (address of its communicator), ``called`` was made ``ago`` calls back.

    ``left_out``: the call is what used to come after the one that was due, which did not follow: it was left out, rather than
    another made in its place or the two swapped.
    """

    due: int
    called: int
    ago: int
    left_out: bool


def find_deviation(order: CallOrder) -> Deviation | None:
    """The last call that broke the habit of a process. O(recent calls x kept calls x context)."""
    tokens: list[Token] = [
        (call.comm, call.what, tuple((call.comm, way) for way in sorted(call.ways, key=repr))) for call in order.calls
    ]
    # What follows a broken habit was never seen before, so it breaks none.
    for position in range(len(tokens) - 1, max(SHORTEST_CONTEXT, len(tokens) - RECENT) - 1, -1):
        earlier = _same_before(tokens, position)
        if earlier is not None and tokens[earlier] != tokens[position]:
            due, called = tokens[earlier], tokens[position]
            left_out = called == tokens[earlier + 1] and due not in tokens[position + 1 : position + 2]
            return Deviation(due[0], called[0], len(tokens) - 1 - position, left_out)
    return None


def _same_before(tokens: Sequence[Token], position: int) -> int | None:
    """The last place where the calls before ``position`` were made earlier, if the same call followed every time.

    The longest context counts that was met twice at least, and holds more than one kind of call: in a run of equal calls nothing
    tells how many are still to come.
    """
    lengths: list[tuple[int, int]] = []
    for earlier in range(position - 1, SHORTEST_CONTEXT - 1, -1):
        length = 0
        while length < min(LONGEST_CONTEXT, earlier) and tokens[earlier - 1 - length] == tokens[position - 1 - length]:
            length += 1
        lengths.append((length, earlier))
    if len(lengths) < 2:
        return None
    context = sorted(lengths, reverse=True)[1][0]
    if context < SHORTEST_CONTEXT or len(set(tokens[position - context : position])) < 2:
        return None
    met = [earlier for length, earlier in lengths if length >= context]
    return met[0] if len({tokens[earlier] for earlier in met}) == 1 else None


def judge_deadlock(
    job: Job, cycles: Sequence[Sink], orders: Orders | None, still: float, time: float, confidence: float
) -> Verdict:
    """A verdict on ranks that wait for each other in a circle."""
    inside = [wait for sink in cycles for wait in sink.inside]
    ordered = len({wait.key.group for wait in inside}) > 1 or any(wait.key.point_to_point for wait in inside)
    if not ordered or not any(is_begun(job, wait) for wait in inside):
        return explain.ambiguous_cycle(job, inside, still, time)
    members = {node.index for sink in cycles for node in sink.nodes if isinstance(node, RankNode)}
    entered = _entered_first(inside)
    evidence = explain.order_lines(job, entered)
    deviations = find_deviations(job, members, orders)
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


def _only_one_that_lacks_a_call(job: Job, inside: Sequence[Wait]) -> int | None:
    """The one member of a circle that has not called what it is waited for in, where all others have called all they are.

    Hosts that run ahead of their GPUs have called everything although their GPUs wait in a circle; hosts that do not have each
    left a call to make. Where only one has, it is the one that the others are ahead of.
    """
    nothing_open = [wait for wait in inside if wait.why is Why.NO_OPERATION]
    missing = {wait.target for wait in nothing_open}
    if len(missing) != 1 or not isinstance(found := missing.pop(), RankNode):
        return None
    return found.index if all(lacks(job, wait) for wait in nothing_open) else None


def _lacks_a_call(job: Job, cycles: Sequence[Sink], index: int, inside: Sequence[Wait], still: float, time: float) -> Verdict:
    """A verdict on the one rank of a circle that has not called what the others have."""
    lacking = [wait for wait in inside if wait.why is Why.NO_OPERATION]
    why = Lack.LESS if any(lacks(job, wait) is Lack.LESS for wait in lacking) else Lack.OTHER
    verdict_class = VerdictClass.NOT_ENTERED if why is Lack.LESS else VerdictClass.INCONSISTENT
    culprit = observed_culprit(job, job.member(index), lacking, (), str(why))
    unobserved = ("whether it left the call out or makes it in another order: memory does not keep the order of finished calls",)
    inside_too = {node.index for sink in cycles for node in sink.nodes if isinstance(node, RankNode)}
    evidence = explain.wait_lines([*lacking, *(wait for wait in inside if wait not in lacking)])
    return explain.build(
        job, verdict_class, [culprit], (victims_of(cycles) | inside_too) - {index}, evidence, still=still, time=time,
        confidence=0.7, unobserved=unobserved if why is Lack.LESS else (),
    )  # fmt: skip


def find_deviations(job: Job, members: set[int], orders: Orders | None, *, proper: bool = True) -> dict[int, Deviation]:
    """The members of a circle, or of a disagreement, that broke their habit; with ``proper`` none when all of them did."""
    if orders is None:
        return {}
    found: dict[int, Deviation] = {}
    for index in sorted(members):
        info = job.member(index).info
        order = orders.find(info.host, info.pid)
        deviation = find_deviation(order) if order is not None else None
        if deviation is not None:
            found[index] = deviation
    return {} if proper and len(found) == len(members) else found


def deviation_line(job: Job, member: Member, deviation: Deviation) -> str:
    """A broken habit as evidence."""

    def name(address: int) -> str:
        number = job.group_of.get((member.index, address))
        return f"communicator {job.groups[number].hash:016x}" if number is not None else "another communicator"

    since = f", {deviation.ago} calls ago" if deviation.ago else ""
    then = ", which it has left out" if deviation.left_out else ""
    return (
        f"{member.label} called an operation on {name(deviation.called)}{since}, where its calls always had another on "
        f"{name(deviation.due)}{then}"
    )


def _entered_first(inside: Sequence[Wait]) -> dict[int, set[int]]:
    """Group → members that wait in it: whoever waits in one has entered it before the other."""
    orders: dict[int, set[int]] = defaultdict(set)
    for wait in inside:
        if isinstance(wait.waiter, RankNode):
            orders[wait.key.group].add(wait.waiter.index)
    return dict(orders)
