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
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ncclwatch.engine.edges import End, Wait, Why
from ncclwatch.engine.evidence.base import Fact, FactKind, Source
from ncclwatch.engine.job import Group, Job, Member, launched
from ncclwatch.engine.transfers import Column, Transfers
from ncclwatch.model.state import Communicator, Direction

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "counts"


@dataclass(frozen=True, slots=True)
class OpenCall:
    """What one rank has open on a communicator, as its proxy knows it."""

    collective: str
    sequence: int
    nsteps: int

    def text(self) -> str:
        """``AllReduce #14, 96 steps a channel``."""
        return f"{self.collective or 'operation'} #{self.sequence}, {self.nsteps} steps a channel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch(Fact):
    """Disagreement inside one communicator: what each rank has open, and which ends were seen to disagree."""

    kind: FactKind = FactKind.OPEN_OTHER
    subject: int
    calls: dict[int, OpenCall]
    """rank in the communicator → what it has open"""
    pairs: list[tuple[End, End]]
    """(sender, receiver) of connections whose ends disagree"""

    def suspects(self) -> tuple[list[int], str, bool]:
        """Ranks of the communicator to name, how they were chosen, and whether it is a tie."""
        groups: dict[OpenCall, list[int]] = defaultdict(list)
        for rank, call in self.calls.items():
            groups[call].append(rank)
        sizes = sorted(len(ranks) for ranks in groups.values())
        if len(sizes) > 1 and sizes[-1] > sum(sizes[:-1]):
            majority = max(groups.values(), key=len)
            odd = sorted(set(self.calls) - set(majority))
            return odd, f"{len(majority)} ranks agree, {'this one does' if len(odd) == 1 else 'these do'} not", False
        involved = Counter(rank for pair in self.pairs for rank in (pair[0].key.source, pair[0].key.destination))
        always = [rank for rank, times in involved.items() if times == len(self.pairs)]
        if len(always) == 1 and len(self.pairs) > 1:
            return always, "it is one side of every disagreement", False
        return sorted(involved), "the groups are equally large: a tie", True

    def lines(self, job: Job) -> list[str]:
        """The groups and the disagreeing ends as evidence."""
        groups: dict[OpenCall, list[int]] = defaultdict(list)
        for rank, call in sorted(self.calls.items()):
            groups[call].append(rank)
        lines = [
            f"{', '.join(job.rank_name(self.subject, rank) for rank in ranks)}: {call.text()}"
            for call, ranks in sorted(groups.items(), key=lambda item: -len(item[1]))
        ]
        for sender, receiver in self.pairs:
            key = sender.key
            lines.append(
                f"channel {key.channel}: {job.rank_name(key.group, key.source)} sends steps {sender.sub.base} to "
                f"{sender.last_step} ({sender.operation.collective}), {job.rank_name(key.group, key.destination)} "
                f"expects {receiver.sub.base} to {receiver.last_step} ({receiver.operation.collective})"
            )
        return lines


class OpenCalls(Source):
    """What the two ends of each connection work on."""

    name = "open calls"
    plane = "state"
    kinds = frozenset({FactKind.OPEN_OTHER})

    def facts(self, case: Case) -> Iterator[Mismatch]:
        """Communicators in which two ends of a connection work on different operations. O(transfers)."""
        yield from find_mismatches(case.transfers)


def _open_text(job: Job, group_id: int) -> str:
    return f"ranks of communicator {job.groups[group_id].hash:016x} have different operations open"


def find_mismatches(transfers: Transfers) -> list[Mismatch]:
    """Communicators in which two ends of a connection work on different operations. O(transfers)."""
    pairs: dict[int, list[tuple[End, End]]] = defaultdict(list)
    odd = [_disagreeing(transfers, senders, receivers) for senders, receivers in transfers.pairs()]
    for sender, receiver in sorted(pair for pairs_of_turn in odd for pair in pairs_of_turn):
        pairs[transfers.group_of(sender).id].append((transfers.end(sender), transfers.end(receiver)))
    return [
        Mismatch(
            subject=group_id, source=OpenCalls.name, calls=_open_calls(transfers, group_id), pairs=found,
            describe=partial(_open_text, transfers.job, group_id),
        )
        for group_id, found in pairs.items()
    ]  # fmt: skip


