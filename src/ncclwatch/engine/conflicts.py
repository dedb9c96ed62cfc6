"""Ranks of a job that runs which called something else than their peers: NCCL compares nothing, and the results are wrong.

Another size or type of one rank need not stop the job: as long as as many messages go as are waited for, NCCL goes on with
what it got. Here nothing stands still that would vouch for a finding, so the calls must prove it by themselves: the ranks are
lined up by counts that need no guess, agree again afterwards, and agree nowhere better when one of them is moved on or back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.alignment import KEYS, AlignedBy, Entries, align_entries, has_lost, make_entries, rows_of
from ncclwatch.engine.job import Job
from ncclwatch.engine.ledger import Ledger, Place, Signature
from ncclwatch.engine.topology.labels import Stage

AGREEING = 3
"""Unit: operations; so many since the first conflict must be the same on all ranks, and more than half; as often a context must
be met for what follows it to be a pattern. From: chosen: what is a call apart differs nearly everywhere.
"""
CONTEXTS = (64, 32, 16, 8, 4)
"""Bound: operations before a place by which it is found again in the job's pattern, the longest first."""
MOVED = 4
"""Bound: operations by which a rank is moved either way to see whether it agrees better there."""
COMPARED = 2048
"""Bound: newest operations of a communicator that are compared."""
KEPT_S = 60.0
"""Bound: seconds that a conflict is told at the least, however soon its calls are kept no longer."""
PAUSE, LEAST_PAUSE_S = 20, 1.0
"""Bound: the calls are looked at again after so many times as long as the last look took, and after so many seconds at the
least.
"""

StageOf = Callable[[str, int, int, int], Stage | None]
"""(host, pid, communicator's address or 0, calls made since) → where in the iteration that call stands."""
PROVEN = [number for number, key in enumerate(KEYS) if key in (AlignedBy.BIRTH, AlignedBy.SEQUENCE_NUMBER)]


@dataclass(frozen=True, slots=True)
class Conflict:
    """The newest operation of a communicator in which ranks called something else than the others."""

    group: int
    sequence: int
    called: dict[int, Signature]
    """rank → what it called, of the odd ones"""
    others: Signature | None
    """``None`` when as many called one thing as another, and what they call otherwise says nothing either."""
    times: int
    """In how many of the operations that are kept they did."""
    ago: int
    calls_ago: dict[int, int] = field(default_factory=dict)
    """rank → how many operations it has called on the communicator since, of the odd ones and one of the others"""
    stages: dict[int, str] = field(default_factory=dict)
    """rank → where in the iteration that call was, as far as that is known"""


@dataclass(slots=True)
class _Looked:
    """What the looks at one job have found."""

    next: float = 0.0
    """When to look again."""
    seen: dict[tuple[int, frozenset[int]], Conflict] = field(default_factory=dict)
    """Of the last look, by communicator and ranks: it takes two, since a loss of records may be known later than its gap."""
    told: dict[int, tuple[float, Conflict]] = field(default_factory=dict)
    """Communicator → (until when it is told, what was found last)"""


@dataclass(slots=True)
class ConflictWatch:
    """Looks at the calls of running jobs from time to time and remembers what it found until it looks again."""

    _jobs: dict[int, _Looked] = field(default_factory=dict)
    _lossy: set[str] = field(default_factory=set)
    """Hosts of which records were lost."""

    def find(
        self, job: Job, now: float, ledger: Ledger, totals: dict[Place, tuple[int, int]], stage_of: StageOf | None
    ) -> list[Conflict]:
        """What ranks of a job that runs called otherwise than their peers.

        O(ranks x COMPARED) at most once a second of the job's time, and for at most a twentieth of it.
        """
        if not ledger.rows or not job.groups:
            return []
        looked = self._jobs.setdefault(min(job.groups), _Looked())
        if now >= looked.next:
            begin = time.process_time()
            conflicts, oldest = find_conflicts(job, ledger, totals, self._lossy)
            found = {(one.group, frozenset(one.called)): _staged(job, one, stage_of) for one in conflicts}
            told = [found[kind] for kind in found.keys() & looked.seen.keys()]
            # What is kept no longer cannot be found again.
            told += [one for kind, one in looked.seen.items() if kind not in found and one.sequence < oldest.get(one.group, 0)]
            looked.told = {number: kept for number, kept in looked.told.items() if kept[0] > now}
            looked.told |= {conflict.group: (now + KEPT_S, conflict) for conflict in told}
            looked.seen, looked.next = found, now + max(LEAST_PAUSE_S, PAUSE * (time.process_time() - begin))
        told = [conflict for _, conflict in looked.told.values() if conflict.group in job.groups]
        return [conflict for conflict in told if not self._is_lossy(job, conflict.group)]

    def lose(self, source: str) -> None:
        """Records of a node were lost: its calls prove nothing any more. An empty source is all there is."""
        self._lossy.add(source)

    def _is_lossy(self, job: Job, number: int) -> bool:
        return bool(self._lossy) and any(has_lost(member, self._lossy) for member, _ in job.groups[number].members.values())

    def forget(self, groups: set[int]) -> None:
        """Drop what is known of jobs none of whose communicators is among these."""
        self._jobs = {which: looked for which, looked in self._jobs.items() if which in groups}


