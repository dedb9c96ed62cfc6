"""What is told beside an explanation: CPU limits, GPUs, NICs, connections and kernel logs of the ranks that it names.

None of it names anybody. Only what concerns the ranks named is told: a NIC that their connections use, or a line of the kernel's
log that names a culprit's process or came from a culprit's host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from statistics import median_low

from ncclwatch.engine.case import Case, Cause, Hypothesis, Suspect
from ncclwatch.engine.edges import told
from ncclwatch.engine.evidence.base import FactKind, Strength
from ncclwatch.engine.evidence.cpu_limits import HELD_BACK, HELD_TIMES, held_back
from ncclwatch.engine.evidence.kernel_log import Logged
from ncclwatch.engine.evidence.ports import PortDown, PortErrors, names_of
from ncclwatch.engine.evidence.sockets import FlowFact
from ncclwatch.engine.evidence.work_requests import WorkFact
from ncclwatch.engine.explain_network import BEFORE_S
from ncclwatch.engine.job import Job
from ncclwatch.engine.network import LOSSY_SEGMENTS
from ncclwatch.engine.nodes import RankNode
from ncclwatch.engine.patience import LONGEST_PATIENCE_S
from ncclwatch.engine.slow.delay_matrix import delay_lines
from ncclwatch.engine.stated import first_waits
from ncclwatch.model.network import FlowState, KernelLogLine
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass

# --- CPU limits --------------------------------------------------------------------------------------------------------

CRAWL_TIMES = 6.0
"""Unit: times the patience with others; whoever is held back may stand still for so long. From: chosen. A process with a fiftieth
of a CPU was seen to get none for seven seconds (Linux 6.18), and one step of a transfer takes several such turns.
"""
RAISE_LIMITS = "raise the CPU limits of the job's containers or pods, or take them away"


def crawls(case: Case) -> Iterator[Hypothesis]:
    """A standstill that names nobody but ranks that a CPU limit holds back, most others not, or links with such a rank at an end:
    that is too early to say anything.
    """
    standing, longer = case.standing, min(CRAWL_TIMES * case.patience_s, LONGEST_PATIENCE_S)
    if standing is None or case.still >= longer:
        return
    if standing.verdict_class not in (VerdictClass.NOT_ENTERED, VerdictClass.HARDWARE):
        return
    job, facts = case.job, case.facts.of(FactKind.THROTTLED)
    parts = dict.fromkeys((member.index for member in job.members), 0.0)
    for fact in facts:
        if isinstance(fact.subject, RankNode):
            parts[fact.subject.index] = max(parts[fact.subject.index], fact.value or 0.0)
    least = max(HELD_BACK, HELD_TIMES * median_low(parts.values()))
    found: set[int] = set()
    for suspect in standing.suspects:
        slow = {index for index in _involved(job, suspect) if parts[index] >= least}
        if not slow:
            return
        found |= slow
    if found:
        because = tuple(
            fact for fact in facts
            if isinstance(fact.subject, RankNode) and fact.subject.index in found and fact.value == parts[fact.subject.index]
        )  # fmt: skip
        yield Hypothesis(
            "crawls", VerdictClass.UNKNOWN, Cause.PAUSE, supports=first_waits(case), seconds=longer, because=because,
            follows=(*standing.follows, standing.rule),
        )  # fmt: skip


def limited(case: Case) -> Iterator[Hypothesis]:
    """Limits that hold back who is named: what looks like standing still may be that."""
    standing = case.standing
    if standing is None or not standing.accuses or not standing.suspects:
        return
    held = [
        fact for fact in case.facts.of(FactKind.THROTTLED) if fact.strength is Strength.PROVEN and fact.subject in standing.named
    ]
    held = [fact for fact in held if (fact.value or 0.0) >= HELD_BACK]
    if held:
        yield standing.beside_it("cpu-limit", (), because=(*standing.because, *held))


def all_held_back(job: Job) -> str:
    """What to say where CPU limits hold at least half of all ranks back; empty where they do not."""
    parts = [part for member in job.members if (part := held_back(member)) is not None and part >= HELD_BACK]
    if 2 * len(parts) < len(job.members) or not parts:
        return ""
    return (
        f"CPU limits hold {len(parts)} of {len(job.members)} ranks back, in {min(parts):.0%} to {max(parts):.0%} of their periods"
    )


def _involved(job: Job, suspect: Suspect) -> set[int]:
    """The rank a suspect is; both ends where it is the end of a link, since either may keep that from carrying."""
    link, group = suspect.place.link, job.groups.get(suspect.group)
    if link is None or group is None:
        return {suspect.index} if suspect.index is not None else set()
    return {member.index for end in (link.source, link.destination) if (member := group.holder(end)) is not None}


# --- GPUs, samples -----------------------------------------------------------------------------------------------------

GPU_LINES = 4
"""Bound: lines of evidence from the device plane for one rank."""


def gpus(case: Case) -> Iterator[Hypothesis]:
    """What the GPUs of those named say of themselves, where their processes have the shim; and copies that do not come back."""
    standing, job = case.standing, case.job
    if standing is None or not any(member.last.device is not None for member in job.members):
        return
    planes = standing.planes if "device" in standing.planes else (*standing.planes, "device")
    silent = case.facts.of(FactKind.GPU_SILENT)
    if not standing.accuses:
        yield standing.beside_it("gpu", (), missing=(*standing.missing, *silent), planes=planes)
        return
    lines = [
        fact
        for index in sorted(standing.named)
        for fact in case.facts.about(FactKind.GPU_UNFINISHED, RankNode(index))[:GPU_LINES]
    ]
    yield standing.beside_it("gpu", (*lines, *silent), planes=planes)


def newcomers(case: Case) -> Iterator[Hypothesis]:
    """Processes that were sampled once: where they stand is known, and others may wait for them; whether they move is not."""
    standing, number = case.standing, len(case.newcomers)
    if standing is None or not number or standing.cause in (Cause.ALL_ENDED, Cause.ONE_SAMPLE, Cause.PROGRESS):
        return
    if standing.accuses and not case.newcomers.isdisjoint(standing.named):
        yield Hypothesis("newcomers", VerdictClass.UNKNOWN, Cause.ONE_SAMPLE, follows=(*standing.follows, standing.rule))
        return
    what = "1 process was" if number == 1 else f"{number} processes were"
    line = f"{what} looked at only once so far: whether anything moves there is not known yet"
    yield standing.beside_it("newcomers", (), missing=(*standing.missing, told(line, kind=FactKind.HALTED)))


# --- work requests -----------------------------------------------------------------------------------------------------

WORK_LINES = 4
"""Bound: lines of evidence about work requests."""


def work_requests(case: Case) -> Iterator[Hypothesis]:
    """What the flows of those named, and of their peers with them, show since the job stands."""
    standing = case.standing
    if standing is None or not standing.suspects:
        return
    named = standing.named
    about = [fact for fact in case.facts.of(FactKind.WORK, WorkFact) if named & {fact.owner, fact.peer}]
    facts = sorted(about, key=lambda fact: fact.owner not in named)[:WORK_LINES]
    if facts:
        planes = standing.planes if "wire" in standing.planes else (*standing.planes, "wire")
        yield standing.beside_it("work-requests", facts, planes=planes)


# --- network and kernel logs -------------------------------------------------------------------------------------------

MAX_LINES = 6
"""Bound: evidence lines that one verdict gets of the network and the kernels."""
NETWORK_CLASSES = frozenset(
    {VerdictClass.HARDWARE, VerdictClass.SLOW_COMMUNICATION, VerdictClass.SLOW_MIXED, VerdictClass.UNKNOWN, VerdictClass.ERROR}
)
"""Verdicts that a NIC in trouble can explain; a stopped process is stopped whatever the network does."""
MISSING_SOMETHING = frozenset({VerdictClass.DEAD, VerdictClass.NOT_ENTERED, VerdictClass.INIT_HANG})
"""Verdicts that a helper process which was killed can explain."""
OUT_OF_MEMORY = (
    "it was killed for want of memory: raise the limit of its cgroup, or find what grew (data loaders, pinned buffers, /dev/shm)"
)


def add_network(case: Case, verdict: Verdict) -> Verdict:
    """The verdict with what NICs, connections and kernel logs have to say about it, itself when that is nothing. Its id stays."""
    logged = list(_log_lines(case, verdict))
    evidence = [fact.text for fact in logged]
    killed = any(fact.line.kind == "memory" and _names(fact.line, verdict.culprits) for fact in logged)
    steps = [OUT_OF_MEMORY] if killed else []
    if verdict.verdict_class in NETWORK_CLASSES or verdict.verdict_class is VerdictClass.NOT_ENTERED:
        for line, step in _nic_lines(case, verdict):
            evidence.append(line)
            steps.append(step)
    if verdict.verdict_class in NETWORK_CLASSES:
        slow = verdict.verdict_class.slow
        troubled, lost = case.facts.of(FactKind.FLOW_TROUBLE, FlowFact), case.facts.of(FactKind.LOST, FlowFact)
        lines, lossy = flow_lines(troubled, lost, verdict, slow=slow)
        evidence += lines
        steps += lossy
        flows = [flow for _, known in sorted(case.known.network.hosts.items()) for flow in known.flows] if slow else []
        evidence += delay_lines(flows, verdict) if slow else []
        named = {culprit.rank for culprit in verdict.culprits}
        work = case.facts.of(FactKind.WORK, WorkFact) if slow else ()
        evidence += [fact.text for fact in work if fact.global_rank in named][:WORK_LINES]
    evidence = [line for line in dict.fromkeys(evidence) if line not in verdict.evidence][:MAX_LINES]
    if not evidence:
        return verdict
    planes = verdict.planes if "nic" in verdict.planes else (*verdict.planes, "nic")
    fresh = tuple(step for step in dict.fromkeys(steps) if step not in verdict.next_steps)
    return replace(verdict, evidence=(*verdict.evidence, *evidence), next_steps=(*fresh, *verdict.next_steps), planes=planes)


def _nic_lines(case: Case, verdict: Verdict) -> Iterator[tuple[str, str]]:
    """(evidence, next step) for every NIC in trouble that ranks of this verdict use, or that its link names."""
    ranks = {culprit.rank for culprit in verdict.culprits if culprit.rank is not None} | set(verdict.victims)
    device = verdict.link.device if verdict.link else ""
    hosts = {culprit.host for culprit in verdict.culprits}
    down = [port for port in case.facts.of(FactKind.PORT_DOWN, PortDown) if not port.nic.up]
    # Whose port is down may have lost its operations to the error: of a rank that came late a few errors say nothing.
    late = verdict.verdict_class is VerdictClass.NOT_ENTERED
    worn = [port for port in case.facts.of(FactKind.PORT_ERRORS, PortErrors) if port.nic.up and not late]
    ports: list[PortDown | PortErrors] = [*down, *worn]
    for port in sorted(ports, key=lambda port: (port.nic.host, not port.nic.used_by)):
        nic = port.nic
        if nic.used_by:
            concerns = not ranks or bool(ranks & set(nic.used_by))
        else:
            near = [other for other in port.namesakes if not ranks or ranks & set(other.used_by)]
            called = device in names_of(nic) and not any(device in names_of(other) for other in near)
            concerns = called and (nic.host in hosts or not hosts)
        if not concerns:
            continue
        if isinstance(port, PortDown):
            step = f"bring {nic.label} on {nic.host} up again, or look at its cable and switch port ('ip link', 'ibstat')"
        else:
            step = f"look at the path of {nic.label} on {nic.host}: its cable, transceiver and switch port, and congestion"
        yield f"{port.text}{_users(nic.used_by, ranks)}", step


def _users(used_by: tuple[int, ...], ranks: Iterable[int]) -> str:
    users = sorted(set(used_by) & set(ranks)) or list(used_by)
    if not users:
        return ""
    who, verb = ("rank", "uses") if len(users) == 1 else ("ranks", "use")
    return f"; {who} {', '.join(map(str, users[:8]))} {verb} it"


def _log_lines(case: Case, verdict: Verdict) -> Iterator[Logged]:
    """The newest lines of the kernel's log on hosts of culprits: Xids, NIC errors, processes that it ended."""
    if not verdict.verdict_class.accuses and verdict.verdict_class is not VerdictClass.UNKNOWN:
        return
    hosts = {culprit.host for culprit in verdict.culprits}
    for host, facts in groupby(case.facts.of(FactKind.LOGGED, Logged), key=lambda fact: fact.host):
        for fact in list(facts)[-MAX_LINES:] if not hosts or host in hosts else ():
            line = fact.line
            if line.pid is None or not verdict.culprits or _names(line, verdict.culprits) or _is_a_helpers(line, verdict):
                yield fact


