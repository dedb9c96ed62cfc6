"""The sampler of GPU memory: what it is asked for and refuses, a copy engine that does not answer. The driver is a stand-in."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from ncclwatch.collect.device import DeviceWatch, decode
from ncclwatch.model import frame_layout as layout
from ncclwatch.model.device import ConnectionCounter
from ncclwatch.model.frame_layout import WordStatus
from ncclwatch.model.state import Direction
from ncclwatch.target.devconn import CounterPlace
from ncclwatch.target.frame import FrameFile, WantedWord
from unit.shim_harness import CAN_BUILD, FakeNccl, build_shim, words_of

pytestmark = pytest.mark.skipif(not CAN_BUILD, reason="needs gcc and make")

REQUEST_AT = 798720
"""Of ``struct nw_request`` in the frame; its page is the only one that a reader writes."""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Every copy that the shim asks the driver for: address and size."""
    return tmp_path / "copies"


@pytest.fixture
def hang(tmp_path: Path) -> Path:
    """While this file exists the copy engine does not answer."""
    return tmp_path / "hang"


@pytest.fixture
def nccl(log: Path, hang: Path) -> Iterator[FakeNccl]:
    with FakeNccl(driver=True, env={"STANDIN_CUDA_LOG": str(log), "STANDIN_CUDA_HANG": str(hang)}) as child:
        child.do("c = plugin.init(7)")
        child.do("w = Words(16)")
        yield child


def wanted(nccl: FakeNccl) -> list[WantedWord]:
    return [WantedWord(address, held_at) for address, held_at in nccl.do("w.places()")]


def ask(nccl: FakeNccl, words: list[WantedWord], period_s: float = 0.002) -> None:
    """Ask, and wait until two whole rounds have answered."""
    number = nccl.frame.ask(words, period_s)
    nccl.until(lambda h: h["request_seen"] == number, "the request is taken")
    seen = nccl.header()["rounds"]
    if words:
        nccl.until(lambda h: h["rounds"] >= seen + 2, "two rounds")


def copied(log: Path) -> set[tuple[int, int]]:
    if not log.exists():
        return set()
    return {(int(address, 16), int(size)) for address, size in (line.split() for line in log.read_text().splitlines())}


def test_request_page_is_where_the_layout_says() -> None:
    assert layout.FRAME_DTYPE.fields is not None
    assert layout.FRAME_DTYPE.fields["request"][1] == REQUEST_AT and REQUEST_AT % 4096 == 0


def test_values_and_their_changes_are_read(nccl: FakeNccl) -> None:
    assert nccl.until(lambda h: h["sampler"] == layout.Sampler.IDLE, "idle")["copies"] == 0
    for index in range(16):
        nccl.do(f"w.write({index}, {1000 + index})")
    ask(nccl, wanted(nccl))
    assert words_of(nccl.raw(), 16) == [(WordStatus.OK, 1000 + index) for index in range(16)]
    nccl.do("w.write(3, 5)")
    ask(nccl, wanted(nccl))
    word = nccl.raw()["words"][3]
    assert (int(word["value"]), int(word["changes"])) == (5, 1) and word["changed_ns"] > 0
    # It goes on copying meanwhile: between two copies none has begun.
    header = nccl.until(lambda h: h["copy_begun_ns"] == 0, "the copy ends")
    assert header["sampler"] == layout.Sampler.RUNNING and header["last_error"] == 0


def test_nothing_is_read_once_the_reader_is_gone(nccl: FakeNccl) -> None:
    number = nccl.frame.ask(wanted(nccl), 0.002, lease_s=0.6)
    nccl.until(lambda h: h["request_seen"] == number and h["rounds"] > 3, "rounds")
    rounds = nccl.until(lambda h: h["sampler"] == layout.Sampler.IDLE, "idle again")["rounds"]
    time.sleep(0.1)
    assert nccl.header()["rounds"] == rounds


