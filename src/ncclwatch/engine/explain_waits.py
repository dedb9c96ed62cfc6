"""Hypotheses from where the waits end: ranks that stay behind, links, cycles through several communicators, ends nobody sees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from ncclwatch.engine.call_order import Deviation, deviation_facts, find_deviations
from ncclwatch.engine.case import Case, Hypothesis, Suspect, naming, nobody, observed, peers
from ncclwatch.engine.edges import OF_CALLS, PROXY_STALLS, Stall, Wait, Why, told, wait_facts
from ncclwatch.engine.evidence.base import AbsentNode, Fact, HiddenNode, LinkNode, RankNode
from ncclwatch.engine.evidence.calls import called_less_often, lacks_calls
from ncclwatch.engine.evidence.device import gpu_state
from ncclwatch.engine.graph import Sink
from ncclwatch.engine.patience import HANG_FLOOR_S
from ncclwatch.engine.redraw import has_moved, has_open, has_sent, is_begun
from ncclwatch.model.cause import Cause
from ncclwatch.model.device import KernelState
from ncclwatch.model.job import Job, Member, identity_of
from ncclwatch.model.joined import hides
from ncclwatch.model.rings import steps_unlike, steps_written
from ncclwatch.model.state import Direction, Transport
from ncclwatch.model.verdict import LinkRef, VerdictClass

NAMED_ABSENT = 8
"""Bound: unobserved ranks of a communicator that are named."""


def sureness(case: Case) -> float:
    """Confidence in where waits end, by how long nothing has moved."""
    return 0.6 if case.still < HANG_FLOOR_S else 0.85


def _into(sinks: Iterable[Sink]) -> list[Fact]:
    """The waits that lead to ends, as they are told."""
    return wait_facts(wait for sink in sinks for wait in sink.waits)


# --- ends nobody sees --------------------------------------------------------------------------------------------------


def unseen(case: Case) -> Iterator[Hypothesis]:
    """Every chain of waits ends where nothing was observed, or at a rank with nothing open beside one that was not observed."""
    ends = case.waits.ends
    # A hidden rank counts only while somebody may wait for it who is not known to wait for another.
    hidden = [sink for sink in ends.unseen if sink.waits] or ends.unseen
    found = ends.beside_absent or [*hidden, *ends.cycles]
    if not case.waits.open or ((ends.ranks or ends.links) and not found):
        return
    waits = [wait for sink in found for wait in sink.waits] or case.waits.first(12)
    nodes = [sink.nodes[0] for sink in found]
    cause = Cause.UNSEEN if any(isinstance(node, AbsentNode) for node in nodes) else Cause.HIDDEN
    if ends.beside_absent:
        cause, groups = Cause.BESIDE_ABSENT, [case.job.groups[number] for number in {wait.key.group: None for wait in waits}]
        nodes += [AbsentNode(group.id, rank) for group in groups for rank in group.missing[:NAMED_ABSENT]]
    yield nobody(cause, wait_facts(waits), ends=tuple(nodes))


def inside_node(case: Case) -> Iterator[Hypothesis]:
    """All waits end in one node, at a GPU that stands still there and those that NVLink hides behind it: all are named."""
    job, ends, hidden = case.job, case.waits.ends, [sink for sink in case.waits.ends.unseen if sink.waits]
    nodes = [node for sink in hidden if isinstance(node := sink.nodes[0], HiddenNode)]
    if not hidden or len(nodes) < len(hidden) or ends.ranks or ends.links or ends.cycles or ends.beside_absent:
        return
    doors = {wait.subject.index for sink in hidden for wait in sink.waits if isinstance(wait.subject, RankNode)}
    first = {member.index for node in nodes if (member := job.groups[node.group_id].holder(node.comm_rank)) is not None}
    named = doors.union(*map(case.waits.veiled, hidden))
    stalls = {index: case.waits.stalls_of(index) for index in doors}
    groups = {node.group_id for node in nodes}
    known = {identity_of(own, own.rank) for index in named for _, own in job.held_by(job.member(index))}
    one_node = len({one[0] for one in known if one}) == 1
    level = all(job.groups[number].called_alike is not None for number in groups)
    if not one_node or not level or not all(stalls.values()) or first & (case.waits.waiting - doors):
        return
    marks = [mark for index in sorted(doors) for mark in stalls[index]]
    cause = _cause(case, job.member(door := min(doors)), Sink((RankNode(door),), job, stalls=stalls[door]))
    supports = [*_into(hidden), *marks]
    yield naming(
        VerdictClass.NOT_ENTERED if cause in NOT_STARTED else VerdictClass.HARDWARE,
        [observed(job, job.member(index), (), stalls.get(index, marks), cause) for index in sorted(named)],
        case.waits.victims(hidden) | {index for number in groups for index in job.groups[number].ranks}, 0.5,
        [told("one of them has stopped; what joins them inside the node hides which"), *supports], tie=True,
    )  # fmt: skip


# --- links -------------------------------------------------------------------------------------------------------------


def link(case: Case) -> Iterator[Hypothesis]:
    """Data does not arrive over links: both ends of each are named, or the one process that is an end of all of several.

    Where a rank with nothing open may wait for one that was not observed, that one may be why.
    """
    job, ends = case.job, case.waits.ends
    if not ends.links or ends.beside_absent:
        return
    suspects: dict[int, Suspect] = {}
    both = [
        (sink, node, [one for rank in node[1:3] if (one := job.groups[node.group_id].holder(rank)) is not None])
        for sink in ends.links if isinstance(node := sink.nodes[0], LinkNode)
    ]  # fmt: skip
    waits = [wait for sink in ends.links for wait in sink.waits]
    shared = set.intersection(*({member.index for member in members} for _, _, members in both))
    if len(both) > 1 and len(shared) == 1:
        suspects = {index: observed(job, job.member(index), waits, (), Cause.CUT_OFF) for index in shared}
    for sink, node, members in both if not suspects else ():
        channels = tuple(sorted({wait.key.channel for wait in sink.waits}))
        transfers = [wait.end for wait in sink.waits if wait.end is not None]
        device = next((end.sub.net_device_name or end.operation.net_name for end in transfers), "")
        reference = LinkRef(node.source, node.destination, "net", channels, device)
        for member in members:
            suspects.setdefault(member.index, observed(job, member, sink.waits, (), Cause.LINK, link=reference))
    if suspects:
        supports = _into(ends.links)
        missing = tuple(_into((*ends.unseen, *ends.cycles)))
        victims, confidence = case.waits.victims(ends.links), min(sureness(case), 0.7)
        yield naming(VerdictClass.HARDWARE, suspects.values(), victims, confidence, supports, missing=missing)


# --- ranks -------------------------------------------------------------------------------------------------------------

NOT_STARTED = frozenset({Cause.GPU_NOT_BEGUN, Cause.NOT_TAKING_PART, Cause.NOT_ENTERED})
"""The host has not called the operation the others wait in, or its GPU has not started it. All else is in it."""


def rank_behind(case: Case) -> Iterator[Hypothesis]:
    """Ranks at which the waits end: they have not started the operation the others wait in (host or GPU), or are in it and do
    not go on though nothing they need is missing.
    """
    job, ends = case.job, case.waits.ends
    suspects: list[Suspect] = []
    supports: list[Fact] = []
    for sink in ends.ranks:
        if (member := sink.member) is not None:
            suspects.append(observed(job, member, sink.waits, sink.stalls, _cause(case, member, sink)))
            supports += [*wait_facts(sink.waits), *sink.stalls, *map(told, called_less_often(job, member))]
    if suspects:
        not_started = any(suspect.cause in NOT_STARTED for suspect in suspects)
        yield naming(
            VerdictClass.NOT_ENTERED if not_started else VerdictClass.HARDWARE, suspects,
            case.waits.victims(ends.ranks) | peers(job, suspects), sureness(case), supports,
            missing=tuple(_into((*ends.unseen, *ends.cycles, *ends.beside_absent))),
        )  # fmt: skip


def _cause(case: Case, member: Member, sink: Sink) -> Cause:
    stalls = {mark.stall for mark in sink.stalls}
    if stalls & PROXY_STALLS:
        return Cause.PROXY_STALLED
    if Stall.FLUSH in stalls:
        return Cause.FLUSH
    if sink.waits and all(wait.why is Why.GPU_NOT_BEGUN for wait in sink.waits):
        return Cause.GPU_NOT_BEGUN
    if not stalls:
        return Cause.PROXY_NOT_BEGUN if all(wait.why is Why.NOT_BEGUN for wait in sink.waits) else Cause.NOT_ENTERED
    gpu = gpu_state(case.job, member, sink.stalls[0].key.group)
    if gpu is KernelState.RUNNING:
        return Cause.GPU_RUNNING
    ends, amid = [mark.end for mark in sink.stalls if mark.end is not None], member.index in case.amid
    if gpu is not KernelState.NOT_STARTED and not ends:
        return Cause.GPU_STOPPED if amid else Cause.NOT_TAKING_PART
    # Amid an operation inside its node it has stopped there, whatever else it has not begun.
    begun = amid or any(end.sub.gpu_began or has_sent(case.job, end) for end in ends)
    return Cause.GPU_STOPPED if begun and gpu is not KernelState.NOT_STARTED else Cause.GPU_NOT_BEGUN


# --- cycles ------------------------------------------------------------------------------------------------------------


def cycle(case: Case) -> Iterator[Hypothesis]:
    """Ranks wait for each other: those that called operations of several communicators in different orders, or the one that has
    not called what it is waited for in; nobody inside one operation, or by calls alone.
    """
    job, ends = case.job, case.waits.ends
    # Inside one operation there is no order.
    sinks = [sink for sink in ends.cycles if _is_of_orders(job, sink)]
    inside = [wait for sink in sinks or ends.cycles for wait in sink.inside]
    if not sinks:
        # Beside a rank that has nothing open, a cycle inside one operation is where those wait of whom nothing is seen. One that
        # no GPU has begun was called ahead: its ranks wait in something else, and other ends are no less the cause.
        begun = not (ends.ranks or ends.beside_absent or ends.links) or any(is_begun(job, wait) for wait in inside)
        if ends.cycles and begun and all(sink.stalls for sink in (*ends.ranks, *ends.beside_absent)):
            yield nobody(Cause.CYCLE_IN_OPERATION, wait_facts(inside))
        return
    members = {node.index for sink in sinks for node in sink.nodes if isinstance(node, RankNode)}
    victims, deviations = case.waits.victims(sinks) | members, find_deviations(job, members, case.known.orders)
    if not deviations and any(wait.why is Why.NO_MESSAGE for wait in inside):
        yield nobody(Cause.CYCLE_OF_CALLS, wait_facts(inside))
        return
    found = (_lacks_call(job, inside, victims) or _wrote_otherwise(case, inside, victims)) if not deviations else None
    # An order is what all of them are in. A GPU beside one that shows no move may have stopped as well.
    if found is None and not deviations and not all(all(_moved(job, sink)) for sink in sinks):
        found = nobody(Cause.CYCLE_IN_OPERATION, wait_facts(inside))
    yield found or _order(case, inside, members, victims, deviations)


def _first(waits: Sequence[Wait], inside: Sequence[Wait]) -> list[Fact]:
    """Waits of a cycle that tell who is odd in it, and then the others, as evidence."""
    return wait_facts([*waits, *(wait for wait in inside if wait not in waits)])


def _lacks_call(job: Job, inside: Sequence[Wait], victims: set[int]) -> Hypothesis | None:
    """The one rank of a cycle that has called less than the others, or not what they wait in; or who is alone in it."""
    asked = [(wait, True if wait.why is Why.NOT_CALLED else lacks_calls(job, wait)) for wait in inside if wait.why in OF_CALLS]
    lacking = [(wait, fewer) for wait, fewer in asked if fewer is not None or wait.why is Why.NO_OPERATION]
    waits, missing = [wait for wait, _ in lacking], {wait.object for wait, _ in lacking}
    only = missing.pop() if len(missing) == 1 else None
    if not isinstance(only, RankNode) or any(fewer is None for _, fewer in lacking):
        return None
    if any(fewer for _, fewer in lacking):
        suspect = observed(job, job.member(only.index), waits, (), Cause.LACKS_CALL)
        return naming(VerdictClass.NOT_ENTERED, [suspect], victims, 0.7, _first(waits, inside))
    alone = _alone_in_it(job, waits[0])
    cause = Cause.ALONE_IN_CALL if alone else Cause.LACKS_OTHER_CALL
    suspects = [observed(job, member, waits, (), cause) for member in alone or [job.member(only.index)]]
    return naming(VerdictClass.INCONSISTENT, suspects, victims, 0.7, _first(waits, inside))


def _alone_in_it(job: Job, wait: Wait) -> list[Member]:
    """Who is in a collective that a rank is waited for in, where more have ended it. All have called as much: other things."""
    group, own = job.groups[wait.key.group], wait.end.operation if wait.end is not None else None
    # Proxies work in a tree for those that the network joins to their parent, and for these: the others show nothing.
    up = Direction.SEND, Transport.NET
    joined = {
        end for rank, (_, view) in group.members.items() for ring in view.rings
        if (ring.channel, ring.parent, *up) in view.transports for end in (rank, ring.parent)
    }  # fmt: skip
    shown = len(joined) if own is not None and own.algorithm == "Tree" else len(group.members)
    inside = [member for member, _ in group.members.values() if own is not None and has_open(member, own)]
    return inside if 2 * len(inside) < shown else []


def _wrote_otherwise(case: Case, inside: Sequence[Wait], victims: set[int]) -> Hypothesis | None:
    """Who has called as often as others, and written more or less in a ring than so many calls alike amount to."""
    for number in dict.fromkeys(wait.key.group for wait in inside):
        job, group, waits = case.job, case.job.groups[number], [wait for wait in inside if wait.key.group == number]
        rings = steps_written(group, case.rings[number])
        # Who waits here as well is in it, by another stream. What a GPU has not begun yet, proxies have opened.
        within = {wait.subject for wait in waits}
        elsewhere = [wait.subject for wait in inside if wait.subject not in within and has_moved(job, wait)]
        through = {group.ranks.get(node.index, -1) for node in elsewhere if isinstance(node, RankNode)}
        ended, count = any(wait.why is Why.NO_OPERATION for wait in waits), group.called_alike or 0
        odd = dict(chain(*(steps_unlike(one, count, group.nranks, through, ended=ended).items() for one in rings)))
        if all(len(written) == group.nranks for written in rings) and 0 < 2 * len(odd) <= group.nranks:
            members = ((group.members[rank][0], "more" if more else "less") for rank, more in sorted(odd.items()))
            suspects = [observed(job, member, waits, (), Cause.WROTE_OTHERWISE, how) for member, how in members]
            return naming(VerdictClass.INCONSISTENT, suspects, victims, 0.7, _first(waits, inside))
    return None


def _order(
    case: Case, inside: Sequence[Wait], members: set[int], victims: set[int], deviations: dict[int, Deviation]
) -> Hypothesis:  # fmt: skip
    """Calls in different orders, or one left out: memory is the same for both, and either side. A broken pattern tells."""
    job = case.job
    # Whoever waits in one communicator has entered it before the other.
    entered: dict[int, set[int]] = defaultdict(set)
    known = {wait.subject for wait in inside if not wait.weak}
    for wait in inside:
        if isinstance(wait.subject, RankNode) and not (wait.weak and wait.subject in known):
            entered[wait.key.group].add(wait.subject.index)
    supports = [*_order_facts(job, entered), *deviation_facts(job, deviations), *wait_facts(inside)]
    left_out = bool(deviations) and all(deviation.left_out for deviation in deviations.values())
    biggest = max(entered.values(), key=len, default=set())
    # One rank against many others: its order is the odd one. Otherwise nobody's order is more right than another's.
    odd = set(deviations) or (members - biggest if 2 * len(biggest) > len(members) else set()) or members
    tie = not deviations and odd == members
    verdict_class = VerdictClass.NOT_ENTERED if left_out else VerdictClass.DEADLOCK
    suspects = []
    for index in sorted(odd):
        # Whom the others wait for (it has left out theirs), or what it waits in itself (its order is the odd one).
        own = [wait for wait in inside if (wait.object if left_out else wait.subject) == RankNode(index)]
        suspects.append(observed(job, job.member(index), own, (), Cause.LEFT_OUT if left_out else Cause.ORDER))
    # All that is proven of a tie is the cycle: whoever broke the order, or left a call out, is one of them.
    confidence = min(sureness(case), 0.6) if tie else sureness(case)
    return naming(verdict_class, suspects, victims, confidence, supports, tie=tie)


def _is_of_orders(job: Job, sink: Sink) -> bool:
    several = len({wait.key.group for wait in sink.inside}) > 1 or any(wait.key.point_to_point for wait in sink.inside)
    return several and any(_moved(job, sink))


def _moved(job: Job, sink: Sink) -> list[bool]:
    """Of each wait of a cycle whether its operation has begun: it must show where NVLink may hide what its rank waits for."""
    hidden = any(hides(job.member(node.index)) for node in sink.nodes if isinstance(node, RankNode))
    return [(has_moved if hidden else is_begun)(job, wait) for wait in sink.inside]


def _order_facts(job: Job, entered: dict[int, set[int]]) -> list[Fact]:
    found = []
    for number, indices in sorted(entered.items(), key=lambda item: -len(item[1])):
        group, members = job.groups[number], [job.member(index) for index in sorted(indices)]
        who = ", ".join(f"rank {member.rank}" if member.rank is not None else member.label for member in members)
        does = "wait" if len(members) > 1 else "waits"
        found.append(told(f"{who} entered communicator {group.hash:016x} ({group.nranks} ranks) first and {does} there"))
    return found
