"""All words of a verdict, made last: summary, evidence, what was not observed, what to do next. By class and cause alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from ncclwatch.engine.case import Case
from ncclwatch.engine.evidence.base import FactKind
from ncclwatch.engine.evidence.ports import PortDown
from ncclwatch.engine.hypotheses import Cause, Hypothesis, Suspect
from ncclwatch.engine.job import Job
from ncclwatch.engine.nodes import AbsentNode, HiddenNode, RankNode
from ncclwatch.engine.suspects import group_of, one_of_each
from ncclwatch.engine.unobserved import not_observed, not_read
from ncclwatch.model.verdict import Culprit, OperationRef, Verdict, VerdictClass
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
TCP_TRIES = "what was lost is sent again by TCP"
RAISE_LIMIT = "on {host}: raise the CPU limit of process {pid} (of its container or pod; `cat /proc/{pid}/cgroup`, cpu.max there)"


def severity(verdict: Verdict) -> int:
    """Sorts verdicts, the worst first."""
    return -SEVERITY.index(verdict.verdict_class)


def render(case: Case, found: Hypothesis) -> Verdict:
    """The verdict that a hypothesis is."""
    words = _UNNAMED.get(found.cause)
    if words is not None:
        verdict = words(case, found)
        verdict = replace(verdict, unobserved=(*verdict.unobserved, *(fact.text for fact in found.missing)))
    else:
        verdict = _named(case, found)
    verdict = _with_limits(case, found, verdict)
    return replace(verdict, time=case.time, rules=rules_of(case, found), planes=found.planes)


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
        unobserved=(*missing, *not_observed(job)),
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
    ports = [fact for fact in found.because if isinstance(fact, PortDown)]
    if found.cause is Cause.PORT:
        return f"{'; '.join(_port_words(port, culprits) for port in ports[:3])}: the job stands still{where}"
    if ports and found.narrowed is not None:
        users = [one for one in culprits if any(port.is_used_by(one.host, one.rank) for port in ports)]
        names = ", ".join(f"rank {rank}" for rank in sorted(one.rank for one in users if one.rank is not None))
        labels = ", ".join(sorted({port.nic.label for port in ports}))
        use = "use" if len(users) > 1 else "uses"
        rest = _summary(job, found.narrowed, [culprit(one) for one in one_of_each(found.narrowed.suspects)], operation)
        return f"{labels}, which {names} {use}, {ports[0].state}: {rest}"
    if found.cause is Cause.NCCL_ERROR:
        return f"{count(job)}: NCCL reports an error and nothing moves"
    names = ", ".join(name_of(one) for one in culprits[:NAMED])
    if len(culprits) > NAMED:
        names += f" and {len(culprits) - NAMED} more"
    if found.cause is Cause.ORDER:
        verb = "waits" if len(culprits) == 1 else "wait"
        return f"{names} {verb} in a cycle: operations of several communicators in different orders"
    if all(one.link for one in culprits):
        return _links_summary(job, culprits, where, found)
    if len(culprits) == 1:
        return f"{names} holds up the job{where}: {culprits[0].reason}"
    reasons = {one.reason for one in culprits}
    return f"{names} hold up the job{where}" + (f", each: {reasons.pop()}" if len(reasons) == 1 else ": do not go on")


def _port_words(port: PortDown, culprits: Sequence[Culprit]) -> str:
    """``eth0 on node1 is down, and rank 1 uses it``."""
    users = [one for one in culprits if port.is_used_by(one.host, one.rank)]
    names = sorted(one.rank for one in users if one.rank is not None)
    shown = ", ".join(map(str, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    who, verb = ("rank", "uses") if len(names) == 1 else ("ranks", "use")
    return f"{port.nic.label} on {port.nic.host} {port.state}, and {who} {shown} {verb} it"


def _links_summary(job: Job, culprits: Sequence[Culprit], where: str, found: Hypothesis) -> str:
    """Links that carry nothing, each by both ends: no rank is to blame for its link."""
    known = {f"rank {c.rank}": name_of(c) for c in culprits if c.rank is not None}
    texts: dict[str, None] = {}
    for one in culprits:
        group = group_of(job, one)
        if one.link is not None:
            ends = (one.link.source, one.link.destination)
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


def _nobody(case: Case, found: Hypothesis, text: str, *, limit: int | None = None, unobserved: Iterable[str] = ()) -> Verdict:
    lines = tuple(fact.text for fact in found.supports)[:limit]
    return Verdict(
        found.verdict_class, f"{count(case.job)}: {text}", confidence=found.confidence, evidence=(*lines, _stillness(case)),
        unobserved=tuple(unobserved), next_steps=STEPS_BY_CAUSE.get(found.cause, ()),
    )  # fmt: skip


def _all_ended(case: Case, found: Hypothesis) -> Verdict:
    return Verdict(found.verdict_class, f"{count(case.job)}: all have ended", confidence=found.confidence)


def _one_sample(case: Case, found: Hypothesis) -> Verdict:
    text = f"{count(case.job)}: only one sample of a process, so progress cannot be told from standstill"
    return Verdict(found.verdict_class, text, next_steps=STEPS_BY_CAUSE[Cause.ONE_SAMPLE])


def _progress(case: Case, found: Hypothesis) -> Verdict:
    text, notes = f"{count(case.job)}: NCCL makes progress", tuple(fact.text for fact in found.supports)
    return Verdict(found.verdict_class, text, confidence=found.confidence, evidence=notes, unobserved=not_read(case.job))


def _pause(case: Case, found: Hypothesis) -> Verdict:
    """Nothing moves, but not for long enough to accuse a rank that merely computes."""
    text = f"no NCCL counter has moved for {case.still:.1f} s; a pause of up to {found.seconds:.0f} s is not yet a hang"
    if found.seconds == case.retries_s:
        text = f"{text}; {TCP_TRIES}"
    return _nobody(case, found, text)


def _nothing_open(case: Case, found: Hypothesis) -> Verdict:
    return _nobody(case, found, "no NCCL operation is open", unobserved=not_observed(case.job))


def _nothing_seen(case: Case, found: Hypothesis) -> Verdict:
    text = f"NCCL has not moved for {case.still:.0f} s; what joins the ranks hides whether an operation is open"
    return _nobody(case, found, text, limit=EVIDENCE_LINES, unobserved=not_observed(case.job))


def _creating(case: Case, found: Hypothesis) -> Verdict:
    group = case.job.groups[found.group or 0]
    text = f"{len(group.members)} of {group.nranks} ranks wait in the creation of communicator {group.hash:016x}"
    return replace(_nobody(case, found, "", unobserved=not_read(case.job)), summary=text)


def _unseen(case: Case, found: Hypothesis) -> Verdict:
    nodes = [node for node in found.ends if isinstance(node, AbsentNode | HiddenNode)]
    names = dict.fromkeys(case.job.rank_name(node.group_id, node.comm_rank) for node in nodes)
    absent = any(isinstance(node, AbsentNode) for node in found.ends)
    what = "was not observed" if absent else "is joined by a transport the host cannot see into"
    text = f"nothing moves; the waits lead to {', '.join(names) or 'no rank'}, which {what}"
    verdict = _nobody(case, found, text, limit=EVIDENCE_LINES, unobserved=not_observed(case.job))
    return replace(verdict, next_steps=("attach to the processes of the ranks named as well",) if absent else ())


def _beside_absent(case: Case, found: Hypothesis) -> Verdict:
    job = case.job
    names = ", ".join(job.member(node.index).label for node in found.ends if isinstance(node, RankNode))
    absent = [job.rank_name(node.group_id, node.comm_rank) for node in found.ends if isinstance(node, AbsentNode)]
    text = f"the waits lead to {names}, which has nothing open and may wait for {', '.join(absent)}, not observed"
    return _nobody(case, found, text, unobserved=not_read(job))


def _cycle_in_operation(case: Case, found: Hypothesis) -> Verdict:
    text = "ranks wait for each other inside one operation; what was read does not single one out"
    return _nobody(case, found, text, limit=EVIDENCE_LINES)


def _cycle_of_calls(case: Case, found: Hypothesis) -> Verdict:
    text = "ranks wait for each other in a cycle of calls; what was read does not single one out"
    return _nobody(case, found, text, limit=EVIDENCE_LINES)


_UNNAMED: dict[Cause, Callable[[Case, Hypothesis], Verdict]] = {
    Cause.ALL_ENDED: _all_ended,
    Cause.ONE_SAMPLE: _one_sample,
    Cause.PROGRESS: _progress,
    Cause.PAUSE: _pause,
    Cause.NOTHING_OPEN: _nothing_open,
    Cause.NOTHING_SEEN: _nothing_seen,
    Cause.CREATING: _creating,
    Cause.UNSEEN: _unseen,
    Cause.BESIDE_ABSENT: _beside_absent,
    Cause.CYCLE_IN_OPERATION: _cycle_in_operation,
    Cause.CYCLE_OF_CALLS: _cycle_of_calls,
}


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
