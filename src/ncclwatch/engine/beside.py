"""What is told beside an explanation: calls, GPUs, requests and CPU limits of those it names; NICs, connections, kernel logs.

None of it names anybody. Only what concerns the ranks named is told: a NIC that their connections use, or a line of the kernel's
log that names a culprit's process or came from a culprit's host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from ncclwatch.engine.case import Case, Cause, Hypothesis, nobody
from ncclwatch.engine.edges import told
from ncclwatch.engine.evidence.base import FactKind, RankNode, Strength
from ncclwatch.engine.evidence.kernel import HELD_BACK, Logged, held_back
from ncclwatch.engine.evidence.nics import FlowFact, PortDown, PortErrors, names_of
from ncclwatch.engine.evidence.work_requests import WorkFact
from ncclwatch.engine.explain_calls import behind_fact
from ncclwatch.engine.explain_network import BEFORE_S
from ncclwatch.engine.job import Job
from ncclwatch.engine.network import LOSSY_SEGMENTS
from ncclwatch.engine.slow.delay_matrix import delay_lines
from ncclwatch.model.network import FlowState, KernelLogLine
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass

# --- beside a hypothesis -----------------------------------------------------------------------------------------------

GPU_LINES, WORK_LINES = 4, 4
"""Bound: lines of evidence from the device plane for one rank, and about work requests."""
STATED = frozenset({VerdictClass.STOPPED, VerdictClass.DEAD, VerdictClass.INIT_HANG, VerdictClass.ERROR})
"""Verdicts that the operating system or NCCL states outright."""
RAISE_LIMITS = "raise the CPU limits of the job's containers or pods, or take them away"


def newcomers(case: Case) -> Iterator[Hypothesis]:
    """Processes that were sampled once: where they stand is known, and others may wait for them; whether they move is not."""
    standing, number = case.standing, len(case.newcomers)
    if standing is None or not number or standing.cause in (Cause.ALL_ENDED, Cause.ONE_SAMPLE, Cause.PROGRESS):
        return
    if standing.accuses and not case.newcomers.isdisjoint(standing.named):
        yield nobody(Cause.ONE_SAMPLE, follows=(*standing.follows, standing.rule))
        return
    what = "1 process was" if number == 1 else f"{number} processes were"
    line = f"{what} looked at only once so far: whether anything moves there is not known yet"
    yield replace(standing, missing=(*standing.missing, told(line, kind=FactKind.HALTED)))


def planes_beside(case: Case) -> Iterator[Hypothesis]:
    """What calls, GPUs with the shim, work requests and CPU limits say of those named; and copies that do not come back."""
    standing, job, facts = case.standing, case.job, case.facts
    if standing is None:
        return
    shim = ["device"] if any(member.last.device is not None for member in job.members) else []
    silent = facts.of(FactKind.GPU_SILENT) if shim else ()
    if not standing.suspects or not standing.accuses:
        if shim:
            yield replace(standing, missing=(*standing.missing, *silent)).seen_by(*shim)
        return
    named = standing.named
    # What the operating system states needs no word of the calls; finding that takes a while.
    findings = {} if "calls" in standing.planes or standing.verdict_class in STATED else case.findings
    behind = [(job.groups[number], finding) for number, finding in findings.items()]
    calls = [
        behind_fact(job, group, finding) for group, finding in behind
        if any(rank in group.members and group.members[rank][0].index in named for rank in finding.behind)
    ]  # fmt: skip
    gpus = [fact for index in sorted(named) if shim for fact in facts.about(FactKind.GPU_UNFINISHED, RankNode(index))[:GPU_LINES]]
    about = [fact for fact in facts.of(FactKind.WORK, WorkFact) if named & {fact.owner, fact.peer}]
    work = sorted(about, key=lambda fact: fact.owner not in named)[:WORK_LINES]
    held = [
        fact for fact in facts.of(FactKind.THROTTLED)
        if fact.strength is Strength.PROVEN and fact.subject in named and (fact.value or 0.0) >= HELD_BACK
    ]  # fmt: skip
    if calls or shim or work or held:
        beside, because = (*standing.beside, *calls, *gpus, *silent, *work), (*standing.because, *held)
        planes = [*(["calls"] if calls else []), *shim, *(["wire"] if work else [])]
        yield replace(standing, beside=beside, because=because).seen_by(*planes)


def all_held_back(job: Job) -> str:
    """What to say where CPU limits hold at least half of all ranks back; empty where they do not."""
    parts = [part for member in job.members if (part := held_back(member)) is not None and part >= HELD_BACK]
    if 2 * len(parts) < len(job.members) or not parts:
        return ""
    return (
        f"CPU limits hold {len(parts)} of {len(job.members)} ranks back, in {min(parts):.0%} to {max(parts):.0%} of their periods"
    )


# --- network and kernel logs, beside a verdict -------------------------------------------------------------------------

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
    told = list(dict.fromkeys((*_log_lines(case, verdict), *_nic_lines(case, verdict), *_flow_lines(case, verdict))))
    told = [(line, step) for line, step in told if line not in verdict.evidence]
    if not told:
        return verdict
    planes = verdict.planes if "nic" in verdict.planes else (*verdict.planes, "nic")
    fresh = dict.fromkeys(step for _, step in told if step and step not in verdict.next_steps)
    lines = [line for line, _ in told[:MAX_LINES]]
    return replace(verdict, evidence=(*verdict.evidence, *lines), next_steps=(*fresh, *verdict.next_steps), planes=planes)


_Lines = Iterator[tuple[str, str]]
"""(evidence, next step or nothing)"""


def _nic_lines(case: Case, verdict: Verdict) -> _Lines:
    """Every NIC in trouble that ranks of this verdict use, or that its link names."""
    # Whose port is down may have lost its operations to the error: of a rank that came late a few errors say nothing.
    late = verdict.verdict_class is VerdictClass.NOT_ENTERED
    if not late and verdict.verdict_class not in NETWORK_CLASSES:
        return
    ranks = {culprit.rank for culprit in verdict.culprits if culprit.rank is not None} | set(verdict.victims)
    device = verdict.link.device if verdict.link else ""
    hosts = {culprit.host for culprit in verdict.culprits}
    down = [port for port in case.facts.of(FactKind.PORT_DOWN, PortDown) if not port.nic.up]
    worn = [port for port in case.facts.of(FactKind.PORT_ERRORS, PortErrors) if port.nic.up and not late]
    ports: list[PortDown | PortErrors] = [*down, *worn]
    for port in sorted(ports, key=lambda port: (port.nic.host, not port.nic.used_by)):
        nic = port.nic
        near = [other for other in port.namesakes if not ranks or ranks & set(other.used_by)]
        called = device in names_of(nic) and not any(device in names_of(other) for other in near)
        if (not ranks or ranks & set(nic.used_by)) if nic.used_by else called and (nic.host in hosts or not hosts):
            users = sorted(set(nic.used_by) & ranks) or list(nic.used_by)
            who, verb = ("rank", "uses") if len(users) == 1 else ("ranks", "use")
            step = f"look at the path of {nic.label} on {nic.host}: its cable, transceiver and switch port, and congestion"
            if isinstance(port, PortDown):
                step = f"bring {nic.label} on {nic.host} up again, or look at its cable and switch port ('ip link', 'ibstat')"
            yield port.text + (f"; {who} {', '.join(map(str, users[:8]))} {verb} it" if users else ""), step


def _log_lines(case: Case, verdict: Verdict) -> _Lines:
    """The newest lines of the kernel's log on hosts of culprits: Xids, NIC errors, processes that it ended."""
    if not verdict.verdict_class.accuses and verdict.verdict_class is not VerdictClass.UNKNOWN:
        return
    hosts = {culprit.host for culprit in verdict.culprits}
    for host, facts in groupby(case.facts.of(FactKind.LOGGED, Logged), key=lambda fact: fact.host):
        for fact in list(facts)[-MAX_LINES:] if not hosts or host in hosts else ():
            line = fact.line
            named = any((culprit.host, culprit.pid) == (line.host, line.pid) for culprit in verdict.culprits)
            if line.pid is None or not verdict.culprits or named or _is_a_helpers(line, verdict):
                yield fact.text, OUT_OF_MEMORY if named and line.kind == "memory" else ""


