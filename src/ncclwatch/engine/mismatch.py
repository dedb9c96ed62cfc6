"""Inconsistent calls (H2), as far as memory still shows them: the two ends of a connection work on different operations.

Both ends of a connection count the same steps, so transfers that begin or end at different steps, or belong to different
collectives, prove that the ranks called different things. Who is wrong is a vote: the smaller group; else a rank that is part of
every disagreement; else a tie.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from ncclwatch.engine.connections import Connections, End
from ncclwatch.engine.job import Job
from ncclwatch.model.state import Direction


@dataclass(frozen=True, slots=True)
class OpenCall:
    """What one rank has open on a communicator, as its proxy knows it."""

    collective: str
    sequence: int
    nsteps: int

    def text(self) -> str:
        """``AllReduce #14, 96 steps a channel``."""
        return f"{self.collective or 'operation'} #{self.sequence}, {self.nsteps} steps a channel"


@dataclass(slots=True)
class Mismatch:
    """Disagreement inside one communicator: what each rank has open, and which ends were seen to disagree."""

    group_id: int
    calls: dict[int, OpenCall]
    """rank in the communicator → what it has open"""
    pairs: list[tuple[End, End]]
    """(sender, receiver) of connections whose ends disagree"""

    def suspects(self) -> tuple[list[int], str]:
        """Ranks of the communicator to name, and how they were chosen."""
        groups: dict[OpenCall, list[int]] = defaultdict(list)
        for rank, call in self.calls.items():
            groups[call].append(rank)
        sizes = sorted(len(ranks) for ranks in groups.values())
        if len(sizes) > 1 and sizes[-1] > sum(sizes[:-1]):
            majority = max(groups.values(), key=len)
            odd = sorted(set(self.calls) - set(majority))
            return odd, f"{len(majority)} ranks agree, {'this one does' if len(odd) == 1 else 'these do'} not"
        involved = Counter(rank for pair in self.pairs for rank in (pair[0].key.source, pair[0].key.destination))
        always = [rank for rank, times in involved.items() if times == len(self.pairs)]
        if len(always) == 1 and len(self.pairs) > 1:
            return always, "it is one side of every disagreement"
        return sorted(involved), "the groups are equally large: a tie"

    def lines(self, job: Job) -> list[str]:
        """The groups and the disagreeing ends as evidence."""
        groups: dict[OpenCall, list[int]] = defaultdict(list)
        for rank, call in sorted(self.calls.items()):
            groups[call].append(rank)
        lines = [
            f"{', '.join(job.rank_name(self.group_id, rank) for rank in ranks)}: {call.text()}"
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


def find_mismatches(job: Job, connections: Connections) -> list[Mismatch]:
    """Communicators in which two ends of a connection work on different operations. O(transfers)."""
    pairs: dict[int, list[tuple[End, End]]] = defaultdict(list)
    for key, senders in connections.senders.items():
        for sender in senders:
            for receiver in connections.receivers.get(key, ()):
                if sender.begun and receiver.begun and _disagree(sender, receiver):
                    pairs[key.group].append((sender, receiver))
    return [Mismatch(group_id, _open_calls(connections, group_id), found) for group_id, found in pairs.items()]


def _disagree(sender: End, receiver: End) -> bool:
    overlap = sender.sub.base < receiver.last_step and receiver.sub.base < sender.last_step
    if not overlap:
        return False
    same_steps = (sender.sub.base, sender.sub.nsteps) == (receiver.sub.base, receiver.sub.nsteps)
    if sender.key.point_to_point:
        return not same_steps
    return not same_steps or sender.operation.collective != receiver.operation.collective


def _open_calls(connections: Connections, group_id: int) -> dict[int, OpenCall]:
    """The first collective each rank has open, by its sending side, else its receiving side."""
    calls: dict[int, OpenCall] = {}
    for direction in (Direction.SEND, Direction.RECV):
        for end in sorted(connections.unfinished(direction), key=lambda e: (e.operation.op_count, e.key.channel)):
            if end.key.group != group_id or end.key.point_to_point:
                continue
            rank = end.key.source if direction is Direction.SEND else end.key.destination
            calls.setdefault(rank, OpenCall(end.operation.collective, end.operation.sequence, end.sub.nsteps))
    return calls
