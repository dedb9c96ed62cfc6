"""Verdicts on processes that are stopped or have ended: a fact of the operating system, and who waits for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ncclwatch.engine import explain
from ncclwatch.engine.culprits import absent_culprit, observed_culprit
from ncclwatch.engine.edges import AbsentNode, RankNode, Waits, Why
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.locate import Sink, victims_of
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass


def missed(job: Job, waits: Waits, sinks: Sequence[Sink]) -> list[Member]:
    """Processes that ended while others needed them: ranks that end when the work is done are not missed.

    Whoever waits need not show whom for: the proxy of a neighbour may have dropped the broken transfer. A collective that stands
    still in a communicator with an ended rank waits for that rank in the end.
    """
    gone = [member for member in job.members if member.gone]
    if not gone:
        return []
    if any(explain.errors_of(member) for member in job.members if not member.gone):
        return gone
    needed = {node.index for sink in sinks if sink.waits for node in sink.nodes if isinstance(node, RankNode)}
    for number in waits.collectives():
        needed |= {member.index for member, _ in job.groups[number].members.values()}
    return [member for member in gone if member.index in needed]


def ended_ranks(
    job: Job, sinks: Sequence[Sink], silent: Collection[tuple[int, int]], complete_hosts: Collection[str]
) -> list[Sink]:
    """Ranks that were not observed, that others wait for, and that are known to have ended; the last two arguments as of
    :class:`diagnose.Outlook`.
    """
    absent = [sink for sink in sinks if not sink.is_cycle and isinstance(sink.nodes[0], AbsentNode)]
    whole = whole_hosts(job, complete_hosts) if absent else frozenset()
    return [sink for sink in absent if _has_ended(job, sink, silent, whole)]


def _has_ended(job: Job, sink: Sink, silent: Collection[tuple[int, int]], whole: Collection[int]) -> bool:
    node = sink.nodes[0]
    if not isinstance(node, AbsentNode) or node.group_id not in job.groups:
        return False
    group = job.groups[node.group_id]
    if (group.hash, node.comm_rank) in silent:
        return False
    if not may_live(group, node.comm_rank, whole):
        return True
    if any(wait.why is Why.BROKEN for wait in sink.waits):
        return True
    waiting = {wait.waiter for wait in sink.waits}
    return any(RankNode(member.index) in waiting and explain.errors_of(member) for member in job.members)


def whole_hosts(job: Job, complete_hosts: Collection[str]) -> frozenset[int]:
    """What NCCL calls the hosts (``ncclPeerInfo.hostHash``) of which every process was looked at. O(processes)."""
    found: set[int] = set()
    for member in job.members if complete_hosts else ():
        if member.info.host in complete_hosts:
            own = (c.peers[c.rank].host_hash for c in member.last.communicators if c.rank < len(c.peers))
            found.update(one for one in own if one is not None)
    return frozenset(found)


def may_live(group: Group, comm_rank: int, whole: Collection[int]) -> bool:
    """Whether a rank that was not observed may still run: not so on a host of which every process was looked at (``whole``)."""
    views = (own.peers[comm_rank] for _, own in group.members.values() if comm_rank < len(own.peers))
    known = next((peer.host_hash for peer in views if peer.rank == comm_rank and peer.host_hash is not None), None)
    return known is None or known not in whole


def judge_halted(
    job: Job, halted: Sequence[Member], ended: Sequence[Sink], waits: Waits, sinks: Sequence[Sink], still: float, time: float,
    *, confidence: float = 0.99,
) -> Verdict:  # fmt: skip
    """A verdict on stopped and ended processes (``halted``), and on ranks nobody observed that have ended."""
    by_member = {sink.nodes[0].index: sink for sink in sinks if isinstance(sink.nodes[0], RankNode) and not sink.is_cycle}
    culprits: list[Culprit] = []
    evidence: list[str] = []
    victims: set[int] = set()
    first = explain.wait_lines(waits.first(4))[:4]
    for member in halted:
        sink = by_member.get(member.index)
        culprits.append(observed_culprit(job, member, sink.waits if sink else (), (), explain.halted_reason(member)))
        evidence.append(explain.halted_evidence(member))
        if sink is not None:
            evidence += explain.wait_lines(sink.waits)
        if member.gone or sink is None or not sink.waits:
            # Its neighbours' transfers with it may be gone, or hidden inside the node.
            evidence += first
    # Whoever waits for whom: everybody in a collective that stands still with one of them waits for it in the end.
    indices = {member.index for member in halted}
    for number in waits.collectives():
        if not indices.isdisjoint(job.groups[number].ranks):
            victims |= job.groups[number].ranks.keys()
    for sink in ended:
        culprits.append(absent_culprit(job, sink, "has ended: it is not among the processes of its host, or its peers lost it"))
        evidence += explain.wait_lines(sink.waits)
    victims |= victims_of([*(by_member[index] for index in indices if index in by_member), *ended])
    evidence += [line for member in job.members for line in explain.error_lines(member)]
    any_gone = bool(ended) or any(member.gone for member in halted)
    verdict_class = VerdictClass.DEAD if any_gone else VerdictClass.STOPPED
    victims |= explain.fellows(job, culprits)
    victims -= {member.index for member in halted}
    return explain.build(
        job, verdict_class, culprits, victims, evidence, still=still, time=time, confidence=confidence if victims else 0.8
    )
