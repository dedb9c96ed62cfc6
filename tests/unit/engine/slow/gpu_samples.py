"""Samples of four ranks whose shims tell what their GPUs have done."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.model.device import ConnectionCounter, DeviceCommunicator, DeviceOperation, DeviceSample
from ncclwatch.model.state import ProcessSample
from unit.synthetic import SECOND, WORLD, Rank, address_of, communicator, looks

WORLD_SIZE = 4


def operation(ordinal: int, began_s: float, lasted_s: float, duration_ns: int | None = None) -> DeviceOperation:
    began = int(began_s * SECOND)
    return DeviceOperation(
        ordinal, "AllReduce", False, ordinal - 1, 1024, None, 2, 2, 2, True, began, started_ns=began,
        finished_ns=began + int(lasted_s * SECOND), duration_ns=duration_ns,
    )  # fmt: skip


def at(second: float, operations: list[list[DeviceOperation]], rates: list[float] | None = None) -> list[ProcessSample]:
    """A look at all ranks; ``operations`` are those that each rank's GPU has ended lately."""
    samples = []
    for rank in range(WORLD_SIZE):
        own = communicator(rank, WORLD_SIZE)
        ended = tuple(operations[rank])
        device = DeviceSample(
            "plugin", 6, "running", 0,
            (DeviceCommunicator(WORLD, address_of(WORLD) + 64, rank, WORLD_SIZE, False, 1, 1, 0, recent=ended),),
            counters=() if rates is None else (
                ConnectionCounter(address_of(WORLD), 0, (rank + 1) % WORLD_SIZE, True, 0, "head", 40, steps_per_s=rates[rank]),
            ),
        )  # fmt: skip
        made = looks([Rank(rank, WORLD_SIZE, (own,), host=f"node{rank}", extra={"device": device})])[0][-1]
        samples.append(replace(made, time_ns=int(second * SECOND), wall_ns=int(second * SECOND)))
    return samples
