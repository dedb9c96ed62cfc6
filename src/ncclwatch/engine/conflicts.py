"""Ranks of a job that runs which called something else than their peers: NCCL compares nothing, and the results are wrong.

Nothing stands still that would vouch for it: ranks are lined up by counts that need no guess, and agree nowhere better. They
agree before and after; or they never do again, and call what nobody else calls, in whatever place.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.alignment import Entries, line_up
from ncclwatch.collect.ledger import ALIKE, Ledger, Signature
from ncclwatch.model.job import Group, Job
from ncclwatch.model.topology import Stage

CONTEXTS = (64, 32, 16, 8, 4)
"""Bound: operations before a place by which it is found again in the job's pattern, the longest first."""
MOVED = 4
"""Bound: operations by which a rank is moved either way to see whether it agrees better there."""
COMPARED = 2048
"""Bound: newest operations of a communicator that are compared."""
KEPT_S = 60.0
"""Bound: seconds that a conflict is told at the least, however soon its calls are kept no longer."""
PAUSE, LEAST_PAUSE_S = 20, 1.0
"""Bound: pause between two looks at the calls, in times that the last look took, and in seconds at the least."""

StageOf = Callable[[str, int, int, int], Stage | None]
"""(host, pid, communicator's address or 0, calls made since) → where in the iteration that call stands."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """The newest operation of a communicator in which ranks called something else than the others.

    ``called``: rank → what it called, of the odd ones; ``others``: what the others did, ``None`` when as many called one thing as
    another, and what they call otherwise says nothing either. ``times``: in how many of the operations that are kept they did;
    ``ago``: operations that were called since; ``stages``: rank → where in the iteration it was, as far as that is known.
    """

    group: int
    sequence: int
    called: dict[int, Signature]
    others: Signature | None
    times: int
    ago: int
    stages: dict[int, str]


Kind = tuple[int, frozenset[int]]
"""(communicator, ranks that called something else)"""


@dataclass(slots=True)
class _Looked:
    """Looks at one job: when the next is, what the last saw (it takes two), and until when what is told, by communicator."""

    next: float = 0.0
    seen: dict[Kind, Conflict] = field(default_factory=dict)
    told: dict[int, tuple[float, Conflict]] = field(default_factory=dict)


@dataclass(slots=True)
class ConflictWatch:
    """Looks at the calls of running jobs from time to time and remembers what it found until it looks again."""

    _jobs: dict[int, _Looked] = field(default_factory=dict)

    def find(self, job: Job, now: float, ledger: Ledger, stage_of: StageOf) -> list[Conflict]:
        """What ranks of a job that runs called otherwise; takes a twentieth of the job's time at most. O(ranks x COMPARED)."""
        if not ledger.rows or not job.groups:
            return []
        looked = self._jobs.setdefault(min(job.groups), _Looked())
        if now >= looked.next:
            begin = time.process_time()
            found, oldest = _find_conflicts(job, ledger, stage_of)
            looked.told = {number: kept for number, kept in looked.told.items() if kept[0] > now}
            for kind, one in looked.seen.items():
                # What is kept no longer cannot be found again.
                if kind in found or one.sequence < oldest.get(one.group, 0):
                    looked.told[one.group] = now + KEPT_S, found.get(kind, one)
            looked.seen, looked.next = found, now + max(LEAST_PAUSE_S, PAUSE * (time.process_time() - begin))
        told = [conflict for _, conflict in looked.told.values() if conflict.group in job.groups]
        return [conflict for conflict in told if _is_whole(job.groups[conflict.group], ledger)]

    def forget(self, groups: set[int]) -> None:
        """Drop what is known of jobs none of whose communicators is among these."""
        self._jobs = {which: looked for which, looked in self._jobs.items() if which in groups}


def _is_whole(group: Group, ledger: Ledger) -> bool:
    """Whether no records of any of its ranks' hosts were lost: else their calls prove nothing."""
    return not ledger.lossy or ledger.lossy.isdisjoint(("", *(member.info.host for member, _ in group.members.values())))


def _find_conflicts(job: Job, ledger: Ledger, stage_of: StageOf) -> tuple[dict[Kind, Conflict], dict[int, int]]:
    """Where a minority of ranks provably called something else, and of each communicator the oldest operation compared."""
    chosen = {group.id: ledger.rows_of(group) for group in job.groups.values() if _is_whole(group, ledger)}
    chosen = {number: rows for number, rows in chosen.items() if len(rows) > 1}
    found: dict[Kind, Conflict] = {}
    oldest: dict[int, int] = {}
    entries = line_up(ledger, list(chosen.values()))
    entries.place_by_own_count()
    proven = np.flatnonzero(entries.proven)
    parts = np.split(proven, np.searchsorted(proven, entries.starts[1:])) if chosen else []
    for number, part in zip(chosen, parts, strict=True):
        if len(part) > 1:
            newest = int(entries.ends[part].min())
            oldest[number] = max(int(entries.oldest[part].max()), newest - COMPARED)
            conflict = _conflict(job.groups[number], entries, part, np.arange(oldest[number], newest), stage_of)
            if conflict is not None:
                found[number, frozenset(conflict.called)] = conflict
    return found, oldest


