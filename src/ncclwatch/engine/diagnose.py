"""One-shot diagnosis: what two or more looks at the processes of a job say about it.

A pure function of the samples. Progress between the looks means that the job runs, and nobody is accused. When nothing moves, the
waits are followed to their end (``waits``, ``locate``); what stands there is named, with the evidence, or said to be unseen.
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ncclwatch.engine import explain
from ncclwatch.engine.calls import CallsFinding, compare_groups
from ncclwatch.engine.calls_verdict import add_call_waits, add_calls_evidence, judge_calls
from ncclwatch.engine.creation import judge_creation
from ncclwatch.engine.culprits import absent_culprit, observed_culprit
from ncclwatch.engine.deadlock import LEFT_OUT, Orders, deviation_line, find_deviations, judge_deadlock
from ncclwatch.engine.device import add_device_evidence, gpu_state, observe_hidden
from ncclwatch.engine.edges import PROXY_STALLS, AbsentNode, HiddenNode, LinkNode, RankNode, Stall, Waits, Why
from ncclwatch.engine.job import Job, Member, assemble
from ncclwatch.engine.ledger import Ledger, Place
from ncclwatch.engine.locate import Sink, find_sinks, victims_of
from ncclwatch.engine.patience import Patience
from ncclwatch.engine.waits import find_waits
from ncclwatch.model.device import KernelState
from ncclwatch.model.progress import progressed
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Culprit, LinkRef, Verdict, VerdictClass

SEVERITY = (
    VerdictClass.RUNNING,
    VerdictClass.IDLE,
    VerdictClass.UNKNOWN,
    VerdictClass.SLOW_MIXED,
    VerdictClass.SLOW_COMMUNICATION,
    VerdictClass.SLOW_COMPUTATION,
    VerdictClass.ERROR,
    VerdictClass.INIT_HANG,
    VerdictClass.HARDWARE,
    VerdictClass.INCONSISTENT,
    VerdictClass.NOT_ENTERED,
    VerdictClass.DEADLOCK,
    VerdictClass.STOPPED,
    VerdictClass.DEAD,
)
"""From nothing wrong to a cause the operating system states outright."""


@dataclass(slots=True)
class Outlook:
    """What is known about a job besides its samples.

    ``patience``: how long nothing must have moved before a rank is accused on the evidence of waits alone (``None``: no time at
    all); a stopped or ended process needs no patience. ``creation_patience_s``: the same for the creation of a communicator.
    ``complete_hosts``: hosts on which every NCCL process was looked at, so that a rank that should be there and is not has ended.
    """

    patience: Patience | None = None
    creation_patience_s: float = 15.0
    complete_hosts: Collection[str] = field(default_factory=frozenset)
    silent: Collection[tuple[int, int]] = field(default_factory=frozenset)
    """(communicator's hash, rank in it) of ranks whose node has fallen silent: they are not seen, which says nothing of them."""
    ledger: Ledger | None = None
    """What the calls plane recorded."""
    orders: Orders | None = None
    """In which order each process called what."""
    totals: dict[Place, tuple[int, int]] = field(default_factory=dict)
    """Communicator of a process → (NCCL's own count of collectives, calls in the ledger at that moment)"""

    def findings(self, job: Job) -> dict[int, CallsFinding]:
        """What the calls plane says of each communicator of a job; empty without one."""
        if self.ledger is None:
            return {}
        numbers, known = list(job.groups), []
        for group in job.groups.values():
            rows, totals = {}, {}
            for rank, (member, own) in group.members.items():
                place = self.ledger.place(member.info.host, member.info.pid, own.address)
                row = self.ledger.rows.get(place)
                if row is not None:
                    rows[rank] = row
                    if place in self.totals:
                        totals[rank] = self.totals[place]
            known.append((rows, totals))
        return dict(zip(numbers, compare_groups(self.ledger, known), strict=True))


def diagnose_jobs(samples: Sequence[Sequence[ProcessSample]], outlook: Outlook | None = None) -> list[Verdict]:
    """One verdict for each job among the observed processes, worst first.

    ``samples`` holds, for each process, its samples in time order, at least two of them a second apart.
    """
    return [verdict for _, verdict in judge_jobs(samples, outlook)]


def judge_jobs(samples: Sequence[Sequence[ProcessSample]], outlook: Outlook | None = None) -> list[tuple[Job, Verdict]]:
    """As :func:`diagnose_jobs`, each verdict with its job."""
    outlook = outlook or Outlook()
    with _collector_at_rest():
        jobs = assemble(samples)
        for job in jobs:
            observe_hidden(job)
        loners = [member for job in jobs if not job.groups for member in job.members]
        verdicts = [(job, add_device_evidence(job, _diagnose_job(job, outlook, loners))) for job in jobs]
    return sorted(verdicts, key=lambda judged: severity(judged[1]))


def severity(verdict: Verdict) -> int:
    """Sorts verdicts, the worst first."""
    return -SEVERITY.index(verdict.verdict_class)


def diagnose(samples: Sequence[Sequence[ProcessSample]], outlook: Outlook | None = None) -> Verdict:
    """The worst verdict of :func:`diagnose_jobs`; ``UNKNOWN`` when no process was observed."""
    verdicts = diagnose_jobs(samples, outlook)
    if not verdicts:
        return Verdict(VerdictClass.UNKNOWN, "no NCCL process was observed", next_steps=("run `ncclwatch ps` on the job's node",))
    return verdicts[0]


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Garbage waits until a diagnosis is done: with thousands of ranks the collector would walk all their samples over and over,
    for longer than the diagnosis takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def still_seconds(member: Member) -> float:
    """For how long NCCL has not moved in a process, as far as the samples tell; 0 when it moved in the last interval."""
    samples = member.samples
    newest = samples[-1]
    since = newest
    for before, after in zip(reversed(samples[:-1]), reversed(samples[1:]), strict=True):
        if progressed(before, after):
            break
        since = before
    return (newest.time_ns - since.time_ns) / 1e9


def _diagnose_job(job: Job, outlook: Outlook, loners: Sequence[Member]) -> Verdict:
    time = max(member.last.wall_ns for member in job.members) / 1e9
    looks = min(len(member.samples) for member in job.members)
    alive = [member for member in job.members if not member.gone]
    if not alive:
        return explain.ended(job, time)
    if looks < 2:
        return explain.single_look(job, time)
    still = min(still_seconds(member) for member in alive)
    if still == 0.0:
        return explain.running(job, time)
    waits = find_waits(job)
    sinks = find_sinks(job, waits)
    halted = [member for member in alive if member.stopped] + _missed(job, waits, sinks)
    gone_ranks = _ended_ranks(job, sinks, outlook)
    if halted or gone_ranks:
        if outlook.patience is not None:
            outlook.patience.halted(job)
        return _halted(job, halted, gone_ranks, waits, sinks, still, time)
    if not waits.open:
        creation = judge_creation(job, loners, still, outlook.creation_patience_s, time)
        if creation is not None:
            return creation
    findings = outlook.findings(job)
    if waits.open and add_call_waits(job, findings, waits):
        sinks = find_sinks(job, waits)
    patience_s = outlook.patience.needed(job, sinks, findings, still, outlook.ledger) if outlook.patience is not None else 0.0
    if still < patience_s:
        return explain.too_early(job, sinks, still, patience_s, time) if waits.open else explain.nothing_open(job, still, time)
    by_calls = (
        judge_calls(job, findings, outlook.ledger, outlook.orders, waits, still, time) if outlook.ledger is not None else None
    )
    if not waits.open:
        return by_calls or explain.nothing_open(job, still, time)
    verdict = _stalled(job, waits, sinks, outlook.orders, still, time)
    inconsistent = any(finding.inconsistent for finding in findings.values())
    if by_calls is not None and (inconsistent or not verdict.verdict_class.accuses):
        return by_calls
    return add_calls_evidence(job, verdict, findings)


# --- a process is stopped or has ended ---------------------------------------------------------------------------------


def _missed(job: Job, waits: Waits, sinks: Sequence[Sink]) -> list[Member]:
    """Processes that ended while others needed them: ranks that end when the work is done are not missed.

    Whoever waits need not show whom for: the proxy of a neighbour may have dropped the broken transfer. A collective that stands
    still in a communicator with an ended rank waits for that rank in the end.
    """
    gone = [member for member in job.members if member.gone]
    if any(explain.errors_of(member) for member in job.members if not member.gone):
        return gone
    needed = {node.index for sink in sinks if sink.waits for node in sink.nodes if isinstance(node, RankNode)}
    for number in _standing_groups(waits):
        needed |= {member.index for member, _ in job.groups[number].members.values()}
    return [member for member in gone if member.index in needed]


def _standing_groups(waits: Waits) -> set[int]:
    """Groups in which a collective stands still."""
    keys = (*(wait.key for wait in waits.edges), *(mark.key for mark in waits.stalls))
    return {key.group for key in keys if not key.point_to_point}


def _ended_ranks(job: Job, sinks: Sequence[Sink], outlook: Outlook) -> list[Sink]:
    """Ranks that were not observed, that others wait for, and that are known to have ended."""
    return [
        sink for sink in sinks if not sink.is_cycle and isinstance(sink.nodes[0], AbsentNode) and _has_ended(job, sink, outlook)
    ]


def _has_ended(job: Job, sink: Sink, outlook: Outlook) -> bool:
    node = sink.nodes[0]
    if not isinstance(node, AbsentNode) or node.group_id not in job.groups:
        return False
    group = job.groups[node.group_id]
    if (group.hash, node.comm_rank) in outlook.silent:
        return False
    for member, communicator in group.members.values():
        hashes = {peer.rank: peer.host_hash for peer in communicator.peers}
        same_host = hashes.get(node.comm_rank) is not None and hashes.get(node.comm_rank) == hashes.get(communicator.rank)
        if same_host and member.info.host in outlook.complete_hosts:
            return True
    if any(wait.why is Why.BROKEN for wait in sink.waits):
        return True
    waiting = {wait.waiter for wait in sink.waits}
    return any(RankNode(member.index) in waiting and explain.errors_of(member) for member in job.members)


def _halted(
    job: Job, halted: Sequence[Member], ended: Sequence[Sink], waits: Waits, sinks: Sequence[Sink], still: float, time: float
) -> Verdict:
    by_member = {sink.nodes[0].index: sink for sink in sinks if isinstance(sink.nodes[0], RankNode) and not sink.is_cycle}
    culprits: list[Culprit] = []
    evidence: list[str] = []
    victims: set[int] = set()
    for member in halted:
        sink = by_member.get(member.index)
        culprits.append(observed_culprit(job, member, sink.waits if sink else (), (), explain.halted_reason(member)))
        evidence.append(explain.halted_evidence(member))
        if sink is not None:
            evidence += explain.wait_lines(sink.waits)
            victims |= victims_of([sink])
        if member.gone or sink is None or not sink.waits:
            # Its neighbours' transfers with it may be gone, or hidden inside the node.
            evidence += explain.wait_lines(waits.edges)[:4]
        # Whoever waits for whom: everybody in a collective that stands still with it waits for it in the end.
        shared = [job.groups[number] for number in _standing_groups(waits) if member.index in job.groups[number].ranks]
        victims |= {other.index for group in shared for other, _ in group.members.values()}
    for sink in ended:
        culprits.append(absent_culprit(job, sink, "has ended: it is not among the processes of its host, or its peers lost it"))
        evidence += explain.wait_lines(sink.waits)
    victims |= victims_of(ended)
    evidence += [line for member in job.members for line in explain.error_lines(member)]
    any_gone = bool(ended) or any(member.gone for member in halted)
    verdict_class = VerdictClass.DEAD if any_gone else VerdictClass.STOPPED
    victims |= explain.fellows(job, culprits)
    victims -= {member.index for member in halted}
    return explain.build(
        job, verdict_class, culprits, victims, evidence, still=still, time=time, confidence=0.99 if victims else 0.8
    )


# --- nobody is stopped: the waits decide -------------------------------------------------------------------------------


def _stalled(job: Job, waits: Waits, sinks: Sequence[Sink], orders: Orders | None, still: float, time: float) -> Verdict:
    cycles = [sink for sink in sinks if sink.is_cycle]
    ranks = [sink for sink in sinks if sink.member(job) is not None]
    links = [sink for sink in sinks if not sink.is_cycle and isinstance(sink.nodes[0], LinkNode)]
    unseen = [sink for sink in sinks if not sink.is_cycle and isinstance(sink.nodes[0], AbsentNode | HiddenNode)]
    confidence = 0.6 if still < 3 else 0.85
    if waits.mismatches:
        return _inconsistent(job, waits, orders, still, time)
    if cycles:
        return judge_deadlock(job, cycles, orders, still, time, confidence)
    doubtful = [sink for sink in ranks if _may_wait_for_absent(job, sink)]
    ranks = [sink for sink in ranks if sink not in doubtful]
    if ranks:
        return _ranks_behind(job, ranks, [*unseen, *doubtful], still, time, confidence)
    if doubtful:
        return explain.beside_absent(job, doubtful, still, time)
    if links:
        return _links(job, links, unseen, still, time, confidence)
    return explain.unseen(job, unseen, waits, still, time)


def _may_wait_for_absent(job: Job, sink: Sink) -> bool:
    """Whether a rank with nothing open has a neighbour that was not observed: their transfer may have been dropped."""
    member = sink.member(job)
    if member is None or sink.stalls:
        return False
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
        return explain.ambiguous_cycle(job, waits.edges, still, time)
    verdict_class, confidence = VerdictClass.INCONSISTENT, 0.5 if tie else 0.9
    deviations = find_deviations(job, set(suspects), orders) if tie else {}
    if deviations:
        # The side that broke its own habit breaks the tie.
        evidence += [deviation_line(job, job.member(index), deviation) for index, deviation in deviations.items()]
        suspects, confidence = {index: suspects[index] for index in deviations}, 0.8
        if all(deviation.left_out for deviation in deviations.values()):
            verdict_class, suspects = VerdictClass.NOT_ENTERED, dict.fromkeys(suspects, LEFT_OUT)
    culprits = []
    for index, reason in suspects.items():
        own = [wait for wait in waits.edges if RankNode(index) in (wait.waiter, wait.target)]
        culprits.append(observed_culprit(job, job.member(index), own, (), reason))
    victims = explain.other_fellows(job, culprits)
    return explain.build(job, verdict_class, culprits, victims, evidence, still=still, time=time, confidence=confidence)


def _ranks_behind(
    job: Job, sinks: Sequence[Sink], unseen: Sequence[Sink], still: float, time: float, confidence: float
) -> Verdict:
    culprits: list[Culprit] = []
    classes: list[VerdictClass] = []
    evidence: list[str] = []
    victims: set[int] = set()
    for sink in sinks:
        member = sink.member(job)
        if member is None:
            continue
        verdict_class, reason = _classify_rank(job, member, sink)
        classes.append(verdict_class)
        culprits.append(observed_culprit(job, member, sink.waits, sink.stalls, reason))
        evidence += explain.wait_lines(sink.waits) + [mark.text for mark in sink.stalls]
        evidence += explain.count_lines(job, member)
    victims |= victims_of(sinks) | explain.fellows(job, culprits)
    victims -= {member.index for sink in sinks if (member := sink.member(job)) is not None}
    worst = max(classes, key=SEVERITY.index)
    notes = explain.wait_lines(wait for sink in unseen for wait in sink.waits)
    return explain.build(job, worst, culprits, victims, evidence, still=still, time=time, confidence=confidence, unobserved=notes)


def _classify_rank(job: Job, member: Member, sink: Sink) -> tuple[VerdictClass, str]:
    stalls = {mark.stall for mark in sink.stalls}
    if stalls & PROXY_STALLS:
        return VerdictClass.HARDWARE, "its proxy thread does not move transfers that could go on"
    if Stall.FLUSH in stalls:
        return VerdictClass.HARDWARE, "data arrived, but the flush to its GPU's memory does not complete"
    gpu = gpu_state(job, member, sink.stalls[0].key.group) if stalls else None
    if gpu is KernelState.RUNNING:
        return VerdictClass.HARDWARE, "its GPU is in the operation and does not go on, although nothing it needs is missing"
    if gpu is KernelState.NOT_STARTED:
        return VerdictClass.NOT_ENTERED, "has called the operation, but its GPU has not begun it"
    if stalls and all(mark.end is None for mark in sink.stalls):
        return VerdictClass.NOT_ENTERED, "does not take part: data for it lies unread and it waits for nobody"
    if stalls:
        moved = any(_has_moved(mark.end.sub.done, mark.end.sub.gpu_ready) for mark in sink.stalls if mark.end is not None)
        if moved:
            return VerdictClass.HARDWARE, "its GPU has stopped in the middle of the operation"
        return VerdictClass.NOT_ENTERED, "has called the operation, but its GPU has not begun it"
    if all(wait.why is Why.NOT_BEGUN for wait in sink.waits):
        return VerdictClass.HARDWARE, "its proxy thread has not begun an operation that is queued"
    return VerdictClass.NOT_ENTERED, "has not entered the operation the others wait in"


def _has_moved(done: int, gpu_ready: int | None) -> bool:
    return done > 0 or (gpu_ready is not None and gpu_ready > 0)


def _links(job: Job, sinks: Sequence[Sink], unseen: Sequence[Sink], still: float, time: float, confidence: float) -> Verdict:
    culprits: list[Culprit] = []
    evidence: list[str] = []
    victims = victims_of(sinks)
    common = _common_end(job, sinks)
    for sink in sinks:
        node = sink.nodes[0]
        assert isinstance(node, LinkNode)  # noqa: S101 - by construction of the caller's list
        channels = tuple(sorted({wait.key.channel for wait in sink.waits}))
        ends = [wait.end for wait in sink.waits if wait.end is not None]
        device = next((end.sub.net_device_name or end.operation.net_name for end in ends), "")
        link = LinkRef(node.source, node.destination, "net", channels, device)
        for comm_rank in (node.source, node.destination):
            member = job.groups[node.group_id].holder(comm_rank)
            if common is None and member is not None and not explain.names(culprits, member):
                reason = "one end of the link on which data does not arrive"
                culprits.append(observed_culprit(job, member, sink.waits, (), reason, link=link))
        evidence += explain.wait_lines(sink.waits)
    if common is not None:
        waits = [wait for sink in sinks for wait in sink.waits]
        reason = "data arrives neither at it nor from it: its proxy thread or its network port stands still"
        culprits = [observed_culprit(job, common, waits, (), reason)]
    victims -= {member.index for member in job.members if explain.names(culprits, member)}
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
    return next(member for member in job.members if member.index in shared)