def _is_a_helpers(line: KernelLogLine, verdict: Verdict) -> bool:
    """Whether another process was killed for want of memory shortly before, or since: a data loader's worker, perhaps."""
    began = verdict.since if verdict.since is not None else verdict.time
    if line.kind != "memory" or verdict.verdict_class not in MISSING_SOMETHING or began is None:
        return False
    return began - BEFORE_S <= line.wall_ns / 1e9


def _flow_lines(case: Case, verdict: Verdict) -> _Lines:
    """Connections in trouble; of a job that runs slowly its delays and work requests as well."""
    if verdict.verdict_class not in NETWORK_CLASSES:
        return
    slow = verdict.verdict_class.slow
    troubled, lost = case.facts.of(FactKind.FLOW_TROUBLE, FlowFact), case.facts.of(FactKind.LOST, FlowFact)
    yield from flow_lines(troubled, lost, verdict, slow=slow)
    if slow:
        flows = [flow for _, known in sorted(case.known.network.hosts.items()) for flow in known.flows]
        yield from ((line, "") for line in delay_lines(flows, verdict))
        named = {culprit.rank for culprit in verdict.culprits}
        work = [fact.text for fact in case.facts.of(FactKind.WORK, WorkFact) if fact.global_rank in named]
        yield from ((line, "") for line in work[:WORK_LINES])


