"""What a culprit of a slow job is: S1, S2 or S3 (CCL-D 2.2); its cause where evidence says so; its cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.evidence.kernel import HELD_BACK, HELD_TIMES
from ncclwatch.engine.slow.critical_path import Timed
from ncclwatch.engine.slow.detect import SlowDown
from ncclwatch.engine.slow.findings import Context, Finding
from ncclwatch.engine.slow.lateness import EXPLAINS
from ncclwatch.engine.slow.profile import Profile, Shares
from ncclwatch.model.rows import distinct
from ncclwatch.model.verdict import SlowCause, VerdictClass
from ncclwatch.model.verdict import SlowKind as Kind

RARELY = 0.6
"""Bound: part of the iterations since the slow-down; who begins more of them late is not late now and then. For words alone."""
FELL = 0.65
"""A rank lacks CPUs when the part of its runnable time in which it runs falls so low. Unit: ratio to its past. From: chosen."""
LEAST_WAIT = 0.3
"""Threads waiting for a CPU on average: fewer delay nothing. Unit: threads. From: chosen; NCCL's proxy polls with one."""
HEAVY_WAIT = 1.0
"""Without a past: as many threads waiting are too many. Unit: threads. From: then the host thread or the proxy is always late."""
NOT_UNLIKELY = 0.1
"""Bound: probability of a candidate from which on more samples are asked for to tell it from who is named."""
ALONE = 1.4
"""A rank is said to lack CPUs if so many times as many of its threads wait for one. Unit: ratio. From: chosen."""


@dataclass(slots=True)
class Judgement:
    """What is behind a verdict of slowness."""

    findings: list[Finding]
    profile: Profile
    context: Context
    slow: SlowDown | None
    since: float
    iteration_s: float | None
    gpus: Timed = field(default_factory=Timed)

    @property
    def named(self) -> frozenset[object]:
        """Who is named, and whether for their work."""
        return frozenset((finding.kind.computes, finding.members) for finding in self.findings)

    @property
    def verdict_class(self) -> VerdictClass:
        """The class by what is blamed."""
        kinds = {finding.kind.computes for finding in self.findings}
        if len(kinds) > 1:
            return VerdictClass.SLOW_MIXED
        return VerdictClass.SLOW_COMPUTATION if True in kinds else VerdictClass.SLOW_COMMUNICATION

    @property
    def may_grow(self) -> bool:
        """Whether more samples may name others beside who is named: a candidate that has them both is not unlikely."""
        return any(
            chance >= NOT_UNLIKELY and {*finding.members} < {*members}
            for finding in self.findings for _, members, chance in finding.rivals
        )  # fmt: skip

    def starts_late(self, finding: Finding) -> bool:
        """Whether the hosts of a finding's ranks are seen to begin iterations later than the others."""
        late = self.context.late
        return finding.kind is Kind.HOST and late is not None and bool(np.all(late.share[list(finding.members)] > 0))


class Cause(NamedTuple):
    """Why a culprit is slow, in words, and in one word where something singles it out; empty where evidence says nothing."""

    detail: str = ""
    word: SlowCause | None = None

    @property
    def text(self) -> str:
        """``CPU throttling: a CPU limit holds it back …``."""
        return f"{self.word}: {self.detail}" if self.word else self.detail


def cause(judgement: Judgement, finding: Finding) -> Cause:
    """What evidence says of why a culprit is slow."""
    members = list(finding.members)
    if finding.kind.computes and (lack := lacks_cpu(judgement.profile, judgement.context, members)):
        return lack
    if finding.kind is Kind.HOST:
        return _host_cause(judgement, finding, members)
    slow = judgement.slow
    if finding.kind is Kind.COMPUTE and slow is not None and 2 <= slow.slow <= 0.5 * slow.iterations:
        seen = f"{slow.slow} of {slow.iterations} iterations are slow and the others normal"
        return Cause(f"{seen} (a rhythm of its own: garbage collection)", SlowCause.PAUSES)
    if finding.kind is not Kind.NIC:
        stretches = "its proxy thread does not run for stretches: CPU contention or an overloaded proxy core"
        return Cause(stretches if finding.kind is Kind.PROXY else "")
    text = "all links of the host are slow: congestion or its NICs" if members[1:] else "all its links are slow: its NIC or port"
    if len(distinct(judgement.context.nodes[members])) > 1:
        text = "all links between their hosts are slow: a NIC at either end, the switch, or congestion; which does not show"
    return Cause(text)


