"""How much CPU the processes of a job use, and how long their threads wait for one: graded evidence for slow hosts and ranks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from ncclwatch.engine.evidence.base import Coverage, FactKind, Measure, Quantity, Source
from ncclwatch.engine.job import Member
from ncclwatch.engine.nodes import RankNode
from ncclwatch.model.state import ProcessSample

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "CPU use"


def cpus_used(before: ProcessSample, after: ProcessSample) -> float | None:
    """How many CPUs the threads of a process used on average between two samples; ``None`` where that is not known."""
    return _rate(before.cpu_time_ns, after.cpu_time_ns, after.time_ns - before.time_ns)


def cpus_waited(before: ProcessSample, after: ProcessSample) -> float | None:
    """How many threads of a process were runnable without a CPU on average between two samples; ``None``: not known.

    Only of threads alive now: where many have ended in between it may fall, and is not known.
    """
    return _rate(before.run_queue_wait_ns, after.run_queue_wait_ns, after.time_ns - before.time_ns)


def _rate(before: int | None, after: int | None, elapsed_ns: int) -> float | None:
    if before is None or after is None or elapsed_ns <= 0 or after < before:
        return None
    return (after - before) / elapsed_ns


class CpuUse(Source):
    """CPU times and run-queue waits of processes (``/proc/PID/stat``, ``schedstat``)."""

    name = NAME
    plane = "state"
    kinds = frozenset({FactKind.SLOWED})

    def facts(self, case: Case) -> Iterator[Measure]:
        """CPUs used and waited for, between the first and the last sample at hand of each process. O(processes)."""
        for member in case.job.members:
            before, after = member.samples[0], member.last
            for quantity, value in (
                (Quantity.CPU_USED, cpus_used(before, after)),
                (Quantity.CPU_WAITED, cpus_waited(before, after)),
            ):
                if value is not None:
                    yield Measure(
                        kind=FactKind.SLOWED, subject=RankNode(member.index), source=NAME, quantity=quantity, value=value,
                        interval=(before.wall_ns / 1e9, after.wall_ns / 1e9), describe=partial(_text, member, quantity, value),
                    )  # fmt: skip

    def coverage(self, case: Case) -> Coverage:
        """Processes whose CPU times could be read."""
        seen = sum(member.last.cpu_time_ns is not None for member in case.job.members)
        return Coverage(NAME, seen, len(case.job.members))


def _text(member: Member, quantity: Quantity, value: float) -> str:
    if quantity is Quantity.CPU_USED:
        return f"{member.label}: its threads use {value:.1f} CPUs"
    return f"{member.label}: {value:.1f} of its threads wait for a CPU"
