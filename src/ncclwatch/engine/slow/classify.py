"""What a culprit of a slow job is: S1 computation, S2 communication or S3 mixed (CCL-D 2.2); its cause where evidence says so;
its cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.evidence.kernel import HELD_BACK, HELD_TIMES
from ncclwatch.engine.slow.findings import Context, Finding, Kind
from ncclwatch.engine.slow.profile import Profile, Shares
from ncclwatch.model.verdict import VerdictClass

if TYPE_CHECKING:
    from ncclwatch.engine.slow.detect import SlowDown
    from ncclwatch.engine.slow.watch import Judgement

SLOWER = 1.25
"""From this factor on of the times between a rank's calls its work is slower, whatever its communication does. Unit: ratio. From:
chosen.
"""
FELL = 0.65
"""A rank is short of CPUs when the part of its runnable time in which it runs falls to this part of what it was. Unit: ratio.
From: chosen; half as many CPUs as threads that want them make it a half.
"""
LEAST_WAIT = 0.3
"""Threads waiting for a CPU on average: fewer delay nothing. Unit: threads. From: chosen; NCCL's proxy polls with one."""
HEAVY_WAIT = 1.0
"""Without a past: as many threads waiting are too many. Unit: threads. From: then the host thread or the proxy is always late."""
ALONE = 1.4
"""A rank is said to lack CPUs if so many times as many of its threads wait for one. Unit: ratio. From: chosen."""
WHOLE = 0.5
"""Culprits seen to hold the job up for at least this part of what is lost explain all of it: looks see waits, not their ends.
Unit: share. From: more than half, so that no two explain all of it.
"""


def classify(judgement: Judgement) -> VerdictClass:
    """The class by what is blamed; of links also by whether the work of their ranks takes longer as well."""
    kinds = {finding.kind.computes for finding in judgement.findings}
    if len(kinds) > 1 or any(works_slower(judgement, finding) for finding in judgement.findings):
        return VerdictClass.SLOW_MIXED
    return VerdictClass.SLOW_COMPUTATION if True in kinds else VerdictClass.SLOW_COMMUNICATION


def works_slower(judgement: Judgement, finding: Finding) -> bool:
    """Whether the work of all ranks of a finding about communication grew as well."""
    factors = judgement.factors[list(finding.members)]
    return bool(finding.kind is Kind.NIC and len(factors) and np.all(factors >= SLOWER))


def cause(judgement: Judgement, finding: Finding) -> str:
    """A sub-cause in words; empty where nothing singles one out."""
    if finding.kind.computes and (lack := lacks_cpu(judgement.profile, judgement.context, list(finding.members))):
        return lack
    if finding.kind is Kind.COMPUTE:
        return _compute_cause(judgement, finding)
    if finding.kind is Kind.HOST:
        factors = judgement.factors[list(finding.members)]
        extras = judgement.extras[list(finding.members)]
        if len(factors) and np.all(factors < 0.5) and np.all(extras > 0.001):
            pace = float(np.median(extras)) * 1e3
            return f"its host takes about {pace:.0f} ms for each call: too little CPU (throttling, affinity, load)"
        return _host_cause(judgement, finding)
    if finding.kind is Kind.PROXY:
        return "its proxy thread does not run for stretches: CPU contention or an overloaded proxy core"
    if finding.kind is Kind.NIC:
        many = len(finding.members) > 1
        if len(set(judgement.context.nodes[list(finding.members)].tolist())) > 1:
            return "all links between their hosts are slow: a NIC at either end, the switch, or congestion; which does not show"
        return "all links of the host are slow: congestion or its NICs" if many else "all its links are slow: its NIC or port"
    return ""


def short_cause(judgement: Judgement, finding: Finding) -> str:
    """The sub-cause in a word or two, for a summary; empty where nothing singles one out, or only many words do."""
    if not finding.kind.computes:
        return ""
    if lack := lacks_cpu(judgement.profile, judgement.context, list(finding.members)):
        return lack.partition(":")[0]
    if finding.kind is Kind.COMPUTE:
        pauses = periodic_pauses(judgement)
        return "pauses" if pauses and _compute_cause(judgement, finding) == pauses else ""
    if not starts_late(judgement, finding):
        return ""
    return "pauses" if _is_rarely_late(judgement, finding) else "begins iterations late"


