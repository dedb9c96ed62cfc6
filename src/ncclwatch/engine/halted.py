"""Verdicts on processes that are stopped or have ended: a fact of the operating system, and who waits for them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ncclwatch.engine import explain
from ncclwatch.engine.culprits import absent_culprit, observed_culprit
from ncclwatch.engine.edges import AbsentNode, RankNode, Waits, Why
from ncclwatch.engine.job import Group, Identity, Job, Member, identity_of
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
    job: Job, waits: Waits, sinks: Sequence[Sink], silent: Collection[tuple[int, int]], complete_hosts: Collection[str]
) -> list[Sink]:
    """Ranks that were not observed, that others wait for, and that are known to have ended; the last two arguments as of
    :class:`diagnose.Outlook`.

    Where nobody is seen to wait for one, a collective that stands still in its communicator waits for it in the end.
    """
    absent = [sink for sink in sinks if not sink.is_cycle and isinstance(sink.nodes[0], AbsentNode)]
    standing = [group for number in sorted(waits.collectives()) if len((group := job.groups[number]).members) < group.nranks]
    if not absent and not standing:
        return []
    census = Census.of(job, complete_hosts)
    found = [sink for sink in absent if _has_ended(job, sink, silent, census)]
    if found or not sinks or not census.whole:
        return found
    graph = sinks[0].graph
    missing = (AbsentNode(group.id, rank) for group in standing for rank in group.missing if (group.hash, rank) not in silent)
    return [Sink((node,), graph) for node in missing if census.runs(job.groups[node.group_id], node.comm_rank) is False]


def _has_ended(job: Job, sink: Sink, silent: Collection[tuple[int, int]], census: Census) -> bool:
    node = sink.nodes[0]
    if not isinstance(node, AbsentNode) or node.group_id not in job.groups:
        return False
    group = job.groups[node.group_id]
    if (group.hash, node.comm_rank) in silent:
        return False
    runs = census.runs(group, node.comm_rank)
    if runs is not None:
        return not runs
    if any(wait.why is Why.BROKEN for wait in sink.waits):
        return True
    waiting = {wait.waiter for wait in sink.waits}
    return any(RankNode(member.index) in waiting and explain.errors_of(member) for member in job.members)


@dataclass(frozen=True, slots=True)
class Census:
    """Who runs, as NCCL knows processes (``ncclPeerInfo``: ``hostHash``, ``pidHash``)."""

    whole: frozenset[int]
    """Hosts of which every process was looked at."""
    alive: frozenset[Identity]
    """Observed processes that run."""

    @classmethod
    def of(cls, job: Job, complete_hosts: Collection[str]) -> Census:
        """Of the processes of a job. O(their communicators)."""
        whole: set[int] = set()
        alive: set[Identity] = set()
        for member in job.members:
            for own in member.last.communicators:
                identity = identity_of(own, own.rank)
                if identity is None:
                    continue
                if member.info.host in complete_hosts:
                    whole.add(identity[0])
                if not member.gone:
                    alive.add(identity)
        return cls(frozenset(whole), frozenset(alive))

    def runs(self, group: Group, comm_rank: int) -> bool | None:
        """Whether a rank that no observed process seems to hold runs; ``None``: it may.

        A process may well be observed, and its communicator not yet found.
        """
        found = (identity_of(own, comm_rank) for _, own in group.members.values())
        identity = next((one for one in found if one is not None), None)
        if identity is None:
            return None
        if identity in self.alive:
            return True
        return False if identity[0] in self.whole else None


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