def _host_cause(judgement: Judgement, finding: Finding, members: list[int]) -> Cause:
    late = judgement.context.late
    if late is None or not judgement.starts_late(finding):
        return Cause("its host calls late while its GPU has nothing queued: data loader, Python, or CPU")
    newest = late.seen if judgement.slow is None else min(late.seen, judgement.slow.iterations)
    times, seconds = min(newest, int(late.late[members].max())), float(late.seconds[members].mean())
    seen = f"its host begins {times} of {newest} iterations {seconds:.2f} s later than the others"
    if times <= RARELY * newest:
        return Cause(f"{seen} (garbage collection, or another process)", SlowCause.PAUSES)
    return Cause(f"{seen} (slow data loader, or other work of the host)", SlowCause.LATE)


# --- want of CPUs ------------------------------------------------------------------------------------------------------------
#
# Threads that poll use and wait for CPUs the more the longer they poll. What tells is the part of the runnable time in which they
# ran: it falls when others want the same CPUs. A CPU limit of a control group says itself how often it held a rank back.


def running_part(profile: Profile) -> Shares:
    """The part of each rank's runnable time in which its threads ran, 0 to 1; nan where it is not known."""
    runnable = profile.cpu_wait + profile.cpu_use
    return profile.cpu_use / np.where(runnable > 0, runnable, np.nan)


def short_of_cpu(profile: Profile, before: Profile | None) -> NDArray[np.bool_]:
    """Ranks that lack CPUs now and did not before, or, without a past, that lack them badly."""
    wait = np.nan_to_num(profile.cpu_wait)
    past = running_part(before) if before is not None else np.full(len(wait), np.nan)
    fell = (wait >= LEAST_WAIT) & (running_part(profile) < FELL * past)
    return np.where(np.isnan(past), wait >= HEAVY_WAIT, fell)


def held_back_alone(profile: Profile, context: Context) -> NDArray[np.bool_]:
    """Ranks that a CPU limit holds back now (``HELD_TIMES`` as much as before) and does not hold most others back."""
    held, before = np.nan_to_num(profile.held_back), context.before
    past = np.nan_to_num(before.held_back) if before is not None else 0.0
    usual = np.maximum(past, np.quantile(held, 0.5, method="lower"))
    return np.asarray((held >= HELD_BACK) & (held >= HELD_TIMES * usual), np.bool_)


def lacks_cpu(profile: Profile, context: Context, members: list[int]) -> Cause | None:
    """What to say of ranks that a CPU limit holds back, or that wait for CPUs much more than all the others do."""
    if held_back_alone(profile, context)[members].all():
        held, usual = float(profile.held_back[members].mean()), float(np.nanmedian(profile.held_back))
        who = "it" if len(members) == 1 else "them"
        seen = f"a CPU limit holds {who} back in {held:.0%} of the limit's periods (most others in {usual:.0%})"
        return Cause(seen, SlowCause.THROTTLED)
    others = np.delete(profile.cpu_wait, members)
    known = others[np.isfinite(others)]
    own, usual = float(profile.cpu_wait[members].mean()), float(np.median(known)) if len(known) else 0.0
    if not short_of_cpu(profile, context.before)[members].all() or own < ALONE * usual + LEAST_WAIT:
        return None
    seen = f"on average {own:.1f} of its threads want a CPU and have none (of the others' {usual:.1f})"
    return Cause(seen, SlowCause.CONTENDED)


# --- cost --------------------------------------------------------------------------------------------------------------------
#
# With a healthy past the loss is measured, and culprits have their parts of it as they hold the others up; without one it is at
# least the time that others are seen to wait. What critical paths say of a rank counts before both.


@dataclass(frozen=True, slots=True)
class Cost:
    """Share and seconds of an iteration, and how long it would last without; ``least``: it may be more, samples see a part."""

    share: float
    seconds: float
    without: float
    least: bool = False

    def text(self) -> str:
        """``costs 23 % of the iteration (0.12 s; without it: 0.40 s)``."""
        least, most = ("at least ", "at most ") if self.least else ("", "")
        return f"costs {least}{self.share:.0%} of the iteration ({self.seconds:.2f} s; without it: {most}{self.without:.2f} s)"


def costs(
    findings: Sequence[Finding], slow: SlowDown | None, iteration_s: float | None, paths: Mapping[int, float] | None = None
) -> list[Cost | None]:
    """What each finding costs; ``None`` where iterations are not known. ``paths``: of a process, seconds by the critical path."""
    duration = slow.mean_s if slow is not None else iteration_s
    if not duration:
        return [None] * len(findings)
    total = explained = sum(finding.share for finding in findings)
    if slow is not None and total >= EXPLAINS * slow.lost_share:
        explained = slow.lost_share
    found: list[Cost | None] = []
    for finding in findings:
        seconds = paths.get(finding.members[0]) if paths and finding.kind.computes and len(finding.members) == 1 else None
        least = seconds is None and (slow is None or explained < slow.lost_share)
        share = seconds / duration if seconds is not None else finding.share * explained / total if total > 0 else 0.0
        share = min(1.0, share)
        found.append(Cost(share, share * duration, (1 - share) * duration, least))
    return found
