"""Verdicts where nobody is stopped and the waits decide: ranks that stay behind, links, circles, calls that disagree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ncclwatch.engine import explain
from ncclwatch.engine.counted import Disagreement, find_disagreements
from ncclwatch.engine.culprits import observed_culprit
from ncclwatch.engine.deadlock import is_of_orders, judge_deadlock
from ncclwatch.engine.device import gpu_state
from ncclwatch.engine.edges import PROXY_STALLS, AbsentNode, HiddenNode, LinkNode, RankNode, Stall, Waits, Why
from ncclwatch.engine.habits import LEFT_OUT, Orders, deviation_line, find_alone_in_deviating, find_deviations
from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.locate import Sink, victims_of
from ncclwatch.engine.messages import beside_unobserved
from ncclwatch.engine.next_steps import GPU_NOT_BEGUN, NEITHER_WAY, PROXY_NOT_BEGUN, PROXY_STALLED
from ncclwatch.engine.severity import SEVERITY
from ncclwatch.model.device import KernelState
from ncclwatch.model.verdict import Culprit, LinkRef, Verdict, VerdictClass


def judge_stalled(job: Job, waits: Waits, sinks: Sequence[Sink], orders: Orders | None, still: float, time: float) -> Verdict:
    """A verdict on what the chains of waits end at, the surest kind of end first."""
    cycles = [sink for sink in sinks if sink.is_cycle]
    # One that has ended is a sink even where nobody waits for it: its work was done.
    ranks = [sink for sink in sinks if sink.member(job) is not None and (sink.waits or sink.stalls)]
    links = [sink for sink in sinks if not sink.is_cycle and isinstance(sink.nodes[0], LinkNode)]
    unseen = [sink for sink in sinks if not sink.is_cycle and isinstance(sink.nodes[0], AbsentNode | HiddenNode)]
    confidence = 0.6 if still < 3 else 0.85
    if waits.mismatches:
        return _inconsistent(job, waits, orders, still, time)
    disagreements = find_disagreements(job, _standing(job, [*cycles, *ranks], [*unseen, *links]))
    if disagreements:
        return _counts_disagree(job, disagreements, waits, orders, still, time)
    ordered = [sink for sink in cycles if is_of_orders(job, sink)]
    # Beside a rank that has nothing open, a circle inside one operation is where those wait of whom nothing is seen.
    if ordered or (cycles and all(sink.stalls for sink in ranks)):
        return judge_deadlock(job, ordered or cycles, orders, still, time, confidence)
    unseen += cycles
    doubtful = [sink for sink in ranks if _may_wait_for_absent(job, sink)]
    ranks = [sink for sink in ranks if sink not in doubtful]
    if ranks:
        return _ranks_behind(job, ranks, [*unseen, *doubtful], still, time, confidence)
    if doubtful:
        return explain.beside_absent(job, doubtful, still, time)
    if links:
        return _links(job, links, unseen, still, time, confidence)
    return explain.unseen(job, unseen, waits, still, time)


def judge_habits(job: Job, waits: Waits, orders: Orders | None, still: float, time: float) -> Verdict | None:
    """A verdict on the few ranks of a job that stands which alone have left out what they always called; ``None`` without any."""
    deviations = {index: found for index, found in find_alone_in_deviating(job, orders).items() if found.left_out}
    if not deviations:
        return None
    culprits = [observed_culprit(job, job.member(index), (), (), LEFT_OUT) for index in deviations]
    evidence = [deviation_line(job, job.member(index), deviation) for index, deviation in deviations.items()]
    evidence += explain.wait_lines(waits.first(4))
    victims = {member.index for member in job.members} - deviations.keys()
    return explain.build(job, VerdictClass.NOT_ENTERED, culprits, victims, evidence, still=still, time=time, confidence=0.6)


def _standing(job: Job, ends: Sequence[Sink], beyond: Sequence[Sink]) -> list[Member]:
    """The observed processes at which the waits end, and those that wait for links or for what nobody sees."""
    found = {node.index for sink in ends for node in sink.nodes if isinstance(node, RankNode)}
    found |= {wait.waiter.index for sink in beyond for wait in sink.waits if isinstance(wait.waiter, RankNode)}
    return [job.member(index) for index in sorted(found)]


def _may_wait_for_absent(job: Job, sink: Sink) -> bool:
    """Whether a rank with nothing open has a neighbour nobody observed: their transfer may have been dropped, or be hidden."""
    member = sink.member(job)
    if member is None or sink.stalls:
        return False
    if beside_unobserved(job, member):
        return True
    for wait in sink.waits:
        group = job.groups[wait.key.group]
        rank = group.rank_of(member)
        if rank is None or wait.key.point_to_point:
            continue
        rings = group.members[rank][1].rings
        if any(neighbour not in group.members for ring in rings for neighbour in (ring.prev, ring.next)):
            return True
    return False


def _inconsistent(job: Job, waits: Waits, orders: Orders | None, still: float, time: float) -> Verdict:
    """Ranks that called different things hang whatever else the waits show: the disagreement is the cause."""
    suspects: dict[int, str] = {}
    evidence: list[str] = []
    tie = False
    for mismatch in waits.mismatches:
        ranks, how = mismatch.suspects()
        tie = tie or "tie" in how
        evidence += [*mismatch.lines(job), how]
        for rank in ranks:
            member, call = job.groups[mismatch.group_id].holder(rank), mismatch.calls.get(rank)
            if member is not None:
                what = f"has called {call.text()}, unlike its peers" if call else "has called another operation than its peers"
                suspects.setdefault(member.index, what)
    if not suspects:
        return explain.ambiguous_cycle(job, waits.first(explain.EVIDENCE_LINES), still, time)
    verdict_class, confidence = VerdictClass.INCONSISTENT, explain.TIE if tie else 0.9
    deviations = find_deviations(job, set(suspects), orders) if tie else {}
    if deviations:
        # The side that broke its own habit breaks the tie.
        evidence += [deviation_line(job, job.member(index), deviation) for index, deviation in deviations.items()]
        suspects, confidence = {index: suspects[index] for index in deviations}, 0.8
        if all(deviation.left_out for deviation in deviations.values()):
            verdict_class, suspects = VerdictClass.NOT_ENTERED, dict.fromkeys(suspects, LEFT_OUT)
    own = waits.of(suspects)
    culprits = [observed_culprit(job, job.member(index), own[index], (), reason) for index, reason in suspects.items()]
    victims = explain.other_fellows(job, culprits)
    return explain.build(job, verdict_class, culprits, victims, evidence, still=still, time=time, confidence=confidence)


def _counts_disagree(
    job: Job, disagreements: Sequence[Disagreement], waits: Waits, orders: Orders | None, still: float, time: float
) -> Verdict:
    """What finished has left no trace but its count: ranks that called different things, though nothing of it is open."""
    suspects: dict[int, tuple[Member, str, Disagreement]] = {}
    evidence: list[str] = []
    for disagreement in disagreements:
        evidence += [*disagreement.lines(job), disagreement.how]
        for rank, name in disagreement.odd.items():
            member = disagreement.group.members[rank][0]
            suspects.setdefault(member.index, (member, f"has called {name} where its peers called something else", disagreement))
    tie = any(disagreement.tie for disagreement in disagreements)
    deviations = find_deviations(job, set(suspects), orders) if tie else {}
    if deviations:
        evidence += [deviation_line(job, job.member(index), deviation) for index, deviation in deviations.items()]
        suspects, tie = {index: suspects[index] for index in deviations}, False
    culprits = []
    for member, reason, disagreement in suspects.values():
        culprit = observed_culprit(job, member, (), (), reason)
        place = disagreement.group
        culprits.append(replace(culprit, communicator=place.reference(), comm_rank=place.rank_of(member), operation=None))
    own = waits.of(suspects)
    evidence += explain.wait_lines(wait for index in suspects for wait in own[index])
    victims = {index for d in disagreements for index in d.group.ranks} - suspects.keys()
    confidence = explain.TIE if tie else 0.85
    unobserved = ("which call it was: memory does not keep the order of finished calls",)
    return explain.build(
        job, VerdictClass.INCONSISTENT, culprits, victims, evidence, still=still, time=time, confidence=confidence,
        unobserved=unobserved,
    )  # fmt: skip


def _ranks_behind(
    job: Job, sinks: Sequence[Sink], unseen: Sequence[Sink], still: float, time: float, confidence: float
) -> Verdict:
    culprits: list[Culprit] = []
    classes: list[VerdictClass] = []
    evidence: list[str] = []
    victims: set[int] = set()
    counts = explain.Counts(job)
    for sink in sinks:
        member = sink.member(job)
        if member is None:
            continue
        verdict_class, reason = _classify_rank(job, member, sink)
        classes.append(verdict_class)
        culprits.append(observed_culprit(job, member, sink.waits, sink.stalls, reason))
        evidence += explain.wait_lines(sink.waits) + [mark.text for mark in sink.stalls]
        evidence += counts.lines(member)
    victims |= victims_of(sinks) | explain.fellows(job, culprits)
    victims -= {member.index for sink in sinks if (member := sink.member(job)) is not None}
    worst = max(classes, key=SEVERITY.index)
    notes = explain.wait_lines(wait for sink in unseen for wait in sink.waits)
    return explain.build(job, worst, culprits, victims, evidence, still=still, time=time, confidence=confidence, unobserved=notes)


def _classify_rank(job: Job, member: Member, sink: Sink) -> tuple[VerdictClass, str]:
    stalls = {mark.stall for mark in sink.stalls}
    if stalls & PROXY_STALLS:
        return VerdictClass.HARDWARE, PROXY_STALLED
    if Stall.FLUSH in stalls:
        return VerdictClass.HARDWARE, "data arrived, but the flush to its GPU's memory does not complete"
    gpu = gpu_state(job, member, sink.stalls[0].key.group) if stalls else None
    if gpu is KernelState.RUNNING:
        return VerdictClass.HARDWARE, "its GPU is in the operation and does not go on, although nothing it needs is missing"
    if gpu is KernelState.NOT_STARTED:
        return VerdictClass.NOT_ENTERED, GPU_NOT_BEGUN
    if stalls and all(mark.end is None for mark in sink.stalls):
        return VerdictClass.NOT_ENTERED, "does not take part: data for it lies unread and it waits for nobody"
    if stalls:
        moved = any(_has_moved(mark.end.sub.done, mark.end.sub.gpu_ready) for mark in sink.stalls if mark.end is not None)
        if moved:
            return VerdictClass.HARDWARE, "its GPU has stopped in the middle of the operation"
        return VerdictClass.NOT_ENTERED, GPU_NOT_BEGUN
    if all(wait.why is Why.NOT_BEGUN for wait in sink.waits):
        return VerdictClass.HARDWARE, PROXY_NOT_BEGUN
    return VerdictClass.NOT_ENTERED, "has not entered the operation the others wait in"


def _has_moved(done: int, gpu_ready: int | None) -> bool:
    return done > 0 or (gpu_ready is not None and gpu_ready > 0)


def _links(job: Job, sinks: Sequence[Sink], unseen: Sequence[Sink], still: float, time: float, confidence: float) -> Verdict:
    culprits: list[Culprit] = []
    evidence: list[str] = []
    victims = victims_of(sinks)
    common = _common_end(job, sinks)
    named: set[int] = set()
    for sink in sinks:
        node = sink.nodes[0]
        assert isinstance(node, LinkNode)  # noqa: S101 - by construction of the caller's list
        channels = tuple(sorted({wait.key.channel for wait in sink.waits}))
        ends = [wait.end for wait in sink.waits if wait.end is not None]
        device = next((end.sub.net_device_name or end.operation.net_name for end in ends), "")
        link = LinkRef(node.source, node.destination, "net", channels, device)
        for comm_rank in (node.source, node.destination):
            member = job.groups[node.group_id].holder(comm_rank)
            if common is None and member is not None and member.index not in named:
                named.add(member.index)
                reason = "one end of the link on which data does not arrive"
                culprits.append(observed_culprit(job, member, sink.waits, (), reason, link=link))
        evidence += explain.wait_lines(sink.waits)
    if common is not None:
        waits = [wait for sink in sinks for wait in sink.waits]
        culprits = [observed_culprit(job, common, waits, (), NEITHER_WAY)]
    victims -= explain.accused(job, culprits)
    notes = explain.wait_lines(wait for sink in unseen for wait in sink.waits)
    return explain.build(
        job, VerdictClass.HARDWARE, culprits, victims, evidence, still=still, time=time, confidence=min(confidence, 0.7),
        unobserved=notes,
    )  # fmt: skip


def _common_end(job: Job, sinks: Sequence[Sink]) -> Member | None:
    """The one process that is an end of every broken link, where there are several: then it is not the links."""
    shared: set[int] | None = None
    for sink in sinks:
        node = sink.nodes[0]
        if not isinstance(node, LinkNode):
            return None
        members = job.groups[node.group_id].members
        ends = {members[rank][0].index for rank in (node.source, node.destination) if rank in members}
        shared = ends if shared is None else shared & ends
    if len(sinks) < 2 or shared is None or len(shared) != 1:
        return None
    return job.member(shared.pop())
