"""Dumps that are cut off, damaged or hostile: one line with the file, bounded memory, nothing run, exit status 3."""

from __future__ import annotations

import json
import os
import pickle
import resource
import struct
from pathlib import Path

import pytest

from ncclwatch.cli.main import run
from ncclwatch.cli.watch_folder import FolderWatch
from ncclwatch.ingest import flight_recorder_file
from ncclwatch.ingest.base import IngestError
from ncclwatch.ingest.flight_recorder_file import read_dump
from ncclwatch.ingest.flight_recorder_rank import read_rank
from unit.ingest.dumps import Dumps

HEAD = b"\x80\x02}q\x00(X\x07\x00\x00\x00versionX\x03\x00\x00\x002.4X\x09\x00\x00\x00pg_config}"


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harm",)


def written(folder: Path, data: bytes, rank: int = 0) -> Path:
    file = folder / f"fr_{rank}"
    file.write_bytes(data)
    return file


def a_dump() -> dict[str, object]:
    job = Dumps(2)
    job.all_call(times=4)
    return job.dump(0)


def test_no_class_is_ever_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = written(tmp_path, pickle.dumps({**a_dump(), "more": Harmful()}, 2))
    with pytest.raises(IngestError, match="names a class"):
        read_dump(file)
    assert not (tmp_path / "harm").exists()


def test_what_refers_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IngestError, match="elsewhere"):
        read_dump(written(tmp_path, HEAD + b"X\x01\x00\x00\x00ax\x01\x00\x00\x00bQu."))


