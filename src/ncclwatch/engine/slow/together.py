"""Ranks that are slow together: all of a host, and all that are under one CPU limit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.findings import FLOOR, SLOWER, Context
from ncclwatch.engine.slow.profile import Profile, Shares

AS_EVER = 1.1
"""Below this factor on the times between calls a rank works as fast as ever."""
AT_WORK_SIGMAS = 3.0
LONGER, ALIKE, FEWEST_BEFORE = 1.3, 1.5, 4
PAIR_ALIKE_SIGMAS, PAIR_APART_SIGMAS = 2.0, 2.5
"""Two ranks are at work alike, and apart from all others: standard errors of how often a look finds a rank at work."""
EXPLAINED = 0.6
"""From this part of what is lost on, the growth of a host's work explains it: its links and proxies are not asked."""


def whole_hosts(
    own: Shares, held: Shares, busier: NDArray[np.bool_], profile: Profile, context: Context
) -> list[NDArray[np.int64]]:
    """Hosts, and nodes of a host, of which every rank holds others up alike or is at work alone, while no other host's do, or
    while the calls say that their work grew.
    """
    found: list[NDArray[np.int64]] = []
    for places in _places(context):
        totals = [float(own[members].sum()) for members in places]
        for at, members in enumerate(places):
            if len(members) < 2 or totals[at] < FLOOR or any(np.isin(members, known).any() for known in found):
                continue
            if not (others := totals[:at] + totals[at + 1 :]):
                continue
            # Where the times between calls tell, they must not say that some of the ranks work as fast as ever.
            if np.any(context.factor[members] < AS_EVER) and not np.all(context.factor[members] < AS_EVER):
                continue
            if (
                _together(members, own, held, profile)
                and bool(busier[members].mean() >= 0.75)
                and (totals[at] >= 2.0 * float(np.median(others)) or explained_by_work(members, profile, context))
                and held[members].max() >= 2
            ):
                found.append(members)
    return found


def _places(context: Context) -> list[list[NDArray[np.int64]]]:
    """The ranks of each host, and of each node where hosts of containers are several."""
    kinds = [context.host] if np.array_equal(context.host, context.nodes) else [context.host, context.nodes]
    ends = [np.cumsum(np.unique(numbers, return_counts=True)[1])[:-1] for numbers in kinds]
    return [np.split(np.argsort(numbers, kind="stable"), end) for numbers, end in zip(kinds, ends, strict=True)]


def _together(members: NDArray[np.int64], own: Shares, held: Shares, profile: Profile) -> bool:
    """Whether what a host's ranks hold up is not the doing of one of them."""
    total = float(own[members].sum())
    if float(own[members].max()) > 0.7 * total:
        return False
    return bool(np.all(own[members] >= max(0.01, 0.3 * total / len(members)))) or _at_work_alone(members, held, profile)


def _at_work_alone(members: NDArray[np.int64], held: Shares, profile: Profile) -> bool:
    """Whether each of a host's ranks is seen at work more often, and waits less, than every rank elsewhere, all of them together
    so much that it is no chance, and each holds others up: whose waits can be followed to whom matters little then. (Of the
    ranks of a host those of a later pipeline stage are waited for first.)
    """
    rest = np.setdiff1d(np.arange(len(profile.busy)), members)
    if held[members].min() < 2 or profile.busy[members].min() <= profile.busy[rest].max():
        return False
    if profile.waits[members].max() >= profile.waits[rest].min():
        return False
    usual = np.clip((profile.busy[rest].mean(), profile.waits[rest].mean()), 0.1, 0.9)
    chance = np.sqrt(usual * (1 - usual) / max(1.0, float(profile.seen[members].sum())))
    differences = np.array((profile.busy[members].mean() - usual[0], usual[1] - profile.waits[members].mean()))
    return bool(np.all(differences >= AT_WORK_SIGMAS * chance))


def whole_stages(own: Shares, held: Shares, profile: Profile, context: Context) -> list[NDArray[np.int64]]:
    """Sets of equal ranks (a pipeline stage, or the busiest of it) that work alone and alike, and longer than they did: they have
    no equals that would tell, or too few. Only where none of their waits is unseen: who waits in shared memory may seem to be at
    work as well.
    """
    before = context.before
    if context.lost is None or before is None or before.looks < FEWEST_BEFORE or context.exposed is None:
        return []
    past = before.of(profile.processes, before.busy)
    found = []
    for number in np.unique(context.equal[context.equal >= 0]).tolist():
        stage = np.flatnonzero(context.equal == number)
        busiest = _busiest(stage, profile)
        for members in (stage, busiest):
            several = len(members) >= 3 or (members is busiest and _is_pair(members, profile))
            shows = several and len(members) < len(past) and bool(context.exposed[members].all())
            longer = profile.busy[members].mean() * context.stretch >= LONGER * past[members].mean()
            # Of the busiest it shows beside the rest of the stage that they are; which of them is waited for does not matter.
            alike = own[members].max() <= ALIKE * own[members].mean() and own[members].min() * ALIKE >= own[members].mean()
            if shows and longer and (alike or members is busiest) and _at_work_alone(members, held, profile):
                found.append(members)
                break
    return found


