"""Recordings: readable whatever happens to the writer or the file, bounded, and never in the way of who records."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.errors import TargetError, UsageError
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.report.history import incidents
from ncclwatch.store import writer as writing
from ncclwatch.store.container import FRAME_BYTES, HEADER_BYTES, Container, Kind
from ncclwatch.store.recorder import Recorder
from ncclwatch.store.replay import Recordings, Replay
from ncclwatch.store.writer import ContainerWriter, Full
from unit.batches import WALL, node_batches, ring_looks
from unit.synthetic import SECOND


def record(path: Path, batches: Sequence[NodeBatch], *, cap: int | None = None) -> Path:
    recorder = Recorder(path, cap_bytes=cap)
    for batch in batches:
        recorder.put(batch)
        while recorder._queue.qsize() > 100:
            time.sleep(0.01)
    status = recorder.close()
    assert status.dropped == 0
    return path


def read(path: Path) -> list[NodeBatch]:
    with Recordings([path]) as recordings:
        assert not recordings.problems
        return [batch for _, _, batch in recordings.batches()]


def test_what_was_put_in_comes_out_again(tmp_path: Path) -> None:
    batches = list(node_batches(list(ring_looks(23, stuck_from=10))))
    found = read(record(tmp_path / "a", batches))
    assert [batch.wall_ns for batch in found] == [batch.wall_ns for batch in batches]
    assert [batch.samples for batch in found] == [batch.samples for batch in batches]
    assert [shape(batch) for batch in found] == [shape(batch) for batch in batches]
    assert [batch.planes for batch in found] == [batch.planes for batch in batches]


def shape(batch: NodeBatch) -> list[object]:
    """Windows without their rates, which travel in single precision."""
    return [(w.process, w.rank, w.run_state, w.operation and (w.operation.name, w.operation.sequence)) for w in batch.windows]


def test_batches_that_say_nothing_are_left_out(tmp_path: Path) -> None:
    [look] = node_batches(list(ring_looks(1)))
    silent = replace(look, looked=False, samples=(), windows=())
    assert len(read(record(tmp_path / "a", [silent, look, silent, replace(silent, notes=("hm",))]))) == 2


def test_the_verdicts_of_a_recording_are_those_of_the_job(tmp_path: Path) -> None:
    path = record(tmp_path / "a", list(node_batches(list(ring_looks(20, stuck_from=8)))))
    with Recordings([path]) as recordings:
        replay = Replay(recordings)
        [incident] = incidents(replay)
    assert incident.verdict.verdict_class is VerdictClass.STOPPED
    assert [culprit.rank for culprit in incident.verdict.culprits] == [2]
    assert incident.ended is None
    assert WALL / 1e9 + 7 <= incident.began <= WALL / 1e9 + 10


def test_recordings_of_several_nodes_are_judged_together(tmp_path: Path) -> None:
    looks = list(ring_looks(20, stuck_from=8))
    paths = [record(tmp_path / host, list(node_batches(looks, hosts=[host]))) for host in ("node0", "node1", "node2", "node3")]
    with Recordings(paths) as recordings:
        replay = Replay(recordings)
        [incident] = incidents(replay)
        assert [window.rank for window in replay.windows] == [0, 1, 2, 3]
    assert [culprit.rank for culprit in incident.verdict.culprits] == [2]


def test_a_seek_begins_at_a_key_frame_and_shows_the_same(tmp_path: Path) -> None:
    batches = list(node_batches(list(ring_looks(600))))
    path = record(tmp_path / "a", batches)
    with Recordings([path]) as recordings:
        wanted = WALL + 500 * SECOND
        found = [batch for time_ns, _, batch in recordings.batches(wanted)]
        assert found[0].wall_ns <= wanted
        assert found[0].wall_ns > WALL
        assert [b.samples for b in found] == [b.samples for b in batches if b.wall_ns >= found[0].wall_ns]


KILLED = """
import sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from ncclwatch.store.recorder import Recorder
from unit.batches import node_batches, ring_looks
recorder = Recorder(Path(sys.argv[1]), cap_bytes=int(sys.argv[3]) or None)
for batch in node_batches(ring_looks(100000)):
    recorder.put(batch)
    while recorder.status.batches <= batch.sequence:
        time.sleep(0.0005)
    # Only now is the batch with the kernel: a kill may come at any time after this line or before it.
    sys.stdout.write("x")
    sys.stdout.flush()
