"""Reading ahead says what reading one by one says, in a few calls, and never takes what is old for what is present."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest

from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ProcessInfo, ProcessSample, VersionSource
from ncclwatch.target.layout import Layout
from ncclwatch.target.memory import UnreadableError
from ncclwatch.target.read_ahead import UNUSED_SAMPLES, ReadAhead
from ncclwatch.target.sampler import ProcessFacts, Sampler
from unit.target_fake import FakeJob, FakeProcess, ScriptedReader, released_layout

VERSIONS = [(2, 18, 3), (2, 21, 5), (2, 27, 5), (2, 32, 3)]
INFO = ProcessInfo(ProcessKey("boot", 1, 2, "id"), "host", "name", (), "libnccl.so.2", None, VersionSource.DEBUG_INFO)


@pytest.fixture(params=VERSIONS, ids=lambda v: ".".join(map(str, v)))
def layout(request: pytest.FixtureRequest) -> Layout:
    return released_layout(request.param)


def sampler(reader: ScriptedReader, job: FakeJob, *, keep: bool) -> Sampler:
    made = Sampler(reader, job.layout, None, keep=keep)
    made.expect({job.comm: "hint"})
    return made


def look(one: Sampler) -> ProcessSample:
    return replace(one.sample(INFO, ProcessFacts(1, 2, "S")), duration_ns=0)


def test_a_job_that_moves_looks_the_same(layout: Layout) -> None:
    """Counters that move, operations that come and go at new and at known places, over many looks."""
    job, source = FakeJob(layout), random.Random(7)
    ends = [(job.connect(channel, peer, way), way) for channel in (0, 1) for peer, way in ((0, "recv"), (2, "send"))]
    ahead = sampler(ScriptedReader(job.process), job, keep=True)
    args = [job.operation(end, op_count=34 + 2 * n, posted=8, received=0, transmitted=0) for n, (end, _) in enumerate(ends)]
    sub = layout.member("ncclProxyArgs.subs").at(0)
    for number in range(24):
        for place in args:
            done = source.randrange(0, 9)
            for name in ("posted", "received", "transmitted", "done"):
                job.process.set(place + sub, f"ncclProxySubArgs.{name}", done)
            job.process.set(place, "ncclProxyArgs.state", source.choice((1, 2, 2, 2)))
            job.process.set(place, "ncclProxyArgs.opCount", 34 + 2 * source.randrange(100))
        job.process.set(job.comm, "ncclComm.opCount", number)
        if number % 5 == 4:
            end, _ = source.choice(ends)
            args.append(job.operation(end, op_count=60 + number, posted=1))
        plain = look(sampler(ScriptedReader(job.process), job, keep=False))
        assert look(ahead) == plain
        assert plain.operations and not plain.torn


def test_what_is_known_takes_a_few_calls(layout: Layout) -> None:
    job = FakeJob(layout)
    for channel in (0, 1):
        job.operation(job.connect(channel, 2, "send"), op_count=34 + channel, posted=8)
    reader = ScriptedReader(job.process)
    one = sampler(reader, job, keep=True)
    look(one)
    first, reader.reads = reader.reads, 0
    look(one)
    look(one)
    reader.reads = 0
    look(one)
    assert reader.reads <= 4 < first


def test_an_operation_reused_while_it_is_read_is_dropped() -> None:
    """Whenever the change falls: what is told of it is of before or of after, or it is left out and counted."""
    layout = released_layout((2, 32, 3))
    dropped = told = 0
    for moment in range(1, 12):
        job = FakeJob(layout)
        args = job.operation(job.connect(0, 2, "send"), op_count=34, posted=8)
        reader = ScriptedReader(job.process)
        one = sampler(reader, job, keep=True)
        for _ in range(3):
            assert [op.op_count for op in look(one).operations] == [34]
        reader.after(reader.reads + moment, args + layout.member("ncclProxyArgs.opCount").offset, (40).to_bytes(8, "little"))
        sample = look(one)
        assert [op.op_count for op in sample.operations] in ([], [34], [40])
        assert bool(sample.operations) != bool(sample.torn)
        dropped += sample.torn
        told += [op.op_count for op in sample.operations] == [34]
    assert dropped and told


def test_a_sample_is_of_the_moment_its_memory_was_fetched_or_else_of_the_present(layout: Layout) -> None:
    """Whatever changes between fetching and decoding: no sample mixes the two."""
    job, source = FakeJob(layout), random.Random(3)
    ends = [job.connect(channel, peer, way) for channel in (0, 1) for peer, way in ((0, "recv"), (2, "send"))]
    args = [job.operation(end, op_count=34 + 2 * n, posted=8, received=0, transmitted=0) for n, end in enumerate(ends[:2])]
    ahead, sub = sampler(ScriptedReader(job.process), job, keep=True), layout.member("ncclProxyArgs.subs").at(0)

    def move(number: int) -> None:
        for place in args:
            counters = sorted((source.randrange(0, 9) for _ in range(4)), reverse=True)
            for name, value in zip(("posted", "received", "transmitted", "done"), counters, strict=True):
                job.process.set(place + sub, f"ncclProxySubArgs.{name}", value)
        job.process.set(job.comm, "ncclComm.opCount", number)

    def plain() -> ProcessSample:
        return look(sampler(ScriptedReader(job.process), job, keep=False))

    of_then = 0
    for number in range(24):
        move(2 * number)
        before = plain()
        ahead.fetch()
        move(2 * number + 1)
        if number % 6 == 5 and len(args) < 4:
            args.append(job.operation(ends[len(args)], op_count=60 + number, posted=1))
        sample = look(ahead)
        if sample.time_ns != 1:  # not that of the facts
            of_then += 1
            assert abs(time.monotonic_ns() - sample.time_ns) < 60e9
            assert replace(sample, time_ns=1, wall_ns=2) == before
        else:
            assert sample == plain()
    assert 12 <= of_then < 24


def test_what_was_fetched_is_used_once(layout: Layout) -> None:
    job = FakeJob(layout)
    ahead = sampler(ScriptedReader(job.process), job, keep=True)
    for _ in range(3):
        look(ahead)
    ahead.fetch()
    job.process.set(job.comm, "ncclComm.opCount", 77)
    assert [look(ahead).communicators[0].op_count for _ in range(2)] == [17, 77]


def test_looking_for_communicators_is_not_cut_off(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has looked at a new place has looked: the sample is of the present then, and looks no second time at the same."""
    job = FakeJob(layout)
    ahead = sampler(ScriptedReader(job.process), job, keep=True)
    for _ in range(3):
        look(ahead)
    refresh, places, done = ahead._refresh_finder, [job.process.words([5]), job.process.words([6])], []

    def looking(facts: ProcessFacts) -> None:
        if places:
            place = places.pop()
            done.append((place, ahead.reader.read(place, 8)))
        refresh(facts)

    monkeypatch.setattr(ahead, "_refresh_finder", looking)
    ahead.fetch()
    job.process.set(job.comm, "ncclComm.opCount", 77)
    sample = look(ahead)
    assert len(done) == 2 and not places, "of what was fetched, then of the present"
    assert sample.time_ns == 1 and sample.communicators[0].op_count == 77
    ahead.fetch()
    assert look(ahead).time_ns != 1


