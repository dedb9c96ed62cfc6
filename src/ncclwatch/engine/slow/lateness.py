"""What the calls of host threads say of who is late: between iterations, inside nodes that NVLink joins, and between calls.

Between two iterations nothing is queued on the GPUs, so a host that makes the first call of an iteration late (a pause of a
garbage collector, a slow data loader) holds everybody up by as much. That is only so where hosts wait for their GPUs once an
iteration, so it is believed only if the iterations a rank was late in were longer by it. Times of different nodes are compared
with what they usually differ by; clock offsets cancel.

What NVLink joins waits in GPU memory: in the samples all members of such a communicator are at work while one of them is late.
Their calls are lined up (``Skew``): who calls an operation last keeps the others waiting from the last but one on. Hosts run
ahead of their GPUs, each by a little more or less, so within the length of an iteration only the longest such wait counts, and
only what is longer than it was. Who is late because it waits for another that is late is not late by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.alignment import Entries, align_entries, make_entries, rows_of
from ncclwatch.engine.connections import is_hidden
from ncclwatch.engine.job import Group, Job
from ncclwatch.engine.ledger import Ledger, Place
from ncclwatch.engine.slow.cadence import Cadence

LEAST_S, LEAST_SHARE = 0.01, 0.05
"""Seconds, and part of the normal iteration: less is no lateness. Unit: as said. From: chosen; the
least slow-down that counts is a twentieth.
"""
CLOSE = 0.5
"""So far apart at most do processes begin the same iteration while nothing is wrong. Unit: part of the normal iteration. From:
further apart they would be nearer to another one.
"""
ENOUGH = 3
"""Iterations of a kind that it takes to say anything of them: healthy, since the job is slow, and late ones. Unit: iterations.
From: the median of fewer is one outlier.
"""
EXPLAINS = 0.5
"""Part that must be explained by lateness: of its own seconds by longer iterations, of the lost time by fellows that it keeps
waiting. Unit: share. From: more than half, so that no two ranks explain the same loss.
"""
MOSTLY = 0.75
"""Part of the processes whose beginning of an iteration must be known for it to count. Unit: share. From: chosen; some have been
watched for less long, and a median of three of four is one.
"""
LONGEST_TIMES = 5.0
"""A stretch that many times the usual is no stretch of work but the wait for an iteration's end. Unit: ratio. From: chosen."""


@dataclass(slots=True)
class Lateness:
    """By process: ``share`` of the time that the others wait for its first call, ``late`` iterations of ``seen``, and the mean
    ``seconds`` of a late one.
    """

    share: NDArray[np.float64]
    late: NDArray[np.int64]
    seen: int
    seconds: NDArray[np.float64]
    usual: NDArray[np.float64] | None = None
    """By how much each usually begins after one of them, in seconds; ``None`` where no healthy past was at hand."""


def measure(
    cadences: Sequence[Cadence | None],
    since: Sequence[float],
    normal_s: float,
    equal: NDArray[np.int64],
    known_usual: NDArray[np.float64] | None = None,
) -> Lateness:
    """Lateness since a moment (seconds on each process's own clock); zeros where it cannot be told.

    Ranks are compared with their equals (``equal`` numbers sets of them, −1: none): stages of a pipeline end iterations at times
    of their own. ``known_usual`` is what was usual when the healthy past was still at hand. O(processes × iterations).
    """
    size = len(cadences)
    nothing = Lateness(np.zeros(size), np.zeros(size, np.int64), 0, np.zeros(size))
    known = [at for at, cadence in enumerate(cadences) if cadence is not None and len(cadence.iterations) >= ENOUGH]
    if len(known) < 2:
        return nothing
    reference = max(known, key=lambda at: len(cadences[at].iterations))  # type: ignore[union-attr]  # it is known
    iterations = list(cadences[reference].iterations)  # type: ignore[union-attr]
    table = _begins(cadences, since, known, reference, normal_s)
    begins = np.array([iteration.begin for iteration in iterations])
    complete = np.isfinite(table[known]).mean(axis=0) >= MOSTLY
    now = complete & (begins >= since[reference] - 1e-9)
    healthy = complete & (begins < since[reference] - 1e-9)
    if np.count_nonzero(now) < ENOUGH:
        return nothing
    usual = _median(table[:, healthy]) if np.count_nonzero(healthy) >= ENOUGH else known_usual
    late = np.nan_to_num(_beyond_equals(table, usual, equal)[:, now])
    durations = (np.array([iteration.end for iteration in iterations]) - begins)[now]
    counts = late > max(LEAST_S, LEAST_SHARE * normal_s)
    result = Lateness(np.zeros(size), counts.sum(axis=1), int(np.count_nonzero(now)), np.zeros(size), usual)
    for at in known:
        own = counts[at]
        if result.late[at] < ENOUGH:
            continue
        result.seconds[at] = float(late[at][own].mean())
        rest = float(np.median(durations[~own])) if np.count_nonzero(~own) >= ENOUGH else normal_s
        # An iteration's duration counts from the reference's first call: lateness of others lies in it, its own before it.
        length = durations if at != reference else durations + late[at]
        if float(length[own].mean()) - rest >= EXPLAINS * result.seconds[at]:
            result.share[at] = float(late[at][own].sum() / length.sum())
    return result


