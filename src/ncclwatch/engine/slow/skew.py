"""Hosts that call later than their fellows, where the GPUs' waits for each other do not show.

What NVLink joins waits in GPU memory: in the looks all members of such a communicator are at work while one of them is late.
Their calls are lined up: who calls an operation last keeps the others waiting from the last but one on. Hosts of one node have
one clock; clocks of several are compared with what they differed by while the job was healthy. Hosts run ahead of their GPUs,
each by a little more or less, so within the length of an iteration only the longest such wait counts, and only what is longer
than it was. Who is late because it waits for another that is late is not late by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.alignment import Entries, align_entries, make_entries, rows_of
from ncclwatch.engine.connections import is_hidden
from ncclwatch.engine.job import Group, Job
from ncclwatch.engine.ledger import Ledger, Place
from ncclwatch.engine.slow.lateness import LEAST_S, LEAST_SHARE, Lateness

FEWEST = 3
"""Iterations since the job is slow, and late ones among them, that it takes."""
EXPLAINS = 0.5
"""Part of the lost time for which a rank must keep its fellows waiting: then they wait, and do not work."""


@dataclass(slots=True)
class Skew:
    """By process: ``share`` of the time since the job is slow for which it kept all its fellows on the node waiting, in how many
    iterations (``late``), for how many ``seconds`` each; ``waits`` says who waited for such a one.
    """

    share: NDArray[np.float64]
    late: NDArray[np.int64]
    seconds: NDArray[np.float64]
    waits: NDArray[np.bool_]

    def joined(self, late: Lateness) -> Lateness:
        """Lateness, with what is late by this."""
        more = self.share > late.share
        return Lateness(
            np.where(more, self.share, late.share),
            np.where(more, self.late, late.late),
            late.seen,
            np.where(more, self.seconds, late.seconds),
        )


def measure_skew(
    job: Job, ledger: Ledger, totals: Mapping[Place, tuple[int, int]], since: Sequence[float], normal_s: float, now_s: float,
    lost: float,
) -> Skew:  # fmt: skip
    """Skew since a moment (seconds on each process's own clock); zeros where it cannot be told.

    ``normal_s`` and ``now_s``: length of an iteration before and since, ``lost``: the share of the time that is lost.
    O(operations the ledger keeps of communicators inside nodes).
    """
    found: dict[int, _Late] = {}
    groups = [group for group in job.groups.values() if _has_hidden(group)]
    known = [rows_of(group, ledger, totals) for group in groups]
    chosen = [(group, pair) for group, pair in zip(groups, known, strict=True) if len(pair[0]) == group.nranks]
    entries = make_entries([pair for _, pair in chosen])
    if chosen:
        align_entries(ledger, entries)
    moments = np.array(since)
    for number, (group, _) in enumerate(chosen):
        part = np.flatnonzero(entries.group == number)
        members = np.array([group.members[rank][0].index for rank in entries.ranks[part].tolist()])
        times = _times(ledger, entries, part)
        hosts = [job.member(index).info.host for index in members.tolist()]
        if times is not None and _on_one_clock(times, hosts, moments[members]):
            late = _latest_of(members, times, since[int(members[0])], normal_s, now_s)
            if late is not None and late.share >= max(EXPLAINS * lost, found[late.at].share if late.at in found else 0.0):
                found[late.at] = late
    return _by_itself(job, found)


def without_partners(job: Job, ledger: Ledger, skew: Skew, late: Lateness, lost: float) -> Skew:
    """The skew without those whose partner in a pipeline begins its iterations late, for long enough to explain what is lost.

    Stages are late together at their gradients; who is late from the first call on is who makes the other so.
    """
    first = [int(at) for at in np.flatnonzero(late.share >= max(EXPLAINS * lost, np.finfo(float).tiny))]
    share = skew.share.copy()
    for at in np.flatnonzero((skew.share > 0) & (late.share == 0)).tolist():
        if any(_exchange(job, ledger, at, other) for other in first):
            share[at] = 0.0
    return replace(skew, share=share)


def _exchange(job: Job, ledger: Ledger, one: int, other: int) -> bool:
    """Whether a process has called sends or receives to or from another."""
    info = job.member(one).info
    for group in job.groups.values():
        if one in group.ranks and other in group.ranks:
            own = group.members[group.ranks[one]][1]
            made = ledger.point_to_point.get(ledger.place(info.host, info.pid, own.address), {})
            if any(peer == group.ranks[other] for _, peer in made):
                return True
    return False


@dataclass(frozen=True, slots=True)
class _Late:
    """A process that is late in a communicator, and the others of it."""

    at: int
    share: float
    times: int
    seconds: float
    others: frozenset[int]


def _latest_of(
    members: NDArray[np.int64], times: NDArray[np.float64], since: float, normal_s: float, now_s: float
) -> _Late | None:
    """Who of a communicator is late since a moment more than it was before."""
    began = times.max(axis=0) >= since
    share, late, seconds = _latest(times[:, began], now_s, normal_s)
    usual, _, _ = _latest(times[:, ~began], normal_s, normal_s)
    share = np.maximum(share - usual, 0.0)
    worst = int(np.argmax(share))
    if late[worst] < FEWEST:
        return None
    others = frozenset(np.delete(members, worst).tolist())
    return _Late(int(members[worst]), float(share[worst]), int(late[worst]), float(seconds[worst]), others)


def _by_itself(job: Job, found: Mapping[int, _Late]) -> Skew:
    """Those that do not wait for another late one, and who on their nodes waits for them."""
    size = len(job.members)
    result = Skew(np.zeros(size), np.zeros(size, np.int64), np.zeros(size), np.zeros(size, np.bool_))
    own = [
        late
        for at, late in found.items()
        if not any(at in other.others and other.at not in late.others for other in found.values() if other.at != at)
    ]
    for late in own:
        result.share[late.at], result.late[late.at], result.seconds[late.at] = late.share, late.times, late.seconds
        host = job.member(late.at).info.host
        result.waits[[at for at in late.others if job.member(at).info.host == host]] = True
    result.waits &= result.share == 0
    return result


def _has_hidden(group: Group) -> bool:
    """Whether all ranks of a communicator are seen, and some of them are joined by what the host cannot see."""
    if group.nranks < 2 or len(group.members) < group.nranks:
        return False
    return any(is_hidden(own) for _, own in group.members.values())


def _on_one_clock(times: NDArray[np.float64], hosts: Sequence[str], since: NDArray[np.float64]) -> bool:
    """Put the times of all nodes on the clock of the first rank's, by what they differed by before; in place.

    ``since``: the moment on each rank's own clock. False where nothing is known of the past.
    """
    names = np.array(hosts)
    home = names == names[0]
    for host in dict.fromkeys(hosts[1:]):
        there = names == host
        if host == hosts[0]:
            continue
        first = int(np.argmax(there))
        past = (times[0] < since[0]) & (times[first] < since[first])
        if not past.any():
            return False
        times[there] -= float(np.median(times[there][:, past].mean(axis=0) - times[home][:, past].mean(axis=0)))
    return True


def _times(ledger: Ledger, entries: Entries, part: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """When each rank of a communicator called what all have called, seconds, shape (ranks, operations); ``None`` if unaligned."""
    if not entries.aligned[part].all():
        return None
    rows, offsets = entries.rows[part], entries.offsets[part]
    called = ledger.called[rows].astype(np.int64)
    sequences = np.arange(int((offsets + ledger.oldest_kept(called)).max()), int((offsets + called).min()))
    if not len(sequences):
        return None
    stamps = ledger.operations["time_ns"][rows[:, None], (sequences - offsets[:, None]) % ledger.depth]
    times: NDArray[np.float64] = stamps / 1e9
    return times


def _latest(
    times: NDArray[np.float64], iteration_s: float, normal_s: float
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.float64]]:
    """For each rank: the share of the time that all others waited for its calls, in how many stretches of the length of an
    iteration, and the mean of such a wait (s).
    """
    size = len(times)
    share, late, seconds = np.zeros(size), np.zeros(size, np.int64), np.zeros(size)
    if not times.size or iteration_s <= 0:
        return share, late, seconds
    order = np.sort(times, axis=0)
    waits, last = order[-1] - order[-2], np.argmax(times, axis=0)
    begin, end = float(order[-1].min()), float(order[-1].max())
    stretches = int((end - begin) / iteration_s)
    if stretches < FEWEST:
        return share, late, seconds
    stretch = np.minimum(((order[-1] - begin) / iteration_s).astype(np.int64), stretches - 1)
    longest = np.zeros((size, stretches))
    np.maximum.at(longest, (last, stretch), waits)
    counts = longest > max(LEAST_S, LEAST_SHARE * normal_s)
    late = counts.sum(axis=1)
    total = np.where(counts, longest, 0.0).sum(axis=1)
    share = np.minimum(total / (stretches * iteration_s), 1.0)
    seconds = np.divide(total, late, out=seconds, where=late > 0)
    return share, late, seconds
