"""All words of a verdict, made last: summary, evidence, what was not observed, what to do next. By class and cause alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ncclwatch.engine.case import Case, Cause, Hypothesis, Suspect
from ncclwatch.engine.evidence.base import Fact, FactKind
from ncclwatch.engine.evidence.ports import PortDown
from ncclwatch.engine.evidence.registry import not_observed, not_read
from ncclwatch.engine.job import Job
from ncclwatch.engine.nodes import AbsentNode, HiddenNode, RankNode
from ncclwatch.engine.suspects import one_of_each
from ncclwatch.model.verdict import Culprit, OperationRef, Step, StepKind, Verdict, VerdictClass
from ncclwatch.text import compressed

EVIDENCE_LINES = 12
"""Bound: lines of evidence."""
NAMED = 4
"""Bound: culprits that a summary names; of more only the number is told."""

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

REASONS = {
    Cause.ENDED: "its process has ended",
    Cause.ENDED_UNSEEN: "has ended: it is not among the processes of its host, or its peers lost it",
    Cause.STOPPED: "its process is stopped by a signal",
    Cause.STOPPED_BY_DEBUGGER: "its process is stopped by a debugger",
    Cause.NCCL_ERROR: "reports {detail}",
    Cause.NOT_JOINED: "has not come to the creation of the communicator",
    Cause.NOT_ENTERED: "has not entered the operation the others wait in",
    Cause.NOT_TAKING_PART: "does not take part: data for it lies unread and it waits for nobody",
    Cause.NOT_CALLED: "has not called the operation the others have called",
    Cause.LEFT_OUT: "has left out an operation that its calls always had here",
    Cause.LACKS_CALL: "has not called an operation that the others have called, and waits elsewhere",
    Cause.LACKS_OTHER_CALL: "has made as many calls as its peers, but not the one they wait in",
    Cause.ALONE_IN_CALL: "is in an operation that its peers are not in: they have ended what they called instead, and gone on",
    Cause.CALLED_OTHER: "has called {detail}, unlike its peers",
    Cause.CALLED_OTHER_AS: "called {detail}, unlike its peers",
    Cause.RUNS_ON: "called {detail}",
    Cause.COUNTED_OTHER: "has called {detail} where its peers called something else",
    Cause.ORDER: "waits in a cycle",
    Cause.GPU_NOT_BEGUN: "has called the operation, but its GPU has not begun it",
    Cause.GPU_STOPPED: "its GPU has stopped in the middle of the operation",
    Cause.GPU_RUNNING: "its GPU is in the operation and does not go on, although nothing it needs is missing",
    Cause.FLUSH: "data arrived, but the flush to its GPU's memory does not complete",
    Cause.PROXY_STALLED: "its proxy thread does not move transfers that could go on",
    Cause.PROXY_NOT_BEGUN: "its proxy thread has not begun an operation that is queued",
    Cause.LINK: "one end of the link on which data does not arrive",
    Cause.CUT_OFF: "data arrives neither at it nor from it: its proxy thread or its network port stands still",
    Cause.PORT_RETRIES: "its network port, or the path to it, is slow: no transfer with it ends, though TCP still tries",
    Cause.PORT: "its network port {detail}",
    Cause.PATH: "nothing that is sent to or from its address is acknowledged: its network port, or the path to it, is dead",
    Cause.PATH_END: "one end of a path over which nothing is acknowledged",
}
"""Why a rank is named, as the clause that follows its name."""

NEXT_STEPS: dict[VerdictClass, tuple[str, ...]] = {
    VerdictClass.STOPPED: (
        "find out who stopped the process (debugger, job control, kill -STOP); `kill -CONT {pid}` lets it go on",
    ),
    VerdictClass.DEAD: (
        "look for why it ended: `dmesg -T` (out of memory, Xid), the exit status its launcher printed, core files",
        "the remaining ranks cannot finish: restart the job, or let its watchdog abort the communicators",
    ),
    VerdictClass.NOT_ENTERED: (
        "see where it stands: `py-spy dump --nonblocking --pid {pid}` on {host}",
        "data loading, checkpointing and host-side exceptions before the collective are the usual causes",
    ),
    VerdictClass.HARDWARE: ("look for GPU and NIC errors on {host}: `dmesg -T | grep -iE 'xid|mlx5|link'`, `nvidia-smi -q`",),
    VerdictClass.SLOW_COMMUNICATION: (
        "look for GPU and NIC errors on {host}: `dmesg -T | grep -iE 'xid|mlx5|link'`, `nvidia-smi -q`",
    ),
    VerdictClass.INIT_HANG: (
        "see where it stands: `py-spy dump --nonblocking --pid {pid}` on {host}",
        "a different rendezvous address or network interface, or a slow import, keeps ranks from meeting",
    ),
    VerdictClass.INCONSISTENT: (
        "compare what the ranks named call with their peers: operation, element count, type and order must be the same",
    ),
    VerdictClass.DEADLOCK: ("make every rank call the operations of these communicators in one order",),
    VerdictClass.ERROR: ("read the NCCL log of the ranks named (NCCL_DEBUG=WARN)",),
}
_PROXY_STEPS = (
    "see whether its threads get a CPU and where they stand: `top -H -p {pid}`, `grep . /proc/{pid}/task/*/wchan` on {host}",
    "a CPU limit, a debugger on that thread and a network plugin that blocks are the usual causes",
)
STEPS_BY_CAUSE = {
    Cause.GPU_NOT_BEGUN: (
        "its host code has called the operation; see what its GPU does: `nvidia-smi -q`, `dmesg -T | grep -i xid` on {host}",
        "a kernel before it that does not end, and a stream that waits for an event nobody records, are the usual causes: "
        "`py-spy dump --nonblocking --native --pid {pid}`",
    ),
    Cause.LEFT_OUT: (
        "look for a condition in its code that this rank alone evaluates otherwise: uneven data, an exception that was caught",
        "see where it stands: `py-spy dump --nonblocking --pid {pid}` on {host}",
    ),
    Cause.PROXY_STALLED: _PROXY_STEPS,
    Cause.PROXY_NOT_BEGUN: _PROXY_STEPS,
    Cause.PATH: (
        "look at the port, its cable and its switch: `ip -s link`, `ethtool`, `dmesg -T | grep -i link` on {host}",
        "from another host, `ncclwatch probe {host}` tells whether the path is dead",
    ),
    Cause.ONE_SAMPLE: ("take at least two samples, a second apart",),
    Cause.NOTHING_SEEN: (
        "see where the ranks stand: `py-spy dump --nonblocking --pid PID` for each; a healthy job computes or loads data",
        "start the job with the counter shim to see inside a node (docs/device-plane.md)",
    ),
    Cause.UNSEEN: ("attach to the processes of the ranks named as well",),
    Cause.BESIDE_ABSENT: ("look whether the ranks that were not observed still run; attach to them as well",),
}
"""Where the class alone would send people to look in the wrong place."""

NOT_TOLD = {
    Cause.COUNTED_OTHER: "which call it was: memory does not keep the order of finished calls",
    Cause.LACKS_CALL: (
        "whether it left the call out or makes it in another order: memory does not keep the order of finished calls"
    ),
    Cause.LACKS_OTHER_CALL: (
        "what it has called instead, and so whether it or who waits for it is wrong: memory does not keep finished calls"
    ),
}
"""What a cause leaves open."""
ORDER_NOT_TOLD = "which of them broke the order, or left a call out: memory does not keep the order of finished calls"
RAISE_LIMIT = "on {host}: raise the CPU limit of process {pid} (of its container or pod; `cat /proc/{pid}/cgroup`, cpu.max there)"


def severity(verdict: Verdict) -> int:
    """Sorts verdicts, the worst first."""
    return -SEVERITY.index(verdict.verdict_class)


def render(case: Case, found: Hypothesis) -> Verdict:
    """The verdict that a hypothesis is."""
    verdict = _nobody(case, found) if found.cause in NOBODY else _named(case, found)
    verdict = _with_limits(case, found, verdict)
    return replace(verdict, time=case.time, rules=rules_of(case, found), planes=found.planes, trail=tuple(_trail(case, found)))


def rules_of(case: Case, found: Hypothesis) -> tuple[str, ...]:
    """The rules that led to a hypothesis: those that changed the graph, then those it was made by."""
    changed = dict.fromkeys([*(rule for rule, _ in case.trail.drawn), *(one.rule for one in case.trail.retracted)])
    return tuple(dict.fromkeys((*changed, *found.follows, found.rule)))


def _with_limits(case: Case, found: Hypothesis, verdict: Verdict) -> Verdict:
    """With the CPU limits that hold back whom it names, or whom it waits for."""
    held = [fact for fact in found.because if fact.kind is FactKind.THROTTLED and isinstance(fact.subject, RankNode)]
    if not held:
        return verdict
    members = [case.job.member(int(fact.subject)) for fact in held if isinstance(fact.subject, RankNode)]
    least = min(fact.value or 0.0 for fact in held)
    ranks = [member.rank for member in members if member.rank is not None]
    who = f"rank{'s' if len(ranks) != 1 else ''} {compressed(ranks)}" if ranks else f"{len(members)} processes"
    if found.accuses:
        who = "it" if len(held) == 1 else "them"
        verdict = replace(verdict, evidence=(*(fact.text for fact in held), *verdict.evidence))
    if not found.accuses or len(held) == len(verdict.culprits):
        verdict = replace(verdict, summary=f"{verdict.summary}; a CPU limit holds {who} back in {least:.0%} of its periods")
    steps = dict.fromkeys(RAISE_LIMIT.format(host=member.info.host, pid=member.info.pid) for member in members)
    return replace(verdict, next_steps=tuple(dict.fromkeys((*steps, *verdict.next_steps))))


# --- somebody is named -------------------------------------------------------------------------------------------------


def _named(case: Case, found: Hypothesis) -> Verdict:
    job = case.job
    suspects = one_of_each(found.suspects)
    culprits = [culprit(suspect) for suspect in suspects]
    first = next((c for c in culprits if c.operation), culprits[0])
    beside = dict.fromkeys(fact.text for fact in found.beside)
    missing = [*(fact.text for fact in found.missing), *_not_told(found)]
    return Verdict(
        verdict_class=found.verdict_class,
        summary=_summary(job, found, culprits, first.operation),
        culprits=tuple(culprits),
        victims=ranks_of(job, found.victims),
        communicator=first.communicator,
        operation=first.operation,
        link=next((c.link for c in culprits if c.link), None),
        confidence=found.confidence,
        evidence=(*_evidence(case, found), *beside),
        unobserved=(*missing, *not_observed(case)),
        next_steps=next_steps(found.verdict_class, suspects),
    )


def culprit(suspect: Suspect) -> Culprit:
    """A suspect as a verdict names it."""
    return replace(suspect.place, reason=REASONS[suspect.cause].format(detail=suspect.detail))


def next_steps(verdict_class: VerdictClass, suspects: Sequence[Suspect]) -> tuple[str, ...]:
    """What to do about the first suspect."""
    first = suspects[0]
    pid = "PID" if first.place.pid is None else str(first.place.pid)
    steps = STEPS_BY_CAUSE.get(first.cause) or NEXT_STEPS.get(verdict_class, ())
    return tuple(step.format(pid=pid, host=first.place.host or "its host") for step in steps)


def _not_told(found: Hypothesis) -> list[str]:
    if found.cause is Cause.ORDER and found.tie:
        return [ORDER_NOT_TOLD]
    return [NOT_TOLD[found.cause]] if found.cause in NOT_TOLD else []


def _evidence(case: Case, found: Hypothesis) -> list[str]:
    stillness = _stillness(case)
    texts = dict.fromkeys(fact.text for fact in found.supports)
    lines = [*(line for line in texts if line != stillness), stillness]
    if len(lines) <= EVIDENCE_LINES:
        return lines
    more = f"… {len(lines) - EVIDENCE_LINES + 1} more of the same kind"
    return [*lines[: EVIDENCE_LINES - 2], more, lines[-1]]


def _summary(job: Job, found: Hypothesis, culprits: Sequence[Culprit], operation: OperationRef | None) -> str:
    where = f" in {operation.name} #{operation.sequence}" if operation and operation.name else ""
    if found.cause is Cause.PORT:
        ports = [fact for fact in found.because if isinstance(fact, PortDown)]
        return f"{'; '.join(_port_words(port, culprits) for port in ports[:3])}: the job stands still{where}"
    if found.cause is Cause.NCCL_ERROR:
        return f"{count(job)}: NCCL reports an error and nothing moves"
    if found.cause is not Cause.ORDER and all(one.link for one in culprits):
        return _links_summary(job, one_of_each(found.suspects), where, found)
    names = ", ".join(name_of(one) for one in culprits[:NAMED])
    if len(culprits) > NAMED:
        names += f" and {len(culprits) - NAMED} more"
    s = "s" if len(culprits) == 1 else ""
    if found.cause is Cause.ORDER:
        return f"{names} wait{s} in a cycle: operations of several communicators in different orders"
    reasons = {one.reason for one in culprits}
    if found.cause is Cause.RUNS_ON:
        what = reasons.pop() if len(reasons) == 1 else "called something else than their peers"
        return f"{names} {what}: the job runs on with wrong results"
    why = f"{': ' if s else ', each: '}{reasons.pop()}" if len(reasons) == 1 else ": do not go on"
    return f"{names} hold{s} up the job{where}{why}"


def _port_words(port: PortDown, culprits: Sequence[Culprit]) -> str:
    """``eth0 on node1 is down, and rank 1 uses it``."""
    users = [one for one in culprits if port.is_used_by(one.host, one.rank)]
    names = sorted(one.rank for one in users if one.rank is not None)
    shown = ", ".join(map(str, names[: 2 * NAMED])) + (f" and {len(names) - 2 * NAMED} more" if len(names) > 2 * NAMED else "")
    who, verb = ("rank", "uses") if len(names) == 1 else ("ranks", "use")
    return f"{port.nic.label} on {port.nic.host} {port.state}, and {who} {shown} {verb} it"


def _links_summary(job: Job, suspects: Sequence[Suspect], where: str, found: Hypothesis) -> str:
    """Links that carry nothing, each by both ends: no rank is to blame for its link."""
    known = {f"rank {one.place.rank}": name_of(one.place) for one in suspects if one.place.rank is not None}
    texts: dict[str, None] = {}
    for one in suspects:
        group, link = job.groups.get(one.group), one.place.link
        if link is not None:
            ends = (link.source, link.destination)
            ranks = [job.rank_name(group.id, end) if group is not None else f"rank {end}" for end in ends]
            texts[" → ".join(known.get(name, name) for name in ranks)] = None
    more = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    subject = f"{', '.join([*texts][:NAMED])}{more}"
    one_link = len(texts) == 1
    what, holds = ("carries no data", "holds") if one_link else ("carry no data", "hold")
    if found.verdict_class is VerdictClass.SLOW_COMMUNICATION:
        what = "is slow" if one_link else "are slow"
        where += f": no transfer has ended for {found.seconds:.0f} s, though TCP still tries"
    return f"the {'link' if one_link else 'links'} {subject} {what} and {holds} up the job{where}"


def name_of(one: Culprit) -> str:
    """A culprit as a summary names it."""
    name = f"rank {one.rank}" if one.rank is not None else f"communicator rank {one.comm_rank}"
    if one.pid is None:
        return name
    gpu = f", GPU {one.gpu}" if one.gpu is not None else ""
    return f"{name} ({one.host}, pid {one.pid}{gpu})"


# --- nobody is named ---------------------------------------------------------------------------------------------------


NOBODY: dict[Cause, str] = {
    Cause.ALL_ENDED: "all have ended",
    Cause.ONE_SAMPLE: "only one sample of a process, so progress cannot be told from standstill",
    Cause.PROGRESS: "NCCL makes progress",
    Cause.PAUSE: "no NCCL counter has moved for {still:.1f} s; a pause of up to {seconds:.0f} s is not yet a hang",
    Cause.TCP_TRIES: "no NCCL counter has moved for {still:.1f} s; a pause of up to {seconds:.0f} s is not yet a hang; what "
    "was lost is sent again by TCP",
    Cause.NOTHING_OPEN: "no NCCL operation is open",
    Cause.NOTHING_SEEN: "NCCL has not moved for {still:.0f} s; what joins the ranks hides whether an operation is open",
    Cause.CREATING: "{come} ranks wait in the creation of communicator {communicator}",
    Cause.UNSEEN: "nothing moves; the waits lead to {unseen}, which was not observed",
    Cause.HIDDEN: "nothing moves; the waits lead to {unseen}, which is joined by a transport the host cannot see into",
    Cause.BESIDE_ABSENT: "the waits lead to {ranks}, which has nothing open and may wait for {unseen}, not observed",
    Cause.CYCLE_IN_OPERATION: "ranks wait for each other inside one operation; what was read does not single one out",
    Cause.CYCLE_OF_CALLS: "ranks wait for each other in a cycle of calls; what was read does not single one out",
}
"""What is said of the processes where nobody is named, by cause."""
MAY_BE_HIDDEN = frozenset({Cause.NOTHING_OPEN, Cause.NOTHING_SEEN, Cause.UNSEEN, Cause.HIDDEN})
"""Where what the transports hide may be why nobody is named."""
SAMPLES_ALONE = frozenset({Cause.ALL_ENDED, Cause.ONE_SAMPLE})
"""Where nothing was looked for in the samples."""


def _nobody(case: Case, found: Hypothesis) -> Verdict:
    job, group = case.job, case.job.groups.get(found.group if found.group is not None else -1)
    unseen = [job.rank_name(node.group_id, node.comm_rank) for node in found.ends if isinstance(node, AbsentNode | HiddenNode)]
    text = NOBODY[found.cause].format(
        still=case.still, seconds=found.seconds, unseen=", ".join(dict.fromkeys(unseen)) or "no rank",
        ranks=", ".join(job.member(node.index).label for node in found.ends if isinstance(node, RankNode)),
        come=f"{len(group.members)} of {group.nranks}" if group else "", communicator=f"{group.hash:016x}" if group else "",
    )  # fmt: skip
    lines = [fact.text for fact in found.supports][:EVIDENCE_LINES]
    hidden = not_observed(case) if found.cause in MAY_BE_HIDDEN else () if found.cause in SAMPLES_ALONE else not_read(job)
    return Verdict(
        found.verdict_class, f"{count(job)}: {text}", confidence=found.confidence,
        evidence=(*lines, *(() if found.cause in SAMPLES_ALONE or found.cause is Cause.PROGRESS else (_stillness(case),))),
        unobserved=(*hidden, *(fact.text for fact in found.missing)), next_steps=STEPS_BY_CAUSE.get(found.cause, ()),
    )  # fmt: skip


# --- the trail ---------------------------------------------------------------------------------------------------------

FACTS_SHOWN = 6
"""Bound: facts of one kind by one rule that the trail shows; of more only the number is told."""


def _trail(case: Case, found: Hypothesis) -> Iterator[Step]:
    """How it came about: facts, what rules drew and took back, what was weighed and lost, what was missing."""
    trail = case.trail
    yield from _steps(StepKind.FACT, "", [*found.because, *found.supports, *found.beside])
    taken_back = [(one.rule, one.fact) for one in trail.retracted]
    for kind, pairs in ((StepKind.DRAWN, trail.drawn), (StepKind.RETRACTED, taken_back)):
        for rule in dict.fromkeys(rule for rule, _ in pairs):
            yield from _steps(kind, rule, [fact for other, fact in pairs if other == rule])
    yield from (Step(StepKind.LOST, lost.hypothesis.rule, _in_short(lost.hypothesis), lost.against) for lost in trail.lost)
    yield from (Step(StepKind.STANDS, rule, "") for rule in found.follows if rule != found.rule)
    yield Step(StepKind.STANDS, found.rule, _in_short(found))
    yield from _steps(StepKind.MISSING, "", found.missing)


def _steps(kind: StepKind, rule: str, facts: Sequence[Fact]) -> Iterator[Step]:
    yield from (Step(kind, rule, fact.text) for fact in facts[:FACTS_SHOWN])
    if len(facts) > FACTS_SHOWN:
        yield Step(kind, rule, f"… {len(facts) - FACTS_SHOWN} more")


def _in_short(found: Hypothesis) -> str:
    if not found.suspects:
        return f"{found.verdict_class}: nobody is named ({found.cause})"
    places = [suspect.place for suspect in found.suspects[: 2 * NAMED]]
    ranks = ", ".join(f"rank {p.rank}" if p.rank is not None else f"communicator rank {p.comm_rank}" for p in places)
    more = f" and {len(found.suspects) - len(places)} more" if len(found.suspects) > len(places) else ""
    return f"{found.verdict_class}: {ranks}{more}: {culprit(found.suspects[0]).reason} (confidence {found.confidence:.0%})"


# --- parts -------------------------------------------------------------------------------------------------------------


def ranks_of(job: Job, indices: Iterable[int]) -> tuple[int, ...]:
    """The job's ranks of members."""
    return tuple(sorted({rank for index in indices if (rank := job.member(index).rank) is not None}))


def count(job: Job) -> str:
    """``4 processes``."""
    number = len(job.members)
    if any(member.last.process.key.part for member in job.members):
        # A process that drives several GPUs is a member for each of them.
        number = len({(member.info.host, member.info.pid) for member in job.members})
    return f"{number} process{'es' if number != 1 else ''}"


def _stillness(case: Case) -> str:
    if case.still > 0:
        return f"no NCCL counter moved in any of {count(case.job)} for {case.still:.1f} s"
    return "NCCL still moved in other processes"
