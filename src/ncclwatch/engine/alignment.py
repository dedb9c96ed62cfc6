"""Line up the operations of ranks that were attached at different times, by a key that is checked and never assumed.

No counter of NCCL lines ranks up by itself: ``opCount`` counts launched plans and in some releases (2.27.3 to 2.30.7) only
those in which this very rank has proxy work. So a key is proposed, and accepted only when the ranks' call signatures agree
under it; else the rank is ``unaligned`` and is never accused on account of its place in the sequence.

All communicators of a job are lined up at once, in flat columns: one entry a rank of a communicator, entries of one communicator
side by side.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.job import Group, Member
from ncclwatch.engine.ledger import Ledger, Place

AGREEMENT = 0.9
"""Unit: share of common operations whose signatures must agree. From: the tests and the simulated jobs with conflicting calls:
0.5 to 0.9 tell the same, at 0.98 one inconsistent operation unaligns a rank; chance must.
"""

MINIMUM_COMMON = 3
"""Unit: operations. From: the tests, where one tells the same, and eight leave out ranks that line up: of fewer in common nothing
is said.
"""

COMPARED = 64
"""Bound: newest operations that are compared with those of a partner."""

PARTNERS = 4
"""Bound: partners of the same communicator each rank is compared with before it is given up as unaligned."""


class AlignedBy(StrEnum):
    """The key that put a rank into line."""

    BIRTH = "seen from the communicator's creation on"
    SEQUENCE_NUMBER = "ncclComm.seqNumber"
    OP_COUNT = "ncclComm.opCount"
    UNALIGNED = "unaligned"


KEYS = (AlignedBy.BIRTH, AlignedBy.SEQUENCE_NUMBER, AlignedBy.OP_COUNT)


@dataclass(slots=True)
class Alignment:
    """For each rank of a communicator the offset that turns its ordinal (since attach) into the common sequence number."""

    offsets: dict[int, int] = field(default_factory=dict)
    how: dict[int, AlignedBy] = field(default_factory=dict)

    def sequence(self, rank: int, ordinal: int) -> int | None:
        """The common sequence number of a rank's ordinal, or ``None`` for an unaligned rank."""
        offset = self.offsets.get(rank)
        return None if offset is None else offset + ordinal


@dataclass(slots=True)
class Entries:
    """Ranks of communicators in flat columns, those of one communicator side by side.

    ``starts``: index of the first entry of each communicator. ``rows``: row in the ledger. ``totals``: what must be added to an
    ordinal to get NCCL's own ``seqNumber``; ``has_total`` says where that is known. ``aligned`` and ``offsets`` are the result;
    ``how`` indexes ``KEYS``.
    """

    starts: NDArray[np.int64]
    ranks: NDArray[np.int64]
    rows: NDArray[np.int64]
    totals: NDArray[np.int64]
    has_total: NDArray[np.bool_]
    aligned: NDArray[np.bool_] = field(init=False)
    offsets: NDArray[np.int64] = field(init=False)
    how: NDArray[np.int8] = field(init=False)
    group: NDArray[np.int64] = field(init=False)
    """Number of the communicator of each entry."""

    def __post_init__(self) -> None:
        number = len(self.rows)
        self.aligned, self.offsets = np.zeros(number, np.bool_), np.zeros(number, np.int64)
        self.how = np.full(number, -1, np.int8)
        sizes = np.diff(np.r_[self.starts, number])
        self.group = np.repeat(np.arange(len(self.starts)), sizes)


def has_lost(member: Member, hosts: Collection[str]) -> bool:
    """Whether a process is on one of the hosts of which records were lost; an empty name is all hosts there are."""
    return member.info.host in hosts or "" in hosts


def rows_of(
    group: Group, ledger: Ledger, totals: Mapping[Place, tuple[int, int]], left_out: Collection[str] = ()
) -> tuple[dict[int, int], dict[int, tuple[int, int]]]:
    """What is known of the calls of a communicator's ranks, as :func:`make_entries` takes it; not of hosts that are left out.

    ``totals``: communicator of a process → (NCCL's own count of collectives, calls in the ledger at that moment).
    """
    rows: dict[int, int] = {}
    counted: dict[int, tuple[int, int]] = {}
    for rank, (member, own) in group.members.items():
        if left_out and has_lost(member, left_out):
            continue
        place = ledger.place(member.info.host, member.info.pid, own.address)
        row = ledger.rows.get(place)
        if row is not None:
            rows[rank] = row
            if place in totals:
                counted[rank] = totals[place]
    return rows, counted


def make_entries(groups: Sequence[tuple[dict[int, int], dict[int, tuple[int, int]]]]) -> Entries:
    """Flat columns from (rank → row, rank → (NCCL's count, ordinal at that moment)) of each communicator."""
    sizes = [len(rows) for rows, _ in groups]
    ranks = [rank for rows, _ in groups for rank in rows]
    rows = [row for rows, _ in groups for row in rows.values()]
    known = [totals.get(rank) if totals else None for members, totals in groups for rank in members]
    return Entries(
        starts=np.cumsum([0, *sizes[:-1]], dtype=np.int64) if sizes else np.zeros(0, np.int64),
        ranks=np.array(ranks, np.int64),
        rows=np.array(rows, np.int64),
        totals=np.array([0 if pair is None else pair[0] - pair[1] for pair in known], np.int64),
        has_total=np.array([pair is not None for pair in known], np.bool_),
    )


