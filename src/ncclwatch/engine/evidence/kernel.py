"""What the kernels of the hosts say: who is stopped or has ended, whom a CPU limit holds back, and their logs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING

from ncclwatch.engine.evidence.base import Fact, FactKind, RankNode, Source, Strength
from ncclwatch.model.job import Group, Identity, Job, Member, identity_of
from ncclwatch.model.network import KernelLogLine
from ncclwatch.model.state import CpuLimit

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case


class Exits(Source):
    """States of processes."""

    kinds = frozenset({FactKind.HALTED})

    def facts(self, case: Case) -> Iterator[Fact]:
        """Processes that are stopped or have ended. O(processes)."""
        for member in case.job.halted:
            yield Fact(FactKind.HALTED, RankNode(member.index), describe=partial(_halted_text, member))


@dataclass(frozen=True, slots=True)
class Census:
    """Who runs, by ``hostHash`` and ``pidHash`` of ``ncclPeerInfo``: hosts sampled ``whole``, and processes that run."""

    whole: frozenset[int]
    alive: frozenset[Identity]

    @classmethod
    def of(cls, job: Job, complete_hosts: Collection[str]) -> Census:
        """Of the processes of a job. O(their communicators)."""
        held = ((member, own) for member in job.members for own in member.last.communicators)
        known = [(member, identity) for member, own in held if (identity := identity_of(own, own.rank)) is not None]
        return cls(
            frozenset(host_hash for member, (host_hash, _) in known if member.info.host in complete_hosts),
            frozenset(identity for member, identity in known if not member.gone),
        )

    def runs(self, group: Group, comm_rank: int) -> bool | None:
        """Whether a rank that no observed process seems to hold runs; ``None``: it may. Its communicator may not be found yet."""
        identity = group.identity(comm_rank)
        if identity is None or (identity not in self.alive and identity[0] not in self.whole):
            return None
        return identity in self.alive


def _halted_text(member: Member) -> str:
    state = member.last.run_state
    words = {"T": "stopped", "t": "stopped by a debugger", "Z": "a zombie: it has ended", "X": "gone: it has ended"}
    same = [sample for sample in member.samples if sample.run_state == state]
    span = (same[-1].time_ns - same[0].time_ns) / 1e9
    return f"{member.label} is {words.get(state, state)} (state {state}) in {len(same)} samples over {span:.1f} s"


_CPU_LIMIT = attrgetter("cpu_limit")
HELD_BACK = 0.25
"""Unit: part of a limit's periods; from it on a rank is held back. From: chosen, as what is held back in a quarter
of them can lose a fifth of its speed and more.
"""
HELD_TIMES = 2.0
"""A limit that holds a rank back so much more than others is its own. Unit: times the median of all. From: chosen."""


def throttled_share(before: CpuLimit | None, after: CpuLimit | None) -> float | None:
    """The part of the limit's periods in which it held a process back; ``None``: not known, or put there in between."""
    rise = after.since(before) if before is not None and after is not None else None
    return None if rise is None else min(1.0, rise[1] / max(1, rise[0]))


def held_back(member: Member) -> float | None:
    """:func:`throttled_share` between the first and the last reading at hand of a process."""
    known = [*filter(None, map(_CPU_LIMIT, member.samples))]
    return throttled_share(known[0], known[-1]) if len(known) > 1 else None


class CpuLimits(Source):
    """CPU limits of control groups (``cpu.stat``)."""

    kinds = frozenset({FactKind.THROTTLED})

    def facts(self, case: Case) -> Iterator[Fact]:
        """Processes that a limit has held back: ``PROVEN`` between the samples at hand; ``LIKELY`` where no period has passed
        between them: of all periods of the control group so far. O(processes).

        (Seen on Linux 6.18: for seven seconds no thread of a process with a fiftieth of a CPU got any, nor did a period end.)
        """
        for member in case.job.members:
            known = [*filter(None, map(_CPU_LIMIT, member.samples))]
            if not known or not (known[-1].periods and known[-1].throttled):
                continue
            share, strength = held_back(member), Strength.PROVEN
            if not share and known[-1].periods == known[0].periods:
                share, strength = min(1.0, known[-1].throttled / known[-1].periods), Strength.LIKELY
            if share:
                text = partial("{}: a CPU limit holds it back in {:.0%} of the limit's periods".format, member.label, share)
                yield Fact(FactKind.THROTTLED, RankNode(member.index), strength, value=share, describe=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logged(Fact):
    """A line of the kernel log of ``host``. ``subject`` is that host and the process it names (``None``: none)."""

    host: str
    line: KernelLogLine


class KernelLog(Source):
    """The kernels' logs: Xids, NIC errors, processes that were killed for want of memory."""

    kinds = frozenset({FactKind.LOGGED})

    def facts(self, case: Case) -> Iterator[Logged]:
        """Every line that is remembered, by host, the oldest first."""
        for host, known in sorted(case.known.network.hosts.items()):
            for _, line in known.kernel:
                text = partial("kernel log of {}: {}".format, line.origin, line.text)
                yield Logged(FactKind.LOGGED, (host, line.pid), host=host, line=line, describe=text)