def _is_a_helpers(line: KernelLogLine, verdict: Verdict) -> bool:
    """Whether another process was killed for want of memory shortly before, or since: a data loader's worker, perhaps."""
    began = verdict.since if verdict.since is not None else verdict.time
    if line.kind != "memory" or verdict.verdict_class not in MISSING_SOMETHING or began is None:
        return False
    return began - BEFORE_S <= line.wall_ns / 1e9


def _names(line: KernelLogLine, culprits: Iterable[Culprit]) -> bool:
    return any((culprit.host, culprit.pid) == (line.host, line.pid) for culprit in culprits)


# --- connections -------------------------------------------------------------------------------------------------------

MAX_FLOWS = 3
"""Bound: connections that are told of."""
LOST = LOSSY_SEGMENTS
"""Unit: segments that a culprit's sockets sent again in 30 s. Fewer are not spoken of. From: :data:`network.LOSSY_SEGMENTS`."""
TIMES = 5.0
"""Unit: times what other sockets send again. From: chosen, as counts of ten differ by less than twofold by chance."""
WHERE_LOST = (
    "packets of {who} are lost on the way: look for errors and drops at the cable, the transceiver and the switch port "
    "(ethtool -S), and for queues that overflow"
)


def flow_lines(
    troubled: Sequence[FlowFact], lost: Sequence[FlowFact], verdict: Verdict, *, slow: bool
) -> tuple[list[str], list[str]]:
    """Lines of evidence, and next steps; of a job that stands still (not ``slow``) it says nothing that a connection was slow.

    ``troubled`` are facts of connections in trouble, ``lost`` of what connections have sent again.
    """
    culprits = {culprit.rank for culprit in verdict.culprits if culprit.rank is not None}
    ranks = culprits | set(verdict.victims)
    said: dict[str, list[FlowFact]] = {}
    for fact in troubled:
        flow = fact.flow
        blocked = flow.state is FlowState.BLOCKED and flow.global_rank in culprits
        trouble = flow.state.is_trouble and (slow or flow.state is not FlowState.SLOW)
        if blocked or (trouble and (not ranks or flow.global_rank in ranks)):
            said.setdefault(f"{flow.global_rank} {flow.direction} {flow.peer} {flow.state}", []).append(fact)
    together = list(said.values())
    if slow and culprits:
        # Others' connections may be slower than they were, too: who reads this asks why the culprit's are.
        together = sorted((group for group in together if _touches(group[0], verdict.culprits, culprits)), key=_severity)
    lines = [_flow_line(group, verdict.culprits) for group in together[:MAX_FLOWS]]
    if not slow or (loss := _loss(lost, verdict.culprits, culprits)) is None:
        return lines, []
    who = f"rank {min(culprits)}" if len(culprits) == 1 else "these ranks"
    return [loss, *lines], [WHERE_LOST.format(who=who)]