@pytest.fixture
def words() -> tuple[FakeProcess, ReadAhead, int]:
    process = FakeProcess(released_layout((2, 32, 3)))
    place = process.words([1, 2, 3])
    return process, ReadAhead(ScriptedReader(process)), place


def value(data: bytes | None) -> int:
    return int.from_bytes(data or b"", "little")


def test_a_third_look_does_not_see_the_second(words: tuple[FakeProcess, ReadAhead, int]) -> None:
    process, reader, place = words
    for _ in range(2):
        reader.begin()
        reader.read(place, 8)
        reader.read_many([(place, 8)], again=True)
    reader.begin()
    assert value(reader.read(place, 8)) == 1
    process.write(place, (5).to_bytes(8, "little"))
    assert value(reader.read(place, 8)) == 1, "one moment"
    assert value(reader.read_many([(place, 8)], again=True)[0]) == 5
    process.write(place, (6).to_bytes(8, "little"))
    assert value(reader.read_many([(place, 8)], again=True)[0]) == 6


def test_what_was_read_anew_is_not_vouched_for_by_an_older_repetition(words: tuple[FakeProcess, ReadAhead, int]) -> None:
    process, reader, place = words
    for _ in range(2):
        reader.begin()
        reader.read_many([(place, 8)])
        reader.read_many([(place, 8), (place + 8, 8)], again=True)
    reader.begin()
    reader.read_many([(place, 8)])
    reader.read_many([(place, 8)], again=True)
    assert value(reader.read(place + 8, 8)) == 2, "at a place that was not asked for before"
    process.write(place + 8, (9).to_bytes(8, "little"))
    assert value(reader.read_many([(place + 8, 8)], again=True)[0]) == 9


def test_outside_of_a_sample_the_present_is_read(words: tuple[FakeProcess, ReadAhead, int]) -> None:
    process, reader, place = words
    reader.begin()
    reader.read(place, 8)
    reader.end()
    process.write(place, (5).to_bytes(8, "little"))
    assert value(reader.read(place, 8)) == value(reader.read_many([(place, 8)])[0]) == 5


def test_what_nobody_asks_for_is_forgotten_and_what_cannot_be_read_stays_unreadable() -> None:
    process = FakeProcess(released_layout((2, 32, 3)))
    reader = ReadAhead(process.reader())
    for _ in range(2):
        reader.begin()
        with pytest.raises(UnreadableError):
            reader.read(0x10, 8)
        assert reader.read_many([(0x10, 8)]) == [None]
    for _ in range(UNUSED_SAMPLES + 2):
        reader.begin()
    assert not reader._first and not reader._again
