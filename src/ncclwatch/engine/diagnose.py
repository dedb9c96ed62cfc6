"""One-shot diagnosis: what two or more looks at the processes of a job say about it.

A pure function of the samples. Progress between the looks means that the job runs, and nobody is accused. When nothing moves, the
waits are followed to their end (``waits``, ``locate``); what stands there is named, with the evidence, or said to be unseen.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ncclwatch.engine import explain
from ncclwatch.engine.alignment import rows_of
from ncclwatch.engine.calls import CallsFinding, compare_groups
from ncclwatch.engine.calls_verdict import add_call_waits, add_calls_evidence, judge_calls, leave_out_contradicted
from ncclwatch.engine.circles import break_false_circles
from ncclwatch.engine.cpu_limits import add_cpu_limits, crawl_patience, merely_crawls
from ncclwatch.engine.creation import judge_creation
from ncclwatch.engine.dead_paths import DeadPath, blame_dead_paths
from ncclwatch.engine.device import add_device_evidence, observe_hidden
from ncclwatch.engine.dropped import follow_dropped
from ncclwatch.engine.edges import Waits
from ncclwatch.engine.habits import Orders
from ncclwatch.engine.halted import ended_ranks, judge_halted, missed
from ncclwatch.engine.hidden import add_counted_waits, follow_counts, follow_hidden
from ncclwatch.engine.job import Job, Member, assemble
from ncclwatch.engine.ledger import Ledger, Place
from ncclwatch.engine.locate import Sink, find_sinks
from ncclwatch.engine.messages import Messages, follow_messages
from ncclwatch.engine.next_steps import NEITHER_WAY
from ncclwatch.engine.patience import RETRY_S, TCP_TRIES, Patience, retry_patience
from ncclwatch.engine.ports import PortDown, blame_ports
from ncclwatch.engine.severity import severity
from ncclwatch.engine.stalled import judge_habits, judge_stalled
from ncclwatch.engine.waits import find_waits
from ncclwatch.garbage import collector_at_rest
from ncclwatch.model.progress import progressed
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass

OF_CALLS = frozenset({VerdictClass.NOT_ENTERED, VerdictClass.DEADLOCK, VerdictClass.UNKNOWN})
"""What follows where a rank has left a call out."""

MESSAGE_ROUNDS = 64
"""Waits for messages are followed from rank to rank so often: a pipeline's stages."""


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
    ports_down: Sequence[PortDown] = ()
    """NICs that ranks use and that can carry no traffic."""
    dead_paths: Collection[DeadPath] = ()
    """Connections between ranks on which nothing is acknowledged."""
    retrying: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    """Connections whose sockets try again to send, as of :meth:`NetworkMemory.retrying`."""
    totals: dict[Place, tuple[int, int]] = field(default_factory=dict)
    """Communicator of a process → (NCCL's own count of collectives, calls in the ledger at that moment)"""

    def findings(self, job: Job) -> dict[int, CallsFinding]:
        """What the calls plane says of each communicator of a job; empty without one."""
        if self.ledger is None:
            return {}
        known = [rows_of(group, self.ledger, self.totals) for group in job.groups.values()]
        found = dict(zip(job.groups, compare_groups(self.ledger, known), strict=True))
        leave_out_contradicted(job, found, self.ledger)
        return found

    def messages(self, job: Job) -> Messages | None:
        """Who waits for whom in sends and receives of a job; ``None`` without a calls plane."""
        return Messages(job, self.ledger, self.totals, self.orders) if self.ledger is not None else None


def diagnose_jobs(samples: Sequence[Sequence[ProcessSample]], outlook: Outlook | None = None) -> list[Verdict]:
    """One verdict for each job among the observed processes, worst first.

    ``samples`` holds, for each process, its samples in time order, at least two of them a second apart.
    """
    with collector_at_rest():  # The jobs are gone when it is left, and the collector need not walk them.
        return [verdict for _, verdict in judge_jobs(samples, outlook)]