"""


@pytest.mark.parametrize("cap", [0, 1 << 20])
def test_killed_at_random_nothing_is_lost_that_was_written(tmp_path: Path, cap: int) -> None:
    rounds = int(os.environ.get("NCCLWATCH_KILL_ROUNDS", "3"))
    chance = random.Random(7 + cap)
    for i in range(rounds):
        path = tmp_path / f"r{i}"
        child = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(path), str(Path(__file__).parents[2]), str(cap)], stdout=subprocess.PIPE
        )
        assert child.stdout is not None
        told = len(child.stdout.read(1))
        time.sleep(chance.random() * 0.6)
        child.send_signal(signal.SIGKILL)
        told += len(child.stdout.read())
        child.wait()
        with Recordings([path]) as recordings:
            found = [batch for _, _, batch in recordings.batches()]
            assert all(recording.ended == "" for recording in recordings.files)
        numbers = [(batch.wall_ns - WALL) // SECOND for batch in found]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert numbers[-1] + 1 >= told
        assert cap or numbers[0] == 0


def test_every_cut_leaves_what_was_before_it(tmp_path: Path) -> None:
    path = record(tmp_path / "a", list(node_batches(list(ring_looks(5)))))
    whole = path.read_bytes()
    with Container(path) as container:
        frames = list(container.frames())
    for cut in [*range(0, HEADER_BYTES + 40, 7), *range(HEADER_BYTES, len(whole), 97)]:
        path.write_bytes(whole[:cut])
        try:
            with Container(path) as container:
                found = list(container.frames())
        except TargetError:
            assert cut < HEADER_BYTES
            continue
        assert found == [frame for frame in frames if frame.offset + frame.length <= cut]


def test_damage_costs_only_what_it_hit(tmp_path: Path) -> None:
    path = record(tmp_path / "a", list(node_batches(list(ring_looks(30)))))
    whole = path.read_bytes()
    chance = random.Random(5)
    with Container(path) as container:
        frames = list(container.frames())
    for _ in range(30):
        broken = bytearray(whole)
        begin = chance.randrange(HEADER_BYTES, len(whole) - 1)
        end = min(begin + chance.choice((1, 10, 300)), len(whole))
        # Every byte becomes another: what is written over itself is no damage.
        broken[begin:end] = bytes(byte ^ chance.randrange(1, 256) for byte in whole[begin:end])
        path.write_bytes(broken)
        with Container(path) as container:
            found = list(container.frames())
            assert container.damaged > 0
        hit = [f for f in frames if f.offset - FRAME_BYTES < end and f.offset + f.length > begin]
        assert found == [frame for frame in frames if frame not in hit]
        with Recordings([path]) as recordings:
            assert recordings.problems
            list(Replay(recordings).updates())


@pytest.mark.parametrize("content", [b"", b"ncclwREC", b"x" * 500, b"ncclwREC" + b"\xff" * 200])
def test_what_is_no_recording_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    with pytest.raises(TargetError):
        Recordings([path])


def test_a_ring_keeps_its_size_and_the_newest(tmp_path: Path) -> None:
    cap = 512 << 10
    batches = list(node_batches(list(ring_looks(1500))))
    path = record(tmp_path / "a", batches, cap=cap)
    assert path.stat().st_size <= cap
    found = read(path)
    assert found[-1].samples == batches[-1].samples
    first = (found[0].wall_ns - WALL) // SECOND
    assert first > 0
    assert [b.wall_ns for b in found] == [b.wall_ns for b in batches[first:]]
    # At least six of eight slots hold the past at any time.
    assert sum(1 for _ in found) > 0.6 * len(batches) * cap / written(batches, tmp_path)


def written(batches: Sequence[NodeBatch], folder: Path) -> int:
    return record(folder / "endless", batches).stat().st_size


def test_a_full_disk_is_a_line_and_recording_goes_on_when_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.store.recorder.RETRY_S", 0.0)
    batches = list(node_batches(list(ring_looks(30))))
    room = [10**9]
    real = ContainerWriter._put

    def put(self: ContainerWriter, data: bytes, at: int) -> None:
        if room[0] < len(data):
            raise Full("No space left on device")
        room[0] -= len(data)
        real(self, data, at)

    monkeypatch.setattr(writing.ContainerWriter, "_put", put)
    recorder = Recorder(tmp_path / "a")
    for i, batch in enumerate(batches):
        room[0] = 0 if 10 <= i < 20 else 10**9
        recorder.put(batch)
        while recorder._queue.qsize() or recorder.status.batches + recorder.status.dropped <= i:
            time.sleep(0.001)
        if i == 15:
            assert "No space left on device" in recorder.status.problem
    status = recorder.close()
    assert (status.batches, status.dropped, status.problem) == (20, 10, "")
    with Recordings([tmp_path / "a"]) as recordings:
        found = [batch for _, _, batch in recordings.batches()]
        assert recordings.files[0].dropped == 10
        assert any("10 batches were not recorded" in line for line in recordings.problems)
    assert [b.samples for b in found] == [b.samples for b in [*batches[:10], *batches[20:]]]


def test_a_real_full_disk(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)], check=False, capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("nothing can be mounted here")
    try:
        recorder = Recorder(tmp_path / "a", calls="all")
        batches = list(node_batches(list(ring_looks(200, world=16))))
        for batch in batches:
            recorder.put(batch)
            while recorder._queue.qsize() > 50:
                time.sleep(0.001)
        status = recorder.close()
        assert "No space left on device" in status.problem
        with Recordings([tmp_path / "a"]) as recordings:
            found = [batch for _, _, batch in recordings.batches()]
        assert 0 < len(found) == status.batches < len(batches)
        assert [b.samples for b in found] == [b.samples for b in batches[: len(found)]]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_does_not_answer_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.store.recorder.QUEUE", 4)
    real = ContainerWriter.append
    gate: list[bool] = []

    def slow(self: ContainerWriter, kind: Kind, payload: bytes, *, time_ns: int, key: bool = False) -> None:
        while not gate:
            time.sleep(0.001)
        real(self, kind, payload, time_ns=time_ns, key=key)

    monkeypatch.setattr(ContainerWriter, "append", slow)
    recorder = Recorder(tmp_path / "a")
    for batch in node_batches(list(ring_looks(30))):
        recorder.put(batch)
    assert recorder.status.dropped >= 20
    assert "does not keep up" in recorder.status.problem
    gate.append(True)
    status = recorder.close()
    with Recordings([tmp_path / "a"]) as recordings:
        assert len(recordings.files[0].frames) == status.batches


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("precious")
    with pytest.raises(UsageError, match="exists"):
        Recorder(path)
    assert path.read_text() == "precious"
    with pytest.raises(UsageError, match="cannot write"):
        Recorder(tmp_path / "no" / "folder")
    with pytest.raises(UsageError, match="only seconds"):
        Recorder(tmp_path / "b", cap_bytes=1000)


def test_a_recording_of_a_real_job_stays_readable() -> None:
    """Recorded on the testbed; a change of the format that cannot read it any more is a new version of the format."""
    with Recordings([Path(__file__).parent.parent.parent / "fixtures" / "stopped-8-ranks.recording"]) as recordings:
        assert recordings.problems == []
        replay = Replay(recordings)
        [incident] = incidents(replay)
    assert incident.verdict.verdict_class is VerdictClass.STOPPED
    assert [culprit.rank for culprit in incident.verdict.culprits] == [2]
    assert incident.ended is not None
    assert 9 < incident.ended - incident.began < 11
    assert len(replay.windows) == 8