def _disagreeing(transfers: Transfers, senders: Column, receivers: Column) -> list[tuple[int, int]]:
    """Those of the pairs that overlap and are not the same."""
    bases, other_bases = transfers.base[senders], transfers.base[receivers]
    steps, other_steps = transfers.nsteps[senders], transfers.nsteps[receivers]
    overlap = (bases < other_bases + other_steps) & (other_bases < bases + steps)
    other_name = (transfers.collective[senders] != transfers.collective[receivers]) & ~transfers.point_to_point[senders]
    odd = overlap & ((bases != other_bases) | (steps != other_steps) | other_name)
    return list(zip(senders[odd].tolist(), receivers[odd].tolist(), strict=True))


def _open_calls(transfers: Transfers, group_id: int) -> dict[int, OpenCall]:
    """The first collective each rank has open, by its sending side, else its receiving side."""
    calls: dict[int, OpenCall] = {}
    for direction in (Direction.SEND, Direction.RECV):
        rows = transfers.unfinished(direction)
        place = transfers.members.places[group_id]
        rows = rows[(transfers.group[rows] == place) & ~transfers.point_to_point[rows]]
        rows = rows[np.lexsort((transfers.channel[rows], transfers.op_count[rows]))]
        _, first = np.unique(transfers.rank[rows], return_index=True)
        for row in rows[np.sort(first)].tolist():
            operation = transfers.operation_of(row)
            call = OpenCall(operation.collective, operation.sequence, int(transfers.nsteps[row]))
            calls.setdefault(int(transfers.rank[row]), call)
    return calls


# --- counts of calls --------------------------------------------------------------------------------------------------

FAMILIAR = 3
"""Unit: calls. From: one call too many is the fault, another may be of before the job's loop; what a rank has called more often
than that on a communicator is nothing unheard of there.
"""


