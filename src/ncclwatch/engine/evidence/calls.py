"""Who has not called what its peers have (H1), and who called something else (H2): by records, open transfers and NCCL's counts.

Both ends of a connection count the same steps: transfers that begin or end elsewhere, or are of other collectives, prove that the
ranks called different things. So does each being ahead of the other in a count (``ncclComm.seqNumber``, from 2.26 on).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.alignment import Entries, line_up
from ncclwatch.collect.ledger import ALIKE, Ledger, Signature
from ncclwatch.engine.edges import SAID_BY_THE_OTHER, End, Wait, Why
from ncclwatch.engine.evidence.base import Fact, FactKind, Source
from ncclwatch.engine.transfers import Transfers
from ncclwatch.model.columns import Column, numbered
from ncclwatch.model.job import Group, Job, Member, launched
from ncclwatch.model.rows import distinct
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import OperationRef

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

SHOWN = 8
"""Bound: ranks that called the same which are named in a line."""
TIE = "nothing tells which of them is wrong: a tie"


# --- calls that were recorded --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Called(Fact):
    """What the ranks of a communicator (``subject``, by its id) have called; in words, who has not called what."""

    subject: int
    finding: CallsFinding


class Calls(Source):
    """API calls, where the calls plane recorded them."""

    kinds = frozenset({FactKind.CALLED})

    def facts(self, case: Case) -> Iterator[Called]:
        """What the ranks of each communicator have called, compared. O(ranks x depth)."""
        ledger, groups = case.known.ledger, case.job.groups
        if ledger is None:
            return
        findings = compare_groups(ledger, [ledger.rows_of(group) for group in groups.values()])
        for group, finding in zip(groups.values(), findings, strict=True):
            _leave_out_contradicted(group, finding, ledger)
            text = partial(_behind_text, case.job, group, finding) if finding.behind else str
            yield Called(kind=FactKind.CALLED, subject=group.id, finding=finding, describe=text)

    def coverage(self, case: Case) -> Iterator[str]:
        """That calls are not recorded, or cannot be lined up with those of the peers; replays of what was captured before."""
        known, captured = case.known.ledger, any(own.captured_plans for own in case.job.views)
        if known is None:
            yield "no calls were recorded"
        if captured and not (known and all(known.replays.get(known.process(m.info.host, m.info.pid)) for m in case.job.members)):
            yield "replays of CUDA graphs: no calls are seen of what was captured before calls were recorded; proxy steps are"
        unaligned = sum(len(finding.unaligned) for finding in case.findings.values())
        if unaligned:
            yield f"{unaligned} rank{'s' if unaligned > 1 else ''} whose calls cannot be lined up with those of their peers"


def _behind_text(job: Job, group: Group, finding: CallsFinding) -> str:
    what = finding.called.text() if finding.called else "the operation"
    behind = ", ".join(job.rank_name(group.id, rank) for rank in finding.behind)
    replays = " and replays of CUDA graphs" if any(own.captured_plans for _, own in group.members.values()) else ""
    return (
        f"calls{replays} on communicator {group.hash:016x}: {behind} has not called #{finding.sequence} ({what}), "
        f"{len(finding.waiting)} other ranks have"
    )


@dataclass(slots=True)
class CallsFinding:
    """Comparison of the aligned ranks of one communicator.

    ``behind``: ranks that have not called operation ``sequence`` while others (``waiting``) have. ``groups``: the signatures
    of the first operation that ranks called differently, with the ranks that called each, else empty; ``odd_sequence`` is its
    number, ``ago`` how many operations the foremost rank has called since, ``odd`` what is taken for wrong, ``how`` how that was
    decided. ``unaligned``: ranks that nothing can be said about.
    """

    sequence: int | None = None
    called: Signature | None = None
    behind: list[int] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    groups: dict[Signature, list[int]] = field(default_factory=dict)
    odd_sequence: int | None = None
    ago: int = 0
    odd: list[Signature] = field(default_factory=list)
    how: str = ""
    unaligned: list[int] = field(default_factory=list)


def compare_groups(ledger: Ledger, groups: Sequence[Mapping[int, int]]) -> list[CallsFinding]:
    """Compare what the ranks of each communicator (rank → row) have called. O(ranks x depth), vectorised."""
    findings = [CallsFinding() for _ in groups]
    filled = [finding for finding, rows in zip(findings, groups, strict=True) if rows]
    if not filled:
        return findings
    entries = line_up(ledger, [rows for rows in groups if rows])
    slowest, fastest = _least(entries, entries.ends), -_least(entries, -entries.ends)
    in_line = np.bincount(entries.group, weights=entries.aligned)
    comparable, unaligned = in_line >= 2, in_line < np.bincount(entries.group)
    bounds = np.r_[entries.starts, len(entries.rows)].tolist()
    odd, late = _first_inconsistent(entries, fastest, comparable), comparable & (slowest < fastest)
    for place in np.flatnonzero(late | (odd >= 0) | unaligned).tolist():
        finding, part = filled[place], np.arange(*bounds[place : place + 2])
        aligned = part[entries.aligned[part]]
        finding.unaligned = sorted(set(entries.ranks[part].tolist()) - set(entries.ranks[aligned].tolist()))
        if odd[place] >= 0:
            _describe_inconsistency(entries, aligned, int(odd[place]), finding)
            finding.ago = int(fastest[place]) - int(odd[place]) - 1
        if late[place]:
            # The operation that holds the group up is the one the slowest has not called.
            ahead = entries.ends[aligned] > slowest[place]
            finding.sequence = int(slowest[place])
            finding.behind = sorted(entries.ranks[aligned[~ahead]].tolist())
            finding.waiting = sorted(entries.ranks[aligned[ahead]].tolist())
            finding.called = entries.signature(int(aligned[ahead][0]), finding.sequence)
    return findings


def _least(entries: Entries, values: NDArray[np.int64]) -> NDArray[np.int64]:
    least: NDArray[np.int64] = np.minimum.reduceat(np.where(entries.aligned, values, np.iinfo(np.int64).max), entries.starts)
    return least


def _first_inconsistent(entries: Entries, fastest: NDArray[np.int64], comparable: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each communicator the first kept number under which ranks in line called different things; -1: none."""
    oldest = -_least(entries, -entries.oldest)
    length = np.where(comparable, np.clip(fastest - oldest, 0, entries.ledger.depth), 0)
    width = int(length.max(initial=0))
    if width == 0:
        return np.full(len(entries.starts), -1, np.int64)
    sequences = oldest[entries.group][:, None] + np.arange(width)
    inside = (sequences < entries.ends[:, None]) & (np.arange(width) < length[entries.group][:, None]) & entries.aligned[:, None]
    found = entries.of("signature", np.arange(len(entries.rows)), sequences)
    highest = np.maximum.reduceat(np.where(inside, found, np.uint64(0)), entries.starts, axis=0)
    lowest = np.minimum.reduceat(np.where(inside, found, np.iinfo(np.uint64).max), entries.starts, axis=0)
    differs = (highest != lowest) & (highest > 0)
    return np.where(differs.any(axis=1), oldest + differs.argmax(axis=1), -1)


