"""What the calls plane says about a standstill: who has not called what the others have (H1), who called something else (H2).

Host call time is not GPU time: a rank that has called an operation need not have begun it. So the calls plane names ranks that
did *not* call, and ranks whose call differs; what happens after the call is the state plane's business.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.alignment import Entries, align_entries, make_entries, rows_of
from ncclwatch.engine.evidence.base import Fact, FactKind, Source
from ncclwatch.engine.job import Group, Job, launched
from ncclwatch.engine.ledger import Ledger, Signature
from ncclwatch.model.events import Function
from ncclwatch.model.verdict import OperationRef

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "calls"


@dataclass(frozen=True, slots=True, kw_only=True)
class Called(Fact):
    """What the ranks of a communicator (``subject``, by its id) have called."""

    subject: int
    finding: CallsFinding


class Calls(Source):
    """API calls, where the calls plane recorded them."""

    name = NAME
    plane = "calls"
    kinds = frozenset({FactKind.CALLED})

    def facts(self, case: Case) -> Iterator[Called]:
        """What the ranks of each communicator have called, compared. O(ranks x depth)."""
        ledger, groups = case.known.ledger, case.job.groups
        if ledger is None:
            return
        findings = compare_groups(ledger, [rows_of(group, ledger, case.known.totals) for group in groups.values()])
        for group, finding in zip(groups.values(), findings, strict=True):
            _leave_out_contradicted(group, finding, ledger)
            text = partial(_text, case.job, group, finding)
            yield Called(kind=FactKind.CALLED, subject=group.id, source=NAME, finding=finding, describe=text)

    def coverage(self, case: Case) -> Iterator[str]:
        """That calls are not recorded, or cannot be lined up with those of the peers."""
        if case.known.ledger is None:
            yield "no calls were recorded"
        unaligned = sum(len(finding.unaligned) for finding in case.findings.values())
        if unaligned:
            yield f"{unaligned} ranks whose calls cannot be lined up with those of their peers"


def _text(job: Job, group: Group, finding: CallsFinding) -> str:
    lines = [behind_text(job, group, finding)] if finding.behind else []
    for signature in finding.odd_ones[0]:
        names = ", ".join(job.rank_name(group.id, rank) for rank in finding.groups[signature])
        lines.append(f"{names} called {signature.text()} as #{finding.odd_sequence}, unlike its peers")
    return "; ".join(lines) or f"all ranks of communicator {group.hash:016x} have called the same"


def behind_text(job: Job, group: Group, finding: CallsFinding) -> str:
    """Who has not called what."""
    what = finding.called.text() if finding.called else "the operation"
    behind = ", ".join(job.rank_name(group.id, rank) for rank in finding.behind)
    return (
        f"calls on communicator {group.hash:016x}: {behind} has not called #{finding.sequence} ({what}), "
        f"{len(finding.waiting)} other ranks have"
    )


@dataclass(slots=True)
class CallsFinding:
    """Comparison of the aligned ranks of one communicator.

    ``behind``: ranks that have not called operation ``sequence`` while at least one other has. ``groups``: the signatures of the
    first inconsistent operation with the ranks that called each; ``odd_sequence`` is its number, ``ago`` how many operations the
    foremost rank has called since, ``familiar`` how often each of its signatures stands elsewhere in what the ranks keep.
    ``unaligned``: ranks that nothing can be said about.
    """

    sequence: int | None = None
    called: Signature | None = None
    behind: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    groups: dict[Signature, list[int]] = field(default_factory=dict)
    odd_sequence: int | None = None
    ago: int = 0
    familiar: dict[Signature, int] = field(default_factory=dict)
    unaligned: list[int] = field(default_factory=list)

    @property
    def odd_ones(self) -> tuple[list[Signature], str]:
        """Signatures that are taken for wrong, and how it was decided: the smaller groups, else what nobody calls otherwise."""
        groups = sorted(self.groups.items(), key=lambda item: -len(item[1]))
        if len(groups) < 2:
            return [], ""
        if len(groups[0][1]) > len(groups[1][1]):
            return [signature for signature, _ in groups[1:]], ""
        strange = [signature for signature in self.groups if not self.familiar.get(signature)]
        if 0 < len(strange) < len(groups):
            return strange, "the groups are equally large, but only one of them called what is called here otherwise"
        return list(self.groups), "the groups are equally large: a tie"

    @property
    def inconsistent(self) -> bool:
        """Whether ranks called different things under the same sequence number."""
        return len(self.groups) > 1


def compare_groups(ledger: Ledger, groups: Sequence[tuple[dict[int, int], dict[int, tuple[int, int]]]]) -> list[CallsFinding]:
    """Compare what the ranks of each communicator have called: (rank → row, rank → total) each. O(ranks x depth), vectorised."""
    findings = [CallsFinding() for _ in groups]
    filled = [number for number, (rows, _) in enumerate(groups) if rows]
    if not filled:
        return findings
    entries = make_entries([groups[number] for number in filled])
    align_entries(ledger, entries)
    called = ledger.called[entries.rows].astype(np.int64)
    after = entries.offsets + called
    slowest, fastest = _least(entries, after), -_least(entries, -after)
    in_line = np.bincount(entries.group, weights=entries.aligned, minlength=len(entries.starts))
    comparable, unaligned = in_line >= 2, in_line < np.bincount(entries.group, minlength=len(entries.starts))
    odd = _first_inconsistent(ledger, entries, called, fastest, comparable)
    bounds = np.r_[entries.starts, len(entries.rows)].tolist()
    for place in np.flatnonzero((comparable & (slowest < fastest)) | (odd >= 0) | unaligned).tolist():
        part = slice(bounds[place], bounds[place + 1])
        finding = findings[filled[place]]
        finding.unaligned = sorted(entries.ranks[part][~entries.aligned[part]].tolist())
        if not comparable[place]:
            continue
        if odd[place] >= 0:
            _describe_inconsistency(ledger, entries, part, int(odd[place]), finding)
            finding.ago = int(fastest[place]) - int(odd[place]) - 1
        if slowest[place] < fastest[place]:
            _describe_behind(ledger, entries, part, after[part], int(slowest[place]), finding)
    return findings


def _least(entries: Entries, values: NDArray[np.int64]) -> NDArray[np.int64]:
    least: NDArray[np.int64] = np.minimum.reduceat(np.where(entries.aligned, values, np.iinfo(np.int64).max), entries.starts)
    return least


def _first_inconsistent(
    ledger: Ledger, entries: Entries, called: NDArray[np.int64], fastest: NDArray[np.int64], comparable: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """For each communicator the first sequence number under which its ranks called different things, -1 where there is none.

    Only what all aligned ranks still keep is compared.
    """
    first = entries.offsets + ledger.oldest_kept(called)
    oldest = -_least(entries, -first)
    length = np.where(comparable, np.clip(fastest - oldest, 0, ledger.depth), 0)
    width = int(length.max(initial=0))
    if width == 0:
        return np.full(len(entries.starts), -1, np.int64)
    sequences = oldest[entries.group][:, None] + np.arange(width)
    ordinals = sequences - entries.offsets[:, None]
    inside = (ordinals < called[:, None]) & (np.arange(width) < length[entries.group][:, None]) & entries.aligned[:, None]
    found = ledger.operations["signature"][entries.rows[:, None], ordinals % ledger.depth]
    highest = np.maximum.reduceat(np.where(inside, found, np.uint64(0)), entries.starts, axis=0)
    lowest = np.minimum.reduceat(np.where(inside, found, np.iinfo(np.uint64).max), entries.starts, axis=0)
    differs = (highest != lowest) & (highest > 0)
    return np.where(differs.any(axis=1), oldest + differs.argmax(axis=1), -1)


def _describe_inconsistency(ledger: Ledger, entries: Entries, part: slice, sequence: int, finding: CallsFinding) -> None:
    groups: dict[Signature, list[int]] = defaultdict(list)
    hashes: dict[Signature, np.uint64] = {}
    columns = (entries.ranks[part], entries.rows[part], entries.offsets[part], entries.aligned[part])
    for rank, row, offset, aligned in zip(*(column.tolist() for column in columns), strict=True):
        signature = ledger.signature(row, sequence - offset) if aligned else None
        if signature is not None:
            groups[signature].append(rank)
            hashes[signature] = ledger.operations["signature"][row, (sequence - offset) % ledger.depth]
    if len(groups) > 1:
        finding.groups = {signature: sorted(ranks) for signature, ranks in groups.items()}
        finding.odd_sequence = sequence
        kept = ledger.operations["signature"][entries.rows[part][entries.aligned[part]]]
        for signature, ranks in groups.items():
            finding.familiar[signature] = int(np.count_nonzero(kept == hashes[signature])) - len(ranks)


def _describe_behind(
    ledger: Ledger, entries: Entries, part: slice, after: NDArray[np.int64], slowest: int, finding: CallsFinding
) -> None:
    """The operation that holds the group up is the one the slowest has not called."""
    ranks, aligned = entries.ranks[part], entries.aligned[part]
    finding.sequence = slowest
    finding.behind = sorted(ranks[aligned & (after == slowest)].tolist())
    finding.waiting = sorted(ranks[aligned & (after > slowest)].tolist())
    leader = int(np.flatnonzero(aligned & (after > slowest))[0])
    finding.called = ledger.signature(int(entries.rows[part][leader]), slowest - int(entries.offsets[part][leader]))


def _leave_out_contradicted(group: Group, finding: CallsFinding, ledger: Ledger) -> None:
    """Take back that ranks have not called what others have, where NCCL's own counts say that they have called as often.

    A record may be lost, or late, at the very end of what was called; what was called is counted in the process itself. Not where
    NCCL counts launches alone, and those of messages among them.
    """
    seen = list(group.members.values()) if finding.behind else []
    places = (ledger.place(member.info.host, member.info.pid, own.address) for member, own in seen)
    if not all(own.sequence_numbers for _, own in seen) and any(place in ledger.point_to_point for place in places):
        return
    held = (rank for rank in (*finding.behind, *finding.waiting) if rank in group.members)
    counts = {rank: count for rank in held if (count := launched(*group.members[rank])) is not None}
    most = max((counts[rank] for rank in finding.waiting if rank in counts), default=None)
    if most is not None:
        finding.behind = [rank for rank in finding.behind if counts.get(rank, -1) < most]


def operation_of(called: Signature | None, sequence: int | None) -> OperationRef:
    """A collective that was called, as a verdict names it."""
    known = called is not None and called.function in Function._value2member_map_
    name = Function(called.function).name.title().replace("_", "") if called is not None and known else ""
    return OperationRef(name, sequence)
