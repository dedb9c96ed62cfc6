"""What is told beside an explanation: calls, GPUs, requests and CPU limits of those it names; NICs, connections, kernel logs.

None of it names anybody, and only what concerns the ranks named is told.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np

from ncclwatch.collect.network_memory import LOSSY_SEGMENTS, way_of
from ncclwatch.engine.case import Case, Hypothesis, nobody
from ncclwatch.engine.edges import told
from ncclwatch.engine.evidence.base import FactKind, RankNode, Strength
from ncclwatch.engine.evidence.kernel import HELD_BACK, Logged, held_back
from ncclwatch.engine.evidence.nics import FlowFact, PortDown, PortErrors, names_of
from ncclwatch.engine.evidence.paths import PathFact
from ncclwatch.engine.evidence.work_requests import WorkFact
from ncclwatch.engine.explain_network import BEFORE_S
from ncclwatch.model.cause import Cause
from ncclwatch.model.columns import medians
from ncclwatch.model.job import Job
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, KernelLogLine
from ncclwatch.model.next_steps import OUT_OF_MEMORY, WHERE_LOST
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from ncclwatch.paths.findings import MOVE_APART

# --- beside a hypothesis -----------------------------------------------------------------------------------------------

GPU_LINES, WORK_LINES = 4, 4
"""Bound: lines of evidence from the device plane for one rank, and about work requests."""
STATED = frozenset({VerdictClass.STOPPED, VerdictClass.DEAD, VerdictClass.INIT_HANG, VerdictClass.ERROR})
"""Verdicts that the operating system or NCCL states outright."""


def newcomers(case: Case) -> Iterator[Hypothesis]:
    """Processes that were sampled once: where they stand is known, and others may wait for them; whether they move is not."""
    standing, number = case.standing, len(case.newcomers)
    if standing is None or not number or standing.cause in (Cause.ALL_ENDED, Cause.ONE_SAMPLE, Cause.PROGRESS):
        return
    if standing.verdict_class.accuses and not case.newcomers.isdisjoint(standing.named):
        yield nobody(Cause.ONE_SAMPLE, follows=(*standing.follows, standing.rule))
        return
    what = "1 process was" if number == 1 else f"{number} processes were"
    line = f"{what} looked at only once so far: whether anything moves there is not known yet"
    yield replace(standing, missing=(*standing.missing, told(line)))


def planes_beside(case: Case) -> Iterator[Hypothesis]:
    """What calls, GPUs with the shim, work requests and CPU limits say of those named; and copies that do not come back."""
    standing, job, facts = case.standing, case.job, case.facts
    if standing is None:
        return
    shim = ["device"] if job.shims else []
    silent, named = facts.of(FactKind.GPU_SILENT) if shim else (), standing.named
    if not standing.suspects or not standing.verdict_class.accuses:
        if shim:
            yield replace(standing, missing=(*standing.missing, *silent)).seen_by(*shim)
        return
    # What the operating system states needs no word of the calls; finding that takes a while.
    findings = {} if "calls" in standing.planes or standing.verdict_class in STATED else case.findings
    calls = [
        fact for number, finding in findings.items()
        if any(job.groups[number].members[rank][0].index in named for rank in finding.behind)
        for fact in facts.about(FactKind.CALLED, number)
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
    ranks, share = f"{len(parts)} of {len(job.members)} ranks", f"{min(parts):.0%} to {max(parts):.0%}"
    return f"CPU limits hold {ranks} back, in {share} of their periods"


# --- network and kernel logs, beside a verdict -------------------------------------------------------------------------

MAX_LINES = 6
"""Bound: evidence lines that one verdict gets of the network and the kernels."""
NETWORK_CLASSES = frozenset(
    {VerdictClass.HARDWARE, VerdictClass.SLOW_COMMUNICATION, VerdictClass.SLOW_MIXED, VerdictClass.UNKNOWN, VerdictClass.ERROR}
)
"""Verdicts that a NIC in trouble can explain; a stopped process is stopped whatever the network does."""
MISSING_SOMETHING = frozenset({VerdictClass.DEAD, VerdictClass.NOT_ENTERED, VerdictClass.INIT_HANG})
"""Verdicts that a helper process which was killed can explain."""
_Lines = Iterator[tuple[str, str]]
"""(evidence, next step or nothing)"""


def add_network(case: Case, verdict: Verdict) -> Verdict:
    """The verdict with what NICs, connections and kernel logs have to say about it, itself when that is nothing. Its id stays."""
    told = dict.fromkeys((*_log_lines(case, verdict), *_nic_lines(case, verdict), *flow_lines(case, verdict)))
    fresh = [(line, step) for line, step in told if line not in verdict.evidence]
    if not fresh:
        return verdict
    planes = verdict.planes if "nic" in verdict.planes else (*verdict.planes, "nic")
    steps = dict.fromkeys(step for _, step in fresh if step and step not in verdict.next_steps)
    lines = [line for line, _ in fresh[:MAX_LINES]]
    return replace(verdict, evidence=(*verdict.evidence, *lines), next_steps=(*steps, *verdict.next_steps), planes=planes)


PATH_CLASSES = NETWORK_CLASSES - {VerdictClass.ERROR, VerdictClass.HARDWARE} | {VerdictClass.RUNNING}
"""Verdicts that paths of flows can explain, or beside which they are worth knowing: a job whose flows collide runs."""


def add_paths(case: Case, verdict: Verdict, pace_of: Callable[[Job], tuple[float | None, float | None]]) -> Verdict:
    """The verdict with what is wrong with the paths of the job's flows, and what that costs; its id stays. ``pace_of`` tells of a
    job the seconds of an iteration, and the part of it that is lost against the healthy past; asked only where paths are wrong.
    """
    facts = case.facts.of(FactKind.PATH, PathFact) if verdict.verdict_class in PATH_CLASSES else ()
    if not facts:
        return verdict
    first, pace = facts[0], pace_of(case.job)
    steps = dict.fromkeys(fact.finding.step for fact in facts[:MAX_LINES])
    return replace(
        verdict, summary=f"{verdict.summary}; {first.finding.trouble}, {first.subject}{_price(first.value, *pace)}",
        evidence=(*verdict.evidence, *(f"{fact.text}{_price(fact.value, *pace)}" for fact in facts[:MAX_LINES])),
        next_steps=(*steps, *verdict.next_steps), planes=tuple(dict.fromkeys((*verdict.planes, "nic"))),
    )  # fmt: skip


def _price(share: float | None, iteration_s: float | None, lost: float | None) -> str:
    """What a share of the time of communication is of an iteration: it also computes, and no cause costs more than is lost."""
    if not share:
        return ""
    most = min(share, lost) if lost is not None else share
    seconds = f" ({most * iteration_s:.2f} s of {iteration_s:.2f} s)" if iteration_s else ""
    return f"; costs at most {most:.0%} of an iteration{seconds}, PREDICTED"


def _nic_lines(case: Case, verdict: Verdict) -> _Lines:
    """Every NIC in trouble that ranks of this verdict use, or that its link names."""
    # Whose port is down may have lost its operations to the error: of a rank that came late a few errors say nothing.
    late = verdict.verdict_class is VerdictClass.NOT_ENTERED
    if not late and verdict.verdict_class not in NETWORK_CLASSES:
        return
    ranks = _culprits(verdict) | set(verdict.victims)
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


def _culprits(verdict: Verdict) -> set[int]:
    return {culprit.rank for culprit in verdict.culprits if culprit.rank is not None}


# --- connections -------------------------------------------------------------------------------------------------------

MAX_FLOWS = 3
"""Bound: connections that are told of, and parts of the matrix of delays."""


def flow_lines(case: Case, verdict: Verdict) -> _Lines:
    """Connections in trouble; of a job that runs slowly also slow ones, what is lost, delays and work requests."""
    if verdict.verdict_class not in NETWORK_CLASSES:
        return
    slow, named, culprits = verdict.verdict_class.slow, verdict.culprits, _culprits(verdict)
    ranks = culprits | set(verdict.victims)
    said: dict[str, list[FlowFact]] = defaultdict(list)
    for fact in case.facts.of(FactKind.FLOW_TROUBLE, FlowFact):
        flow = fact.flow
        blocked = flow.state is FlowState.BLOCKED and flow.global_rank in culprits
        trouble = flow.state.is_trouble and (slow or flow.state is not FlowState.SLOW)
        if blocked or (trouble and (not ranks or flow.global_rank in ranks)):
            said[f"{flow.global_rank} {flow.direction} {flow.peer} {flow.state}"].append(fact)
    together = list(said.values())
    if slow and culprits:
        # Others' connections may be slower than they were, too: who reads this asks why the culprit's are.
        together = sorted((group for group in together if _touches(group[0], named, culprits)), key=_severity)
    loss = _loss(case.facts.of(FactKind.LOST, FlowFact), named, culprits) if slow else ""
    if loss:
        # Where flows collide, that is why a queue overflows.
        who = f"rank {min(culprits)}" if len(culprits) == 1 else "these ranks"
        yield loss, "" if MOVE_APART in verdict.next_steps else WHERE_LOST.format(who=who)
    yield from ((_flow_line(group, named), "") for group in together[:MAX_FLOWS])
    if slow:
        flows = [flow for _, known in sorted(case.known.network.hosts.items()) for flow in known.flows]
        yield from ((line, "") for line in delay_lines(flows, verdict))
        work = [fact for fact in case.facts.of(FactKind.WORK, WorkFact) if any(fact.global_rank == one.rank for one in named)]
        yield from ((fact.text, "") for fact in work[:WORK_LINES])


def far_end(fact: FlowFact, culprits: Sequence[Culprit]) -> int | None:
    """The job's rank at the other end of a connection, of culprits also where nobody watches their hosts; ``None``: unknown."""
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
    first, other = group[0].flow, far_end(group[0], named)
    peer = f"rank {other}" if other is not None else f"rank {first.peer} of its communicator"
    way = "to" if first.direction is Direction.SEND else "from"
    channels = sorted({fact.flow.channel for fact in group if fact.flow.channel is not None})
    over = f" over {first.device}" if first.device else ""
    where = f"channel{'s' if len(channels) != 1 else ''} {', '.join(map(str, channels))}"
    return f"rank {first.global_rank} {way} {peer}{over}, {where}: {group[0].text}"