def _describe_inconsistency(entries: Entries, aligned: NDArray[np.int64], sequence: int, finding: CallsFinding) -> None:
    """Who called what; taken for wrong are the smaller groups, else what nobody calls otherwise."""
    groups: dict[Signature, list[int]] = defaultdict(list)
    for entry in aligned.tolist():
        signature = entries.signature(entry, sequence)
        if signature is not None:
            groups[signature].append(entry)
    if len(groups) < 2:
        return
    finding.odd_sequence = sequence
    finding.groups = {signature: sorted(entries.ranks[callers].tolist()) for signature, callers in groups.items()}
    usual, *others = sorted(groups, key=lambda signature: -len(groups[signature]))
    if len(groups[usual]) > len(groups[others[0]]):
        finding.odd = others
        return
    finding.odd, finding.how = list(groups), "the groups are equally large: a tie"
    ledger, rows, number = entries.ledger, entries.rows[aligned], np.array([sequence])
    # What lies behind the calls of a row was called by whoever had the row before.
    kept = np.where(np.arange(ledger.depth) < ledger.called[rows][:, None], ledger.operations["signature"][rows], np.uint64(0))
    strange = [
        signature for signature, callers in groups.items()
        if np.count_nonzero(kept == entries.of("signature", np.array(callers[:1]), number)) == len(callers)
    ]  # fmt: skip
    if 0 < len(strange) < len(groups):
        finding.odd = strange
        finding.how = "the groups are equally large, but only one of them called what is called here otherwise"


