"""Turn what was located into verdicts a person can act on: summary, evidence with numbers, what was not seen, what to do next."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ncclwatch.engine.connections import is_hidden
from ncclwatch.engine.culprits import one_of_each
from ncclwatch.engine.edges import AbsentNode, HiddenNode, Wait, Waits
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.engine.locate import Sink
from ncclwatch.engine.next_steps import NEITHER_WAY, PORT_RETRIES, next_steps
from ncclwatch.engine.unobserved import not_observed, not_read
from ncclwatch.model.state import Communicator
from ncclwatch.model.verdict import Culprit, OperationRef, Verdict, VerdictClass, places, stands_in

EVIDENCE_LINES = 12
TIE = 0.5
"""Confidence of a verdict that names all sides of a disagreement; no other has it."""
HEALTHY_RESULTS = frozenset({"ncclSuccess", "ncclInProgress"})


def build(
    job: Job,
    verdict_class: VerdictClass,
    culprits: Sequence[Culprit],
    victims: Iterable[int],
    evidence: Sequence[str],
    *,
    still: float,
    time: float,
    confidence: float,
    unobserved: Sequence[str] = (),
) -> Verdict:
    """A verdict that accuses; ``victims`` are member indices, ``still`` seconds without progress."""
    culprits = one_of_each(culprits)
    first = next((c for c in culprits if c.operation), culprits[0])
    stillness = _stillness(job, still)
    lines = [*(line for line in dict.fromkeys(evidence) if line != stillness), stillness]
    shown = lines if len(lines) <= EVIDENCE_LINES else [*lines[: EVIDENCE_LINES - 2], _left_out(lines), lines[-1]]
    return Verdict(
        verdict_class=verdict_class,
        summary=_summary(job, verdict_class, culprits, first.operation),
        culprits=tuple(culprits),
        victims=ranks_of(job, victims),
        communicator=first.communicator,
        operation=first.operation,
        link=next((c.link for c in culprits if c.link), None),
        time=time,
        confidence=confidence,
        evidence=tuple(shown),
        unobserved=(*unobserved, *not_observed(job)),
        next_steps=next_steps(verdict_class, culprits),
    )


def running(job: Job, time: float) -> Verdict:
    """NCCL moved between the last two looks."""
    notes = tuple(halted_evidence(member) for member in job.members if member.stopped)
    text = f"{_count(job)}: NCCL makes progress"
    return Verdict(VerdictClass.RUNNING, text, time=time, confidence=1.0, evidence=notes, unobserved=not_read(job))


def ended(job: Job, time: float) -> Verdict:
    """Every observed process has ended."""
    return Verdict(VerdictClass.IDLE, f"{_count(job)}: all have ended", time=time, confidence=1.0)


def single_look(job: Job, time: float) -> Verdict:
    """One look cannot tell a pause from a hang."""
    text = f"{_count(job)}: only one sample of a process, so progress cannot be told from standstill"
    return Verdict(VerdictClass.UNKNOWN, text, time=time, next_steps=("take at least two samples, a second apart",))


def newcomers(number: int) -> str:
    """That some processes of the job have been looked at only once."""
    what = "1 process was" if number == 1 else f"{number} processes were"
    return f"{what} looked at only once so far: whether anything moves there is not known yet"


def nothing_open(job: Job, still: float, time: float, *, overdue: bool = False) -> Verdict:
    """No transfer is open: the job computes, waits outside NCCL, or has failed.

    Where transports hide what is open, that is no rest: once patience is over (``overdue``) it is said that nobody can tell.
    """
    errors = [line for member in job.members for line in error_lines(member)]
    unobserved = not_observed(job)
    if errors:
        text = f"{_count(job)}: NCCL reports an error and nothing moves"
        steps = ("read the NCCL log of the ranks named (NCCL_DEBUG=WARN)",)
        return Verdict(
            VerdictClass.ERROR, text, _error_culprits(job), time=time, confidence=0.9, evidence=(*errors, _stillness(job, still)),
            unobserved=unobserved, next_steps=steps,
        )  # fmt: skip
    if overdue and any(is_hidden(own) for member in job.members for own in member.last.communicators):
        text = f"{_count(job)}: NCCL has not moved for {still:.0f} s; what joins the ranks hides whether an operation is open"
        gone = tuple(halted_evidence(member) for member in job.members if member.gone)
        look = (
            "see where the ranks stand: `py-spy dump --nonblocking --pid PID` for each; a healthy job computes or loads data",
            "start the job with the counter shim to see inside a node (docs/device-plane.md)",
        )
        return Verdict(
            VerdictClass.UNKNOWN, text, time=time, evidence=(*gone[:EVIDENCE_LINES], _stillness(job, still)),
            unobserved=unobserved, next_steps=look,
        )  # fmt: skip
    text = f"{_count(job)}: no NCCL operation is open"
    return Verdict(VerdictClass.IDLE, text, time=time, confidence=0.7, evidence=(_stillness(job, still),), unobserved=unobserved)


def in_creation(job: Job, group: Group, evidence: Sequence[str], still: float, time: float) -> Verdict:
    """Ranks wait for each other in the creation of a communicator, which may just take its time."""
    text = f"{len(group.members)} of {group.nranks} ranks wait in the creation of communicator {group.hash:016x}"
    unobserved = not_read(job)
    return Verdict(VerdictClass.UNKNOWN, text, time=time, evidence=(*evidence, _stillness(job, still)), unobserved=unobserved)


def too_early(job: Job, sinks: Sequence[Sink], still: float, patience: float, time: float, why: str = "") -> Verdict:
    """Nothing moves, but not for long enough to accuse a rank that merely computes. ``why``: a reason to wait for longer."""
    text = f"{_count(job)}: no NCCL counter has moved for {still:.1f} s; a pause of up to {patience:.0f} s is not yet a hang"
    text = f"{text}; {why}" if why else text
    waits = [wait for sink in sinks[:4] for wait in sink.waits[:4]]
    return Verdict(VerdictClass.UNKNOWN, text, time=time, evidence=(*wait_lines(waits), _stillness(job, still)))


def ambiguous_cycle(job: Job, inside: Sequence[Wait], still: float, time: float, where: str = "inside one operation") -> Verdict:
    """Ranks wait for each other inside one operation, which by itself names nobody."""
    text = f"{_count(job)}: ranks wait for each other {where}; what was read does not single one out"
    evidence = tuple(wait_lines(inside))[:EVIDENCE_LINES]
    return Verdict(VerdictClass.UNKNOWN, text, time=time, evidence=(*evidence, _stillness(job, still)))


def unseen(job: Job, sinks: Sequence[Sink], waits: Waits, still: float, time: float) -> Verdict:
    """Every chain of waits ends where nothing was observed."""
    names: list[str] = []
    for sink in sinks:
        node = sink.nodes[0]
        if isinstance(node, AbsentNode | HiddenNode):
            names.append(job.rank_name(node.group_id, node.comm_rank))
    absent = any(isinstance(sink.nodes[0], AbsentNode) for sink in sinks)
    what = "was not observed" if absent else "is joined by a transport the host cannot see into"
    text = f"{_count(job)}: nothing moves; the waits lead to {', '.join(dict.fromkeys(names)) or 'no rank'}, which {what}"
    evidence = tuple(wait_lines([wait for sink in sinks for wait in sink.waits] or waits.first(EVIDENCE_LINES)))
    steps = ("attach to the processes of the ranks named as well",) if absent else ()
    return Verdict(
        VerdictClass.UNKNOWN, text, time=time, evidence=(*evidence[:EVIDENCE_LINES], _stillness(job, still)),
        unobserved=not_observed(job), next_steps=steps,
    )  # fmt: skip


def wait_lines(waits: Iterable[Wait]) -> list[str]:
    """Waits as evidence: one line for all channels between the same two ranks that stand for the same reason."""
    first: dict[object, Wait] = {}
    channels: dict[object, set[int]] = {}
    for wait in waits:
        same = (wait.waiter, wait.target, wait.why, wait.end.operation.direction if wait.end else None)
        first.setdefault(same, wait)
        channels.setdefault(same, set()).add(wait.key.channel)
    lines = []
    for key, wait in first.items():
        more = len(channels[key]) - 1
        lines.append(wait.text + (f" (and {more} more channel{'s' if more > 1 else ''})" if more else ""))
    return lines


def order_lines(job: Job, orders: Mapping[int, set[int]]) -> list[str]:
    """Which ranks wait in which communicator: the orders that contradict each other."""
    names = {member.index: f"rank {member.rank}" if member.rank is not None else member.label for member in job.members}
    lines = []
    for number, indices in sorted(orders.items(), key=lambda item: -len(item[1])):
        group = job.groups[number]
        who = ", ".join(names[index] for index in sorted(indices))
        does = "wait" if len(indices) > 1 else "waits"
        lines.append(f"{who} entered communicator {group.hash:016x} ({group.nranks} ranks) first and {does} there")
    return lines


def beside_absent(job: Job, sinks: Sequence[Sink], still: float, time: float) -> Verdict:
    """The waits end at a rank with nothing open, whose neighbour in the ring was not observed: either may be the cause."""
    names = ", ".join(member.label for sink in sinks if (member := sink.member(job)) is not None)
    absent = [
        job.rank_name(group.id, rank)
        for group in {w.key.group: job.groups[w.key.group] for sink in sinks for w in sink.waits}.values()
        for rank in group.missing[:8]
    ]
    text = f"{_count(job)}: the waits lead to {names}, which has nothing open and may wait for {', '.join(absent)}, not observed"
    evidence = (*wait_lines(wait for sink in sinks for wait in sink.waits), _stillness(job, still))
    steps = ("look whether the ranks that were not observed still run; attach to them as well",)
    return Verdict(VerdictClass.UNKNOWN, text, time=time, evidence=evidence, unobserved=not_read(job), next_steps=steps)


# --- parts -------------------------------------------------------------------------------------------------------------


def halted_reason(member: Member) -> str:
    """Why a stopped or ended process holds the job up."""
    if member.gone:
        return "its process has ended"
    return "its process is stopped by a debugger" if member.last.run_state == "t" else "its process is stopped by a signal"


def halted_evidence(member: Member) -> str:
    """The operating system's word on a stopped or ended process."""
    state = member.last.run_state
    words = {"T": "stopped", "t": "stopped by a debugger", "Z": "a zombie: it has ended", "X": "gone: it has ended"}
    same = [sample for sample in member.samples if sample.run_state == state]
    span = (same[-1].time_ns - same[0].time_ns) / 1e9
    return f"{member.label} is {words.get(state, state)} (state {state}) in {len(same)} samples over {span:.1f} s"


