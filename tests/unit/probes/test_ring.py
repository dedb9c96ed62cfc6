"""Decoding of the ring buffer on memory laid out as the kernel lays it out."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ncclwatch.probes.ring import BUSY, DISCARDED, RingDecoder, RingError

RECORD = np.dtype([("number", "<u8"), ("twice", "<u8"), ("thrice", "<u8"), ("more", "<u4"), ("pad", "<u4")])
SLOT = 8 + RECORD.itemsize
SIZE = 4096


class FakeRing:
    """What the kernel does: a producer that writes records, and pages that appear twice."""

    def __init__(self, start: int = 0, size: int = SIZE) -> None:
        self.size = size
        self.memory = np.zeros(size, np.uint8)
        self.data = np.zeros(2 * size, np.uint8)
        self.consumer = np.array([start], np.uint64)
        self.producer = np.array([start], np.uint64)
        self.decoder = RingDecoder(self.consumer, self.producer, self.data[: size + SLOT], RECORD, size)

    def put(self, number: int, flags: int = 0, length: int = RECORD.itemsize) -> None:
        record = np.array((number, 2 * number, 3 * number, 7, 0), RECORD).tobytes()
        header = (length | flags).to_bytes(4, "little") + bytes(4)
        start = int(self.producer[0])
        assert start + SLOT - int(self.consumer[0]) <= self.size, "the kernel never overwrites what was not consumed"
        for index, byte in enumerate(header + record):
            self.memory[(start + index) % self.size] = byte
        self.producer[0] = start + SLOT
        self.mirror()

    def set_header(self, position: int, value: int) -> None:
        for index, byte in enumerate(value.to_bytes(4, "little")):
            self.memory[(position + index) % self.size] = byte
        self.mirror()

    def mirror(self) -> None:
        self.data[: self.size] = self.memory
        self.data[self.size :] = self.memory

    def read(self) -> npt.NDArray[Any]:
        return self.decoder.read()


def test_an_empty_ring_gives_nothing() -> None:
    ring = FakeRing()
    assert len(ring.read()) == 0
    assert ring.decoder.pending() == 0


def test_records_come_out_once_and_free_their_room() -> None:
    ring = FakeRing()
    for number in range(23):
        ring.put(number)
    records = ring.read()
    assert records["number"].tolist() == list(range(23))
    assert records["thrice"].tolist() == [3 * n for n in range(23)]
    assert ring.consumer[0] == ring.producer[0] == 23 * SLOT
    assert len(ring.read()) == 0


def test_the_ring_wraps_around_many_times() -> None:
    """4096 is no multiple of 40, so records straddle the end at ever other places."""
    ring = FakeRing(start=7 * SIZE)
    seen: list[int] = []
    for first in range(0, 2000, 50):
        for number in range(first, first + 50):
            ring.put(number)
        seen += ring.read()["number"].tolist()
    assert seen == list(range(2000))
    assert SIZE % SLOT != 0


def test_reading_stops_at_a_record_that_is_being_written() -> None:
    ring = FakeRing()
    ring.put(1)
    busy_at = int(ring.producer[0])
    ring.put(2, int(BUSY))
    ring.put(3)
    assert ring.read()["number"].tolist() == [1]
    assert len(ring.read()) == 0
    ring.set_header(busy_at, RECORD.itemsize)
    assert ring.read()["number"].tolist() == [2, 3]


def test_discarded_records_are_skipped_and_freed() -> None:
    ring = FakeRing()
    ring.put(1)
    ring.put(2, int(DISCARDED))
    ring.put(3)
    assert ring.read()["number"].tolist() == [1, 3]
    assert ring.consumer[0] == 3 * SLOT


def test_a_record_of_another_size_is_an_error_not_a_misreading() -> None:
    ring = FakeRing()
    ring.put(1)
    ring.put(2, length=RECORD.itemsize + 8)
    with pytest.raises(RingError, match="40 bytes, not 32"):
        ring.read()


def test_what_was_read_does_not_change_when_the_kernel_writes_on() -> None:
    ring = FakeRing()
    ring.put(5)
    records = ring.read()
    ring.data[:] = 0xFF
    assert records["number"].tolist() == [5]


@pytest.mark.parametrize("size", [0, 16, 3000])
def test_impossible_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        FakeRing(size=size)
