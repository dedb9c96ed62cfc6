"""Hosts that begin iterations late: by themselves, or because the collective before has ended late for them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.findings import SLOWER, Context, Finding, Kind
from ncclwatch.engine.slow.lateness import Lateness
from ncclwatch.engine.slow.looks import Part
from ncclwatch.engine.slow.profile import Profile, Shares

LATE_TOGETHER, LATE_LITTLE = 0.25, 0.2
"""Ranks are late together where more than so many of their equals are late half as often, and by so much of their time."""
LATE_INCIDENT, LATE_IDLE = 0.5, 1.2
"""Nobody is late by itself whose links hold up so much of what its late starts do, or than whom an idle rank is so much later."""
LATE_EXPLAINS, LATE_TIMES, LATE_CARRIED, LATE_WAITS = 0.5, 2.0, 0.3, 0.1
LATE_ALL = 0.6
"""From this part of what is lost on, late starts explain it."""


def late_by_itself(busier: NDArray[np.bool_], profile: Profile, late: Lateness) -> Shares:
    """The share of those who begin late by themselves. A rank also does when the collective before ended late for it, as behind a
    slow link: only one that is busier and whose links hold up little is late by itself, and nobody who is not busier is later.
    """
    idle = float(np.where(busier, 0.0, late.share).max(initial=0.0))
    itself = busier & (profile.incident() <= LATE_INCIDENT * late.share) & (LATE_IDLE * late.share >= idle)
    return np.where(itself, late.share, 0.0)


def late_together(context: Context, late: Lateness) -> NDArray[np.bool_]:
    """Ranks that begin late like many of their equals on other hosts: the collective before has ended late for all of them."""
    result = np.zeros(len(context.equal), np.bool_)
    for at in np.flatnonzero(late.share > 0).tolist():
        # Those without equals are compared with each other: behind a late collective all of them are late.
        equals = context.equal == context.equal[at]
        equals[at] = False
        others = equals & (context.nodes != context.nodes[at])
        others = others if others.any() else equals
        # Who else is late need not be waited for: where a ring ends late each of it ends a little before the next.
        as_often = (late.late[others] >= 0.5 * late.late[at]) & (late.seconds[others] >= LATE_LITTLE * late.seconds[at])
        alike = (late.share[others] >= 0.5 * late.share[at]) | as_often
        result[at] = others.any() and float(alike.mean()) > LATE_TOGETHER
    return result


def late_for_what_is_lost(profile: Profile, context: Context) -> NDArray[np.bool_]:
    """Ranks that begin so late that it explains most of what is lost, alone among their equals, and that are seen to hold others
    up more than these usually do, and not by their links: for whom a collective ends late, that one waits more than others.

    In shared memory all seem to wait most of the time, so who holds them up need not be seen to wait much less.
    """
    result = np.zeros(len(context.equal), np.bool_)
    if context.late is None or context.lost is None:
        return result
    share, own = context.late.share, profile.own()
    for at in np.flatnonzero((share > 0) & (share >= LATE_EXPLAINS * context.lost)).tolist():
        others = context.others(at, by_means=False)
        if not len(others) or share[others].max() >= LATE_TOGETHER * share[at]:
            continue
        key = profile.processes[at]
        carried = sum(part for link, part in profile.links.items() if key in link[:2]) + profile.hold[Part.PROXY][at]
        result[at] = _holds_more(at, others, own, profile, context) and carried <= LATE_CARRIED * share[at]
    return result


def _holds_more(at: int, others: NDArray[np.int64], own: Shares, profile: Profile, context: Context) -> bool:
    """Whether a rank holds others up more than its equals do. Beside a single one, which may be an onlooker inside the node, or
    such as are seen by other means: whether it waits no more than they do.
    """
    if len(others) > 1 and np.all(context.equal[others] == context.equal[at]) and context.equal[at] >= 0:
        return bool(own[at] > LATE_TIMES * float(np.median(own[others])))
    return bool(own[at] > 0 and profile.waits[at] <= profile.waits[others].max() + LATE_WAITS)


def without_onlookers(findings: list[Finding], context: Context) -> list[Finding]:
    """Where the late starts of one host explain nearly all that is lost, only times of their own count against the others: who
    waits inside a node for a host that calls late seems to be at work.
    """
    late, lost = context.late, context.lost
    if late is None or lost is None or lost <= 0:
        return findings
    if not any(f.kind is Kind.HOST and float(late.share[list(f.members)].sum()) >= LATE_ALL * lost for f in findings):
        return findings
    return [f for f in findings if f.kind is not Kind.COMPUTE or np.all(context.factor[list(f.members)] >= SLOWER)]