def longer_at_work(members: NDArray[np.int64], profile: Profile, context: Context) -> float:
    """The share of the time for which ranks of :func:`whole_stages` are at work longer than before, where that explains what is
    lost; else 0. Of a few looks it shows whom the waits lead to, but of all of them who is at work.
    """
    if context.lost is None or context.before is None:
        return 0.0
    past = context.before.of(profile.processes, context.before.busy)[members]
    grown = float(np.mean(profile.worked()[members] - past / context.stretch))
    return min(context.lost, grown) if grown >= EXPLAINED * context.lost else 0.0


def _is_pair(members: NDArray[np.int64], profile: Profile) -> bool:
    """Whether two ranks are at work as often as each other, and more often than all others, so that it is no chance: of one
    that is slow and another that waits for it, the other is not.
    """
    worked = profile.worked()
    if len(members) != 2 or len(worked) < 4:
        return False
    more, less, rest = float(worked[members].max()), float(worked[members].min()), float(np.delete(worked, members).max())

    def apart(one: float, other: float) -> float:
        middle = float(np.clip((one + other) / 2, 0.1, 0.9))
        return (one - other) / float(np.sqrt(2 * middle * (1 - middle) / max(1, profile.looks)))

    return apart(more, less) < PAIR_ALIKE_SIGMAS and apart(less, rest) >= PAIR_APART_SIGMAS


def _busiest(stage: NDArray[np.int64], profile: Profile) -> NDArray[np.int64]:
    """Those of a stage before the widest gap in how often its ranks are seen at work."""
    order = stage[np.argsort(-profile.busy[stage], kind="stable")]
    if len(order) < 2:
        return order
    return np.sort(order[: int(np.argmax(-np.diff(profile.busy[order]))) + 1])


def limited_together(limited: NDArray[np.bool_], profile: Profile) -> list[NDArray[np.int64]]:
    """Ranks that the same CPU limit holds back, several of each: a container, or a pod."""
    numbers = np.unique(profile.limits[limited & (profile.limits >= 0)])
    found = [np.flatnonzero(limited & (profile.limits == number)) for number in numbers]
    return [members for members in found if len(members) > 1]


def outside(values: Shares, members: NDArray[np.int64], context: Context) -> float:
    """What is usual among the equals of a host's ranks on other hosts, summed over the ranks; nan where one has none."""
    inside = np.zeros(len(values), np.bool_)
    inside[members] = True
    total = 0.0
    for at in members.tolist():
        equals = values[(context.equal == context.equal[at]) & ~inside]
        if context.equal[at] < 0 or not len(equals):
            return float("nan")
        total += float(np.median(equals))
    return total


def slower_than_equals(members: NDArray[np.int64], context: Context) -> bool:
    """Whether the times between the calls of all these ranks have grown, and much more than those of their equals elsewhere."""
    if not np.all(context.factor[members] >= SLOWER):
        return False
    inside = np.zeros(len(context.equal), np.bool_)
    inside[members] = True
    for at in members.tolist():
        others = context.factor[(context.equal == context.equal[at]) & ~inside]
        others = others[np.isfinite(others)]
        if context.equal[at] < 0 or not len(others) or not context.factor[at] >= SLOWER * max(1.0, float(np.median(others))):
            return False
    return True


def explained_by_work(members: NDArray[np.int64], profile: Profile, context: Context) -> float:
    """The share of the time by which the work of ranks has grown, where it has on all of them and on none of their equals
    elsewhere, and where that explains what is lost; else 0. The calls say so, and need no looks.
    """
    if context.lost is None or not slower_than_equals(members, context):
        return 0.0
    grown = float(np.mean(profile.busy[members] * (1.0 - 1.0 / context.factor[members])))
    return min(context.lost, grown) if grown >= EXPLAINED * context.lost else 0.0


def explained_hosts(profile: Profile, context: Context) -> NDArray[np.bool_]:
    """Ranks of hosts whose work has grown by what is lost, as the calls say: their links are not asked."""
    result = np.zeros(len(context.host), np.bool_)
    for members in (members for places in _places(context) for members in places):
        result[members] |= len(members) > 1 and explained_by_work(members, profile, context) > 0
    return result