def far_end(fact: FlowFact, culprits: Sequence[Culprit]) -> int | None:
    """The job's rank at the other end of a connection; ``None`` where it is not known, or several could be.

    Culprits are known by both ranks, also where nobody watches their hosts.
    """
    found = set(fact.far)
    if not fact.by_address:
        place = fact.flow.comm_hash, fact.flow.peer
        found |= {c.rank for c in culprits if c.rank is not None and _comm_place(c) == place}
    return next(iter(found)) if len(found) == 1 else None


def _comm_place(culprit: Culprit) -> tuple[int, int] | None:
    """Hash of the communicator that a culprit is accused in, and its rank in it."""
    if culprit.communicator is None or culprit.comm_rank is None:
        return None
    return int(culprit.communicator.hash, 16), culprit.comm_rank


def _touches(fact: FlowFact, named: Sequence[Culprit], culprits: Collection[int]) -> bool:
    return fact.flow.global_rank in culprits or far_end(fact, named) in culprits


def _severity(group: Sequence[FlowFact]) -> tuple[bool, float]:
    """The worst first: what it carries of what it used to (nothing where it stands); data that nobody reads last."""
    flows = [fact.flow for fact in group]
    carried = min(flow.bandwidth / flow.expected if flow.bandwidth is not None and flow.expected else 0.0 for flow in flows)
    return flows[0].state is FlowState.BLOCKED, carried


