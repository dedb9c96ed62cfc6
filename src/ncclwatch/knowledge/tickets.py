"""What a ticket needs of a culprit: node, Slurm job or pod, GPU, NIC, as far as the samples of its process say it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from ncclwatch.model.network import NicRecord
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.traits import GpuTrait
from ncclwatch.model.verdict import Culprit, Ticket, Verdict
from ncclwatch.text import bus_text

Processes = Mapping[tuple[str, int], ProcessSample]
"""The newest sample by (host, pid)."""


def by_place(samples: Iterable[ProcessSample]) -> Processes:
    """Samples by where their process is."""
    return {(sample.process.host, sample.process.pid): sample for sample in samples}


def ticketed(verdict: Verdict, processes: Processes, nics: Iterable[NicRecord] = ()) -> Verdict:
    """The verdict whose culprits carry what is known for a ticket."""
    if not verdict.culprits:
        return verdict
    known = list(nics)
    return replace(verdict, culprits=tuple(replace(one, ticket=ticket(one, processes, known)) for one in verdict.culprits))


def ticket(culprit: Culprit, processes: Processes, nics: Iterable[NicRecord] = ()) -> Ticket | None:
    """Of one culprit; ``None`` where nothing was read of its process."""
    sample = processes.get((culprit.host, culprit.pid)) if culprit.pid is not None else None
    if sample is None:
        return None
    traits, info = sample.process.traits, sample.process
    gpu = gpu_of(culprit, sample)
    uuid = gpu.uuid if gpu is not None else ""
    buses = _buses(culprit, sample)
    bus = buses.pop() if len(buses) == 1 else ""
    ports = tuple(dict.fromkeys(_nics(culprit, nics)))
    if traits is None:
        return Ticket(node=info.host, container=info.container_id, nics=ports, gpu_bus=bus)
    place = traits.node or info.host
    return Ticket(place, traits.job, traits.namespace, traits.pod, info.container_id, uuid, ports, bus)


def gpu_of(culprit: Culprit, sample: ProcessSample) -> GpuTrait | None:
    """The GPU of the node that a culprit's communicators drive, by its bus id; ``None`` where that is not known."""
    traits = sample.process.traits
    wanted = _buses(culprit, sample)
    found = [gpu for gpu in (traits.gpus if traits is not None else ()) if gpu.bus_id in wanted]
    return found[0] if len(found) == 1 else None


def _buses(culprit: Culprit, sample: ProcessSample) -> set[str]:
    """Bus ids of the GPUs that a culprit's communicators drive."""
    return {
        bus_text(communicator.bus_id)
        for communicator in sample.communicators
        if communicator.bus_id is not None and culprit.gpu in (None, communicator.device)
    }


def _nics(culprit: Culprit, nics: Iterable[NicRecord]) -> Iterator[str]:
    if culprit.link is not None and culprit.link.device:
        yield culprit.link.device
    used = (nic for nic in nics if nic.host == culprit.host and culprit.rank in nic.used_by)
    # Nobody exchanges a loopback.
    yield from (nic.name for nic in used if nic.name != "lo")
