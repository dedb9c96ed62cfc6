"""The dependency graph of one iteration, its critical path, and how long the iteration would have taken without a culprit.

Made of observed operations alone: nothing is assumed of a schedule. An operation of a rank begins when the rank's work before it
ends. It ends a time after the last of those it needs has begun: all ranks of a collective, the sender of what a rank receives,
and the receiver of what it sends where a message does not fit into buffers. Only what lies on the critical path costs time; what
waits for something later anyway is absorbed (MegaTrace III-C; VenusTrace 3.3, Appendix A). Arrays are over operations, sorted by
rank and in program order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
Indices = NDArray[np.int64]
Segment = tuple[int, bool]
"""An operation, and whether the work before it is meant (else its transfer)."""

BETA = 0.5
"""Fact: MegaTrace III-C, parameter m: the share of its expected time by which an anomalous segment is longer."""
LEAST_S = 0.002
"""Unit: s. From: threads that poll see a kernel's begin and end: by less no two times of GPUs differ (chosen, not measured)."""


@dataclass(slots=True)
class Operations:
    """What was observed of one iteration, sorted by rank and in program order.

    ``joint`` numbers the collective an operation is part of, equal on all its ranks; −1 for messages. ``needs`` has shape (n, 2):
    operation, and an operation of another rank whose beginning it needs (a receive its send). Times are seconds of nodes' clocks.
    """

    rank: Indices
    node: Indices
    joint: Indices
    needs: Indices
    begin: Times
    end: Times


class Level(NamedTuple):
    """Sets that need what earlier levels end: members and the operations that need them, ``sizes`` and ``users`` of each."""

    members: Indices
    sizes: Indices
    operations: Indices
    users: Indices


@dataclass(slots=True)
class Structure:
    """Who needs whom; the same in every iteration of a pattern.

    ``rank`` of each operation; ``previous`` and ``following`` of the same rank, −1 at the ends. ``set_of`` is the set of
    operations whose beginnings an operation needs; sets are rows of ``members`` from ``offsets[s]`` to ``offsets[s + 1]``.
    """

    rank: Indices
    previous: Indices
    following: Indices
    set_of: Indices
    members: Indices
    offsets: Indices
    _levels: list[Level] = field(default_factory=list, repr=False)

    def __len__(self) -> int:
        return len(self.rank)

    def needed_by(self, operation: int) -> Indices:
        """The operations whose beginnings an operation needs, itself among them."""
        number = int(self.set_of[operation])
        return self.members[self.offsets[number] : self.offsets[number + 1]]

    def levels(self) -> list[Level]:
        """All sets, each after all it needs. O(memberships), once a pattern. Operations that need each other in a cycle (which no
        real iteration has) are left out."""
        if self._levels:
            return self._levels
        sizes = np.diff(self.offsets)
        by_member, of_member = _grouped(self.members, len(self))
        by_set, of_set = _grouped(self.set_of, len(sizes))
        set_of_place, users, missing = np.repeat(np.arange(len(sizes)), sizes), np.diff(of_set), sizes.copy()
        begun = np.flatnonzero(self.previous < 0)
        while len(begun):
            touched = set_of_place[by_member[_ranges(of_member[begun], of_member[begun + 1])]]
            sets, numbers = np.unique(touched, return_counts=True)
            missing[sets] -= numbers
            ready = sets[missing[sets] == 0]
            if not len(ready):
                break
            members = self.members[_ranges(self.offsets[ready], self.offsets[ready + 1])]
            operations = by_set[_ranges(of_set[ready], of_set[ready + 1])]
            self._levels.append(Level(members, sizes[ready], operations, users[ready]))
            begun = self.following[operations]
            begun = begun[begun >= 0]
        return self._levels


def _grouped(keys: Indices, number: int) -> tuple[Indices, Indices]:
    """Places sorted by key, and where each key's places begin among them."""
    order = np.argsort(keys, kind="stable")
    return order, np.searchsorted(keys[order], np.arange(number + 1)).astype(np.int64)


def _ranges(begins: Indices, ends: Indices) -> Indices:
    """All numbers of many ranges, one after the other."""
    sizes = ends - begins
    numbers: Indices = np.repeat(ends - np.cumsum(sizes), sizes) + np.arange(sizes.sum())
    return numbers


def build(rank: Indices, joint: Indices, needs: Indices) -> Structure:
    """The structure of an iteration, of columns as of :class:`Operations`. O(n log n)."""
    index = np.arange(len(rank))
    first = np.ones(len(rank), np.bool_)
    first[1:] = rank[1:] != rank[:-1]
    _, set_of = np.unique(np.where(joint >= 0, joint, -1 - index), return_inverse=True)
    members, sets = np.concatenate([index, needs[:, 1]]), np.concatenate([set_of, set_of[needs[:, 0]]])
    order, offsets = _grouped(sets, int(set_of.max(initial=-1)) + 1)
    previous, following = np.where(first, -1, index - 1), np.where(np.roll(first, -1), -1, index + 1)
    return Structure(rank.astype(np.int64), previous, following, set_of, members[order], offsets)