# --- connections -------------------------------------------------------------------------------------------------------

MAX_FLOWS = 3
"""Bound: connections that are told of."""
LOST = LOSSY_SEGMENTS
"""Unit: segments that a culprit's sockets sent again in 30 s. Fewer are not spoken of. From: :data:`network.LOSSY_SEGMENTS`."""
WHERE_LOST = (
    "packets of {who} are lost on the way: look for errors and drops at the cable, the transceiver and the switch port "
    "(ethtool -S), and for queues that overflow"
)


def flow_lines(troubled: Sequence[FlowFact], lost: Sequence[FlowFact], verdict: Verdict, *, slow: bool) -> _Lines:
    """What is lost on connections, and which are in trouble; of a job that stands still (not ``slow``) nothing of slow ones.

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
    loss = _loss(lost, verdict.culprits, culprits) if slow else None
    if loss is not None:
        yield loss, WHERE_LOST.format(who=f"rank {min(culprits)}" if len(culprits) == 1 else "these ranks")
    yield from ((_flow_line(group, verdict.culprits), "") for group in together[:MAX_FLOWS])


def far_end(fact: FlowFact, culprits: Sequence[Culprit]) -> int | None:
    """The job's rank at the other end of a connection; ``None`` where it is not known, or several could be.

    Culprits are known by both ranks, also where nobody watches their hosts.
    """
    found, place = set(fact.far), (fact.flow.comm_hash, fact.flow.peer)
    for one in culprits if not fact.by_address else ():
        if one.rank is not None and one.communicator and (int(one.communicator.hash, 16), one.comm_rank) == place:
            found.add(one.rank)
    return next(iter(found)) if len(found) == 1 else None


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
    """That segments of the culprits' sockets are sent again, where each has more of it than any other socket."""
    flows = {fact.flow.socket.local: fact for fact in lost if fact.flow.socket is not None}
    near = {local for local, fact in flows.items() if _touches(fact, named, culprits)}
    theirs, others = (
        [int(fact.value or 0) for local, fact in flows.items() if (local in near) is side] for side in (True, False)
    )
    total = sum(theirs)
    if total < LOST or total <= len(theirs) * max(others, default=0):
        return None
    beside = f", {sum(others)} on {len(others)} others" if others else ""
    return (
        f"{total} segments retransmitted on {len(theirs)} connection{'s' * (len(theirs) > 1)}{beside}, in 30 s: packets are lost"
    )
