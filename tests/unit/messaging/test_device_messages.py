"""What the shim shows travels with the samples: over the network and in recordings, and costs nothing while nothing happens."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.device import DeviceChannel, DeviceSample, StepWait, UnfinishedTransfer
from unit.batches import node_batches
from unit.engine.evidence.test_device import nvlink_ring
from unit.synthetic import SECOND, WORLD


def device(sample_device: object) -> DeviceSample:
    assert isinstance(sample_device, DeviceSample)
    own = replace(sample_device.communicators[0], channels=(DeviceChannel(0, 7, 6, 7), DeviceChannel(63, 1, 1, 7)), name="tensor")
    wait = UnfinishedTransfer(
        WORLD, 0, 3, 1, True, 96, 8, 4, 524288, 5, 6, 7, 4711, (StepWait(4, "nothing has arrived", 99), StepWait(5, "begun", 98))
    )
    return replace(sample_device, communicators=(own,), transfers=(wait,), copy_pending_ns=12, unmatched=3, last_error=-1)


def test_a_device_sample_comes_back_whole() -> None:
    looks = [[replace(rank.looks(1)[0], device=device(rank.extra["device"])) for rank in nvlink_ring()] for _ in range(2)]
    looks[1] = [replace(s, time_ns=s.time_ns + SECOND, wall_ns=s.wall_ns + SECOND) for s in looks[1]]
    writer, reader = BatchWriter(), BatchReader()
    sizes = []
    for batch in node_batches(looks):
        data = writer.encode(batch)
        sizes.append(len(data))
        decoded = reader.decode(data)
        assert decoded.batch is not None
        for ours, theirs in zip(batch.samples, decoded.batch.samples, strict=True):
            assert theirs.device == ours.device
            assert theirs.device is not None and ours.device is not None
            assert theirs.device.communicators[0].recent == ours.device.communicators[0].recent
    assert sizes[1] < sizes[0] / 2, "nothing happened in between"


def test_a_process_without_the_shim_says_nothing() -> None:
    looks = [[rank.looks(1)[0] for rank in nvlink_ring(shim=False)]]
    (batch,) = node_batches(looks)
    decoded = BatchReader().decode(BatchWriter().encode(batch))
    assert decoded.batch is not None and all(sample.device is None for sample in decoded.batch.samples)