def _flow_line(group: Sequence[FlowFact], named: Sequence[Culprit]) -> str:
    first = group[0].flow
    other = far_end(group[0], named)
    peer = f"rank {other}" if other is not None else f"rank {first.peer} of its communicator"
    way = "to" if first.direction is Direction.SEND else "from"
    channels = sorted({fact.flow.channel for fact in group if fact.flow.channel is not None})
    where = f" over {first.device}" if first.device else ""
    return (
        f"rank {first.global_rank} {way} {peer}{where}, "
        f"channel{'s' if len(channels) != 1 else ''} {', '.join(map(str, channels))}: {group[0].text}"
    )


def _loss(lost: Sequence[FlowFact], named: Sequence[Culprit], culprits: Collection[int]) -> str | None:
    """That segments of the culprits' sockets are sent again much more often than those of others, where they are."""
    sockets = {
        fact.flow.socket.local: (int(fact.value or 0), _touches(fact, named, culprits))
        for fact in lost
        if fact.flow.socket is not None
    }
    theirs = [count for count, near in sockets.values() if near]
    others = [count for count, near in sockets.values() if not near]
    total = sum(theirs)
    usual = sum(others) / len(others) if others else 0.0
    if total < LOST or total / len(theirs) < TIMES * usual:
        return None
    beside = f", {sum(others)} on {len(others)} others" if others else ""
    return (
        f"{total} segments retransmitted on {len(theirs)} connection{'s' * (len(theirs) > 1)}{beside}, in 30 s: packets are lost"
    )
