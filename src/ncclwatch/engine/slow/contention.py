"""Whether ranks lack a CPU: how long their threads were runnable without one, against how long they ran.

Polling threads (NCCL's proxies poll while anything is under way) use and wait for CPUs the more the longer they poll: neither sum
tells anything by itself. What tells is the part of the runnable time in which a thread ran. It hardly depends on how much a job
polls, and falls when others want the same CPUs. What is late then is late for want of a CPU: no proxy and no link is to blame.

A CPU limit of a control group says itself in which part of its periods it held a rank back.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.evidence.cpu_limits import HELD_BACK, HELD_TIMES
from ncclwatch.engine.slow.findings import Context
from ncclwatch.engine.slow.profile import Profile, Shares

FELL = 0.65
"""A rank is short of CPUs when the part of its runnable time in which it runs falls to this part of what it was."""
LEAST_WAIT = 0.3
"""Threads waiting for a CPU on average: fewer delay nothing."""
HEAVY_WAIT = 1.0
"""Without a past: as many threads waiting are too many."""
ALONE = 1.4
"""A rank is said to lack CPUs if so many times as many of its threads wait for one."""


def running_part(profile: Profile) -> Shares:
    """The part of each rank's runnable time in which its threads ran, 0 to 1; nan where it is not known."""
    runnable = profile.cpu_wait + profile.cpu_use
    return np.where(runnable > 0, profile.cpu_use / np.where(runnable > 0, runnable, 1.0), np.nan)


def short_of_cpu(profile: Profile, before: Profile | None) -> NDArray[np.bool_]:
    """Ranks that lack CPUs now and did not before, or, without a past, that lack them badly."""
    wait = np.nan_to_num(profile.cpu_wait)
    part = running_part(profile)
    heavy = wait >= HEAVY_WAIT
    if before is None:
        return heavy
    past = before.of(profile.processes, running_part(before))
    fell = (wait >= LEAST_WAIT) & (part < FELL * past)
    return np.where(np.isnan(past), heavy, fell)


def held_back_alone(profile: Profile, context: Context) -> NDArray[np.bool_]:
    """Ranks that a CPU limit holds back now (``HELD_TIMES`` as much as before) and does not hold most others back."""
    held = np.nan_to_num(profile.held_back)
    if not (held >= HELD_BACK).any():
        return np.zeros(len(profile.processes), np.bool_)
    before = context.before
    past = np.zeros(len(held)) if before is None else np.nan_to_num(before.of(profile.processes, before.held_back, 0.0))
    result = (held >= HELD_BACK) & (held >= HELD_TIMES * past)
    return np.asarray(result & (held >= HELD_TIMES * float(np.quantile(held, 0.5, method="lower"))), np.bool_)


def lacks_cpu(profile: Profile, context: Context, members: list[int]) -> str:
    """What to say of ranks that a CPU limit holds back, or that wait for CPUs much more than all the others do; else empty."""
    if held_back_alone(profile, context)[members].all():
        held, usual = float(profile.held_back[members].mean()), float(np.nanmedian(profile.held_back))
        who = "it" if len(members) == 1 else "them"
        return f"CPU throttling: a CPU limit holds {who} back in {held:.0%} of the limit's periods (most others in {usual:.0%})"
    if not short_of_cpu(profile, context.before)[members].all():
        return ""
    others = np.ones(len(profile.processes), np.bool_)
    others[members] = False
    known = profile.cpu_wait[others & np.isfinite(profile.cpu_wait)]
    own, usual = float(profile.cpu_wait[members].mean()), float(np.median(known)) if len(known) else 0.0
    if own < ALONE * usual + LEAST_WAIT:
        return ""
    return f"CPU contention: on average {own:.1f} of its threads want a CPU and have none (of the others' {usual:.1f})"