def _leave_out_contradicted(group: Group, finding: CallsFinding, ledger: Ledger) -> None:
    """Take back who has called as often by NCCL's counts (records may be late), unless these count messages."""
    seen = list(group.members.values()) if finding.behind else []
    counted = all(own.sequence_numbers for _, own in seen)
    if not counted and any(ledger.messages(member.info, own) for member, own in seen):
        return
    most = max((group.launches[rank] for rank in finding.waiting if rank in group.launches), default=None)
    if most is not None:
        finding.behind = [rank for rank in finding.behind if group.launches.get(rank, -1) < most]


def operation_of(called: Signature | None, sequence: int | None) -> OperationRef:
    """A collective that was called, as a verdict names it."""
    return OperationRef(called.name if called is not None else "", sequence)


# --- ranks that called something else ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement(Fact):
    """Ranks called different things; ``odd``: whom to name, with what; ``how`` chosen; ``tie``: nothing tells who is wrong."""

    subject: int
    group: Group
    odd: Mapping[int, str]
    how: str
    lines: tuple[str, ...]
    tie: bool


def _vote(job: Job, group: Group, called: Mapping[int, str]) -> tuple[list[int], tuple[str, ...]]:
    """The ranks that agree and are more than half, if any are; and a line for each thing called, the most frequent first."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, what in sorted(called.items()):
        alike[what].append(rank)
    agree = next((ranks for ranks in alike.values() if 2 * len(ranks) > len(called)), [])
    lines = (
        f"{', '.join(job.rank_name(group.id, rank) for rank in ranks[:SHOWN])} on communicator {group.hash:016x}: {what}"
        for what, ranks in sorted(alike.items(), key=lambda item: -len(item[1]))
    )
    return agree, tuple(lines)


# --- what is open -------------------------------------------------------------------------------------------------------


class OpenCalls(Source):
    """What the two ends of each connection work on."""

    kinds = frozenset({FactKind.OPEN_OTHER})

    def facts(self, case: Case) -> Iterator[Disagreement]:
        """Communicators in which two ends of a connection work on different operations. O(transfers)."""
        t, pairs = case.transfers, defaultdict[int, list[tuple[End, End]]](list)
        odd = [pair for senders, receivers in t.pairs() for pair in _disagreeing(t, senders, receivers)]
        for sender, receiver in sorted(odd):
            pairs[int(t.group[sender])].append((t.end(sender), t.end(receiver)))
        for place, number, called in _otherwise_numbered(t):
            if place not in pairs:
                yield self._numbered(case.job, t.groups[place], number, called)
        for place, found in pairs.items():
            group, calls = t.groups[place], _open_calls(t, place)
            agree, lines = _vote(case.job, group, calls)
            ranks, how, tie = sorted(calls.keys() - agree), f"{len(agree)} ranks agree, the others do not", False
            if not agree:
                involved = Counter(rank for sender, _ in found for rank in (sender.key.source, sender.key.destination))
                ranks = [rank for rank, times in involved.items() if times == len(found)]
                how, tie = "it is one side of every disagreement", len(ranks) != 1 or len(found) == 1
                if tie:
                    ranks, how = sorted(involved), TIE
            names = {rank: calls.get(rank, "another operation") for rank in ranks}
            lines = (*lines, *(_pair_text(case.job, *pair) for pair in found))
            yield Disagreement(kind=FactKind.OPEN_OTHER, subject=group.id, group=group, odd=names, how=how, lines=lines, tie=tie)

    def _numbered(self, job: Job, group: Group, number: int, called: Mapping[int, Mapping[int, str]]) -> Disagreement:
        """Ranks have different collectives open under ``number``. The odd one called what nobody has open under any other."""
        elsewhere = {name for at, ranks in called.items() if at != number for name in ranks.values()}
        names = {rank: f"{name} #{number}" for rank, name in called[number].items()}
        agree, lines = _vote(job, group, names)
        odd = names.keys() - agree if agree else {rank for rank, name in called[number].items() if name not in elsewhere}
        tie = not 0 < len(odd) < len(names)
        how = TIE if tie else "the others agree" if agree else "nobody calls this there under any other number"
        told = {rank: names[rank] for rank in sorted(names if tie else odd)}
        return Disagreement(kind=FactKind.OPEN_OTHER, subject=group.id, group=group, odd=told, how=how, lines=lines, tie=tie)


def _disagreeing(transfers: Transfers, senders: Column, receivers: Column) -> list[tuple[int, int]]:
    """Those of the pairs that overlap and are not the same."""
    bases, other_bases = transfers.base[senders], transfers.base[receivers]
    steps, other_steps = transfers.nsteps[senders], transfers.nsteps[receivers]
    overlap = (bases < other_bases + other_steps) & (other_bases < bases + steps)
    other_name = (transfers.collective[senders] != transfers.collective[receivers]) & ~transfers.point_to_point[senders]
    odd = overlap & ((bases != other_bases) | (steps != other_steps) | other_name)
    return list(zip(senders[odd].tolist(), receivers[odd].tolist(), strict=True))


def _otherwise_numbered(transfers: Transfers) -> Iterator[tuple[int, int, dict[int, dict[int, str]]]]:
    """Communicators (by place) whose ranks have different collectives open under one number; the first such number; and what
    each rank has open, by number. Only where NCCL numbers all calls alike: from 2.26 on ``opCount`` skips those without a proxy.
    """
    t = transfers
    rows = np.flatnonzero(~t.point_to_point & (t.rank >= 0))
    operation, collective = numbered((t.group[rows], t.op_count[rows])), t.collective[rows]
    first = np.empty(int(operation.max(initial=-1)) + 1, np.int64)
    first[operation] = collective
    for place in distinct(t.group[rows][collective != first[operation]]).tolist():
        if not any(own.sequence_numbers for own in t.groups[place].views):
            called: dict[int, dict[int, str]] = defaultdict(dict)
            for row in rows[t.group[rows] == place].tolist():
                one = t.operation_of(row)
                called[one.sequence][int(t.rank[row])] = one.collective
            contested = [number for number, ranks in called.items() if len(set(ranks.values())) > 1]
            if contested:
                yield place, min(contested), called


def _open_calls(transfers: Transfers, place: int) -> dict[int, str]:
    """The first collective each rank has open, by its sending side, else its receiving side."""
    calls: dict[int, str] = {}
    for direction in (Direction.SEND, Direction.RECV):
        rows = transfers.unfinished(direction)
        rows = rows[(transfers.group[rows] == place) & ~transfers.point_to_point[rows]]
        rows = rows[np.lexsort((transfers.channel[rows], transfers.op_count[rows]))]
        for row in rows.tolist():
            if (rank := int(transfers.rank[row])) not in calls:
                operation, steps = transfers.operation_of(row), int(transfers.nsteps[row])
                calls[rank] = f"{operation.collective or 'operation'} #{operation.sequence}, {steps} steps a channel"
    return calls


def _pair_text(job: Job, sender: End, receiver: End) -> str:
    key = sender.key
    ends = [f"{end.sub.base} to {end.sub.base + end.sub.nsteps} ({end.operation.collective})" for end in (sender, receiver)]
    source, destination = (job.rank_name(key.group, rank) for rank in (key.source, key.destination))
    return f"channel {key.channel}: {source} sends steps {ends[0]}, {destination} expects {ends[1]}"


# --- counts of calls --------------------------------------------------------------------------------------------------


class SequenceCounts(Source):
    """NCCL's counts of collectives on each rank."""

    kinds = frozenset({FactKind.CALLED_OTHER})

    def facts(self, case: Case) -> Iterator[Disagreement]:
        """Communicators in which the counts of two ranks contradict each other. O(ranks of communicators)."""
        for _, group in sorted(case.job.groups.items()):
            # Calls captured in a graph are counted on some ranks only (``ncclProfilerStartTaskEvents``, src/plugin/profiler.cc).
            every = [own.sequence_numbers for own in group.views]
            if every.count(every[0]) == len(every):
                continue
            views = ((rank, own) for rank, (_, own) in group.members.items() if own.sequence_numbers and not own.captured_plans)
            ahead = _ahead(counts := {rank: own.sequence_numbers for rank, own in views})
            if not ahead:
                continue
            called = {
                rank: ", ".join(f"{n} {f'{k} times' if k != 1 else 'once'}" for n, k in sorted(own.items()) if k) or "nothing"
                for rank, own in counts.items()
            }
            agree, lines = _vote(case.job, group, {rank: f"has called {text}" for rank, text in called.items()})
            # The one among many first; else who called what nobody, itself included, used to call there.
            odd = {rank: name for rank, name in ahead.items() if agree and rank not in agree}
            how = f"{len(agree)} ranks agree"
            if not odd:
                odd = {rank: name for rank, name in ahead.items() if counts[rank][name] < ALIKE}
                how = "what it called more often was hardly ever called on this communicator before"
            if tie := not odd or len(odd) == len(ahead):
                odd, how = ahead, TIE
            yield Disagreement(kind=FactKind.CALLED_OTHER, subject=group.id, group=group, odd=odd, how=how, lines=lines, tie=tie)


