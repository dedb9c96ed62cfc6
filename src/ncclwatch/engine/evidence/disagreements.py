"""What ranks of one communicator disagree in, as far as memory shows it: what they have open, and NCCL's own counts of calls.

Both ends of a connection count the same steps, so transfers that begin or end at different steps, or belong to different
collectives, prove that the ranks called different things. Who is wrong is a vote: the smaller group; else a rank that is part of
every disagreement; else a tie.

From 2.26 on NCCL counts the calls of each collective on each rank (``ncclComm.seqNumber``, kept for its RAS subsystem). Of ranks
that call the same things in the same order one is nowhere behind the other, however far its host has run ahead. Two ranks each
ahead of the other in something have called different things: sizes and order stay unseen, that much does not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from ncclwatch.engine.edges import End, Wait, Why
from ncclwatch.engine.evidence.base import Fact, FactKind, Source
from ncclwatch.engine.job import Group, Job, Member, launched
from ncclwatch.engine.transfers import Column, Transfers
from ncclwatch.model.state import Direction

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

TIE = "nothing tells which of them is wrong: a tie"


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement(Fact):
    """Ranks of one communicator (``subject``, by its id) that called different things: whom to name, and how that was chosen."""

    subject: int
    group: Group
    odd: Mapping[int, str]
    """rank in the communicator → what it called, or has open"""
    how: str
    lines: tuple[str, ...]
    """What each rank called, as evidence."""

    @property
    def tie(self) -> bool:
        """Whether nothing tells who of them is wrong."""
        return self.how == TIE

    @property
    def text(self) -> str:
        """Who called what."""
        ranks = ", ".join(f"rank {rank}: {what}" for rank, what in self.odd.items())
        return f"communicator {self.group.hash:016x}: ranks called different things: {ranks}"


def _said(job: Job, group: Group, called: Mapping[int, str]) -> tuple[list[list[int]], tuple[str, ...]]:
    """The ranks that called the same, most first, and a line for each."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, what in sorted(called.items()):
        alike[what].append(rank)
    found = sorted(alike.items(), key=lambda item: -len(item[1]))
    names = [", ".join(job.rank_name(group.id, rank) for rank in ranks[:SHOWN]) for _, ranks in found]
    where = f"on communicator {group.hash:016x}"
    return [ranks for _, ranks in found], tuple(f"{who} {where}: {what}" for who, (what, _) in zip(names, found, strict=True))


SHOWN = 8
"""Bound: ranks that called the same which are named in a line."""


def _majority(alike: list[list[int]]) -> list[int]:
    """Those of the ranks that are more than half of them and agree; none where there is no such group."""
    return alike[0] if alike and 2 * len(alike[0]) > sum(map(len, alike)) else []


# --- what is open -------------------------------------------------------------------------------------------------------


class OpenCalls(Source):
    """What the two ends of each connection work on."""

    name = "open calls"
    plane = "state"
    kinds = frozenset({FactKind.OPEN_OTHER})

    def facts(self, case: Case) -> Iterator[Disagreement]:
        """Communicators in which two ends of a connection work on different operations. O(transfers)."""
        t, pairs = case.transfers, defaultdict[int, list[tuple[End, End]]](list)
        odd = [pair for senders, receivers in t.pairs() for pair in _disagreeing(t, senders, receivers)]
        for sender, receiver in sorted(odd):
            pairs[int(t.group[sender])].append((t.end(sender), t.end(receiver)))
        for place, found in pairs.items():
            group, calls = t.members.groups[place], _open_calls(t, place)
            alike, lines = _said(case.job, group, calls)
            agree = _majority(alike)
            ranks, how = sorted(calls.keys() - agree), f"{len(agree)} ranks agree, the others do not"
            if not agree:
                involved = Counter(rank for sender, _ in found for rank in (sender.key.source, sender.key.destination))
                ranks = [rank for rank, times in involved.items() if times == len(found)]
                how = "it is one side of every disagreement"
                if len(ranks) != 1 or len(found) == 1:
                    ranks, how = sorted(involved), TIE
            yield Disagreement(
                kind=FactKind.OPEN_OTHER, subject=group.id, source=self.name, group=group, how=how,
                odd={rank: calls.get(rank, "another operation") for rank in ranks},
                lines=(*lines, *(_pair_text(case.job, *pair) for pair in found)),
            )  # fmt: skip


def _disagreeing(transfers: Transfers, senders: Column, receivers: Column) -> list[tuple[int, int]]:
    """Those of the pairs that overlap and are not the same."""
    bases, other_bases = transfers.base[senders], transfers.base[receivers]
    steps, other_steps = transfers.nsteps[senders], transfers.nsteps[receivers]
    overlap = (bases < other_bases + other_steps) & (other_bases < bases + steps)
    other_name = (transfers.collective[senders] != transfers.collective[receivers]) & ~transfers.point_to_point[senders]
    odd = overlap & ((bases != other_bases) | (steps != other_steps) | other_name)
    return list(zip(senders[odd].tolist(), receivers[odd].tolist(), strict=True))


