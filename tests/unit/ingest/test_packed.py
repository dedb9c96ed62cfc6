"""Records in archives: taken out within bounds, and nothing outside the folder."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclwatch.cli.foreign import judge_found
from ncclwatch.ingest import folders, packed
from ncclwatch.ingest.folders import Found, find
from unit.ingest.dumps import Dumps

LINE = b"[save_count 2] [1755590106.364857579] [Rank 0] Fun AllReduce Data 1 stream 0x55919d27b4b0 opCount 2\n"
CHANGED_S = 1_800_000_000


def dumps() -> dict[str, bytes]:
    """Four ranks, of which one lags; the prefix stands in a folder."""
    job = Dumps(4)
    job.all_call(times=3)
    job.call(0, "all_reduce", state="scheduled")
    job.call(1, "all_reduce", state="scheduled")
    job.call(3, "all_reduce", state="scheduled")
    return {f"hang/fr_{rank}": pickle.dumps(job.dump(rank), 2) for rank in range(4)}


def tar(files: dict[str, bytes], mode: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), CHANGED_S
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize(
    "pack", [lambda files: tar(files, "w:gz"), lambda files: tar(files, "w"), lambda files: tar(files, "w:xz"), zipped]
)
def test_an_archive_of_dumps_is_judged_as_the_folder_would_be(
    tmp_path: Path, pack: Callable[[dict[str, bytes]], bytes]
) -> None:  # fmt: skip
    (tmp_path / "hang.archive").write_bytes(pack(dumps()))
    found = find([tmp_path])
    assert [path.name for path in found.files["flight-recorder"]] == ["fr_0", "fr_1", "fr_2", "fr_3"]
    [job], problems = judge_found(found)
    assert not problems and [culprit.rank for culprit in job.verdicts[0].culprits] == [2]


@pytest.mark.parametrize(("pack", "suffix"), [(gzip.compress, "gz"), (lzma.compress, "xz"), (bz2.compress, "bz2")])
def test_packed_files_keep_their_name_and_go_with_what_was_found(
    tmp_path: Path, pack: Callable[[bytes], bytes], suffix: str
) -> None:  # fmt: skip
    (tmp_path / f"rank_0.log.{suffix}").write_bytes(pack(LINE * 3))
    found = find([tmp_path / f"rank_0.log.{suffix}"])
    [path] = next(iter(found.files.values()))
    assert path.name == "rank_0.log" and path.read_bytes() == LINE * 3
    del found
    assert not path.exists()


def test_an_archive_in_an_archive_is_taken_and_no_deeper(tmp_path: Path) -> None:
    inner = gzip.compress(LINE * 2)
    (tmp_path / "a.tar").write_bytes(tar({"logs/rank_0.log.gz": inner}, "w"))
    assert [path.name for path in _only(find([tmp_path]))] == ["rank_0.log"]
    (tmp_path / "a.tar").write_bytes(tar({"b.tar": tar({"rank_0.log.gz": inner}, "w")}, "w"))
    assert not find([tmp_path]).files


def _only(found: Found) -> list[Path]:
    [files] = found.files.values()
    return files


def test_names_do_not_lead_out_and_links_are_not_followed(tmp_path: Path) -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name in ("../../rank_0.log", "/etc/rank_1.log", "a/" * 20 + "rank_2.log", "x" * 255):
            member = tarfile.TarInfo(name)
            member.size = len(LINE)
            archive.addfile(member, io.BytesIO(LINE))
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE)):
            member = tarfile.TarInfo(f"rank_{number + 3}.log")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    (tmp_path / "a.tar").write_bytes(out.getvalue())
    unpacking = packed.Unpacking()
    files = list(unpacking.files(tmp_path / "a.tar"))
    assert [path.name for path in files] == ["rank_0.log", "rank_1.log"]
    assert all("ncclwatch-" in str(path) and ".." not in path.parts for path in files)


def test_what_is_cut_off_is_told_and_what_came_before_is_kept(tmp_path: Path) -> None:
    source = random.Random(1)
    lines = b"".join(LINE.replace(b"opCount 2", b"opCount %x" % source.getrandbits(60)) for _ in range(60_000))
    data = gzip.compress(lines)
    (tmp_path / "rank_0.log.gz").write_bytes(data[: len(data) // 2])
    found = find([tmp_path])
    assert len(found.problems) == 1 and "rank_0.log.gz is damaged, cut off or too large" in found.problems[0]
    [path] = _only(found)
    kept = path.read_bytes()
    assert len(kept) > 1000 and lines.startswith(kept)
    for name, damaged in (("a.zip", zipped({"rank_0.log": LINE})[:-30]), ("b.xz", lzma.compress(LINE)[:-9] + b"x" * 9)):
        (tmp_path / name).write_bytes(damaged)
        unpacking = packed.Unpacking()
        list(unpacking.files(tmp_path / name))
        assert len(unpacking.problems) == 1 and name in unpacking.problems[0]


def test_an_archive_that_holds_too_much_ends_at_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "MOST_BYTES", 1 << 20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"\0" * (64 << 20)))
    unpacking = packed.Unpacking()
    sizes = [path.stat().st_size for path in unpacking.files(tmp_path / "bomb.gz")]
    assert sum(sizes) <= 1 << 20 and "may be unpacked" in unpacking.problems[0]
    monkeypatch.setattr(packed, "MOST_FILES", 3)
    (tmp_path / "many.tar").write_bytes(tar({f"rank_{n}.log": b"" for n in range(9)}, "w"))
    unpacking = packed.Unpacking()
    assert len(list(unpacking.files(tmp_path / "many.tar"))) == 3 and "more than 3 files" in unpacking.problems[0]


def test_when_a_file_was_written_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar({"fr_0": b"x"}, "w"))
    unpacking = packed.Unpacking()
    [path] = unpacking.files(tmp_path / "a.tar")
    assert path.stat().st_mtime == CHANGED_S


def test_what_only_lies_in_the_folder_is_unpacked_where_it_may_be_of_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    (tmp_path / "weights.pt").write_bytes(zipped({"rank_0.log": LINE}))
    (tmp_path / "data.tar").write_bytes(tar({"rank_1.log": LINE}, "w"))
    monkeypatch.setattr(folders, "LARGEST_PACKED", 1000)
    assert not find([tmp_path]).files
    assert [path.name for path in _only(find([tmp_path / "data.tar"]))] == ["rank_1.log"]
