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
from ncclwatch.engine.slow.findings import Context, Finding, Kind
from ncclwatch.engine.slow.profile import Profile, Shares

FELL = 0.65
"""A rank is short of CPUs when the part of its runnable time in which it runs falls to this part of what it was."""
LEAST_WAIT = 0.3
"""Threads waiting for a CPU on average: fewer delay nothing."""
HEAVY_WAIT = 1.0
"""Without a past: as many threads waiting are too many."""
SLEEPS = 0.75
"""Whose threads wait for CPUs this much less than those of its neighbours does not move for another reason."""
ALONE = 1.4
"""A rank is said to lack CPUs if so many times as many of its threads wait for one."""
MOST = 0.3
"""On a host that is short of CPUs a rank must explain this much of what is lost to be blamed for its work."""

ALIKE = 1.4
"""Ranks lack CPUs alike if none waits so many times as long as is usual, or runs so much less."""
EXPLAINS_MOST = 0.5
OUTWEIGHS = 3.0
"""A NIC or link is blamed though all ranks lack CPUs if it explains this much of what is lost (of which waits are seen), and so
many times what all other links of any one rank do."""


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


def sleeps(profile: Profile, context: Context, members: list[int]) -> bool:
    """Whether ranks want CPUs clearly less than their neighbours on the host, who poll: something in them does not run.

    False where that is not known, and where hardly anybody waits for a CPU.
    """
    others = np.isin(context.host, context.host[members])
    others[members] = False
    if not others.any():
        return False
    usual = float(np.median(profile.cpu_wait[others]))
    return usual >= LEAST_WAIT and float(profile.cpu_wait[members].max()) <= SLEEPS * usual


def alone_without_cpu(profile: Profile, context: Context) -> NDArray[np.bool_]:
    """Ranks that lack CPUs while the others of their host, or where they are all of it those of other hosts, have them."""
    short, part = short_of_cpu(profile, context.before), running_part(profile)
    result = np.zeros(len(short), np.bool_)
    for at in np.flatnonzero(short).tolist():
        others = np.arange(len(short)) != at
        near = others & (context.host == context.host[at])
        others = near if near.any() else others
        if np.isfinite(part[others]).any():
            wait, usual = float(np.nanmedian(profile.cpu_wait[others])), float(np.nanmedian(part[others]))
            result[at] = profile.cpu_wait[at] >= ALONE * wait and part[at] <= FELL * usual
    return result


def held_back_alone(profile: Profile, context: Context) -> NDArray[np.bool_]:
    """Ranks that a CPU limit holds back now (``HELD_TIMES`` as much as before) and does not hold most others back."""
    held = np.nan_to_num(profile.held_back)
    if not (held >= HELD_BACK).any():
        return np.zeros(len(profile.processes), np.bool_)
    before = context.before
    past = np.zeros(len(held)) if before is None else np.nan_to_num(before.of(profile.processes, before.held_back, 0.0))
    result = (held >= HELD_BACK) & (held >= HELD_TIMES * past)
    return np.asarray(result & (held >= HELD_TIMES * float(np.quantile(held, 0.5, method="lower"))), np.bool_)


def carried_by_links(profile: Profile, context: Context) -> tuple[Shares, Shares]:
    """What the links that a rank is an end of hold up more than they did, and in how many looks."""
    looks, index = np.zeros(len(profile.processes)), {key: at for at, key in enumerate(profile.processes)}
    for key, times in profile.link_looks.items():
        for at in {index[end] for end in key[:2] if end in index}:
            looks[at] += times
    share = profile.incident()
    if context.before is not None:
        past = context.before.of(profile.processes, context.before.incident(), 0.0)
        share = np.maximum(share - past / context.stretch, 0.0)
    return share, looks


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


def believed(findings: list[Finding], profile: Profile, context: Context) -> list[Finding]:
    """Findings that a lack of CPUs does not explain."""
    short = short_of_cpu(profile, context.before)
    if not short.any():
        return findings
    return [finding for finding in findings if _is_believed(finding, profile, context, short)]


def _is_believed(finding: Finding, profile: Profile, context: Context, short: NDArray[np.bool_]) -> bool:
    members = list(finding.members)
    here = np.isin(context.host, context.host[members])
    others = here.copy()
    others[members] = False
    if not short[members].any() and not (others.any() and short[others].mean() > 0.5):
        return True
    if finding.kind.computes:
        if (alone_without_cpu(profile, context) | held_back_alone(profile, context))[members].all():
            return True
        # Where its neighbours have as little, want of CPUs names nobody; a rank that has less than they do is named for it.
        alike = others.any() and bool(short[others].mean() > 0.5)
        return not alike or context.lost is None or finding.share >= MOST * context.lost
    return sleeps(profile, context, members) or _outweighs(finding, profile, context)


def _outweighs(finding: Finding, profile: Profile, context: Context) -> bool:
    """Whether a NIC or link explains most of what is lost and outweighs the rest, while its ranks lack CPUs no more than all do.

    Where everybody lacks CPUs alike, everybody's data is late alike.
    """
    members = list(finding.members)
    others = np.setdiff1d(np.arange(len(profile.processes)), members)
    if finding.kind not in (Kind.NIC, Kind.LINK) or context.lost is None or len(others) < 2:
        return False
    part = running_part(profile)
    wait, usual = float(np.nanmedian(profile.cpu_wait[others])), float(np.nanmedian(part[others]))
    if not (profile.cpu_wait[members].max() <= ALIKE * wait and part[members].min() * ALIKE >= usual):
        return False
    rest = float(profile.incident(without=finding.keys).max())
    return finding.share >= EXPLAINS_MOST * context.lost * profile.shown() and finding.share >= OUTWEIGHS * rest
