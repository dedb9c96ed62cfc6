"""A verdict for people: the banner says who and why, then the evidence, what was not seen, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from ncclwatch.model.doing import Doing
from ncclwatch.model.verdict import CommunicatorRef, Culprit, LinkRef, OperationRef, Ticket, Verdict, VerdictClass
from ncclwatch.text import Style, clean, ranges
from ncclwatch.view.failures import failure_lines

# Enough for a person; --json has all of them.
MAX_CULPRITS = 16
MAX_LINES = 24
STATED = (Doing.GONE, Doing.ZOMBIE, Doing.STOPPED, Doing.TRACED)
"""What the class of the verdict says already."""


def verdict_lines(verdict: Verdict, style: Style) -> Iterator[str]:
    """All lines of a verdict, the most important first."""
    yield banner(verdict, style)
    yield from _culprits(verdict, style)
    if verdict.victims:
        noun = "rank" if len(set(verdict.victims)) == 1 else "ranks"
        yield f"  waiting    {noun} {ranges(verdict.victims)}"
    for label, text in _where(verdict):
        yield f"  {label:<10} {text}"
    yield from _list("failed, in the order of time", failure_lines(verdict), style)
    yield from _list("evidence", verdict.evidence, style)
    yield from _list("unlike its peers" if len(verdict.culprits) == 1 else "unlike their peers", verdict.differences, style)
    yield from _list("not observed", verdict.unobserved, style)
    yield from _list("next steps", verdict.next_steps, style, numbered=True)
    yield from knowledge_lines(verdict, style)


def knowledge_lines(verdict: Verdict, style: Style) -> Iterator[str]:
    """What is known of what was seen: each row with the likely cause and what to do."""
    if not verdict.knowledge:
        return
    yield f"  {style.dim('known (ncclwatch explain ID)')}"
    for advice in verdict.knowledge:
        fixed = f"; fixed in {advice.fixed_in}" if advice.fixed_in else "; no release has the fix" if advice.defect else ""
        kind = f"perhaps this known defect of NCCL{fixed}" if advice.defect else f"judged {advice.confidence:.0%} likely"
        yield f"    {style.bold(advice.row)} ({kind})"
        yield f"      seen: {clean(advice.seen, 300)}"
        yield f"      likely: {clean(advice.cause, 400)}"
        if advice.check:
            yield f"      to tell: {clean(advice.check, 300)}"
        for step in advice.do:
            yield f"      → {clean(step, 400)}"


def banner(verdict: Verdict, style: Style) -> str:
    """One line: class, summary, confidence."""
    word = str(verdict.verdict_class).upper().replace("-", " ")
    paint = (
        style.bad
        if verdict.verdict_class.accuses
        else style.warn
        if verdict.verdict_class is VerdictClass.UNKNOWN
        else style.good
    )
    sure = f"  (confidence {verdict.confidence:.0%})" if verdict.verdict_class.accuses else ""
    return f"{paint(word)}  {clean(verdict.summary, 500)}{sure}"


def _culprits(verdict: Verdict, style: Style) -> Iterator[str]:
    shown = verdict.culprits[:MAX_CULPRITS]
    for culprit in shown:
        yield f"  {style.bold('culprit')}    {style.bold(culprit_name(culprit))}"
        about = [clean(part, 300) for part in (culprit.stage, culprit.reason) if part and part != verdict.stage]
        about += [link_name(culprit.link)] if culprit.link and culprit.link != verdict.link else []
        if culprit.doing and culprit.doing[0] not in STATED:
            about.append("it " + Doing(culprit.doing[0]).words)
        if not culprit.observed:
            about.append("not read: no process of this rank was looked at")
        if about:
            yield f"             {'; '.join(about)}"
        if culprit.ticket is not None and (place := ticket_words(culprit.ticket, culprit.host)):
            yield f"             {place}"
    if len(verdict.culprits) > len(shown):
        yield f"             … and {len(verdict.culprits) - len(shown)} more (all of them with --json)"


def ticket_words(ticket: Ticket, host: str) -> str:
    """``Slurm job 4711  GPU-0f3a…  NIC mlx5_0``; empty where nothing but the host is known."""
    parts = [f"node {clean(ticket.node, 64)}"] if ticket.node not in ("", host) else []
    parts += [f"Slurm job {clean(ticket.job, 12)}"] if ticket.job else []
    within = f"{clean(ticket.namespace, 64)}/" if ticket.namespace else ""
    parts += [f"pod {within}{clean(ticket.pod, 128)}"] if ticket.pod else []
    parts += [clean(ticket.gpu_uuid, 48)] if ticket.gpu_uuid else []
    parts += [f"NIC {', '.join(clean(name, 32) for name in ticket.nics[:4])}"] if ticket.nics else []
    return "  ".join(parts)


def culprit_name(culprit: Culprit) -> str:
    """``rank 2  host node1  pid 4711  GPU 2``; what is not known is left out."""
    parts = []
    if culprit.rank is not None:
        parts.append(f"rank {culprit.rank}")
    elif culprit.comm_rank is not None:
        within = f" of communicator {culprit.communicator.hash}" if culprit.communicator else ""
        parts.append(f"rank {culprit.comm_rank}{within}")
    if culprit.host:
        parts.append(f"host {clean(culprit.host, 64)}")
    if culprit.pid is not None:
        parts.append(f"pid {culprit.pid}")
    if culprit.gpu is not None:
        parts.append(f"GPU {culprit.gpu}")
    return "  ".join(parts) or "unknown rank"


def operation_name(operation: OperationRef) -> str:
    """``AllReduce #14 (Ring/Simple)``."""
    number = f" #{operation.sequence}" if operation.sequence is not None else ""
    how = "/".join(clean(part, 16) for part in (operation.algorithm, operation.protocol) if part)
    return f"{clean(operation.name, 40)}{number}{f' ({how})' if how else ''}"


