"""Memory readers: a live process of our own, recording, and images."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ncclwatch.errors import TargetGoneError
from ncclwatch.target import memory
from ncclwatch.target.memory import (
    IOV_MAX,
    MAX_READ,
    PAGE_SIZE,
    AddressSpace,
    LiveReader,
    UnreadableError,
    plausible_pointer,
)
from ncclwatch.target.recorded import ImageReader, RecordingReader, from_pages
from unit.target_fake import mapping

PATTERN = bytes(range(256)) * 64


@pytest.fixture
def own() -> Iterator[LiveReader]:
    reader = LiveReader(os.getpid())
    yield reader
    reader.close()


@pytest.fixture
def hole() -> Iterator[int]:
    """The address of three pages, the middle one not readable."""
    area = mmap.mmap(-1, 3 * PAGE_SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    area[:PAGE_SIZE] = b"a" * PAGE_SIZE
    area[2 * PAGE_SIZE :] = b"c" * PAGE_SIZE
    libc = ctypes.CDLL(None)
    assert libc.mprotect(ctypes.c_void_p(address + PAGE_SIZE), PAGE_SIZE, 0) == 0
    yield address
    assert libc.mprotect(ctypes.c_void_p(address + PAGE_SIZE), PAGE_SIZE, 3) == 0


def test_reads_what_is_there(own: LiveReader) -> None:
    buffer = ctypes.create_string_buffer(PATTERN)
    address = ctypes.addressof(buffer)
    assert own.read(address, len(PATTERN)) == PATTERN
    assert own.read_many([(address + 3, 7), (address, 1), (address + 100, 50)]) == [PATTERN[3:10], PATTERN[:1], PATTERN[100:150]]


def test_more_ranges_than_one_call_takes(own: LiveReader) -> None:
    buffer = ctypes.create_string_buffer(PATTERN)
    address = ctypes.addressof(buffer)
    count = 2 * IOV_MAX + 7
    before = own.counters.calls
    assert own.read_many([(address + i, 3) for i in range(count)]) == [PATTERN[i : i + 3] for i in range(count)]
    assert own.counters.calls - before == 3


def test_a_fault_fails_only_its_range(own: LiveReader, hole: int) -> None:
    wanted = [(hole, 4), (hole + PAGE_SIZE, 4), (hole + 8, 4), (8, 4), (hole + PAGE_SIZE, 1), (hole + 2 * PAGE_SIZE, 4)]
    assert own.read_many(wanted) == [b"aaaa", None, b"aaaa", None, None, b"cccc"]
    assert own.counters.faults == 3


def test_a_range_that_runs_into_a_hole_is_no_partial_answer(own: LiveReader, hole: int) -> None:
    assert own.read_many([(hole + PAGE_SIZE - 8, 16), (hole, 2)]) == [None, b"aa"]
    with pytest.raises(UnreadableError):
        own.read(hole + PAGE_SIZE - 8, 16)


@pytest.mark.parametrize("size", [0, -1, MAX_READ + 1, 1 << 62])
def test_absurd_lengths_are_refused_without_a_call(own: LiveReader, size: int) -> None:
    before = own.counters.calls
    address = own.mappings()[0].start
    assert own.read_many([(address, size), (address, size)]) == [None, None]
    with pytest.raises(UnreadableError):
        own.read(address, size)
    assert own.counters.calls == before


def test_hostile_addresses_are_refused(own: LiveReader) -> None:
    for address in (0, 1, 1 << 47, 1 << 48, (1 << 64) - 8, -8):
        assert own.read_many([(address, 8), (address, 8)]) == [None, None]


def test_scan_stops_at_the_hole(own: LiveReader, hole: int) -> None:
    assert len(own.scan(hole, 3 * PAGE_SIZE)) == PAGE_SIZE // 8
    assert len(own.scan(hole + PAGE_SIZE, PAGE_SIZE)) == 0


def test_probe_goes_on_behind_a_fault(own: LiveReader, hole: int) -> None:
    addresses = np.array([hole, hole + PAGE_SIZE, hole + 2 * PAGE_SIZE, hole + PAGE_SIZE, hole], dtype=np.uint64)
    a, c = (int.from_bytes(letter * 8, "little") for letter in (b"a", b"c"))
    assert own.probe(addresses).tolist() == [a, 0, c, 0, a]


def test_resident_names_only_touched_pages(own: LiveReader) -> None:
    area = mmap.mmap(-1, 64 * PAGE_SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for page in (3, 4, 40):
        area[page * PAGE_SIZE] = 1
    assert own.resident(address, address + 64 * PAGE_SIZE) == [
        (address + 3 * PAGE_SIZE, 2 * PAGE_SIZE),
        (address + 40 * PAGE_SIZE, PAGE_SIZE),
    ]


def test_exit_is_noticed() -> None:
    process = subprocess.Popen(["sleep", "60"])
    reader = LiveReader(process.pid)
    reader.check()
    start = reader.mappings()[0].start
    process.kill()
    process.wait()
    with pytest.raises(TargetGoneError):
        reader.check()
    with pytest.raises(TargetGoneError):
        reader.read_many([(start, 8), (start, 8)])
    reader.close()


def test_exec_is_noticed() -> None:
    code = "import os,sys; print('up', flush=True); sys.stdin.readline(); os.execvp('sleep', ['sleep', '60'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout and process.stdout.readline() == "up\n"
    reader = LiveReader(process.pid)
    reader.check()
    process.stdin.write("\n")
    process.stdin.flush()
    with pytest.raises(TargetGoneError):
        while True:
            reader.check()
    process.kill()
    process.communicate()
    reader.close()


def test_a_pid_that_is_not_there() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(TargetGoneError):
        LiveReader(process.pid)


def test_recording_keeps_the_pages_and_repeats_them(own: LiveReader, hole: int) -> None:
    recorder = RecordingReader(own)
    assert recorder.read(hole + 10, 4) == b"aaaa"
    ctypes.memset(hole + 10, ord("b"), 4)
    assert recorder.read(hole + 10, 4) == b"aaaa"
    assert recorder.read_many([(hole + 10, 4)], again=True) == [b"bbbb"]
    assert recorder.read_many([(hole + PAGE_SIZE, 4), (hole + 2 * PAGE_SIZE, 2)]) == [None, b"cc"]
    image = ImageReader(recorder.pages, own.mappings())
    assert image.read(hole + 10, 4) == b"bbbb"
    assert image.read_many([(hole + PAGE_SIZE, 4)]) == [None]
    assert image.resident(hole, hole + 3 * PAGE_SIZE) == [(hole, PAGE_SIZE), (hole + 2 * PAGE_SIZE, PAGE_SIZE)]
    recorder.start_sample()
    assert recorder.pages == {}


def test_image_searches_like_a_process() -> None:
    pages = {0x7F0000000000 + i * PAGE_SIZE: i.to_bytes(8, "little") * (PAGE_SIZE // 8) for i in (0, 1, 3)}
    image = ImageReader(pages, [mapping(0x7F0000000000, 0x7F0000010000)])
    words = image.scan(0x7F0000000000, 0x10000)
    assert len(words) == 2 * PAGE_SIZE // 8
    assert words[-1] == 1
    probes = np.array([0x7F0000000000 + 3 * PAGE_SIZE, 0x7F0000000000 + 2 * PAGE_SIZE], dtype=np.uint64)
    assert image.probe(probes).tolist() == [3, 0]


def test_ranges_across_pages_are_put_together() -> None:
    base = 0x10000
    pages = {base: b"a" * PAGE_SIZE, base + PAGE_SIZE: b"b" * PAGE_SIZE}
    assert from_pages(pages, base + PAGE_SIZE - 2, 4) == b"aabb"
    assert from_pages(pages, base + 2 * PAGE_SIZE - 2, 4) is None


def test_address_space_knows_what_is_readable() -> None:
    space = AddressSpace([mapping(0x10000, 0x20000), mapping(0x20000, 0x30000, "r--p"), mapping(0x30000, 0x40000, "---p")])
    assert space.contains(0x1FFF8, 16)
    assert not space.contains(0x2FFF8, 16)
    assert not space.contains(0x30000)
    assert not space.contains(0xF000)
    assert not space.contains(0x40000)


def test_plausible_pointers() -> None:
    assert plausible_pointer(0x7F0000000010)
    assert not any(plausible_pointer(value) for value in (0, 1, 2, 0x7F0000000011, 1 << 48, -8))


def test_nothing_of_a_target_is_opened_for_writing(own: LiveReader) -> None:
    """What looks at a process cannot change it: its memory is open for reading, and no call of ours writes, stops or signals."""
    flags = Path(f"/proc/self/fdinfo/{own._mem}").read_text("ascii").split("flags:")[1].split()[0]
    assert int(flags, 8) & os.O_ACCMODE == os.O_RDONLY
    harmful = re.compile(r"process_vm_writev|PTRACE_(ATTACH|SEIZE|POKE|INTERRUPT)|os\.kill\(|pidfd_send_signal")
    # The command line signals other processes of ncclwatch (cli/asking.py).
    sources = (path for path in Path(memory.__file__).parents[1].rglob("*.py") if path.parent.name != "cli")
    assert [path.name for path in sources if harmful.search(path.read_text("utf-8"))] == []