def errors_of(member: Member) -> list[tuple[Communicator, str]]:
    """Communicators whose asynchronous result is an error, with the result."""
    found = [(c, c.async_result) for c in member.last.communicators if c.async_result]
    return [(communicator, result) for communicator, result in found if result not in HEALTHY_RESULTS]


def error_lines(member: Member) -> list[str]:
    """Asynchronous errors of a process as evidence."""
    return [f"{member.label} reports {result} on communicator {own.hash:016x}" for own, result in errors_of(member)]


class Counts:
    """Where NCCL's own per-rank sequence numbers exist (2.26 and later), how a rank's compare with its group's.

    They count calls of each collective from the communicator's creation on, so a rank that stands lower has called less.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._highest: dict[int, Counter[str]] = {}

    def lines(self, member: Member) -> Iterator[str]:
        """What a rank has called less often than another."""
        for own in member.last.communicators:
            group = self._job.groups[self._job.group_of[member.index, own.address]]
            for name, count in own.sequence_numbers.items():
                highest = self._most(group)[name]
                if count < highest:
                    yield f"{member.label} has called {name} {count} times on communicator {group.hash:016x}, others {highest}"

    def _most(self, group: Group) -> Counter[str]:
        if group.id not in self._highest:
            highest = self._highest[group.id] = Counter()
            for _, own in group.members.values():
                highest |= Counter(own.sequence_numbers)
            self._highest[group.id] = highest
        return self._highest[group.id]


def fellows(job: Job, culprits: Sequence[Culprit]) -> set[int]:
    """Members that share a culprit's communicator: a collective that one rank does not finish, no rank finishes."""
    groups: dict[str, list[Group]] = defaultdict(list)
    for group in job.groups.values():
        groups[f"{group.hash:016x}"].append(group)
    hit: dict[int, Group] = {}
    for culprit in culprits:
        if culprit.communicator is None or culprit.operation is None or not _collective(culprit.operation.name):
            continue
        for group in groups.get(culprit.communicator.hash, ()):
            holder = group.holder(culprit.comm_rank) if culprit.comm_rank is not None else None
            if culprit.pid is None or (holder is not None and names([culprit], holder)):
                hit[group.id] = group
    return {member.index for group in hit.values() for member, _ in group.members.values()}