def judge_jobs(samples: Sequence[Sequence[ProcessSample]], outlook: Outlook | None = None) -> list[tuple[Job, Verdict]]:
    """As :func:`diagnose_jobs`, each verdict with its job."""
    outlook = outlook or Outlook()
    with collector_at_rest():
        jobs = assemble(samples)
        for job in jobs:
            observe_hidden(job)
        loners = [member for job in jobs if not job.groups for member in job.members]
        verdicts = [(job, _diagnose_job(job, outlook, loners)) for job in jobs]
        verdicts = [(job, add_cpu_limits(job, add_device_evidence(job, verdict))) for job, verdict in verdicts]
    return sorted(verdicts, key=lambda judged: severity(judged[1]))


def diagnose(samples: Sequence[Sequence[ProcessSample]], outlook: Outlook | None = None) -> Verdict:
    """The worst verdict of :func:`diagnose_jobs`; ``UNKNOWN`` when no process was observed."""
    verdicts = diagnose_jobs(samples, outlook)
    if not verdicts:
        return Verdict(VerdictClass.UNKNOWN, "no NCCL process was observed", next_steps=("run `ncclwatch ps` on the job's node",))
    return verdicts[0]


def still_seconds(member: Member) -> float:
    """For how long NCCL has not moved in a process, as far as the samples tell; 0 when it moved in the last interval."""
    samples = member.samples
    since = len(samples) - 1
    while since > 0 and not progressed(samples[since - 1], samples[since]):
        since -= 1
    return (samples[-1].time_ns - samples[since].time_ns) / 1e9


def _diagnose_job(job: Job, outlook: Outlook, loners: Sequence[Member]) -> Verdict:
    time = max(member.last.wall_ns for member in job.members) / 1e9
    alive = [member for member in job.members if not member.gone]
    if not alive:
        return explain.ended(job, time)
    newcomers = {member.index for member in alive if len(member.samples) < 2}
    if len(newcomers) == len(alive):
        return explain.single_look(job, time)
    still = min(still_seconds(member) for member in alive if member.index not in newcomers)
    if still == 0.0:
        return explain.running(job, time)
    verdict = _judge_standstill(job, outlook, loners, still, time)
    if not newcomers:
        return verdict
    # Where those stand who were looked at once is known, and others may wait for them; whether they move is not.
    if verdict.verdict_class.accuses and not newcomers.isdisjoint(explain.accused(job, verdict.culprits)):
        return explain.single_look(job, time)
    return replace(verdict, unobserved=(*verdict.unobserved, explain.newcomers(len(newcomers))))