def starts_late(judgement: Judgement, finding: Finding) -> bool:
    """Whether the hosts of a finding's ranks are seen to begin iterations later than the others."""
    late = judgement.context.late
    return finding.kind is Kind.HOST and late is not None and bool(np.all(late.share[list(finding.members)] > 0))


def _host_cause(judgement: Judgement, finding: Finding) -> str:
    late = judgement.context.late
    members = list(finding.members)
    if late is None or not starts_late(judgement, finding):
        return "its host calls late while its GPU has nothing queued: data loader, Python, or CPU"
    times, seconds = int(late.late[members].max()), float(late.seconds[members].mean())
    seen = f"its host begins {times} of {late.seen} iterations {seconds:.2f} s later than the others"
    rare = _is_rarely_late(judgement, finding)
    return seen + (
        ": pauses (garbage collection, or another process)" if rare else ": slow data loader, or other work of the host"
    )


def _is_rarely_late(judgement: Judgement, finding: Finding) -> bool:
    """Whether hosts that are late are so now and then only."""
    late = judgement.context.late
    return late is not None and int(late.late[list(finding.members)].max()) <= 0.6 * late.seen


def _compute_cause(judgement: Judgement, finding: Finding) -> str:
    factors = judgement.factors[list(finding.members)]
    if len(factors) and np.all(factors >= SLOWER):
        return (
            f"its work takes {float(np.median(factors)):.1f} times as long throughout: GPU clocks, power or temperature, or load"
        )
    pattern = periodic_pauses(judgement)
    if pattern:
        return pattern
    if len(factors) and not math.isnan(float(factors[0])) and np.all(factors < 1.1):
        return "most of its work is as fast as ever and some parts of the iteration take longer: copies, input, one layer"
    return ""


def periodic_pauses(judgement: Judgement) -> str:
    """Slow iterations among normal ones: pauses at their own rhythm, as of a garbage collector."""
    slow = judgement.slow
    if slow is None or slow.slow > 0.5 * slow.iterations or slow.slow < 2:
        return ""
    seen = f"{slow.slow} of {slow.iterations} iterations are slow and the others normal"
    return f"{seen}: pauses of their own rhythm (garbage collection)"


# --- want of CPUs ------------------------------------------------------------------------------------------------------------
#
# Polling threads (NCCL's proxies poll while anything is under way) use and wait for CPUs the more the longer they poll: neither
# sum tells anything by itself. What tells is the part of the runnable time in which a thread ran. It hardly depends on how much
# a job polls, and falls when others want the same CPUs. A CPU limit of a control group says itself how often it held a rank
# back.


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


# --- cost --------------------------------------------------------------------------------------------------------------------
#
# Where there is a healthy past, the loss is measured (iterations now against normal ones), and several culprits have their
# parts of it as they hold the others up. Without one, the share of the time that others are seen to wait for a culprit is the
# least it costs. What the critical path of whole iterations says of a rank's work counts before both.


@dataclass(frozen=True, slots=True)
class Cost:
    """``share`` of the iteration's time, ``seconds`` of it, and how long an iteration would last without, seconds.

    ``least``: looks see only part of what is lost, or nobody knows what that is, so it may be more.
    """

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
    total = sum(finding.share for finding in findings)
    explained = total
    if slow is not None:
        explained = slow.lost_share if total >= WHOLE * slow.lost_share else min(total, slow.lost_share)
    shares = [min(1.0, finding.share * explained / total) if total > 0 else 0.0 for finding in findings]
    least = [slow is None or explained < slow.lost_share] * len(findings)
    for at, finding in enumerate(findings):
        if paths and finding.kind.computes and len(finding.members) == 1 and finding.members[0] in paths:
            shares[at], least[at] = min(1.0, paths[finding.members[0]] / duration), False
    return [Cost(share, share * duration, (1 - share) * duration, few) for share, few in zip(shares, least, strict=True)]