def names(culprits: Iterable[Culprit], member: Member) -> bool:
    """Whether a member is among the culprits."""
    return any(culprit.is_at(member.info.host, member.info.pid, member.rank) for culprit in culprits)


def group_of(job: Job, culprit: Culprit) -> Group | None:
    """The communicator a culprit is accused in."""
    if culprit.communicator is None or culprit.comm_rank is None:
        return None
    for group in job.groups.values():
        if group.reference() == culprit.communicator:
            holder = group.holder(culprit.comm_rank)
            if holder is None or names([culprit], holder):
                return group
    return None


def accused(job: Job, culprits: Iterable[Culprit]) -> set[int]:
    """Members that are among the culprits."""
    found = places(culprits)
    return {member.index for member in job.members if stands_in(found, member.info.host, member.info.pid, member.rank)}


def other_fellows(job: Job, culprits: Sequence[Culprit]) -> set[int]:
    """The fellows that are not culprits themselves."""
    return fellows(job, culprits) - accused(job, culprits)


def _collective(name: str) -> bool:
    return name not in ("", "Send", "Recv", "SendRecv")


def ranks_of(job: Job, indices: Iterable[int]) -> tuple[int, ...]:
    """The job's ranks of members."""
    return tuple(sorted({rank for index in indices if (rank := job.member(index).rank) is not None}))