def _loss(lost: Sequence[FlowFact], named: Sequence[Culprit], culprits: Collection[int]) -> str:
    """That segments of the culprits' sockets are sent again, where each has more of it than any other socket; else empty."""
    counts: dict[bool, dict[str, int]] = {True: {}, False: {}}
    for fact in lost:
        if fact.flow.socket is not None:
            counts[_touches(fact, named, culprits)][fact.flow.socket.local] = int(fact.value or 0)
    theirs, others = (list(found.values()) for found in counts.values())
    total = sum(theirs)
    if total < LOSSY_SEGMENTS or total <= len(theirs) * max(others, default=0):
        return ""
    beside = f", {sum(others)} on {len(others)} others" if others else ""
    where = f"{len(theirs)} connection{'s' * (len(theirs) > 1)}{beside}"
    return f"{total} segments retransmitted on {where}, in 30 s: packets are lost"


# --- delays ------------------------------------------------------------------------------------------------------------
#
# C4D's matrix of delays of a communicator: a row is a sender, a column a receiver, a cell a link. Delays are completion times of
# work requests (RDMA) or round trips (TCP).

SLOW_TIMES = 3.0
"""Unit: ratio. From: chosen: a delay so many times the usual is told."""
SLOW_SIGMAS = 6.0
"""Unit: robust standard deviations. From: the normal distribution: of a million healthy cells none is so far above by chance."""
OF_MAD = 1.4826
"""Fact: standard deviation of a normal distribution over its median absolute deviation."""
POLISHES = 3
"""Bound: rounds of the median polish; more change nothing."""
_CALLED = {FlowKind.RDMA: "completion of work requests", FlowKind.SOCKET: "TCP round trip"}


