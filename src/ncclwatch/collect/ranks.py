"""A process that drives several GPUs is several ranks: nccl-tests with ``-g``, JAX, a thread or a group of calls for each GPU.

What is read of such a process is told as one sample a GPU, so that everything behind it knows ranks only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ncclwatch.model.device import DeviceSample
    from ncclwatch.model.state import Communicator, ProcessInfo, ProcessSample


def ranks_of(sample: ProcessSample) -> tuple[ProcessSample, ...]:
    """The sample itself where the process drives one GPU, else one for each GPU, by its number.

    What belongs to the process (its state, its CPU time) is in all of them. What cannot be told to a GPU is in the first.
    """
    devices = sorted({c.device for c in sample.communicators if c.device is not None})
    if len(devices) < 2:
        return (sample,)
    owners = _Owners.of(sample.communicators, devices)
    return tuple(_part(sample, owners, device) for device in devices)


def series_of(samples: Sequence[ProcessSample]) -> list[Sequence[ProcessSample]]:
    """Samples of one process in time order, as one such sequence for each of its ranks."""
    by_rank: dict[int, list[ProcessSample]] = {}
    for sample in samples:
        for part in ranks_of(sample):
            by_rank.setdefault(part.process.key.part, []).append(part)
    return list(by_rank.values())


@dataclass(frozen=True, slots=True)
class _Owners:
    """Which GPU communicators are on: by address, by (hash, rank), and by the highest address below another."""

    first: int
    by_address: dict[int, int]
    by_rank: dict[tuple[int, int], int]
    addresses: list[int]

    @classmethod
    def of(cls, communicators: Iterable[Communicator], devices: Sequence[int]) -> _Owners:
        known = [(c, devices[0] if c.device is None else c.device) for c in communicators]
        by_address = {c.address: device for c, device in known}
        return cls(devices[0], by_address, {(c.hash, c.rank): device for c, device in known}, sorted(by_address))

    def device(self, address: int, comm_hash: int | None = None, rank: int | None = None) -> int:
        """The GPU of a communicator's address, else of a rank of it, else the first."""
        found = self.by_address.get(address)
        if found is None and comm_hash is not None and rank is not None:
            found = self.by_rank.get((comm_hash, rank))
        return self.first if found is None else found

    def around(self, inside: int, comm_hash: int | None, rank: int | None) -> int:
        """The GPU of the communicator that an address lies in."""
        if (comm_hash or 0, -1 if rank is None else rank) in self.by_rank:
            return self.device(0, comm_hash, rank)
        at = bisect_right(self.addresses, inside)
        return self.device(self.addresses[at - 1] if at else 0)


def _part(sample: ProcessSample, owners: _Owners, device: int) -> ProcessSample:
    return replace(
        sample,
        process=_info(sample.process, device, first=device == owners.first),
        communicators=tuple(c for c in sample.communicators if owners.device(c.address) == device),
        operations=tuple(
            o
            for o in sample.operations
            if owners.device(o.comm_address, o.comm_hash, o.subs[0].rank if o.subs else None) == device
        ),
        pending=tuple(p for p in sample.pending if owners.device(p.comm_address, p.comm_hash, p.rank) == device),
        device=_device(sample.device, owners, device) if sample.device is not None else None,
    )


def _info(process: ProcessInfo, device: int, *, first: bool) -> ProcessInfo:
    # What the environment calls rank counts processes here: which rank a GPU is, its communicators say.
    key = process.key if first else replace(process.key, part=device)
    return replace(process, key=key, rank=None, local_rank=device, world_size=None, rank_source="communicator")


def _device(told: DeviceSample, owners: _Owners, device: int) -> DeviceSample:
    return replace(
        told,
        communicators=tuple(c for c in told.communicators if owners.around(c.inside_address, c.hash, c.rank) == device),
        transfers=tuple(t for t in told.transfers if owners.device(0, t.hash, t.rank) == device),
        counters=tuple(c for c in told.counters if owners.device(c.comm_address) == device),
    )
