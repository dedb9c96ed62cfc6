"""Inconsistent calls (H2), as far as memory still shows them: the two ends of a connection work on different operations.

Both ends of a connection count the same steps, so transfers that begin or end at different steps, or belong to different
collectives, prove that the ranks called different things. Who is wrong is a vote: the smaller group; else a rank that is part of
every disagreement; else a tie.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from ncclwatch.engine.columns import Column
from ncclwatch.engine.connections import End
from ncclwatch.engine.job import Job
from ncclwatch.engine.transfers import Transfers
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


def find_mismatches(transfers: Transfers) -> list[Mismatch]:
    """Communicators in which two ends of a connection work on different operations. O(transfers)."""
    pairs: dict[int, list[tuple[End, End]]] = defaultdict(list)
    odd = [_disagreeing(transfers, senders, receivers) for senders, receivers in transfers.pairs()]
    for sender, receiver in sorted(pair for pairs_of_turn in odd for pair in pairs_of_turn):
        pairs[transfers.group_of(sender).id].append((transfers.end(sender), transfers.end(receiver)))
    return [Mismatch(group_id, _open_calls(transfers, group_id), found) for group_id, found in pairs.items()]


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
