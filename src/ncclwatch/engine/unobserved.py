"""What a verdict could not see: hidden by the transports in play, not readable in this build, or on nodes nobody looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ncclwatch.engine.evidence.device import sees_everything
from ncclwatch.engine.job import Job
from ncclwatch.model.state import Transport

LISTED = 6
"""Bound: communicators with unobserved ranks that are listed; of more only the number is told."""

BY_TRANSPORT = {
    Transport.SHM: "shared-memory connections: steps are seen, the operation they belong to is not",
    Transport.P2P: "P2P/NVLink connections: their counters lie in GPU memory; only launches are seen without the shim",
    Transport.NVLS: "NVLS: the switch adds up inside the fabric; no host-visible counters, only launches are seen",
    Transport.COLLNET: "CollNet: the switch adds up inside the network; its own counters are not compared between ranks",
    Transport.UNKNOWN: "connections of a transport that was not recognised",
}


def not_observed(job: Job) -> tuple[str, ...]:
    """All that was hidden from a verdict on this job."""
    return (*_hidden(job), *not_read(job))


def _hidden(job: Job) -> Iterator[str]:
    """What the transports and the ways of launching in play hide from the host (docs/engine.md has the table)."""
    communicators = [own for member in job.members for own in member.last.communicators]
    seen = {transport for own in communicators for _, _, _, transport in own.transports}
    if Transport.P2P in seen and sees_everything(job):
        seen.discard(Transport.P2P)
    yield from (text for transport, text in BY_TRANSPORT.items() if transport in seen)
    multi_node = captured = by_device = False
    for own in communicators:
        multi_node = multi_node or bool(own.multi_node_nvlink)
        captured = captured or bool(own.captured_plans)
        by_device = by_device or bool(own.device_initiated)
    if multi_node:
        yield "NVLink between nodes (MNNVL): connections to other nodes are P2P as well; only launches are seen"
    if captured:
        yield "operations captured in CUDA graphs: their replays make no calls; only proxy steps are seen"
    if by_device:
        yield "operations that kernels start themselves (device API, GIN): neither calls nor proxy steps show them"


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