def test_a_cut_off_dump_names_the_file_and_the_place(tmp_path: Path) -> None:
    data = pickle.dumps(a_dump(), 2)
    with pytest.raises(IngestError, match=r"fr_0 is damaged or cut off: .*byte \d+"):
        read_dump(written(tmp_path, data[: len(data) // 2]))
    with pytest.raises(IngestError, match="cut off"):
        read_dump(written(tmp_path, b'{"version": "2.4", "entries": [{"record_id": 1'))


def test_one_opcode_cannot_take_all_memory(tmp_path: Path) -> None:
    """The unpickler's list of what it remembers grows to the largest number that was named."""
    bomb = HEAD + b"r" + struct.pack("<I", 0x7FFF_FFFF) + b"u."
    with pytest.raises(IngestError, match="more memory"):
        read_dump(written(tmp_path, bomb))
    assert resource.getrlimit(resource.RLIMIT_AS)[0] in (resource.RLIM_INFINITY, resource.getrlimit(resource.RLIMIT_AS)[1])


def test_a_bytearray_that_nobody_has_memory_for_is_one_line_and_none_of_the_interpreters(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, HEAD + b"\x96" + struct.pack("<Q", 1 << 60) + b"u.")
    for _ in range(20):  # what it frees is memory that was used before: it need not complain
        with pytest.raises(IngestError, match="more memory"):
            read_dump(file)
    assert capfd.readouterr().err == ""


def test_nesting_ends_the_process_that_reads_and_no_other(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The hash of tuples nested so deep takes more stack than there is."""
    nested = written(tmp_path, HEAD + b"N" + b"\x85" * 2_000_000 + b"Nu.")
    assert run(["diagnose", str(nested)]) == 3
    told = capfd.readouterr().err
    assert "fr_0: the process that read it ended (exit code -11)" in told
    assert len(told.strip().splitlines()) == 1


def test_a_file_without_end_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder_file, "LONGEST_BYTES", 1000)
    with pytest.raises(IngestError, match="larger"):
        read_dump(written(tmp_path, pickle.dumps(a_dump(), 2)))


@pytest.mark.parametrize(
    "changed",
    [
        {"entries": 7},
        {"entries": [7]},
        {"entries": [{}]},
        {"pg_config": [1]},
        {"version": 2.4},
        {"entries": [{"profiling_name": "nccl:all_reduce", "collective_seq_id": "x"}]},
        {"entries": [{"profiling_name": ["x"], "collective_seq_id": 1}]},
        {"entries": [{"profiling_name": "nccl:all_reduce", "collective_seq_id": 1 << 80}]},
        {"entries": [{"profiling_name": "nccl:all_reduce", "collective_seq_id": 1, "process_group": (1, 2)}]},
        {"entries": [{"profiling_name": "nccl:all_reduce", "collective_seq_id": 1, "input_sizes": [[1 << 70]]}]},
        {"entries": [{"profiling_name": "nccl:all_reduce", "collective_seq_id": 1, "time_created_ns": 1 << 70}]},
        {"entries": [{"profiling_name": "nccl:all_reduce", "collective_seq_id": 1, "state": "odd"}]},
    ],
)
def test_what_is_no_dump_is_exit_status_3_and_one_line(
    tmp_path: Path, changed: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, pickle.dumps({**a_dump(), **changed}, 2))
    assert run(["diagnose", str(file)]) == 3
    told = capsys.readouterr().err.strip().splitlines()
    assert len(told) == 1
    assert "fr_0" in told[0]


def test_a_damaged_rank_is_told_and_the_others_are_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = Dumps(4)
    job.all_call(times=5)
    for rank in (0, 1, 3):
        job.call(rank, state="started")
    job.write(tmp_path, prefix="fr_")
    (tmp_path / "fr_3").write_bytes((tmp_path / "fr_3").read_bytes()[:300])
    assert run(["diagnose", "--exit-code", str(tmp_path)]) == 10
    told = capsys.readouterr()
    assert "rank 2" in told.out
    assert "fr_3 is damaged" in told.err
    assert "the dump of rank 3, which could not be read" in told.out
    assert "no dump of" not in told.out


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_who_has_a_dump_that_cannot_be_read_is_a_rank_of_the_job(
    tmp_path: Path, backend: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dumps of gloo do not say who is in a group: the last rank would not be missed."""
    job = Dumps(4, backend=backend)
    job.all_call(times=5, state="completed" if backend == "nccl" else "scheduled")
    for rank in range(4):
        job.call(rank, state="scheduled")
    job.write(tmp_path, prefix="fr_")
    (tmp_path / "fr_3").write_bytes((tmp_path / "fr_3").read_bytes()[:300])
    assert run(["diagnose", "--json", str(tmp_path)]) == 0
    told = json.loads(capsys.readouterr().out)
    [culprit] = told["culprits"]
    assert (culprit["rank"], culprit["observed"]) == (3, False)
    assert "could not be read" in culprit["reason"]


def test_a_file_that_cannot_be_opened_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a dump of another user's is. Here it is a file that fails for root as well."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    (folder / "fr_1").symlink_to("/proc/self/mem")
    assert run(["diagnose", str(folder)]) == 3
    assert "fr_1: Input/output error" in capsys.readouterr().err
    job = Dumps(2)
    job.all_call(times=4)
    job.write(folder, prefix="fr_", without=[1])
    assert run(["diagnose", str(folder)]) == 0
    assert "fr_1: Input/output error" in capsys.readouterr().err
    watched = FolderWatch(folder, 0.0)
    for at in (0.0, 1.0):
        list(watched.look(at))
    assert any("fr_1: Input/output error" in line for line in watched.problems)


def test_a_name_of_tuples_in_tuples_is_not_hashed(tmp_path: Path) -> None:
    """Each has the one before twice: a hash goes through all of them anew, and would not end."""
    deep: object = "x"
    for _ in range(60):
        deep = (deep, deep)
    for changed in ({"profiling_name": deep}, {"process_group": deep}, {"process_group": (deep, "x")}):
        entry = {**a_dump()["entries"][0], **changed}  # type: ignore[index]
        dump = read_dump(written(tmp_path, pickle.dumps({**a_dump(), "entries": [entry]}, 2)))
        with pytest.raises(IngestError, match="is no entry"):
            read_rank(dump, 0)


def test_a_dump_that_would_take_for_ever_is_told_and_the_others_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tuples in tuples as the key of a dictionary: the unpickler itself asks for their hash."""
    monkeypatch.setattr(flight_recorder_file, "LONGEST_S", 1.0)
    job = Dumps(4)
    job.all_call(times=5)
    for rank in (1, 2):
        job.call(rank, state="started")
    job.write(tmp_path, prefix="fr_", without=[3])
    endless = HEAD + b"K\x01\x85q\x01" + b"h\x01h\x01\x86q\x01" * 60 + b"K\x01X\x07\x00\x00\x00entries]u."
    written(tmp_path, endless, rank=3)
    assert run(["diagnose", "--exit-code", str(tmp_path)]) == 10
    told = capsys.readouterr()
    assert "rank 0" in told.out
    assert "fr_3: it takes longer to read" in told.err
    assert "the dump of rank 3, which could not be read" in told.out
    assert run(["diagnose", str(tmp_path / "fr_3")]) == 3


def test_text_that_is_nearly_a_number_is_none(tmp_path: Path) -> None:
    """What Python takes for a space or a sign is not always one to ``int``."""
    config = {"0": {"name": "0", "desc": "", "ranks": "[0, 1\x1d]"}}
    status = {"0": {"last_enqueued_collective": "--1"}}
    dump = read_dump(written(tmp_path, pickle.dumps({**a_dump(), "pg_config": config, "pg_status": status}, 2)))
    assert read_rank(dump, 0).members == {"0": (0, 1)}
    assert read_rank(dump, 0).enqueued == {}


def test_what_a_name_does_not_tell_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dump").write_bytes(pickle.dumps(a_dump(), 2))
    assert run(["diagnose", str(tmp_path / "dump")]) == 3
    assert "no rank" in capsys.readouterr().err


def test_other_files_and_pids_are_not_mixed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, other = written(tmp_path, pickle.dumps(a_dump(), 2)), tmp_path / "other"
    other.write_text("x")
    assert run(["diagnose", str(file), str(other)]) == 2
    assert run(["diagnose", str(file), "--pid", "1"]) == 2
    (tmp_path / "empty").mkdir()
    assert run(["diagnose", str(tmp_path / "empty")]) == 2
    assert "no record" in capsys.readouterr().err