def _open_calls(transfers: Transfers, place: int) -> dict[int, str]:
    """The first collective each rank has open, by its sending side, else its receiving side."""
    calls: dict[int, str] = {}
    for direction in (Direction.SEND, Direction.RECV):
        rows = transfers.unfinished(direction)
        rows = rows[(transfers.group[rows] == place) & ~transfers.point_to_point[rows]]
        rows = rows[np.lexsort((transfers.channel[rows], transfers.op_count[rows]))]
        _, first = np.unique(transfers.rank[rows], return_index=True)
        for row in rows[np.sort(first)].tolist():
            operation, steps = transfers.operation_of(row), int(transfers.nsteps[row])
            text = f"{operation.collective or 'operation'} #{operation.sequence}, {steps} steps a channel"
            calls.setdefault(int(transfers.rank[row]), text)
    return calls


def _pair_text(job: Job, sender: End, receiver: End) -> str:
    """Two ends of a connection that disagree."""
    key = sender.key
    return (
        f"channel {key.channel}: {job.rank_name(key.group, key.source)} sends steps {sender.sub.base} to {sender.last_step} "
        f"({sender.operation.collective}), {job.rank_name(key.group, key.destination)} expects {receiver.sub.base} to "
        f"{receiver.last_step} ({receiver.operation.collective})"
    )


# --- counts of calls --------------------------------------------------------------------------------------------------

FAMILIAR = 3
"""Unit: calls. From: one call too many is the fault, another may be of before the job's loop; what a rank has called more often
than that on a communicator is nothing unheard of there.
"""


class SequenceCounts(Source):
    """NCCL's counts of collectives on each rank."""

    name = "counts"
    plane = "state"
    kinds = frozenset({FactKind.CALLED_OTHER})

    def facts(self, case: Case) -> Iterator[Disagreement]:
        """Communicators in which the counts of two ranks contradict each other. O(ranks of communicators)."""
        for _, group in sorted(case.job.groups.items()):
            # Calls captured in a graph are counted on some ranks only (``ncclProfilerStartTaskEvents``, src/plugin/profiler.cc).
            views = ((rank, own) for rank, (_, own) in group.members.items() if own.sequence_numbers and not own.captured_plans)
            counts = {rank: own.sequence_numbers for rank, own in views}
            first = next(iter(counts.values()), None)
            ahead = _ahead(counts) if any(own != first for own in counts.values()) else {}
            if not ahead:
                continue
            alike, lines = _said(case.job, group, {rank: _counts_text(own) for rank, own in counts.items()})
            # The one among many first; else who called what nobody, itself included, used to call there.
            agree = _majority(alike)
            odd = {rank: name for rank, name in ahead.items() if agree and rank not in agree}
            how = f"{len(agree)} ranks agree"
            if not odd:
                odd = {rank: name for rank, name in ahead.items() if counts[rank][name] < FAMILIAR}
                how = "what it called more often was hardly ever called on this communicator before"
            if not odd or len(odd) == len(ahead):
                odd, how = ahead, TIE
            yield Disagreement(
                kind=FactKind.CALLED_OTHER, subject=group.id, source=self.name, group=group, odd=odd, how=how, lines=lines
            )


def _ahead(counts: Mapping[int, Mapping[str, int]]) -> dict[int, str]:
    """Ranks that are ahead of another in one collective which is ahead of them in another, with the collective."""
    ranks: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for rank, own in counts.items():
        ranks[tuple(sorted(own.items()))].append(rank)
    found: dict[int, str] = {}
    for mine, held in ranks.items():
        for theirs in map(dict, ranks):
            more = [name for name, count in mine if count > theirs.get(name, 0)]
            if more and any(count > dict(mine).get(name, 0) for name, count in theirs.items()):
                found |= dict.fromkeys(held, more[0])
    return found


def _counts_text(counts: Mapping[str, int]) -> str:
    called = (f"{name} once" if count == 1 else f"{name} {count} times" for name, count in sorted(counts.items()) if count)
    return f"has called {', '.join(called) or 'nothing'}"


class Lack(StrEnum):
    """What the counts say of a rank that has nothing open for those who wait for it."""

    LESS = "has not called an operation that the others have called, and waits elsewhere"
    OTHER = "has made as many calls as its peers, but not the one they wait in"


def lacks(job: Job, wait: Wait) -> Lack | None:
    """Why who is waited for in a collective has it not open; ``None``: the counts do not tell, or it has called it.

    Where shared memory does not tell the operation: whether who is to write has called less than who is to read.
    """
    group, end, key = job.groups.get(wait.key.group), wait.end, wait.key
    if group is None or key.point_to_point or (end is None and wait.why is not Why.EMPTY):
        return None
    own_rank, other_rank = (key.source, key.destination) if end is not None and end.sends else (key.destination, key.source)
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
        return Lack.LESS if by_peer < called else None
    name, sequence = end.operation.collective, end.operation.sequence
    if own.sequence_numbers:
        if other.sequence_numbers.get(name, 0) >= own.sequence_numbers.get(name, 0):
            return None
        return Lack.OTHER if by_peer >= called else Lack.LESS
    return None if called <= sequence else Lack.OTHER if by_peer > sequence else Lack.LESS


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