def _begins(
    cadences: Sequence[Cadence | None], since: Sequence[float], known: Sequence[int], reference: int, normal_s: float
) -> NDArray[np.float64]:
    """By how much after the reference each process began each of the reference's iterations (s); NaN where it is not known."""
    moved = [since[at] - since[reference] for at in range(len(cadences))]
    numbered = [{n: b - moved[at] for n, b in c.begins.items()} if c is not None else {} for at, c in enumerate(cadences)]
    iterations = list(cadences[reference].iterations)  # type: ignore[union-attr]  # it is known
    table = np.full((len(cadences), len(iterations)), np.nan)
    for at in known:
        ahead = _ahead(numbered[reference], numbered[at], since[reference], normal_s)
        if ahead is not None:
            table[at] = [numbered[at].get(i.number + ahead, np.nan) - i.begin for i in iterations]
    return table


def _beyond_equals(
    table: NDArray[np.float64], usual: NDArray[np.float64] | None, equal: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Beginnings beyond what is usual and beyond the median of equals; of two equals, beyond the earlier one."""
    relative = table - np.nan_to_num(usual)[:, None] if usual is not None else table.copy()
    for number in np.unique(equal):
        members = equal == number
        fellows = np.count_nonzero(members)
        if number < 0 or fellows < 2 or (fellows == 2 and (usual is None or np.isnan(usual[members]).any())):
            relative[members] = 0.0  # of two that differ nobody knows which is late, without a past of theirs
        elif fellows == 2:
            relative[members] -= np.fmin.reduce(relative[members], axis=0)
        else:
            relative[members] -= _median(relative[members].T)
    return relative


def _median(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The median of each row, of what is known of it; NaN of a row of which nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found: NDArray[np.float64] = np.nanmedian(values, axis=1)
    return found


def _ahead(reference: Mapping[int, float], own: Mapping[int, float], since: float, normal_s: float) -> int | None:
    """By how much a process numbers its iterations higher than the reference does; ``None`` where that is not plain.

    Nobody can begin an iteration before all have ended the one before but for a moment, so the beginnings of one iteration lay
    close together while the job was healthy; since it is slow they may lie more than half an iteration apart.
    """
    before = {number: begin for number, begin in reference.items() if begin < since}
    compared = before if len(before) >= ENOUGH else reference
    if not own or not compared:
        return None
    numbers, begins = np.array(list(own)), np.array(list(own.values()))
    candidates = {int(numbers[np.argmin(np.abs(begins - begin))]) - number for number, begin in compared.items()}
    best: tuple[float, int] | None = None
    for ahead in sorted(candidates):
        gaps = [abs(own[number + ahead] - begin) for number, begin in compared.items() if number + ahead in own]
        if len(gaps) >= min(ENOUGH, len(compared)):
            best = min(best or (np.inf, 0), (float(np.median(gaps)), ahead))
    return best[1] if best is not None and best[0] < CLOSE * normal_s else None


def slope(before: NDArray[np.float64], now: NDArray[np.float64]) -> tuple[float, float]:
    """Theil-Sen fit ``now = factor × before + extra``: (factor, extra). Robust against 29 % of outliers.

    Applied to the times between calls of a rank: what grows in proportion is computation, what is added to each call is
    communication or the host. (nan, nan) where ``before`` hardly varies.
    """
    if not before.size or before.shape != now.shape:
        return float("nan"), float("nan")
    # Calls that follow each other at once have no work between them; they would make what is added look proportional.
    keep = before > 0.3 * float(np.quantile(before, 0.9))
    keep &= before <= LONGEST_TIMES * float(np.median(before[keep]))
    # A host that runs ahead and waits once an iteration calls without work between: then calls tell nothing.
    if float(before[keep].sum()) < 0.5 * float(before.sum()):
        return float("nan"), float("nan")
    before, now = before[keep], now[keep]
    order = np.argsort(before, kind="stable")
    x, y = before[order], now[order]
    if len(x) > 128:
        chosen = np.linspace(0, len(x) - 1, 128).astype(np.int64)
        x, y = x[chosen], y[chosen]
    i, j = np.triu_indices(len(x), 1)
    dx = x[j] - x[i]
    wide = dx > 0.25 * (float(np.quantile(x, 0.9)) if len(x) else 0.0)
    if np.count_nonzero(wide) < 8:
        return float("nan"), float("nan")
    factor = float(np.median((y[j] - y[i])[wide] / dx[wide]))
    return factor, float(np.median(y - factor * x))


# --- calls inside nodes, lined up --------------------------------------------------------------------------------------------


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
    if late[worst] < ENOUGH:
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
    if stretches < ENOUGH:
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