def test_only_words_that_nccl_points_to_in_gpu_memory_are_copied(nccl: FakeNccl, log: Path) -> None:
    good, *rest = wanted(nccl)
    nccl.do("import ctypes; host = (ctypes.c_uint64 * 2)(); host[0] = ctypes.addressof(host) + 8; here = ctypes.addressof(host)")
    host = int(nccl.do("here"))
    refused = {
        WordStatus.MALFORMED: [
            WantedWord(0, good.held_at),
            WantedWord(good.address, 0),
            WantedWord(good.address + 1, good.held_at),
            WantedWord(good.address, good.held_at, 3),
            WantedWord(good.address, good.held_at, 4096),
        ],
        WordStatus.NOT_HELD: [
            WantedWord(rest[0].address, good.held_at),
            WantedWord(good.address, 8),
            WantedWord(good.address, 0xFFFF_8000_0000_0000),
            WantedWord(0xFFFF_FFFF_FFFF_FFF8, 0xFFFF_FFFF_FFFF_FFFF),
        ],
        WordStatus.NOT_DEVICE: [WantedWord(host + 8, host)],
    }
    words = [word for group in refused.values() for word in group]
    ask(nccl, [*words, good])
    expected = [status for status, group in refused.items() for _ in group]
    assert [status for status, _ in words_of(nccl.raw(), len(words) + 1)] == [*expected, WordStatus.OK]
    assert copied(log) == {(good.address, 8)}


def test_a_connection_that_nccl_drops_is_not_read_any_more(nccl: FakeNccl, log: Path) -> None:
    words = wanted(nccl)
    ask(nccl, words)
    nccl.do("w.let_go(0)")
    seen = nccl.header()["rounds"]
    nccl.until(lambda h: h["rounds"] >= seen + 2, "two rounds")
    log.unlink()
    seen = nccl.header()["rounds"]
    nccl.until(lambda h: h["rounds"] >= seen + 2, "two more")
    assert words_of(nccl.raw(), 1)[0][0] == WordStatus.NOT_HELD
    assert words[0].address not in {address for address, _ in copied(log)}


def write_request(frame: FrameFile, seq: int, **fields: int) -> None:
    request = np.zeros((), layout.REQUEST_DTYPE)
    request["seq"] = seq
    for name, value in fields.items():
        request[name] = value
    fd = os.open(frame.path, os.O_RDWR)
    try:
        os.pwrite(fd, request.tobytes(), REQUEST_AT)
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    "fields",
    [
        {"count": layout.FRAME_WORDS + 1, "period_us": 1000, "expires_ns": 0},
        {"count": (1 << 32) - 1, "period_us": 1000, "expires_ns": 0},
        {"count": 1, "period_us": 0, "expires_ns": 0},
        {"count": 1, "period_us": 999, "expires_ns": 0},
        {"count": 1, "period_us": (1 << 32) - 1, "expires_ns": 0},
        {"count": 1, "period_us": 1000, "expires_ns": (1 << 64) - 1},
    ],
)
def test_malformed_requests_are_refused_whole(nccl: FakeNccl, fields: dict[str, int], log: Path) -> None:
    write_request(nccl.frame, 1000, **fields)
    header = nccl.until(lambda h: h["request_seen"] == 1000, "the request is looked at")
    assert (header["malformed_requests"], header["words"], header["copies"]) == (1, 0, 0)
    assert not copied(log)
    ask(nccl, wanted(nccl)[:1])  # a sound one afterwards is served
    assert words_of(nccl.raw(), 1)[0][0] == WordStatus.OK


def test_a_reader_that_dies_while_it_writes_blocks_nobody(nccl: FakeNccl) -> None:
    ask(nccl, wanted(nccl)[:2])
    write_request(nccl.frame, 10_001, count=1024, period_us=1000)
    before = nccl.header()["rounds"]
    nccl.until(lambda h: h["rounds"] >= before + 2, "what was asked before goes on")
    assert nccl.header()["request_seen"] != 10_001
    nccl.do("plugin.whole(c, 0)")
    ask(nccl, wanted(nccl)[:1])  # the next reader takes over
    assert nccl.header()["words"] == 1


def test_requests_of_noise_harm_nothing(nccl: FakeNccl, log: Path) -> None:
    chance = np.random.default_rng(1)
    allowed = {word.address for word in wanted(nccl)}
    fd = os.open(nccl.frame.path, os.O_RDWR)
    try:
        for number in range(40):
            request = np.frombuffer(
                chance.integers(0, 256, layout.REQUEST_DTYPE.itemsize, dtype=np.uint8).tobytes(), layout.REQUEST_DTYPE
            )
            request = request[0].copy()
            request["seq"], request["count"], request["period_us"] = 2 * number + 2, chance.integers(0, 1100), 1000
            request["expires_ns"] = time.monotonic_ns() + 10**9
            os.pwrite(fd, request.tobytes(), REQUEST_AT)
            nccl.do(f"plugin.whole(c, {number})")
            time.sleep(0.01)
    finally:
        os.close(fd)
    assert {address for address, _ in copied(log)} <= allowed
    decode(nccl.frame.read())
    ask(nccl, wanted(nccl)[:1])
    assert words_of(nccl.raw(), 1)[0][0] == WordStatus.OK
    assert nccl.device().communicators[0].operations == 40


