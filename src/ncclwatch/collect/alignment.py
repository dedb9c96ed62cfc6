"""Line up the operations of ranks that were attached at different times, by a key that is checked and never assumed.

``opCount`` counts launched plans, in some releases (2.27.3 to 2.30.7) only those in which this very rank has proxy work. So a key
is accepted only when the ranks' call signatures agree under it; else a rank is ``unaligned`` and never accused by its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.ledger import ALIKE, UNCOUNTED, UNLIKE, Ledger, Signature
from ncclwatch.model.rows import distinct

COMPARED = 64
"""Bound: newest operations that are compared with those of a partner."""

PARTNERS = 4
"""Bound: partners of the same communicator each rank is compared with before it is given up as unaligned."""


@dataclass(slots=True)
class Entries:
    """Ranks of communicators in flat columns, those of one communicator side by side.

    ``starts``: index of the first entry of each communicator, ``group``: its number. ``rows``: row in the ledger, ``called``: how
    many operations it has seen. ``aligned`` and ``offsets`` are the result: an ordinal of a row and its offset are the sequence
    number that the ranks have in common. ``proven``: by the communicator's creation or ``seqNumber``, which need no guess.
    """

    ledger: Ledger
    starts: NDArray[np.int64]
    group: NDArray[np.int64]
    ranks: NDArray[np.int64]
    rows: NDArray[np.int64]
    called: NDArray[np.int64] = field(init=False)
    aligned: NDArray[np.bool_] = field(init=False)
    offsets: NDArray[np.int64] = field(init=False)
    proven: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.called, self.offsets = self.ledger.called[self.rows], np.zeros(len(self.rows), np.int64)
        self.aligned, self.proven = np.zeros((2, len(self.rows)), np.bool_)
        if len(self.rows):
            self._align()

    @property
    def oldest(self) -> NDArray[np.int64]:
        """Sequence number of the oldest operation that is kept of each."""
        return self.offsets + np.maximum(self.called - self.ledger.depth, 0)

    def place_by_own_count(self) -> None:
        """Give those that no peer's calls put into line the place they count for themselves, where they do: ``proven`` all the
        same, and whoever judges them must not take it for granted that it is right.
        """
        ledger, rows = self.ledger, self.rows
        before, from_birth = ledger.before[rows], ledger.from_birth[rows]
        placed = ~self.aligned & (from_birth | (before != UNCOUNTED))
        self.offsets[placed] = np.where(from_birth, 0, before)[placed]
        self.proven |= placed

    @property
    def ends(self) -> NDArray[np.int64]:
        """Sequence number of the operation that each has not called yet."""
        return self.offsets + self.called

    def of(self, field: str, part: NDArray[np.int64], sequences: NDArray[np.int64]) -> NDArray[Any]:
        """A field of operations by entries and numbers, shape (entries, numbers); of what is not kept any other's."""
        columns = (sequences - self.offsets[part, None]) % self.ledger.depth
        found: NDArray[Any] = self.ledger.operations[field][self.rows[part, None], columns]
        return found

    def signature(self, entry: int, sequence: int) -> Signature | None:
        """What a rank called under a sequence number; ``None`` when not called or no longer kept."""
        return self.ledger.signature(int(self.rows[entry]), sequence - int(self.offsets[entry]))

    def _align(self) -> None:
        """Set ``aligned``, ``offsets`` and ``proven``."""
        before, (by_plans, has_plans) = self.ledger.before[self.rows], _offsets_by_op_count(self)
        offered = (
            (self.ledger.from_birth[self.rows], np.zeros_like(before), True),
            (before != UNCOUNTED, before, True),
            (has_plans, by_plans, False),
        )
        for (has, offsets, proven), turn in product(offered, range(PARTNERS)):
            candidate = has & ~self.aligned
            if not candidate.any():
                continue
            partner, of_line = _partners(self, candidate, turn)
            compared = np.flatnonzero(candidate & (partner != np.arange(len(partner))))
            theirs = np.where(of_line, self.offsets[partner], offsets[partner])
            agree = compared[_agree(self, compared, partner[compared], offsets[compared] - theirs[compared])]
            # Two that agree put each other into line.
            fresh = distinct(np.r_[agree, partner[agree][~of_line[agree]]])
            self.aligned[fresh] = True
            self.offsets[fresh] = offsets[fresh]
            self.proven[fresh] = proven

    def end(self, rank: int) -> int | None:
        """Of one communicator: the operation that a rank has not called yet; ``None`` where it is not in line."""
        found = self.ends[(self.ranks == rank) & self.aligned]
        return int(found[0]) if len(found) else None


