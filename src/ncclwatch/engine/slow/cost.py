"""What each culprit costs: how long an iteration would last if it were normal.

Where there is a healthy past, the loss is measured (iterations now against normal ones), and several culprits have their parts of
it as they hold the others up. Without one, the share of the time that others are seen to wait for a culprit is the least it
costs. What the critical path of whole iterations says of a rank's work counts before both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ncclwatch.engine.slow.detect import SlowDown
from ncclwatch.engine.slow.findings import Finding

WHOLE = 0.5
"""Culprits seen to hold the job up for at least this part of what is lost explain all of it: looks see waits, not their ends."""


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