def _count(job: Job) -> str:
    number = len(job.members)
    if any(member.last.process.key.part for member in job.members):
        # A process that drives several GPUs is a member for each of them.
        number = len({(member.info.host, member.info.pid) for member in job.members})
    return f"{number} process{'es' if number != 1 else ''}"


def _stillness(job: Job, still: float) -> str:
    return (
        f"no NCCL counter moved in any of {_count(job)} for {still:.1f} s" if still > 0 else "NCCL still moved in other processes"
    )


def _left_out(lines: Sequence[str]) -> str:
    return f"… {len(lines) - EVIDENCE_LINES + 1} more of the same kind"


def _name(culprit: Culprit) -> str:
    name = f"rank {culprit.rank}" if culprit.rank is not None else f"communicator rank {culprit.comm_rank}"
    if culprit.pid is None:
        return name
    gpu = f", GPU {culprit.gpu}" if culprit.gpu is not None else ""
    return f"{name} ({culprit.host}, pid {culprit.pid}{gpu})"


def slow_links(job: Job, verdict: Verdict, still: float) -> Verdict:
    """A verdict on links, or on a port, that carry no data as one on such that carry little: what was lost is sent again."""
    culprits = tuple(replace(c, reason=PORT_RETRIES) if c.reason == NEITHER_WAY else c for c in verdict.culprits)
    summary = _summary(job, VerdictClass.SLOW_COMMUNICATION, culprits, verdict.operation, still)
    return replace(verdict, verdict_class=VerdictClass.SLOW_COMMUNICATION, culprits=culprits, summary=summary)


def _summary(
    job: Job, verdict_class: VerdictClass, culprits: Sequence[Culprit], operation: OperationRef | None, still: float | None = None
) -> str:
    names = ", ".join(_name(culprit) for culprit in culprits[:4])
    if len(culprits) > 4:
        names += f" and {len(culprits) - 4} more"
    if verdict_class is VerdictClass.DEADLOCK:
        verb = "waits" if len(culprits) == 1 else "wait"
        return f"{names} {verb} in a circle: operations of several communicators in different orders"
    where = f" in {operation.name} #{operation.sequence}" if operation and operation.name else ""
    if all(culprit.link for culprit in culprits):
        return _links_summary(job, culprits, where, still)
    if len(culprits) == 1:
        return f"{names} holds up the job{where}: {culprits[0].reason}"
    reasons = {culprit.reason for culprit in culprits}
    return f"{names} hold up the job{where}" + (f", each: {reasons.pop()}" if len(reasons) == 1 else ": do not go on")


def _links_summary(job: Job, culprits: Sequence[Culprit], where: str, slow_s: float | None) -> str:
    """Links that carry nothing, each by both ends: no rank is to blame for its link. ``slow_s``: nothing came through for so many
    seconds, though they are not dead.
    """
    names = {f"rank {c.rank}": _name(c) for c in culprits if c.rank is not None}
    texts: dict[str, None] = {}
    for culprit in culprits:
        group = group_of(job, culprit)
        if culprit.link is not None:
            ends = (culprit.link.source, culprit.link.destination)
            known = [job.rank_name(group.id, end) if group is not None else f"rank {end}" for end in ends]
            texts[" → ".join(names.get(name, name) for name in known)] = None
    more = f" and {len(texts) - 4} more" if len(texts) > 4 else ""
    subject = f"{', '.join([*texts][:4])}{more}"
    one = len(texts) == 1
    what, holds = ("carries no data", "holds") if one else ("carry no data", "hold")
    if slow_s is not None:
        what = "is slow" if one else "are slow"
        where += f": no transfer has ended for {slow_s:.0f} s, though TCP still tries"
    return f"the {'link' if one else 'links'} {subject} {what} and {holds} up the job{where}"


def _error_culprits(job: Job) -> tuple[Culprit, ...]:
    culprits = []
    for member in job.members:
        for own, result in errors_of(member)[:1]:
            group = job.groups[job.group_of[member.index, own.address]]
            culprits.append(
                Culprit(
                    rank=member.rank,
                    comm_rank=own.rank,
                    host=member.info.host,
                    pid=member.info.pid,
                    gpu=own.device,
                    communicator=group.reference(),
                    reason=f"reports {result}",
                )
            )
    return tuple(culprits)