class SlowPart(NamedTuple):
    """A slow cell, row (no destination: −1) or column (no source); ``delay`` in the cells' unit, ``times`` the usual one."""

    source: int
    destination: int
    delay: float
    times: float


def slow_parts(cells: Mapping[tuple[int, int], Sequence[float]]) -> list[SlowPart]:
    """What stands out of the delays by (source, destination), worst first; a slow row explains its cells if it has several."""
    if len(cells) <= 2:
        return []
    pairs = sorted(cells)
    ranks, ends = np.unique(pairs, return_inverse=True)
    sides = ends.reshape(-1, 2).T
    delays = np.array([np.median(cells[pair]) for pair in pairs])
    level = float(np.median(np.log(delays)))
    logs = np.log(delays) - level
    least = max(float(np.log(SLOW_TIMES)), SLOW_SIGMAS * OF_MAD * float(np.median(np.abs(logs))))
    # Tukey's median polish: the level of each row and column that has several cells is taken out, so that one slow link does not
    # make its sender look slow. Logarithms make "so many times" the same at every level.
    several = np.array([np.bincount(side)[side] > 1 for side in sides])
    rest, levels = logs, np.zeros((2, len(ranks)))
    for way in (0, 1) * POLISHES:
        middle = np.where(several[way], medians(rest, sides[way])[0][sides[way]], 0.0)
        levels[way][sides[way]] += middle
        rest = rest - middle
    excess = np.where(several.all(axis=0), rest, logs)
    told = (levels[0][sides[0]] > least) | (levels[1][sides[1]] > least)
    parts = [
        SlowPart(*pairs[at], float(delays[at]), float(np.exp(excess[at]))) for at in np.flatnonzero((excess > least) & ~told)
    ]
    for way, at in np.argwhere(levels > least).tolist():
        place = (-1, int(ranks[at])) if way else (int(ranks[at]), -1)
        parts.append(SlowPart(*place, float(np.exp(level + levels[way, at])), float(np.exp(levels[way, at]))))
    return sorted(parts, key=lambda part: -part.times)


