"""What the calls of host threads say of who is late: between iterations, and inside nodes that NVLink joins.

Who makes the first call of an iteration late holds everybody up by as much: believed only if the iterations it was late in were
longer by it. Inside nodes who calls an operation last keeps the others waiting from the last but one on; hosts run ahead of their
GPUs, so within an iteration only the longest such wait counts, and only what is longer than it was. Clock offsets cancel.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.alignment import line_up
from ncclwatch.collect.cadence import Cadence, Times
from ncclwatch.collect.ledger import Ledger
from ncclwatch.engine.slow.detect import ENOUGH, LEAST_RATIO, SlowDown
from ncclwatch.model.job import Job
from ncclwatch.model.joined import is_hidden
from ncclwatch.model.rows import distinct

LEAST_S = 0.01
"""Less than this, or than the least slow-down that counts, is no lateness. Unit: seconds. From: chosen."""
CLOSE = 0.5
"""So far apart at most do processes begin an iteration. Unit: part of the normal one. From: further is nearer to another."""
EXPLAINS = 0.5
"""Part that must be explained: of lateness by longer iterations, of the lost time by fellows kept waiting, and by all culprits to
explain all of it. Unit: share. From: more than half, so that no two explain the same loss.
"""
MOSTLY = 0.75
"""Part of the processes whose beginning of an iteration must be known for it to count, and of the samples at a culprit that are
of one pass, for that to be named. Unit: share. From: chosen; a median of three of four is one.
"""


@dataclass(slots=True)
class Lateness:
    """By process: ``share`` of the time others wait for its first call, ``late`` of ``seen`` iterations; mean and usual (s)."""

    share: Times
    late: NDArray[np.int64]
    seen: int
    seconds: Times
    usual: Times | None = None

    @staticmethod
    def of_nobody(size: int) -> Lateness:
        """Of so many processes none is late."""
        return Lateness(np.zeros(size), np.zeros(size, np.int64), 0, np.zeros(size))


def _least(normal_s: float) -> float:
    """How late is late, seconds."""
    return max(LEAST_S, (LEAST_RATIO - 1) * normal_s)


def measure(
    cadences: Sequence[Cadence | None],
    since: Sequence[float],
    normal_s: float,
    equal: NDArray[np.int64],
    known_usual: Times | None = None,
) -> Lateness:
    """Lateness since a moment (seconds on each process's own clock); zeros where it cannot be told.

    Ranks are compared with their equals (``equal`` numbers sets of them, −1: none): stages of a pipeline end iterations at times
    of their own. ``known_usual`` is what was usual when the healthy past was still at hand. O(processes × iterations).
    """
    result = Lateness.of_nobody(len(cadences))
    known = {at: own for at, own in enumerate(cadences) if own is not None and len(own.iterations) >= ENOUGH}
    if len(known) < 2:
        return result
    reference = max(known, key=lambda at: len(known[at].iterations))
    iterations = known[reference].iterations
    table = _begins(known, since, reference, normal_s)
    complete = np.isfinite(table[list(known)]).mean(axis=0) >= MOSTLY
    slow = np.array([iteration.begin for iteration in iterations]) >= since[reference] - 1e-9
    now, healthy = complete & slow, complete & ~slow
    if np.count_nonzero(now) < ENOUGH:
        return result
    usual = _median(table[:, healthy]) if np.count_nonzero(healthy) >= ENOUGH else known_usual
    late = np.nan_to_num(_beyond_equals(table, usual, equal)[:, now])
    durations = np.array([iteration.duration for iteration in iterations])[now]
    counts = late > _least(normal_s)
    result.late, result.seen, result.usual = counts.sum(axis=1), int(np.count_nonzero(now)), usual
    for at in [at for at in known if result.late[at] >= ENOUGH]:
        own = counts[at]
        result.seconds[at] = float(late[at][own].mean())
        rest = float(np.median(durations[~own])) if np.count_nonzero(~own) >= ENOUGH else normal_s
        # An iteration's duration counts from the reference's first call: lateness of others lies in it, its own before it.
        length = durations if at != reference else durations + late[at]
        if float(length[own].mean()) - rest >= EXPLAINS * result.seconds[at]:
            result.share[at] = float(late[at][own].sum() / length.sum())
    return result


def _begins(known: Mapping[int, Cadence], since: Sequence[float], reference: int, normal_s: float) -> Times:
    """By how much after the reference each process began each of the reference's iterations (s); NaN where it is not known."""
    iterations, first = known[reference].iterations, since[reference]
    table = np.full((len(since), len(iterations)), np.nan)
    for at, cadence in known.items():
        begins = {number: begin - (since[at] - first) for number, begin in cadence.begins.items()}
        ahead = _ahead(known[reference].begins, begins, first, normal_s)
        if ahead is not None:
            table[at] = [begins.get(i.number + ahead, np.nan) - i.begin for i in iterations]
    return table


def _beyond_equals(table: Times, usual: Times | None, equal: NDArray[np.int64]) -> Times:
    """Beginnings beyond what is usual and beyond the median of equals; of two equals, beyond the earlier one."""
    relative = table - np.nan_to_num(usual)[:, None] if usual is not None else table.copy()
    for number in distinct(equal):
        members = equal == number
        fellows = np.count_nonzero(members)
        if number < 0 or fellows < 2 or (fellows == 2 and (usual is None or np.isnan(usual[members]).any())):
            relative[members] = 0.0  # of two that differ nobody knows which is late, without a past of theirs
        elif fellows == 2:
            relative[members] -= np.fmin.reduce(relative[members], axis=0)
        else:
            relative[members] -= _median(relative[members].T)
    return relative


def _median(values: Times) -> Times:
    """The median of each row, of what is known of it; NaN of a row of which nothing is."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.asarray(np.nanmedian(values, axis=1))


def _ahead(reference: Mapping[int, float], own: Mapping[int, float], since: float, normal_s: float) -> int | None:
    """By how much a process numbers its iterations higher than the reference does; ``None`` where that is not plain.

    The beginnings of one iteration lay close together only while the job was healthy.
    """
    before = {number: begin for number, begin in reference.items() if begin < since}
    compared = before if len(before) >= ENOUGH else reference
    if not own or not compared:
        return None
    numbers, begins = np.array(list(own)), np.array(list(own.values()))
    candidates = {int(numbers[np.argmin(np.abs(begins - begin))]) - number for number, begin in compared.items()}
    best = np.inf, 0
    for ahead in candidates:
        gaps = [abs(own[number + ahead] - begin) for number, begin in compared.items() if number + ahead in own]
        if len(gaps) >= min(ENOUGH, len(compared)):
            best = min(best, (float(np.median(gaps)), ahead))
    return best[1] if best[0] < CLOSE * normal_s else None


# --- calls inside nodes, lined up --------------------------------------------------------------------------------------------


def with_calls(
    late: Lateness, job: Job, ledger: Ledger, since: Sequence[float], slow: SlowDown
) -> tuple[Lateness, NDArray[np.bool_]]:
    """Lateness with who kept all its fellows on the node waiting since a moment (seconds on each process's own clock), by the
    calls of communicators inside nodes; and who waited for such a one, shape (processes,).

    O(operations the ledger keeps of communicators inside nodes).
    """
    least = EXPLAINS * slow.lost_share
    found: dict[int, _Late] = {}
    for members, times in _lined_up(job, ledger, np.array(since)):
        one = _latest_of(members, times, since[members[0]], slow)
        if one is not None and one.share >= max(least, found[one.at].share if one.at in found else 0.0):
            found[one.at] = one
    # Those that do not wait for another late one, and who on their nodes waits for them.
    own = [
        one for one in found.values()
        if not any(one.at in other.others and other.at not in one.others for other in found.values())
    ]  # fmt: skip
    waits = np.zeros(len(job.members), np.bool_)
    node = [member.info.host for member in job.members]
    waits[[at for one in own for at in one.others if node[at] == node[one.at]]] = True
    waits[[one.at for one in own]] = False
    # Stages are late together at their gradients; who is late from the first call on is who makes the other so.
    first = np.flatnonzero(late.share >= max(least, np.finfo(float).tiny)).tolist()
    result = Lateness(late.share.copy(), late.late.copy(), late.seen, late.seconds.copy())
    for one in own:
        partner = late.share[one.at] == 0 and any(_exchange(job, ledger, one.at, other) for other in first)
        if one.share > result.share[one.at] and not partner:
            result.share[one.at], result.late[one.at], result.seconds[one.at] = one.share, one.times, one.seconds
    return result, waits


def _lined_up(job: Job, ledger: Ledger, since: Times) -> Iterator[tuple[NDArray[np.int64], Times]]:
    """Of whole communicators inside nodes: places in the job, and when each called what all called (ranks, operations)."""
    hidden = (group for group in job.groups.values() if any(is_hidden(own) for _, own in group.members.values()))
    whole = [(group, rows) for group in hidden if len(rows := ledger.rows_of(group)) == group.nranks > 1]
    entries = line_up(ledger, [rows for _, rows in whole])
    for number, (group, _) in enumerate(whole):
        part = np.flatnonzero(entries.group == number)
        sequences = np.arange(int(entries.oldest[part].max()), int(entries.ends[part].min()))
        if entries.aligned[part].all() and len(sequences):
            places = np.array([job.place_of[group.members[rank][0].index] for rank in entries.ranks[part].tolist()])
            times = entries.of("time_ns", part, sequences) / 1e9
            if _on_one_clock(times, np.array([job.members[place].info.host for place in places.tolist()]), since[places]):
                yield places, times


def _on_one_clock(times: Times, hosts: NDArray[np.str_], since: Times) -> bool:
    """Put the times of all nodes on the clock of the first rank's, by what they differed by before; in place.

    ``since``: the moment on each rank's own clock. False where nothing is known of the past.
    """
    home = hosts == hosts[0]
    for host in distinct(hosts[~home]):
        there = hosts == host
        first = int(np.argmax(there))
        past = (times[0] < since[0]) & (times[first] < since[first])
        if not past.any():
            return False
        times[there] -= float(np.median(times[there][:, past].mean(axis=0) - times[home][:, past].mean(axis=0)))
    return True


def _exchange(job: Job, ledger: Ledger, one: int, other: int) -> bool:
    """Whether a process (by its place in the job) has called sends or receives to or from another."""
    member, peer_index = job.members[one], job.members[other].index
    made = ((group, ledger.messages(member.info, own)) for group, own in job.held_by(member))
    return any(peer == group.ranks.get(peer_index) for group, messages in made for _, peer in messages)


class _Late(NamedTuple):
    """A process that is late in a communicator, and the others of it, by their places in the job."""

    at: int
    share: float
    times: int
    seconds: float
    others: frozenset[int]


def _latest_of(members: NDArray[np.int64], times: Times, since: float, slow: SlowDown) -> _Late | None:
    """Who of a communicator is late since a moment more than it was before."""
    began, normal_s = times.max(axis=0) >= since, slow.normal_s
    now, usual = _latest(times[:, began], slow.mean_s, normal_s), _latest(times[:, ~began], normal_s, normal_s)
    share = np.maximum(now.share - usual.share, 0.0)
    worst = int(np.argmax(share))
    others = frozenset(np.delete(members, worst).tolist())
    found = _Late(int(members[worst]), float(share[worst]), int(now.late[worst]), float(now.seconds[worst]), others)
    return found if found.times >= ENOUGH else None


def _latest(times: Times, iteration_s: float, normal_s: float) -> Lateness:
    """For each rank how all others wait for its calls: share of the time, stretches as long as an iteration, mean wait (s)."""
    result = Lateness.of_nobody(len(times))
    if not times.size or iteration_s <= 0:
        return result
    order = np.sort(times, axis=0)
    waits, last = order[-1] - order[-2], np.argmax(times, axis=0)
    begin, end = float(order[-1].min()), float(order[-1].max())
    stretches = int((end - begin) / iteration_s)
    if stretches < ENOUGH:
        return result
    stretch = np.minimum(((order[-1] - begin) / iteration_s).astype(np.int64), stretches - 1)
    longest = np.zeros((len(times), stretches))
    np.maximum.at(longest, (last, stretch), waits)
    counts = longest > _least(normal_s)
    total = np.where(counts, longest, 0.0).sum(axis=1)
    result.late, result.share = counts.sum(axis=1), np.minimum(total / (stretches * iteration_s), 1.0)
    np.divide(total, result.late, out=result.seconds, where=result.late > 0)
    return result
