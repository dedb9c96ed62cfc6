"""Snapshot files: what was recorded decodes to the same, and files that are damaged, foreign or hostile are refused in one
line.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.errors import TargetError, UsageError
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import CpuLimit, ProcessInfo, ProcessSample, VersionSource
from ncclwatch.target import image
from ncclwatch.target.image import HEADER, MAGIC, RecordedProcess, RecordedSample
from ncclwatch.target.recorded import RecordingReader
from ncclwatch.target.sampler import ProcessFacts, Sampler
from unit.target_fake import FakeJob, released_layout

INFO = ProcessInfo(
    ProcessKey("boot", 7, 8, "id"),
    "host",
    "name",
    ("a", "b"),
    "lib",
    (2, 32, 3),
    VersionSource.DEBUG_INFO,
    rank=3,
    rank_source="RANK",
)


def recorded() -> tuple[list[RecordedProcess], list[ProcessSample]]:
    """A process looked at twice, the operation one step further the second time."""
    layout = released_layout((2, 32, 3))
    job = FakeJob(layout)
    args = job.operation(job.connect(0, 0, "recv"), base=960, posted=8, received=2, transmitted=2, done=2)
    job.connect(1, 2, "send")
    sub = args + layout.member("ncclProxyArgs.subs").at(0)
    samples, live = [], []
    for moment in (0, 1):
        for name in ("received", "transmitted", "done"):
            job.process.set(sub, f"ncclProxySubArgs.{name}", 2 + 2 * moment)
        reader = RecordingReader(job.process.reader())
        sampler = Sampler(reader, layout, None, keep=False)
        sampler.expect({job.comm: "magic"})
        limit = CpuLimit(100, 7, 42) if moment else None
        facts = ProcessFacts(moment * 10**9, 5 + moment, "T", 1234, 99, 7, 88, limit)
        sample = sampler.sample(INFO, facts)
        live.append(sample)
        samples.append(RecordedSample(facts, sample.duration_ns, dict(sampler.finder.found), reader.pages, 3, ("cut",)))
    process = RecordedProcess(INFO, layout, None, tuple(job.process.mappings), tuple(samples))
    return [process], live


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.ncw"
    image.write_image(recorded()[0], path)
    return path


def test_what_was_recorded_decodes_to_the_same(tmp_path: Path) -> None:
    processes, live = recorded()
    path = tmp_path / "x.ncw"
    image.write_image(processes, path)
    assert image.is_snapshot(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size < 64_000
    (samples,) = image.load_snapshot(path)
    for sample, was in zip(samples, live, strict=True):
        assert sample.process == INFO
        assert sample.communicators == was.communicators
        assert sample.operations == was.operations
        assert (sample.time_ns, sample.wall_ns, sample.run_state) == (was.time_ns, was.wall_ns, was.run_state)
        assert (sample.cpu_time_ns, sample.context_switches, sample.duration_ns) == (1234, 99, was.duration_ns)
        assert (sample.run_queue_wait_ns, sample.cpu_limit) == (88, was.cpu_limit)
        assert (sample.torn, sample.truncated) == (3, ("cut",))
    assert [sample.cpu_limit for sample in samples] == [None, CpuLimit(100, 7, 42)]
    assert [sample.operations[0].subs[0].done for sample in samples] == [2, 4]


def test_a_sample_in_which_nothing_was_written_is_the_one_before_at_its_own_time(tmp_path: Path) -> None:
    (process,) = recorded()[0]
    first, second = process.samples
    still = replace(second, pages=first.pages, torn=5, truncated=())
    path = tmp_path / "x.ncw"
    image.write_image([replace(process, samples=(first, still))], path)
    (samples,) = image.load_snapshot(path)
    (alone,) = replace(process, samples=(still,)).decode()
    assert samples[1] == alone
    assert (samples[1].time_ns, samples[1].run_state, samples[1].cpu_limit) == (10**9, "T", CpuLimit(100, 7, 42))
    (moved,) = replace(process, samples=(replace(still, found={}),)).decode()
    assert replace(process, samples=(first, replace(still, found={}))).decode()[1] == moved != alone, "other communicators"


def test_the_layout_of_many_files_is_taken_apart_once(tmp_path: Path) -> None:
    for name in "ab":
        image.write_image(recorded()[0], tmp_path / name)
    (one,), (other,) = (image.read_image(tmp_path / name) for name in "ab")
    assert one.layout is other.layout


def test_equal_pages_and_layouts_are_kept_once(tmp_path: Path) -> None:
    (process,) = recorded()[0]
    one, many = tmp_path / "one", tmp_path / "many"
    image.write_image([process], one)
    image.write_image([process] * 20, many)
    assert many.stat().st_size < 3 * one.stat().st_size


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        image.write_image(recorded()[0], tmp_path / "missing" / "x.ncw")
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        image.record_snapshot([], tmp_path / "x.ncw")
    with pytest.raises(UsageError):
        image.record_snapshot([1], tmp_path / "x.ncw", samples=1)


def refusal(path: Path) -> str:
    with pytest.raises(TargetError) as caught:
        image.load_snapshot(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_files_that_are_no_snapshots(tmp_path: Path) -> None:
    path = tmp_path / "x"
    assert "cannot read" in refusal(path)
    assert not image.is_snapshot(path)
    for content in (b"", b"ncclwatch", b"\x7fELF" * 100, MAGIC):
        path.write_bytes(content)
        assert "no ncclwatch snapshot" in refusal(path)


def test_a_newer_version_is_refused_by_name(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(MAGIC)] = 99
    file.write_bytes(data)
    assert "version 99" in refusal(file)


def test_every_kind_of_damage_is_refused(file: Path) -> None:
    good = file.read_bytes()
    rng = random.Random(23)
    for _ in range(60):
        data = bytearray(good)
        if rng.random() < 0.4:
            del data[rng.randrange(len(data)) :]
        else:
            data[rng.randrange(len(MAGIC) + 8, len(data))] ^= 1 << rng.randrange(8)
        file.write_bytes(data)
        refusal(file)


def rewritten(file: Path, change: Callable[[Any], None]) -> None:
    """Change the description and sign it properly: what a hostile author would do."""
    data = file.read_bytes()
    _, _, _, size, pages_size, _ = HEADER.unpack_from(data)
    description = json.loads(lzma.decompress(data[HEADER.size : HEADER.size + size]))
    pages = data[HEADER.size + size :]
    change(description)
    packed = lzma.compress(json.dumps(description).encode())
    digest = hashlib.sha256(packed + pages).digest()
    file.write_bytes(HEADER.pack(MAGIC, image.VERSION, 0, len(packed), pages_size, digest) + packed + pages)


def a_wild_page_number(description: Any) -> None:
    description["processes"][0]["samples"][0]["pages"][0][1] = 1 << 40


def a_negative_page_number(description: Any) -> None:
    description["processes"][0]["samples"][0]["pages"][0][1] = -1


def no_layout(description: Any) -> None:
    description["processes"][0]["layout"] = 5


def an_unknown_member(description: Any) -> None:
    description["processes"][0]["info"]["surprise"] = 1


def a_list_for_a_mapping(description: Any) -> None:
    description["processes"][0]["maps"][0] = [1, 2, 3]


def text_for_processes(description: Any) -> None:
    description["processes"] = "all of them"


def another_page_size(description: Any) -> None:
    description["page_size"] = 65536


@pytest.mark.parametrize(
    "change",
    [
        a_wild_page_number,
        a_negative_page_number,
        no_layout,
        an_unknown_member,
        a_list_for_a_mapping,
        text_for_processes,
        another_page_size,
    ],
)
def test_a_well_signed_but_senseless_file_is_refused(file: Path, change: Callable[[Any], None]) -> None:
    rewritten(file, change)
    assert "cannot be understood" in refusal(file)


def test_a_bomb_does_not_fill_the_memory(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "MAX_DESCRIPTION", 1 << 20)
    rewritten(file, lambda description: description.update(padding="0" * (2 << 20)))
    assert "cannot be understood" in refusal(file)


def test_pages_that_are_missing_make_signals_unavailable_not_errors(file: Path) -> None:
    def without_most_pages(description: Any) -> None:
        sample = description["processes"][0]["samples"][0]
        sample["pages"] = sample["pages"][::2]

    rewritten(file, without_most_pages)
    (samples,) = image.load_snapshot(file)
    assert len(samples) == 2