@dataclass(slots=True)
class Weights:
    """Durations of one iteration in seconds, by operation: ``work`` before it begins, ``transfer`` from when the last it needs
    has begun to its end. ``begin`` and ``end`` are as observed.
    """

    work: Times
    transfer: Times
    begin: Times
    end: Times


def weigh(structure: Structure, begin: Times, end: Times, start: float) -> Weights:
    """Split observed times into work and transfer; ``start`` is when the iteration began."""
    before = np.where(structure.previous >= 0, end[structure.previous], start)
    latest = np.maximum.reduceat(begin[structure.members], structure.offsets[:-1])
    return Weights(begin - before, end - latest[structure.set_of], begin, end)


def replay(structure: Structure, work: Times, transfer: Times, start: float) -> tuple[Times, Times]:
    """Begin and end of every operation if the segments lasted as given. O(memberships), one pass of array operations a level."""
    begin = np.where(structure.previous < 0, start + work, np.nan)
    end = np.full(len(structure), np.nan)
    for members, sizes, operations, users in structure.levels():
        latest = np.maximum.reduceat(begin[members], np.cumsum(sizes) - sizes)
        end[operations] = np.repeat(latest, users) + transfer[operations]
        done = operations[structure.following[operations] >= 0]
        begin[structure.following[done]] = end[done] + work[structure.following[done]]
    return begin, end


def critical_path(structure: Structure, weights: Weights) -> list[Segment]:
    """Walk back from the last end: through each operation to whoever began last, and through its work to what it did before.

    O(path × group).
    """
    path: list[Segment] = []
    at = int(np.argmax(weights.end))
    while at >= 0 and len(path) < 2 * len(structure):
        path.append((at, False))
        needed = structure.needed_by(at)
        at = int(needed[np.argmax(weights.begin[needed])])
        path.append((at, True))
        at = int(structure.previous[at])
    return path[::-1]


def slack(structure: Structure, weights: Weights) -> Times:
    """How much later each operation's work could end without delaying the end of the iteration, seconds; shape (operations,).

    The latest-start pass of VenusTrace's Algorithm 3 over the levels in reverse.
    """
    latest_end = np.where(structure.following < 0, float(weights.end.max()), np.inf)
    latest_begin = np.full(len(structure), np.inf)
    for members, sizes, operations, users in reversed(structure.levels()):
        done = operations[structure.following[operations] >= 0]
        latest_end[done] = latest_begin[structure.following[done]] - weights.work[structure.following[done]]
        room = np.minimum.reduceat(latest_end[operations] - weights.transfer[operations], np.cumsum(users) - users)
        np.minimum.at(latest_begin, members, np.repeat(room, sizes))
    return latest_begin - weights.begin


@dataclass(frozen=True, slots=True)
class Anomaly:
    """A segment that took ``excess`` seconds more than ``expected``, and how much could have been absorbed (0 on the path)."""

    operation: int
    work: bool
    excess: float
    expected: float
    slack: float = 0.0


@dataclass(frozen=True, slots=True)
class PathResult:
    """What is odd in an iteration, the most first: on the critical path, and off it (``harmless``: bubbles absorbed it)."""

    culprits: list[Anomaly]
    harmless: list[Anomaly]


def analyse(
    structure: Structure, weights: Weights, expected: tuple[Times, Times], *, beta: float = BETA, clock_error_s: float = 0.0
) -> PathResult:  # fmt: skip
    """Blame what took longer than expected (work, transfer) by operation.

    Work is a difference of times of one rank. A transfer is one of two ranks' and may be wrong by ``clock_error_s``.
    """
    work, transfer = weights.work - expected[0], weights.transfer - expected[1]
    odd = work > np.maximum(beta * expected[0], LEAST_S)
    odd_transfer = transfer > np.maximum(beta * expected[1], max(LEAST_S, clock_error_s))
    culprits = []
    for at, is_work in critical_path(structure, weights):
        if is_work and odd[at]:
            culprits.append(Anomaly(at, True, float(work[at]), float(expected[0][at])))
            odd[at] = False
        elif not is_work and odd_transfer[at]:
            culprits.append(Anomaly(at, False, float(transfer[at]), float(expected[1][at])))
    room = slack(structure, weights) if odd.any() else work
    harmless = [
        Anomaly(at, True, float(work[at]), float(expected[0][at]), float(room[at])) for at in np.flatnonzero(odd).tolist()
    ]
    return PathResult(sorted(culprits, key=lambda one: -one.excess), sorted(harmless, key=lambda one: -one.excess))


def duration_without(structure: Structure, weights: Weights, anomalies: Iterable[Anomaly], start: float) -> float:
    """Duration of the iteration if the anomalies had taken what is expected of them, everything else unchanged."""
    work, transfer = weights.work.copy(), weights.transfer.copy()
    for anomaly in anomalies:
        if anomaly.work:
            work[anomaly.operation] = anomaly.expected
            continue
        # A collective ends for all its ranks: what delayed it delayed every member.
        same = (structure.set_of == structure.set_of[anomaly.operation]) & (transfer > anomaly.expected)
        transfer[same] -= max(0.0, anomaly.excess)
        transfer[anomaly.operation] = anomaly.expected
    return float(replay(structure, work, transfer, start)[1].max()) - start