def _judge_standstill(job: Job, outlook: Outlook, loners: Sequence[Member], still: float, time: float) -> Verdict:
    """A verdict on a job of which nothing moved between the last two looks."""
    alive = [member for member in job.members if not member.gone]
    waits = find_waits(job)
    sinks = find_sinks(job, waits)
    halted = [member for member in alive if member.stopped] + missed(job, waits, sinks)
    gone_ranks = ended_ranks(job, waits, sinks, outlook.silent, outlook.complete_hosts)
    if halted or gone_ranks:
        if outlook.patience is not None:
            outlook.patience.halted(job)
        return judge_halted(job, halted, gone_ranks, waits, sinks, still, time)
    if not waits.open:
        creation = judge_creation(job, loners, still, outlook.creation_patience_s, time)
        if creation is not None:
            return creation
    findings, messages = outlook.findings(job), outlook.messages(job)
    unseen = not waits.open
    by_calls = add_call_waits(job, findings, waits)
    if unseen:
        # Nobody can look at anything that is open: whatever counts and calls show is all there is.
        told = {number for number, finding in findings.items() if finding.behind}
        by_calls |= add_counted_waits(job, waits, told)
        by_calls |= messages is not None and messages.draw(waits, job.members)
    if by_calls:
        sinks = find_sinks(job, waits)
    patience_s, retries_s = _how_long(job, outlook, sinks, findings, still)
    if still < patience_s:
        why = TCP_TRIES if patience_s == retries_s else ""
        return (
            explain.too_early(job, sinks, still, patience_s, time, why) if waits.open else explain.nothing_open(job, still, time)
        )
    sinks = _follow_further(job, waits, sinks, messages)
    if waits.open and (follow_dropped(job, waits, sinks, outlook.complete_hosts) or by_calls):
        sinks = break_false_circles(job, find_sinks(job, waits))
        halted, gone_ranks = missed(job, waits, sinks), ended_ranks(job, waits, sinks, outlook.silent, outlook.complete_hosts)
        if halted or gone_ranks:
            return judge_halted(job, halted, gone_ranks, waits, sinks, still, time, confidence=0.85)
    verdict = _judge_waits(job, outlook, waits, sinks, findings, messages, still, time)
    tie = verdict.verdict_class is VerdictClass.INCONSISTENT and verdict.confidence == explain.TIE
    if waits.open and (tie or verdict.verdict_class in OF_CALLS):
        # Who has left a call out is one behind in all that follows: the waits may well end at somebody else.
        verdict = judge_habits(job, waits, outlook.orders, still, time) or verdict
    verdict = blame_ports(job, verdict, waits, outlook.ports_down, still, time)
    if still < retries_s:
        link = verdict.verdict_class is VerdictClass.HARDWARE and all(c.link or c.reason == NEITHER_WAY for c in verdict.culprits)
        verdict = (
            explain.slow_links(job, verdict, still) if link else explain.too_early(job, sinks, still, retries_s, time, TCP_TRIES)
        )
    verdict = blame_dead_paths(job, verdict, outlook.dead_paths, still, time)
    longer = crawl_patience(patience_s)
    crawls = merely_crawls(job, verdict, explain.too_early(job, sinks, still, longer, time)) if still < longer else None
    return crawls or verdict


def _how_long(
    job: Job, outlook: Outlook, sinks: Sequence[Sink], findings: dict[int, CallsFinding], still: float
) -> tuple[float, float]:
    """For how many seconds nothing must move before anybody is accused, and before a link that may be about to carry is dead."""
    if outlook.patience is None:
        return 0.0, 0.0
    patience_s = outlook.patience.needed(job, sinks, findings, still, outlook.ledger)
    retries_s = retry_patience(job, sinks, outlook.retrying) if not outlook.ports_down else 0.0
    if retries_s <= RETRY_S:
        return max(patience_s, retries_s), retries_s
    # Something comes through, so that link is slow, which is said at once and teaches nothing.
    outlook.patience.halted(job)
    return min(patience_s, outlook.patience.floor_s), max(patience_s, retries_s)


def _follow_further(job: Job, waits: Waits, sinks: Sequence[Sink], messages: Messages | None) -> list[Sink]:
    """The sinks once false circles are broken, and idle ranks are followed to whom they wait for unseen."""
    found = break_false_circles(job, sinks)
    for follow in (follow_counts, follow_hidden) if waits.open else ():
        if follow(job, waits, found):
            found = break_false_circles(job, find_sinks(job, waits))
    for _ in range(MESSAGE_ROUNDS if waits.open else 0):
        if not follow_messages(job, waits, found, messages):
            break
        found = break_false_circles(job, find_sinks(job, waits))
    return found


def _judge_waits(
    job: Job,
    outlook: Outlook,
    waits: Waits,
    sinks: Sequence[Sink],
    findings: dict[int, CallsFinding],
    messages: Messages | None,
    still: float,
    time: float,
) -> Verdict:
    """What waits and calls say once patience is over."""
    orders = outlook.orders
    by_calls = judge_calls(job, findings, messages, orders, waits, still, time) if messages is not None else None
    if not waits.open:
        return by_calls or explain.nothing_open(job, still, time, overdue=True)
    verdict = judge_stalled(job, waits, sinks, orders, still, time)
    inconsistent = any(finding.inconsistent for finding in findings.values())
    if by_calls is not None and (inconsistent or not verdict.verdict_class.accuses):
        return by_calls
    return add_calls_evidence(job, verdict, findings)