def _conflict(
    group: Group, entries: Entries, part: NDArray[np.int64], sequences: NDArray[np.int64], stage_of: StageOf
) -> Conflict | None:
    """What the ranks of one communicator whose places are proven (indices of their entries) contradict each other in."""
    signatures = entries.of("signature", part, sequences)
    if len(sequences) <= ALIKE or (signatures == signatures[0]).all():
        return None
    usual = _usual(signatures)
    odd = signatures != usual
    at = np.flatnonzero(odd.any(axis=0))
    first, last = int(at[0]), int(at[-1])
    since = len(sequences) - first
    alike = since - len(at) >= ALIKE and 2 * len(at) < since and bool(entries.aligned[part].all())
    moved = (_is_moved(own[first:], usual[first:]) for own in signatures[odd.any(axis=1)])
    if not (alike or _is_throughout(signatures, usual, odd, first)) or any(moved):
        return None
    sequence, wrong, right = int(sequences[last]), part[odd[:, last]].tolist(), part[~odd[:, last]][:1].tolist()
    called = {entry: made for entry in (*wrong, *right) if (made := entries.signature(entry, sequence)) is not None}
    stages: dict[int, Stage] = {}
    for entry in called:  # Told while the calls since can be counted.
        member, own = group.members[int(entries.ranks[entry])]
        stage = stage_of(member.info.host, member.info.pid, own.address, int(entries.ends[entry]) - sequence - 1)
        if stage is not None:
            stages[entry] = stage
    # An odd call has no place in the pattern: it is that of what the others called.
    here = next((stages[entry] for entry in right if entry in stages), None)
    ranks = {entry: int(entries.ranks[entry]) for entry in wrong}
    return Conflict(
        group.id, sequence, {rank: called[entry] for entry, rank in ranks.items()},
        next((called[entry] for entry in right), None), len(at), len(sequences) - 1 - last,
        {ranks[entry]: (here or stages[entry]).at_home_of(stages[entry]).text() for entry in ranks.keys() & stages.keys()},
    )  # fmt: skip


def _is_throughout(signatures: NDArray[np.uint64], usual: NDArray[np.uint64], odd: NDArray[np.bool_], first: int) -> bool:
    """Whether no other place of the odd ranks could explain it: nobody else calls what they call where they are odd, and since
    the ``first`` of these places they call nowhere what the others called there.
    """
    rows = odd.any(axis=1)
    wrong, right = signatures[odd], np.broadcast_to(usual, odd.shape)[odd]
    foreign = not np.isin(wrong, signatures[~rows]).any() and not np.isin(right, signatures[rows, first:]).any()
    return bool(np.count_nonzero(odd.any(axis=0)) >= ALIKE and right.all() and foreign)


def _usual(signatures: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """What most ranks called, operation by operation; of as many what all call in that place of the job's pattern; else 0."""
    differ = (signatures != signatures[0]).any(axis=0)
    agreed: NDArray[np.uint64] = np.where(differ, np.uint64(0), signatures[0])
    usual = agreed.copy()
    for column in np.flatnonzero(differ).tolist():
        called, times = np.unique(signatures[:, column], return_counts=True)
        most = called[times == times.max()]
        expected = most[0] if len(most) == 1 else _in_that_place(agreed, column)
        usual[column] = expected if expected in most else 0
    return usual


def _in_that_place(agreed: NDArray[np.uint64], column: int) -> np.uint64:
    """What all called after the longest context that occurs again (``agreed``: 0 where ranks differ); 0: not one thing."""
    for length in CONTEXTS:
        context = agreed[max(0, column - length) : column]
        if len(context) < length or not context.all():
            continue
        windows = np.lib.stride_tricks.sliding_window_view(agreed[:-1], length)
        after = agreed[length:][(windows == context).all(axis=1)]
        after = after[after != 0]
        if len(after) >= ALIKE:
            return after[0] if (after == after[0]).all() else np.uint64(0)
    return np.uint64(0)


def _is_moved(own: NDArray[np.uint64], usual: NDArray[np.uint64]) -> bool:
    """Whether a rank agrees better some operations earlier or later: it left a call out, or was lined up wrongly."""
    differs = own != usual
    return any(
        np.count_nonzero(own[by:] != usual[:-by]) < np.count_nonzero(differs[by:])
        or np.count_nonzero(own[:-by] != usual[by:]) < np.count_nonzero(differs[:-by])
        for by in range(1, min(MOVED, len(own) - 1) + 1)
    )