def find_conflicts(
    job: Job, ledger: Ledger, totals: dict[Place, tuple[int, int]], lossy: Collection[str] = ()
) -> tuple[list[Conflict], dict[int, int]]:
    """Communicators of a job in which a minority of ranks provably called something else than the others, and the oldest
    operation that was compared of each communicator. ``lossy``: hosts of which records were lost.
    """
    gathered = {number: rows_of(group, ledger, totals, lossy) for number, group in job.groups.items()}
    chosen = {number: pair for number, pair in gathered.items() if len(pair[0]) > 1}
    oldest: dict[int, int] = {}
    if not chosen:
        return [], oldest
    entries = make_entries(list(chosen.values()))
    align_entries(ledger, entries)
    proven = np.flatnonzero(entries.aligned & np.isin(entries.how, PROVEN))
    parts = np.split(proven, np.searchsorted(proven, entries.starts[1:]))
    found = [_conflict(ledger, entries, part, number, oldest) for part, number in zip(parts, chosen, strict=True)]
    return [conflict for conflict in found if conflict is not None], oldest


def _conflict(
    ledger: Ledger, entries: Entries, proven: NDArray[np.int64], group: int, compared_from: dict[int, int]
) -> Conflict | None:
    """What the ranks of one communicator whose places are proven (indices of their entries) contradict each other in."""
    if len(proven) < 2:
        return None
    rows, offsets = entries.rows[proven], entries.offsets[proven]
    called = ledger.called[rows].astype(np.int64)
    newest = int((offsets + called).min())
    oldest = max(int((offsets + ledger.oldest_kept(called)).max()), newest - COMPARED)
    compared_from[group] = oldest
    if newest - oldest <= AGREEING:
        return None
    sequences = np.arange(oldest, newest)
    signatures = ledger.operations["signature"][rows[:, None], (sequences - offsets[:, None]) % ledger.depth]
    if (signatures == signatures[0]).all():
        return None
    usual = _usual(signatures)
    odd = signatures != usual
    at = np.flatnonzero(odd.any(axis=0))
    culprits = np.flatnonzero(odd.any(axis=1))
    first = int(at[0])
    since = len(sequences) - first
    alike = since - len(at) >= AGREEING and 2 * len(at) < since
    if not alike or any(_is_moved(signatures[number, first:], usual[first:]) for number in culprits.tolist()):
        return None
    last = int(at[-1])
    ranks, sequence = entries.ranks[proven].tolist(), int(sequences[last])

    def called_by(number: int) -> Signature | None:
        return ledger.signature(int(rows[number]), sequence - int(offsets[number]))

    what = {ranks[number]: called_by(number) for number in np.flatnonzero(odd[:, last]).tolist()}
    like_others = np.flatnonzero(~odd[:, last]).tolist()
    others = called_by(like_others[0]) if like_others else None
    if (like_others and others is None) or any(signature is None for signature in what.values()):
        return None
    made = {rank: signature for rank, signature in what.items() if signature is not None}
    since_then = dict(zip(ranks, (called + offsets - sequence - 1).tolist(), strict=True))
    calls_ago = {rank: since_then[rank] for rank in [*made, *(ranks[number] for number in like_others[:1])]}
    return Conflict(group, sequence, made, others, len(at), len(sequences) - 1 - last, calls_ago)


def _staged(job: Job, conflict: Conflict, stage_of: StageOf | None) -> Conflict:
    """The conflict with the place in the iteration of what was called, told while the calls since can be counted.

    An odd call has no place in the pattern: it is that of what the others called.
    """
    found: dict[int, Stage] = {}
    group = job.groups[conflict.group]
    for rank, ago in conflict.calls_ago.items():
        if stage_of is not None and rank in group.members:
            member, own = group.members[rank]
            stage = stage_of(member.info.host, member.info.pid, own.address, ago)
            if stage is not None:
                found[rank] = stage
    usual = next((stage for rank, stage in found.items() if rank not in conflict.called), None)
    stages = {rank: (usual or stage).at_home_of(stage).text() for rank, stage in found.items() if rank in conflict.called}
    return replace(conflict, stages=stages)


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
    """What all ranks called after the operations that precede a place, by the longest such context; 0 if that is not one thing.

    ``agreed``: what all called, shape (operations,), 0 where they differ.
    """
    for length in CONTEXTS:
        context = agreed[max(0, column - length) : column]
        if len(context) < length or not context.all():
            continue
        windows = np.lib.stride_tricks.sliding_window_view(agreed[:-1], length)
        after = agreed[length:][(windows == context).all(axis=1)]
        after = after[after != 0]
        if len(after) >= AGREEING:
            return after[0] if (after == after[0]).all() else np.uint64(0)
    return np.uint64(0)


def _is_moved(own: NDArray[np.uint64], usual: NDArray[np.uint64]) -> bool:
    """Whether a rank agrees better with what the others called some operations earlier or later: it left a call out, made one too
    many, or was lined up wrongly.
    """
    differs = own != usual
    for by in range(1, min(MOVED, len(own) - 1) + 1):
        if np.count_nonzero(own[by:] != usual[:-by]) < np.count_nonzero(differs[by:]):
            return True
        if np.count_nonzero(own[:-by] != usual[by:]) < np.count_nonzero(differs[:-by]):
            return True
    return False