def communicator_name(communicator: CommunicatorRef) -> str:
    """``communicator 00f3… (4 ranks, data)``."""
    role = f", {clean(communicator.role, 40)}" if communicator.role else ""
    return f"communicator {communicator.hash} ({communicator.nranks} rank{'s' if communicator.nranks != 1 else ''}{role})"


def link_name(link: LinkRef) -> str:
    """``link rank 1 → rank 2 over net, channels 0-1, device mlx5_0``."""
    channels = f", channel{'s' if len(link.channels) != 1 else ''} {ranges(link.channels)}" if link.channels else ""
    device = f", device {clean(link.device, 40)}" if link.device else ""
    return f"link {link.source} → {link.destination} over {clean(link.transport, 20)}{channels}{device}"


def _where(verdict: Verdict) -> Iterator[tuple[str, str]]:
    if verdict.operation:
        yield "operation", operation_name(verdict.operation)
    if verdict.communicator:
        yield "in", communicator_name(verdict.communicator)
    if verdict.stage:
        yield "stage", clean(verdict.stage, 200)
    if verdict.link:
        yield "link", link_name(verdict.link).removeprefix("link ")
    if verdict.since is not None:
        yield "since", f"{datetime.fromtimestamp(verdict.since):%Y-%m-%d %H:%M:%S}"
    if verdict.verdict_class.accuses:
        yield "id", verdict.id


def _list(heading: str, lines: tuple[str, ...], style: Style, *, numbered: bool = False) -> Iterator[str]:
    if not lines:
        return
    yield f"  {style.dim(heading)}"
    for i, line in enumerate(lines[:MAX_LINES], 1):
        yield f"    {f'{i}.' if numbered else '-'} {clean(line, 500)}"
    if len(lines) > MAX_LINES:
        yield f"    … and {len(lines) - MAX_LINES} more (all of them with --json)"