def test_a_copy_engine_that_does_not_answer_is_reported_and_stops_nobody(nccl: FakeNccl, hang: Path) -> None:
    ask(nccl, wanted(nccl))
    hang.touch()
    nccl.until(
        lambda h: h["copy_begun_ns"] > 0 and time.monotonic_ns() - h["copy_begun_ns"] > 1_100_000_000, "a second in flight"
    )
    device = nccl.device()
    assert device.copy_engine_silent and device.copy_pending_ns is not None and device.copy_pending_ns > 1_000_000_000
    assert device.heartbeat_ns is not None and time.monotonic_ns() - device.heartbeat_ns < 1_000_000_000, (
        "the thread itself lives"
    )
    nccl.do("[plugin.whole(c, n) for n in range(23)] and None")
    assert nccl.device().communicators[0].operations == 23
    hang.unlink()
    rounds = nccl.header()["rounds"]
    nccl.until(lambda h: h["rounds"] > rounds, "rounds again")
    assert not nccl.device().copy_engine_silent


def test_loaded_by_the_driver_it_finds_the_context_by_itself() -> None:
    with FakeNccl(driver=True) as nccl:
        load = f"__import__('ctypes').CDLL({str(build_shim())!r}).InitializeInjection()"
        assert nccl.do(load) == 1
        nccl.until(lambda h: h["sampler"] == layout.Sampler.IDLE, "stream and buffer in the primary context")
        assert nccl.header()["entry"] == layout.Entry.INJECTION
        nccl.do("w = Words(2)")
        nccl.do("w.write(1, 77)")
        ask(nccl, wanted(nccl))
        assert words_of(nccl.raw(), 2)[1] == (WordStatus.OK, 77)


def test_a_child_forked_beside_the_sampler_is_well(nccl: FakeNccl) -> None:
    ask(nccl, wanted(nccl))
    assert nccl.do("fork_and(lambda: plugin.whole(plugin.init(9), 0) or frames_open() == 1 or 1 / 0)") == 0
    before = nccl.header()["rounds"]
    nccl.until(lambda h: h["rounds"] > before, "the parent's sampler goes on")


def test_without_a_driver_it_says_so() -> None:
    with FakeNccl(env={"NCCLWATCH_SAMPLER": "1"}) as nccl:
        nccl.do("plugin.init(7)")
        nccl.until(lambda h: h["sampler"] == layout.Sampler.NO_DRIVER, "no driver")


def test_a_watch_asks_now_and_then_and_often_once_nothing_moves(nccl: FakeNccl) -> None:
    from unit.synthetic import frozen_ring

    class Target:
        def counter_places(self) -> list[CounterPlace]:
            return [CounterPlace(0x1000, 0, 1, Direction.SEND, 0, "head", a, h) for a, h in nccl.do("w.places()[:4]")]

    sample = frozen_ring()[0].looks(1)[0]
    watch, target = DeviceWatch(nccl.pid), Target()

    def counted(holds: Callable[[Sequence[ConnectionCounter]], bool]) -> Sequence[ConnectionCounter]:
        """The counters of the first look at which the shim has answered, and of which this holds."""
        deadline = time.monotonic() + 120
        while True:
            looked = watch.look(sample, target).device
            if looked is not None and looked.counters and holds(looked.counters):
                return looked.counters
            assert time.monotonic() < deadline, looked
            time.sleep(0.02)

    try:
        nccl.do("w.write(0, 41)")
        assert watch.look(sample, target).device is not None and watch.present
        nccl.until(lambda h: h["rounds"] >= 1, "a first round")
        assert nccl.header()["period_us"] == 1_000_000
        counters = counted(lambda found: [c.value for c in found] == [41, 0, 0, 0])
        assert not any(c.stale or c.problem for c in counters)
        nccl.do("w.write(0, 42)")
        watch.look(sample, target)
        # Where a round takes long the shim keeps to its budget, and the period is longer than asked.
        nccl.until(lambda h: h["period_us"] < 1_000_000, "the quicker period")
        counters = counted(lambda found: found[0].value == 42)
        assert counters[0].changes >= 1
        nccl.do("w.write(0, 142)")
        counters = counted(lambda found: found[0].value == 142)
        rates = [counter.steps_per_s for counter in counters]
        assert rates[0] is not None and rates[0] > 10 and rates[1:] == [0.0, 0.0, 0.0]
    finally:
        watch.close()
