"""What CPU limits of control groups do to a job: a process that has used up its share of a period stands still for its rest."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ncclwatch.engine.evidence.base import Fact, FactKind, Source, Strength
from ncclwatch.engine.job import Member
from ncclwatch.engine.nodes import RankNode
from ncclwatch.model.state import CpuLimit

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "CPU limits"

HELD_BACK = 0.25
"""Unit: part of a limit's periods; from it on a rank is held back. From: chosen, as what is held back in a quarter
of them can lose a fifth of its speed and more.
"""
HELD_TIMES = 2.0
"""Unit: times the median of all ranks; so much more, and a limit of its own holds a rank back. From: chosen, as equal limits hold
back alike who works alike.
"""
FEW_PERIODS = 10
"""Unit: periods. Of fewer no share can be told. From: cpu.max's usual period is 100 ms, samples are a second apart."""


def throttled_share(before: CpuLimit | None, after: CpuLimit | None) -> float | None:
    """The part of the limit's periods between two readings in which it held the process back, 0 to 1; 0 without a limit.

    ``None`` where it is not known, or the process was put into its control group only in between.
    """
    rise = after.since(before) if before is not None and after is not None else None
    return None if rise is None else min(1.0, rise[1] / max(1, rise[0]))


def held_back(member: Member) -> float | None:
    """:func:`throttled_share` between the first and the last reading at hand of a process."""
    known = [sample.cpu_limit for sample in member.samples if sample.cpu_limit is not None]
    return throttled_share(known[0], known[-1]) if len(known) > 1 else None


class CpuLimits(Source):
    """CPU limits of control groups (``cpu.stat``)."""

    name = NAME
    plane = "state"
    kinds = frozenset({FactKind.THROTTLED})

    def facts(self, case: Case) -> Iterator[Fact]:
        """Processes that a limit has held back: ``PROVEN`` between the samples at hand. ``LIKELY`` and without an interval where
        hardly a period has passed between them: of all periods of the control group so far. O(processes).

        (Seen on Linux 6.18: for seven seconds no thread of a process with a fiftieth of a CPU got any, nor did a period end.)
        """
        for member in case.job.members:
            known = _known(member)
            if not known:
                continue
            (began, first), (ended, last) = known[0], known[-1]
            share = throttled_share(first, last) if len(known) > 1 else None
            if share:
                yield _fact(member, share, Strength.PROVEN, (began, ended))
            if last.periods and last.throttled and last.periods - first.periods < FEW_PERIODS:
                yield _fact(member, min(1.0, last.throttled / last.periods), Strength.LIKELY, None)


def _known(member: Member) -> list[tuple[float, CpuLimit]]:
    """Readings of a process that has a limit, with when they were made; empty where nothing limits it, or that is not known."""
    last = member.last.cpu_limit
    if last is not None and not last.periods:
        return []
    return [(sample.wall_ns / 1e9, sample.cpu_limit) for sample in member.samples if sample.cpu_limit is not None]


def _fact(member: Member, share: float, strength: Strength, interval: tuple[float, float] | None) -> Fact:
    text = partial(_text, member, share)
    subject = RankNode(member.index)
    return Fact(FactKind.THROTTLED, subject, NAME, strength, interval=interval, value=share, describe=text)


def _text(member: Member, share: float) -> str:
    return f"{member.label}: a CPU limit holds it back in {share:.0%} of the limit's periods"
