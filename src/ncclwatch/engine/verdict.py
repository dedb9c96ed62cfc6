"""The words of a verdict, made last: summary, evidence, what was not observed, what to do next. By class and cause alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter

from ncclwatch.engine.case import Case, Hypothesis, Suspect, one_of_each
from ncclwatch.engine.evidence.base import AbsentNode, Fact, FactKind, HiddenNode, RankNode
from ncclwatch.engine.evidence.nics import PortDown
from ncclwatch.model.cause import Cause
from ncclwatch.model.job import Job
from ncclwatch.model.next_steps import RAISE_LIMIT, STEPS
from ncclwatch.model.verdict import Culprit, OperationRef, Step, StepKind, Verdict, VerdictClass
from ncclwatch.text import compressed, first_of, fit

EVIDENCE_LINES = 12
"""Bound: lines of evidence."""
NAMED, NAMED_RANKS = 4, 8
"""Bound: culprits that a summary names, and ranks without more about them; of more only the number is told."""
LISTED, LISTED_CELLS = 6, 60
"""Bound: communicators with unobserved ranks that are listed, and letters for whose; of more only the number is told."""
FACTS_SHOWN = 6
"""Bound: facts of one kind by one rule that the trail shows; of more only the number is told."""
SEVERITY = (
    VerdictClass.RUNNING, VerdictClass.IDLE, VerdictClass.UNKNOWN, VerdictClass.SLOW_MIXED, VerdictClass.SLOW_COMMUNICATION,
    VerdictClass.SLOW_COMPUTATION, VerdictClass.ERROR, VerdictClass.INIT_HANG, VerdictClass.HARDWARE, VerdictClass.INCONSISTENT,
    VerdictClass.NOT_ENTERED, VerdictClass.DEADLOCK, VerdictClass.STOPPED, VerdictClass.DEAD,
)  # fmt: skip
"""From nothing wrong to a cause the operating system states outright."""
ORDER_NOT_TOLD = "which of them broke the order, or left a call out: memory does not keep the order of finished calls"
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
MAY_BE_HIDDEN = frozenset({Cause.NOTHING_OPEN, Cause.NOTHING_SEEN, Cause.UNSEEN, Cause.HIDDEN})
"""Where what the transports hide may be why nobody is named."""
_UNAVAILABLE, _SAMPLES, _TORN = map(attrgetter, ("last.unavailable", "samples", "torn"))
SAMPLES_ALONE = frozenset({Cause.ALL_ENDED, Cause.ONE_SAMPLE})
"""Where nothing was looked for in the samples."""


def severity(verdict: Verdict) -> int:
    """Sorts verdicts, the worst first."""
    return -SEVERITY.index(verdict.verdict_class)


def render(case: Case, found: Hypothesis) -> Verdict:
    """The verdict that a hypothesis is."""
    suspects = one_of_each(found.suspects)
    culprits = tuple(map(_culprit, suspects))
    first = next((one for one in culprits if one.operation), culprits[0] if culprits else None)
    victims = {rank for member in map(case.job.member, found.victims) if (rank := member.rank) is not None}
    changed = [rule for rule, _ in (*case.trail.drawn, *case.trail.retracted)]
    verdict = Verdict(
        found.verdict_class, _summary(case, found, culprits, first.operation if first else None), culprits,
        tuple(sorted(victims)), first.communicator if first else None, first.operation if first else None,
        link=next((one.link for one in culprits if one.link), None), time=case.time, confidence=found.confidence,
        evidence=tuple(_evidence(case, found)), unobserved=_unobserved(case, found), next_steps=_next_steps(found, suspects),
        planes=found.planes, rules=tuple(dict.fromkeys((*changed, *found.follows, found.rule))), trail=tuple(_trail(case, found)),
    )  # fmt: skip
    return _with_limits(case, found, verdict)


def _with_limits(case: Case, found: Hypothesis, verdict: Verdict) -> Verdict:
    """The verdict with the CPU limits that hold back those of whom it speaks."""
    limits = [fact for fact in found.because if fact.kind is FactKind.THROTTLED]
    held = [case.job.member(fact.subject.index) for fact in limits if isinstance(fact.subject, RankNode)]
    if not held:
        return verdict
    ranks = [member.rank for member in held if member.rank is not None]
    who = f"rank{'s' if len(ranks) != 1 else ''} {compressed(ranks)}" if ranks else f"{len(held)} processes"
    evidence, summary = verdict.evidence, verdict.summary
    if found.verdict_class.accuses:
        who = "it" if len(held) == 1 else "them"
        evidence = (*(fact.text for fact in limits), *evidence)
    if not found.verdict_class.accuses or len(held) == len(verdict.culprits):
        summary += f"; a CPU limit holds {who} back in {min(fact.value or 0.0 for fact in limits):.0%} of its periods"
    steps = [RAISE_LIMIT.format(host=member.info.host, pid=member.info.pid) for member in held]
    return replace(verdict, evidence=evidence, summary=summary, next_steps=tuple(dict.fromkeys((*steps, *verdict.next_steps))))


def _culprit(suspect: Suspect) -> Culprit:
    return replace(suspect.place, reason=suspect.cause.format(detail=suspect.detail))


def _next_steps(found: Hypothesis, suspects: Sequence[Suspect]) -> tuple[str, ...]:
    if not suspects:
        return STEPS.get(found.cause, ())
    first = suspects[0]
    steps = STEPS.get(first.cause) or STEPS.get(found.verdict_class, ())
    pid = "PID" if first.place.pid is None else first.place.pid
    return tuple(step.format(pid=pid, host=first.place.host or "its host") for step in steps)


def _unobserved(case: Case, found: Hypothesis) -> tuple[str, ...]:
    """What was hidden, and what the cause leaves open."""
    hidden = () if found.cause in SAMPLES_ALONE else _not_read(case.job)
    if found.suspects or found.cause in MAY_BE_HIDDEN:
        hidden = (*(line for source in case.known.sources for line in source.coverage(case)), *hidden)
    missing = tuple(fact.text for fact in found.missing)
    if not found.suspects:
        return (*hidden, *missing)
    not_told = ORDER_NOT_TOLD if found.cause is Cause.ORDER and found.tie else NOT_TOLD.get(found.cause)
    return (*missing, *([not_told] if not_told else []), *hidden)


def _not_read(job: Job) -> tuple[str, ...]:
    """Signals that could not be read, each once, and communicator ranks that were not observed."""
    lines = [f"{name}: {reason}" for signals in filter(None, map(_UNAVAILABLE, job.members)) for name, reason in signals.items()]
    if torn := sum(map(_TORN, chain.from_iterable(map(_SAMPLES, job.members)))):
        lines.append(f"{torn} structures changed while they were read and were dropped")
    incomplete = [group for group in job.groups.values() if len(group.members) < group.nranks]
    lines += [
        f"communicator {group.hash:016x}: {len(gone := group.missing)} of {group.nranks} ranks were not observed"
        f" ({fit(compressed(gone), LISTED_CELLS)})"
        for group in incomplete[:LISTED]
    ]
    if len(incomplete) > LISTED:
        sizes = Counter(group.nranks for group in incomplete[LISTED:])
        what = ", ".join(f"{number} of {size} ranks" for size, number in sorted(sizes.items()))
        lines.append(f"{len(incomplete) - LISTED} more communicators with ranks that were not observed ({what})")
    return tuple(dict.fromkeys(lines))


def _evidence(case: Case, found: Hypothesis) -> Iterator[str]:
    still = f"no NCCL counter moved in any of {_count(case.job)} for {case.still:.1f} s"
    still = still if case.still > 0 else "NCCL still moved in other processes"
    lines = [line for line in dict.fromkeys(fact.text for fact in found.supports) if line != still]
    if not found.suspects:
        yield from lines[:EVIDENCE_LINES]
        yield from () if found.cause in SAMPLES_ALONE or found.cause is Cause.PROGRESS else (still,)
        return
    if len(lines) >= EVIDENCE_LINES:
        more = len(lines) - EVIDENCE_LINES + 2
        lines = [*lines[:-more], f"… {more} more of the same kind"]
    yield from lines
    yield from dict.fromkeys((still, *(fact.text for fact in found.beside)))


def _summary(case: Case, found: Hypothesis, culprits: Sequence[Culprit], operation: OperationRef | None) -> str:
    if not culprits:
        return _nobody(case, found)
    where = f" in {operation.name} #{operation.sequence}" if operation and operation.name else ""
    if found.cause is Cause.PORT:
        ports = [fact for fact in found.because if isinstance(fact, PortDown)]
        return f"{'; '.join(_port_words(port, culprits) for port in ports[:3])}: the job stands still{where}"
    if found.cause is Cause.NCCL_ERROR:
        return f"{_count(case.job)}: NCCL reports an error and nothing moves"
    if found.cause is not Cause.ORDER and all(one.link for one in culprits):
        return _links_summary(case.job, one_of_each(found.suspects), where, found)
    names = first_of(map(_name, culprits), NAMED)
    s = "s" if len(culprits) == 1 else ""
    if found.cause is Cause.ORDER:
        return f"{names} wait{s} in a cycle: operations of several communicators in different orders"
    reasons = {one.reason for one in culprits}
    if found.cause is Cause.RUNS_ON:
        what = reasons.pop() if len(reasons) == 1 else "called something else than their peers"
        return f"{names} {what}: the job runs on with wrong results"
    if found.rule == "inside-node" and len(reasons) == 1:
        return f"one of {names} holds up the job{where}: {reasons.pop()}; which, NVLink hides"
    why = f"{': ' if s else ', each: '}{reasons.pop()}" if len(reasons) == 1 else ": do not go on"
    return f"{names} hold{s} up the job{where}{why}"


def _nobody(case: Case, found: Hypothesis) -> str:
    job, group = case.job, case.job.groups.get(found.group)
    unseen = [job.rank_name(node.group_id, node.comm_rank) for node in found.ends if isinstance(node, AbsentNode | HiddenNode)]
    text = found.cause.format(
        still=case.still, seconds=found.seconds, unseen=", ".join(dict.fromkeys(unseen)) or "no rank",
        ranks=", ".join(job.member(node.index).label for node in found.ends if isinstance(node, RankNode)),
        come=f"{len(group.members)} of {group.nranks}" if group else "", communicator=f"{group.hash:016x}" if group else "",
    )  # fmt: skip
    return f"{_count(job)}: {text}"


def _port_words(port: PortDown, culprits: Sequence[Culprit]) -> str:
    """``eth0 on node1 is down, and rank 1 uses it``."""
    ranks = sorted(one.rank for one in culprits if one.rank is not None and port.is_used_by(one.host, one.rank))
    who, verb = ("rank", "uses") if len(ranks) == 1 else ("ranks", "use")
    return f"{port.nic.label} on {port.nic.host} {port.state}, and {who} {first_of(map(str, ranks), NAMED_RANKS)} {verb} it"


def _links_summary(job: Job, suspects: Sequence[Suspect], where: str, found: Hypothesis) -> str:
    """Links that carry nothing, each by both ends: no rank is to blame for its link."""
    known = {f"rank {one.place.rank}": _name(one.place) for one in suspects if one.place.rank is not None}
    texts: dict[str, None] = {}
    for one in suspects:
        if (link := one.place.link) is not None:
            in_group = one.group in job.groups
            ranks = [job.rank_name(one.group, end) if in_group else f"rank {end}" for end in (link.source, link.destination)]
            texts[" → ".join(known.get(name, name) for name in ranks)] = None
    links, what, holds = ("link", "carries no data", "holds") if len(texts) == 1 else ("links", "carry no data", "hold")
    if found.verdict_class is VerdictClass.SLOW_COMMUNICATION:
        what = "is slow" if len(texts) == 1 else "are slow"
        where += f": no transfer has ended for {found.seconds:.0f} s, though TCP still tries"
    return f"the {links} {first_of(texts, NAMED)} {what} and {holds} up the job{where}"


def _name(one: Culprit) -> str:
    gpu = f", GPU {one.gpu}" if one.gpu is not None else ""
    return _rank(one) + (f" ({one.host}, pid {one.pid}{gpu})" if one.pid is not None else "")


def _rank(one: Culprit) -> str:
    return f"rank {one.rank}" if one.rank is not None else f"communicator rank {one.comm_rank}"


def _trail(case: Case, found: Hypothesis) -> Iterator[Step]:
    trail = case.trail
    yield from _steps(StepKind.FACT, "", [*found.because, *found.supports, *found.beside])
    for kind, pairs in ((StepKind.DRAWN, trail.drawn), (StepKind.RETRACTED, trail.retracted)):
        for rule in dict.fromkeys(rule for rule, _ in pairs):
            yield from _steps(kind, rule, [fact for other, fact in pairs if other == rule])
    yield from (Step(StepKind.LOST, lost.rule, _in_short(lost), against) for lost, against in trail.lost)
    yield from (Step(StepKind.STANDS, rule, "") for rule in found.follows if rule != found.rule)
    yield Step(StepKind.STANDS, found.rule, _in_short(found))
    yield from _steps(StepKind.MISSING, "", found.missing)


def _steps(kind: StepKind, rule: str, facts: Sequence[Fact]) -> Iterator[Step]:
    yield from (Step(kind, rule, fact.text) for fact in facts[:FACTS_SHOWN])
    if len(facts) > FACTS_SHOWN:
        yield Step(kind, rule, f"… {len(facts) - FACTS_SHOWN} more")


def _in_short(found: Hypothesis) -> str:
    if not found.suspects:
        return f"{found.verdict_class}: nobody is named ({found.cause.label})"
    ranks = first_of((_rank(suspect.place) for suspect in found.suspects), NAMED_RANKS)
    return f"{found.verdict_class}: {ranks}: {_culprit(found.suspects[0]).reason} (confidence {found.confidence:.0%})"


def _count(job: Job) -> str:
    return f"{job.processes} process{'es' if job.processes != 1 else ''}"