def line_up(ledger: Ledger, groups: Sequence[Mapping[int, int]]) -> Entries:
    """The ranks of communicators (rank → row), lined up; each communicator has some. O(ranks x COMPARED), vectorised."""
    sizes = np.array([len(rows) for rows in groups], np.int64)
    ranks = np.array([rank for rows in groups for rank in rows], np.int64)
    rows = np.array([row for rows in groups for row in rows.values()], np.int64)
    return Entries(ledger, np.cumsum(sizes) - sizes, np.repeat(np.arange(len(sizes)), sizes), ranks, rows)


def _offsets_by_op_count(entries: Entries) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Where ``opCount`` rises by one with every collective kept, its difference to the ordinal is the rank's offset."""
    ledger, called = entries.ledger, entries.called
    kept = np.minimum(called, min(ledger.depth, COMPARED))
    ordinals = (called - kept)[:, None] + np.arange(max(1, int(kept.max())))
    counts = ledger.operations["op_count"][entries.rows[:, None], ordinals % ledger.depth].astype(np.int64)
    rises = np.diff(counts, axis=1) == 1
    steady = (rises | (ordinals >= called[:, None])[:, 1:]).all(axis=1) & (kept >= ALIKE)
    return counts[:, 0] - ordinals[:, 0], steady


def _partners(entries: Entries, candidate: NDArray[np.bool_], turn: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """For each entry one of its communicator to compare with, each turn another, in line where any is; and whether it is."""
    groups = len(entries.starts)
    in_line = np.bincount(entries.group, weights=entries.aligned, minlength=groups) > 0
    index = np.flatnonzero(np.where(in_line[entries.group], entries.aligned, candidate))
    number = np.bincount(entries.group[index], minlength=groups)
    wanted = np.cumsum(number) - number + (turn * number // PARTNERS + turn) % np.maximum(number, 1)
    partner = index[np.minimum(wanted, len(index) - 1)]
    return partner[entries.group], in_line[entries.group]


def _agree(entries: Entries, one: NDArray[np.int64], other: NDArray[np.int64], shift: NDArray[np.int64]) -> NDArray[np.bool_]:
    """For pairs of entries whether both call the same where they overlap; ``shift``: ordinal of the other minus the one's."""
    ledger, rows, called = entries.ledger, entries.rows, entries.called
    first = np.maximum(called - ledger.depth, 0)
    end = np.minimum(called[one] + shift, called[other])
    start = np.maximum.reduce([first[one] + shift, first[other], end - min(ledger.depth, COMPARED)])
    common = np.maximum(end - start, 0)
    width = max(1, int(common.max(initial=0)))
    ordinals = start[:, None] + np.arange(width)
    signatures = ledger.operations["signature"]
    own = signatures[rows[one][:, None], (ordinals - shift[:, None]) % ledger.depth]
    differs = own != signatures[rows[other][:, None], ordinals % ledger.depth]
    differs &= np.arange(width) < common[:, None]
    wrong = differs.sum(axis=1)
    last = differs[np.arange(len(common)), np.clip(common - 1, 0, None)]
    same = (wrong <= UNLIKE * common) | ((wrong == 1) & last)
    # Of a communicator seen from its creation on every call is known: there a few calls need no check, and more may differ.
    born = ledger.from_birth[rows[one]] & ledger.from_birth[rows[other]]
    return np.where(common < ALIKE, born, same | (born & (2 * wrong <= common)))
