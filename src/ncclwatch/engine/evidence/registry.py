"""All sources of evidence, and what a verdict could not see.

To add a source: a module of this package, a line here, and its tests (docs/adding-a-source.md).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ncclwatch.engine.evidence.base import Source
from ncclwatch.engine.evidence.calls import Calls
from ncclwatch.engine.evidence.device import DeviceShim
from ncclwatch.engine.evidence.disagreements import OpenCalls, SequenceCounts
from ncclwatch.engine.evidence.kernel import CpuLimits, Exits, KernelLog
from ncclwatch.engine.evidence.nics import Ports, Sockets
from ncclwatch.engine.evidence.transfers import Proxies, SharedMemory
from ncclwatch.engine.evidence.work_requests import WorkRequests
from ncclwatch.engine.job import Job

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

SOURCES: tuple[Source, ...] = (
    Exits(), Proxies(), SharedMemory(), DeviceShim(), Calls(), OpenCalls(), SequenceCounts(), Ports(), Sockets(), KernelLog(),
    CpuLimits(), WorkRequests(),
)  # fmt: skip
"""Every source, in the order in which what they say is told."""

LISTED = 6
"""Bound: communicators with unobserved ranks that are listed; of more only the number is told."""


def not_observed(case: Case) -> tuple[str, ...]:
    """All that was hidden from a verdict on a job."""
    missing = [line for source in case.known.sources for line in source.coverage(case)]
    return (*missing, *not_read(case.job))


def not_read(job: Job) -> tuple[str, ...]:
    """Signals that could not be read, each once, and communicator ranks that were not observed."""
    lines = [
        f"{name}: {reason}"
        for member in job.members
        if member.last.unavailable
        for name, reason in member.last.unavailable.items()
    ]
    torn = sum([sample.torn for member in job.members for sample in member.samples])
    if torn:
        lines.append(f"{torn} structures changed while they were read and were dropped")
    incomplete = [group for group in job.groups.values() if len(group.members) < group.nranks]
    lines += [
        f"communicator {group.hash:016x}: {group.nranks - len(group.members)} of {group.nranks} ranks were not observed"
        for group in incomplete[:LISTED]
    ]
    if len(incomplete) > LISTED:
        sizes = Counter(group.nranks for group in incomplete[LISTED:])
        what = ", ".join(f"{number} of {size} ranks" for size, number in sorted(sizes.items()))
        lines.append(f"{len(incomplete) - LISTED} more communicators with ranks that were not observed ({what})")
    return tuple(dict.fromkeys(lines))