def _ahead(counts: Mapping[int, Mapping[str, int]]) -> dict[int, str]:
    """Ranks that are ahead of another in one collective which is ahead of them in another, with the collective."""
    ranks: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for rank, own in counts.items():
        ranks[tuple(sorted(own.items()))].append(rank)
    found: dict[int, str] = {}
    for (mine, held), theirs in product(ranks.items(), map(Counter, map(dict, ranks))):
        more = [name for name, count in mine if count > theirs[name]]
        if more and theirs - Counter(dict(mine)):
            found |= dict.fromkeys(held, more[0])
    return found


def lacks_calls(job: Job, wait: Wait) -> bool | None:
    """Whether who is waited for has called less, or as much but not this; ``None``: counts do not tell, or it has called it."""
    group, end, key = job.groups.get(wait.key.group), wait.end, wait.key
    if group is None or key.point_to_point or (end is None and wait.why not in SAID_BY_THE_OTHER):
        return None
    sends = end.sends if end is not None else wait.why is Why.FULL
    own_rank, other_rank = (key.source, key.destination) if sends else (key.destination, key.source)
    if not {own_rank, other_rank} <= group.members.keys():
        return None
    (member, own), (peer, other) = group.members[own_rank], group.members[other_rank]
    called, by_peer = launched(member, own), launched(peer, other)
    if own.sequence_numbers and not other.captured_plans:
        # Who has called no collective has no counts.
        by_peer = sum(other.sequence_numbers.values())
    if called is None or by_peer is None:
        return None
    if end is None:
        return True if by_peer < called else None
    name, sequence = end.operation.collective, end.operation.sequence
    if not own.sequence_numbers:
        return None if called <= sequence else by_peer <= sequence
    # As often as this, and fewer in all: what it has left out came before, and shifts all that follows.
    as_often = other.sequence_numbers.get(name, 0) >= own.sequence_numbers.get(name, 0)
    return (by_peer < called or None) if as_often else by_peer < called


def called_less_often(job: Job, member: Member) -> Iterator[str]:
    """What a rank has called less often than another, where NCCL counts that from the communicator's creation on."""
    for group, own in job.held_by(member):
        for name, count in own.sequence_numbers.items():
            if count < (most := group.most_called[name]):
                yield f"{member.label} has called {name} {count} times on communicator {group.hash:016x}, others {most}"
