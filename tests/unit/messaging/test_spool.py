"""The spool: order, limits, what is kept longest, and what an earlier life left."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ncclwatch.messaging import spool as spools
from ncclwatch.messaging.clock import ClockOffset
from ncclwatch.messaging.spool import Spool, SpoolError


def fill(spool: Spool, count: int, *, size: int = 1000, relevant: bool = False, begin: int = 0) -> None:
    for n in range(begin, begin + count):
        spool.append(n, bytes([n % 256]) * size, relevant=relevant)


@pytest.mark.parametrize("on_disk", [False, True])
def test_batches_come_out_in_order_and_go_when_acknowledged(tmp_path: Path, on_disk: bool) -> None:
    spool = Spool("a", tmp_path if on_disk else None)
    fill(spool, 10)
    assert [entry.n for entry in spool.after(3)] == list(range(3, 10))
    assert all(entry.data == bytes([entry.n]) * 1000 for entry in spool.after(0))
    assert spool.acknowledge("a", 5) == 6
    assert spool.acknowledge("b", 9) == 0
    assert [entry.n for entry in spool.after(0)] == [6, 7, 8, 9]
    assert spool.nbytes == 4000


def test_what_verdicts_are_made_of_is_kept_longest(tmp_path: Path) -> None:
    spool = Spool("a", tmp_path, max_bytes=20_000)
    fill(spool, 5, relevant=True)
    fill(spool, 30, begin=5)
    gone = spool.enforce()
    kept = [entry.n for entry in spool.after(0)]
    assert kept[:5] == [0, 1, 2, 3, 4]
    assert kept[-1] == 34, "the newest stay too"
    assert len(kept) == 35 - gone
    assert spool.nbytes <= 20_000
    assert spool.take_dropped().batches == gone
    fill(spool, 40, begin=40, relevant=True)
    spool.enforce()
    kept = [entry.n for entry in spool.after(0)]
    assert kept == sorted(kept)
    assert kept[-1] == 79
    assert spool.nbytes <= 20_000
    assert all(entry.data == bytes([entry.n]) * 1000 for entry in spool.after(0))


def test_what_is_too_old_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool("a", tmp_path, max_age_s=60)
    fill(spool, 3)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 61)
    fill(spool, 2, begin=3)
    assert spool.enforce() == 3
    assert [entry.n for entry in spool.after(0)] == [3, 4]
    assert spool.take_dropped().batches == 3


def test_the_disk_gives_back_what_was_dropped(tmp_path: Path) -> None:
    spool = Spool("a", tmp_path, max_bytes=3 << 20)
    for n in range(60):
        spool.append(n, os.urandom(100_000), relevant=n % 10 == 0)
        spool.enforce()
    used = sum(file.stat().st_size for file in tmp_path.glob("*.seg"))
    assert used < (3 << 20) + 2 * spools.SEGMENT_BYTES
    assert spool.nbytes <= 3 << 20


def test_an_earlier_life_is_found_again_up_to_what_is_whole(tmp_path: Path) -> None:
    first = Spool("a", tmp_path)
    fill(first, 8)
    first.acknowledge("a", 1)
    # No close: it was killed. Its last record is cut off.
    [segment] = tmp_path.glob("*.seg")
    with segment.open("r+b") as file:
        file.truncate(segment.stat().st_size - 10)
    second = Spool("b", tmp_path)
    assert second.lives == ["a", "b"]
    assert second.last_alive is not None
    fill(second, 2)
    # What was acknowledged is not remembered; the engine knows what it has.
    assert [(entry.life, entry.n) for entry in second.after(0)] == [("a", n) for n in range(7)] + [("b", 0), ("b", 1)]
    assert second.acknowledge("a", 6) == 7
    assert [path.name[0] for path in tmp_path.glob("*.seg")] == ["b"]


def test_a_life_that_is_killed_before_its_first_batch_leaves_a_trace(tmp_path: Path) -> None:
    """Else the next one would not tell that nobody watched: what lives before it had left is sent and gone by then."""
    fill(Spool("a", tmp_path), 3)
    second = Spool("b", tmp_path)
    assert second.acknowledge("a", 2) == 3
    assert not list(tmp_path.glob("a-*"))
    third = Spool("c", tmp_path)
    assert third.last_alive is not None
    assert time.time() - third.last_alive < 60
    assert len(third) == 0
    third.close()
    assert not list(tmp_path.iterdir()), "and one that ends in peace leaves nothing"


def test_a_damaged_segment_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "a-00000000.seg").write_bytes(os.urandom(5000))
    (tmp_path / "odd.seg").write_bytes(b"")
    spool = Spool("b", tmp_path)
    assert len(spool) == 0
    assert [path.name[0] for path in tmp_path.glob("*.seg")] == ["b"], "its own alone"


def test_a_disk_that_fails_leaves_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = Spool("a", tmp_path)
    fill(spool, 2)

    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    assert spool._file is not None
    monkeypatch.setattr(spool._file, "flush", full)
    monkeypatch.setattr(os, "open", full)
    fill(spool, 2, begin=2)
    assert "No space left" in spool.problem
    assert [entry.n for entry in spool.after(0)] == [0, 1, 2, 3]


def test_a_folder_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError, match="--spool"):
        Spool("a", tmp_path / "file" / "below")


def test_clock_offset_is_that_of_the_quickest_round_trip() -> None:
    clock = ClockOffset()
    ahead = 5_000_000_000
    for trip, unequal in ((9_000_000, 4_000_000), (1_000_000, 0), (30_000_000, -9_000_000)):
        sent = 1_000_000_000_000
        received = sent + trip // 2 + unequal + ahead
        clock.add(sent, received, received + 100, sent + trip + 100)
    assert clock.offset_ns is not None
    assert clock.error_ns is not None
    assert abs(clock.offset_ns - ahead) <= clock.error_ns
    assert clock.error_ns == 500_000
    clock.add(10, 5, 4, 0)
    assert clock.samples == 3