def align(ledger: Ledger, rows: dict[int, int], totals: dict[int, tuple[int, int]] | None = None) -> Alignment:
    """Line up the ranks of one communicator; ``rows`` maps a rank to its row of the ledger.

    ``totals`` maps a rank to (collectives NCCL had counted in ``seqNumber``, ordinal in the ledger at that moment); it gives
    the offset outright where NCCL keeps it.
    """
    entries = make_entries([(rows, totals or {})])
    align_entries(ledger, entries)
    result = Alignment()
    for rank, aligned, offset, how in zip(
        entries.ranks.tolist(), entries.aligned.tolist(), entries.offsets.tolist(), entries.how.tolist(), strict=True
    ):
        result.how[rank] = KEYS[how] if aligned else AlignedBy.UNALIGNED
        if aligned:
            result.offsets[rank] = offset
    return result


def align_entries(ledger: Ledger, entries: Entries) -> None:
    """Set ``aligned``, ``offsets`` and ``how`` of all entries. O(entries x COMPARED), vectorised."""
    if not len(entries.rows):
        return
    called = ledger.called[entries.rows].astype(np.int64)
    by_plans, has_plans = _offsets_by_op_count(ledger, entries.rows, called)
    offered = (
        (ledger.from_birth[entries.rows], np.zeros(len(entries.rows), np.int64)),
        (entries.has_total, entries.totals),
        (has_plans, by_plans),
    )
    for number, (has, offsets) in enumerate(offered):
        for turn in range(PARTNERS):
            candidate = has & ~entries.aligned
            if not candidate.any():
                break
            partner, of_line = _partners(entries, candidate, turn)
            compared = np.flatnonzero(candidate & (partner >= 0) & (partner != np.arange(len(partner))))
            theirs = np.where(of_line, entries.offsets[partner], offsets[partner])
            agree = compared[_agree(ledger, entries.rows, called, offsets, partner, theirs, compared)]
            # Two that agree put each other into line.
            fresh = np.unique(np.r_[agree, partner[agree][~of_line[agree]]])
            entries.aligned[fresh] = True
            entries.offsets[fresh] = offsets[fresh]
            entries.how[fresh] = number


def _offsets_by_op_count(
    ledger: Ledger, rows: NDArray[np.int64], called: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where ``opCount`` rises by one with every collective kept, its difference to the ordinal is the rank's offset."""
    kept = np.minimum(called, min(ledger.depth, COMPARED))
    ordinals = (called - kept)[:, None] + np.arange(max(1, int(kept.max())))
    counts = ledger.operations["op_count"][rows[:, None], ordinals % ledger.depth].astype(np.int64)
    inside = ordinals < called[:, None]
    rises = np.diff(counts, axis=1) == 1
    steady = (rises | ~inside[:, 1:]).all(axis=1) & (kept >= MINIMUM_COMMON)
    return counts[:, 0] - ordinals[:, 0], steady


def _partners(entries: Entries, candidate: NDArray[np.bool_], turn: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each entry one entry of its communicator to compare it with, another one each turn, and whether that is in line.

    Entries in line are taken where there are any, else other candidates.
    """
    groups = len(entries.starts)
    in_line = np.bincount(entries.group, weights=entries.aligned, minlength=groups) > 0
    choice = np.where(in_line[entries.group], entries.aligned, candidate)
    index = np.flatnonzero(choice)
    number = np.bincount(entries.group[index], minlength=groups)
    first = np.cumsum(number) - number
    wanted = np.where(number > 0, first + (turn * number // PARTNERS + turn) % np.maximum(number, 1), -1)
    partner = np.where(wanted >= 0, index[np.clip(wanted, 0, None)], -1) if len(index) else np.full(groups, -1)
    return partner[entries.group], in_line[entries.group]


def _agree(
    ledger: Ledger,
    rows: NDArray[np.int64],
    called: NDArray[np.int64],
    offsets: NDArray[np.int64],
    partner: NDArray[np.int64],
    theirs: NDArray[np.int64],
    compared: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """For each entry of ``compared`` whether it calls the same operations as its partner where their sequences overlap."""
    other, shift = partner[compared], offsets[compared] - theirs[compared]
    own_called, other_called = called[compared], called[other]
    depth = min(ledger.depth, COMPARED)
    end = np.minimum(own_called + shift, other_called)
    own_first = ledger.oldest_kept(own_called) + shift
    other_first = ledger.oldest_kept(other_called)
    start = np.maximum.reduce([own_first, other_first, end - depth])
    common = np.maximum(end - start, 0)
    width = max(1, int(common.max(initial=0)))
    ordinals = start[:, None] + np.arange(width)
    inside = np.arange(width) < common[:, None]
    signatures = ledger.operations["signature"]
    own = signatures[rows[compared][:, None], (ordinals - shift[:, None]) % ledger.depth]
    differs = (own != signatures[rows[other][:, None], ordinals % ledger.depth]) & inside
    wrong = differs.sum(axis=1)
    last = differs[np.arange(len(common)), np.clip(common - 1, 0, None)]
    same = (wrong <= (1 - AGREEMENT) * common) | ((wrong == 1) & last)
    # Of a communicator seen from its creation on every call is known: there a few calls need no check, and more may differ.
    born = ledger.from_birth[rows[compared]] & ledger.from_birth[rows[other]]
    return np.where(common < MINIMUM_COMMON, born, same | (born & (2 * wrong <= common)))
