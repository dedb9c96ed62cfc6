"""Ranks that are slow together: all of a host, and all that are under one CPU limit."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.findings import FLOOR, SLOWER, Context
from ncclwatch.engine.slow.profile import Profile, Shares

AS_EVER = 1.1
"""Below this factor on the times between calls a rank works as fast as ever."""
EXPLAINED = 0.6
"""From this part of what is lost on, the growth of a host's work explains it: its links and proxies are not asked."""


def whole_hosts(
    own: Shares, held: Shares, busier: NDArray[np.bool_], profile: Profile, context: Context
) -> list[NDArray[np.int64]]:
    """Hosts of which every rank holds others up alike, while no other host's do, or while the calls say that their work grew."""
    numbers = np.unique(context.host)
    if len(numbers) < 2:
        return []
    found: list[NDArray[np.int64]] = []
    totals = {int(n): float(own[context.host == n].sum()) for n in numbers}
    for number in numbers.tolist():
        members = np.flatnonzero(context.host == number)
        if len(members) < 2 or totals[number] < FLOOR:
            continue
        share = own[members] / totals[number]
        others = [total for n, total in totals.items() if n != number]
        spread = share.max() <= 0.7 and bool(np.all(own[members] >= max(0.01, 0.3 * totals[number] / len(members))))
        # Where the times between calls tell, they must not say that some of the ranks work as fast as ever.
        if np.any(context.factor[members] < AS_EVER) and not np.all(context.factor[members] < AS_EVER):
            continue
        if (
            spread
            and bool(busier[members].mean() >= 0.75)
            and (totals[number] >= 2.0 * float(np.median(others)) or explained_by_work(members, profile, context))
            and held[members].max() >= 2
        ):
            found.append(members)
    return found


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
    for number in np.unique(context.host).tolist():
        members = np.flatnonzero(context.host == number)
        result[members] = len(members) > 1 and explained_by_work(members, profile, context) > 0
    return result
