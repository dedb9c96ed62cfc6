"""The dependency graph of an iteration, from observed operations: compute segments, program order, collectives, matched messages.

Nothing is assumed of a schedule. An operation of a rank begins when the rank's segment of work before it ends, and ends a time
after the last of those it depends on has begun: all ranks of a collective, the senders of what a rank receives, and the
receivers of what it sends where a message does not fit into buffers. Arrays are over operations of ranks, sorted by rank and in
program order; everything is vectorised, a graph of networkx is made of the few operations that are explained only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(slots=True)
class Structure:
    """Who depends on whom; the same in every iteration of a pattern.

    ``rank`` of each operation; ``previous`` and ``following`` of the same rank, −1 at the ends. ``set_of`` is the set of
    operations whose beginnings an operation needs; sets are rows of ``members`` from ``offsets[s]`` to ``offsets[s + 1]``.
    """

    rank: Indices
    previous: Indices
    following: Indices
    set_of: Indices
    members: Indices
    offsets: Indices
    _levels: list[tuple[Indices, Indices, Indices]] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def sets(self) -> int:
        """Number of sets."""
        return len(self.offsets) - 1

    def latest_begin(self, begin: Times) -> Times:
        """For each set when the last of its members begins, shape (sets,)."""
        result: Times = np.maximum.reduceat(begin[self.members], self.offsets[:-1])
        return result

    def depends_on(self, operation: int) -> Indices:
        """The operations whose beginnings an operation needs, itself among them."""
        number = int(self.set_of[operation])
        return self.members[self.offsets[number] : self.offsets[number + 1]]

    def levels(self) -> list[tuple[Indices, Indices, Indices]]:
        """Sets in an order in which each comes after all it needs: for each level (members, where its sets begin in them, sets).

        O(memberships), once a pattern. Operations in a circle of needs (which no real iteration has) are left out.
        """
        if self._levels is None:
            self._levels = self._make_levels()
        return self._levels

    def _make_levels(self) -> list[tuple[Indices, Indices, Indices]]:
        sizes = np.diff(self.offsets)
        set_of_member = np.repeat(np.arange(self.sets), sizes)
        by_operation = np.argsort(self.members, kind="stable")
        belongs = set_of_member[by_operation]
        starts = np.searchsorted(self.members[by_operation], np.arange(len(self) + 1))
        by_set = np.argsort(self.set_of, kind="stable")
        users = np.searchsorted(self.set_of[by_set], np.arange(self.sets + 1))
        missing = sizes.copy()
        frontier = np.flatnonzero(self.previous < 0)
        levels: list[tuple[Indices, Indices, Indices]] = []
        while len(frontier):
            touched = belongs[ranges(starts[frontier], starts[frontier + 1])]
            distinct, numbers = np.unique(touched, return_counts=True)
            missing[distinct] -= numbers
            ready = distinct[missing[distinct] == 0]
            if not len(ready):
                break
            places = ranges(self.offsets[ready], self.offsets[ready + 1])
            begins = np.concatenate([[0], np.cumsum(sizes[ready])[:-1]]).astype(np.int64)
            levels.append((self.members[places], begins, ready))
            done = by_set[ranges(users[ready], users[ready + 1])]
            frontier = self.following[done]
            frontier = frontier[frontier >= 0]
        return levels


def ranges(begins: Indices, ends: Indices) -> Indices:
    """All numbers of many ranges, one after the other."""
    sizes = ends - begins
    total = int(sizes.sum())
    if not total:
        return np.zeros(0, np.int64)
    keep = sizes > 0
    begins, sizes = begins[keep], sizes[keep]
    steps = np.ones(total, np.int64)
    steps[0] = begins[0]
    marks = np.cumsum(sizes)[:-1]
    steps[marks] = begins[1:] - (begins[:-1] + sizes[:-1] - 1)
    return np.cumsum(steps)


def build(rank: Indices, joint: Indices, needs: Indices | None = None) -> Structure:
    """Make the structure of operations that are sorted by rank and in program order.

    ``joint`` numbers the collective an operation is part of, equal on all its ranks; −1 for messages. ``needs`` has shape (n, 2):
    operation, and an operation of another rank whose beginning it needs (a receive its send). O(n log n).
    """
    size = len(rank)
    index = np.arange(size)
    first = np.r_[True, rank[1:] != rank[:-1]] if size else np.zeros(0, np.bool_)
    last = np.r_[first[1:], True] if size else first
    previous, following = np.where(first, -1, index - 1), np.where(last, -1, index + 1)
    alone = np.flatnonzero(joint < 0)
    _, shared = np.unique(joint[joint >= 0], return_inverse=True)
    number = int(shared.max()) + 1 if len(shared) else 0
    set_of = np.empty(size, np.int64)
    set_of[joint >= 0] = shared
    set_of[alone] = number + np.arange(len(alone))
    members, sets = index, set_of
    if needs is not None and len(needs):
        members, sets = np.concatenate([members, needs[:, 1]]), np.concatenate([sets, set_of[needs[:, 0]]])
    order = np.lexsort((members, sets))
    offsets = np.searchsorted(sets[order], np.arange(number + len(alone) + 1))
    return Structure(
        rank.astype(np.int64), previous, following, set_of, members[order].astype(np.int64), offsets.astype(np.int64)
    )


@dataclass(slots=True)
class Weights:
    """Durations of one iteration in seconds, by operation: ``work`` before it begins, ``transfer`` from when the last it needs
    has begun to its end. ``begin`` and ``end`` are as observed.
    """

    work: Times
    transfer: Times
    begin: Times
    end: Times


def weigh(structure: Structure, begin: Times, end: Times, start: float | Times) -> Weights:
    """Split observed times into work and transfer. ``start`` is when each rank's iteration began (per operation or one time)."""
    before = np.where(structure.previous >= 0, end[structure.previous], start)
    transfer = end - structure.latest_begin(begin)[structure.set_of]
    return Weights(begin - before, transfer, begin, end)


def replay(structure: Structure, work: Times, transfer: Times, start: float | Times) -> tuple[Times, Times]:
    """Begin and end of every operation if the segments lasted as given. O(memberships), one pass of array operations a level."""
    starts = np.broadcast_to(np.asarray(start, np.float64), (len(structure),))
    begin = np.where(structure.previous < 0, starts + work, np.nan)
    end = np.full(len(structure), np.nan)
    by_set = np.argsort(structure.set_of, kind="stable")
    users = np.searchsorted(structure.set_of[by_set], np.arange(structure.sets + 1))
    for members, begins, sets in structure.levels():
        latest = np.maximum.reduceat(begin[members], begins)
        done = by_set[ranges(users[sets], users[sets + 1])]
        end[done] = np.repeat(latest, users[sets + 1] - users[sets]) + transfer[done]
        following = structure.following[done]
        more = following >= 0
        begin[following[more]] = end[done[more]] + work[following[more]]
    return begin, end