class SequenceCounts(Source):
    """NCCL's counts of collectives on each rank."""

    name = NAME
    plane = "state"
    kinds = frozenset({FactKind.CALLED_OTHER})

    def facts(self, case: Case) -> Iterator[Disagreement]:
        """Communicators in which the counts of two ranks contradict each other. O(ranks of communicators)."""
        found = (_disagreement(case.job.groups[number]) for number in sorted(case.job.groups))
        yield from (disagreement for disagreement in found if disagreement is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement(Fact):
    """Ranks of one communicator whose counts contradict each other: those to name, and what they called that others did not."""

    kind: FactKind = FactKind.CALLED_OTHER
    subject: int
    group: Group
    odd: Mapping[int, str]
    """rank in the communicator → the collective it has called more often than others"""
    how: str

    @property
    def tie(self) -> bool:
        """Whether nothing tells who of them is wrong."""
        return len(self.odd) == len(self.group.members)

    def lines(self, job: Job) -> list[str]:
        """The counts as evidence: one line for all ranks with the same."""
        alike: dict[str, list[int]] = {}
        for rank, (_, own) in sorted(self.group.members.items()):
            counts = sorted((name, count) for name, count in own.sequence_numbers.items() if count)
            text = ", ".join(f"{name} once" if count == 1 else f"{name} {count} times" for name, count in counts) or "nothing"
            alike.setdefault(text, []).append(rank)
        return [
            f"{', '.join(job.rank_name(self.group.id, rank) for rank in ranks[:8])} has called on communicator "
            f"{self.group.hash:016x}: {text}"
            for text, ranks in sorted(alike.items(), key=lambda item: -len(item[1]))
        ]


def _disagreement(group: Group) -> Disagreement | None:
    # Calls captured in a graph are counted on some ranks only (``ncclProfilerStartTaskEvents``, src/plugin/profiler.cc).
    counts = {rank: own.sequence_numbers for rank, (_, own) in group.members.items() if _counted(own)}
    if len(counts) < 2:
        return None
    first = next(iter(counts.values()))
    if all(own == first for own in counts.values()):
        return None
    kinds = {rank: tuple(sorted(own.items())) for rank, own in counts.items()}
    alike = Counter(kinds.values())
    called: dict[tuple[tuple[str, int], ...], str] = {}
    for kept in alike:
        for other in alike:
            name = _contradiction(dict(kept), dict(other))
            if name:
                called[kept] = name
    ahead = {rank: name for kept, name in called.items() for rank, kind in kinds.items() if kind == kept}
    if not ahead:
        return None
    # The one among many first; else who called what nobody, itself included, used to call there.
    most, times = alike.most_common(1)[0]
    minority = {rank: name for rank, name in ahead.items() if kinds[rank] != most}
    unheard = {rank: name for rank, name in ahead.items() if counts[rank][name] < FAMILIAR}
    if times > sum(alike.values()) - times and minority:
        odd, how = minority, f"{times} ranks agree"
    elif unheard and len(unheard) < len(ahead):
        odd, how = unheard, "what it called more often was hardly ever called on this communicator before"
    else:
        odd, how = ahead, "nothing tells which of them is wrong: a tie"
    return Disagreement(subject=group.id, source=NAME, group=group, odd=odd, how=how, describe=partial(_odd_text, group, odd))


def _odd_text(group: Group, odd: Mapping[int, str]) -> str:
    ranks = ", ".join(f"rank {rank} {name}" for rank, name in odd.items())
    return f"communicator {group.hash:016x}: called more often than by peers, which called something else: {ranks}"


def _counted(own: Communicator) -> bool:
    return bool(own.sequence_numbers) and not own.captured_plans


def _contradiction(mine: Mapping[str, int], other: Mapping[str, int]) -> str:
    """The collective in which the first is ahead of the second, where the second is ahead in another; empty where not so."""
    more = [name for name, count in mine.items() if count > other.get(name, 0)]
    less = any(count > mine.get(name, 0) for name, count in other.items())
    return more[0] if more and less else ""


class Lack(StrEnum):
    """What the counts say of a rank that has nothing open for those who wait for it."""

    LESS = "has not called an operation that the others have called, and waits elsewhere"
    OTHER = "has made as many calls as its peers, but not the one they wait in"


def lacks(job: Job, wait: Wait) -> Lack | None:
    """Why who is waited for in a collective has it not open; ``None``: the counts do not tell, or it has called it."""
    group, end = job.groups.get(wait.key.group), wait.end
    if group is not None and end is None and wait.why is Why.EMPTY and not wait.key.point_to_point:
        return _lacks_inside(group, wait)
    if group is None or end is None or wait.key.point_to_point:
        return None
    own_rank = group.rank_of(end.member)
    other_rank = wait.key.destination if own_rank == wait.key.source else wait.key.source
    if own_rank is None or other_rank not in group.members:
        return None
    (member, own), (peer, other) = group.members[own_rank], group.members[other_rank]
    if own.captured_plans or other.captured_plans:
        return None
    name, mine, theirs = end.operation.collective, own.sequence_numbers, other.sequence_numbers
    if mine:
        if theirs.get(name, 0) >= mine.get(name, 0):
            return None
        return Lack.OTHER if sum(theirs.values()) >= sum(mine.values()) else Lack.LESS
    called, by_peer = launched(member, own), launched(peer, other)
    if called is None or by_peer is None or called <= end.operation.sequence:
        return None
    return Lack.OTHER if by_peer > end.operation.sequence else Lack.LESS


def _lacks_inside(group: Group, wait: Wait) -> Lack | None:
    """The same where shared memory does not tell the operation: whether who is to write has called less than who is to read."""
    if wait.key.source not in group.members or wait.key.destination not in group.members:
        return None
    (writer, its), (reader, own) = group.members[wait.key.source], group.members[wait.key.destination]
    called, by_writer = launched(reader, own), launched(writer, its)
    return Lack.LESS if called is not None and by_writer is not None and by_writer < called else None


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
