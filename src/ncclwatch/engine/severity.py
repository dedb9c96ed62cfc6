"""Verdict classes in order: which of several things found in one job is told first."""

from __future__ import annotations

from ncclwatch.model.verdict import Verdict, VerdictClass

SEVERITY = (
    VerdictClass.RUNNING,
    VerdictClass.IDLE,
    VerdictClass.UNKNOWN,
    VerdictClass.SLOW_MIXED,
    VerdictClass.SLOW_COMMUNICATION,
    VerdictClass.SLOW_COMPUTATION,
    VerdictClass.ERROR,
    VerdictClass.INIT_HANG,
    VerdictClass.HARDWARE,
    VerdictClass.INCONSISTENT,
    VerdictClass.NOT_ENTERED,
    VerdictClass.DEADLOCK,
    VerdictClass.STOPPED,
    VerdictClass.DEAD,
)
"""From nothing wrong to a cause the operating system states outright."""


def severity(verdict: Verdict) -> int:
    """Sorts verdicts, the worst first."""
    return -SEVERITY.index(verdict.verdict_class)