def delay_lines(flows: Iterable[FlowRecord], verdict: Verdict) -> list[str]:
    """What stands out in the matrices of the communicators that culprits belong to, worst first."""
    matrices: dict[tuple[int, FlowKind], dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    names: dict[int, dict[int, int | None]] = defaultdict(dict)
    for flow in flows:
        if (way := way_of(flow)) is not None:
            names[way.comm_hash][way.rank] = flow.global_rank
            if flow.sends_data and flow.delay_us:
                matrices[way.comm_hash, flow.kind][way.rank, way.peer].append(flow.delay_us)
    culprits, found = _culprits(verdict), list[tuple[float, str]]()
    for (comm, kind), cells in matrices.items():
        ranks = names[comm]
        what = f"delay matrix of communicator {comm:016x} ({_CALLED.get(kind, 'delay')}, {len(cells)} pairs)"
        for part in slow_parts(cells):
            if culprits & {ranks.get(part.source), ranks.get(part.destination)}:
                takes = f"takes {part.delay:.0f} µs, {part.times:.1f} times the usual"
                found.append((part.times, f"{what}: {_part_name(part, ranks)} {takes}"))
    return [line for _, line in sorted(found, reverse=True)[:MAX_FLOWS]]


def _part_name(part: SlowPart, names: Mapping[int, int | None]) -> str:
    source, destination = (
        f"rank {names[rank]}" if names.get(rank) is not None else f"rank {rank} of the communicator"
        for rank in (part.source, part.destination)
    )
    if part.destination < 0:
        return f"all that {source} sends"
    return f"all that {destination} receives" if part.source < 0 else f"from {source} to {destination}"
