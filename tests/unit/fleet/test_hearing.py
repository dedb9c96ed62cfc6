"""From batches of nodes to messages of jobs and back: nothing is lost, told twice, or given to another job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from msgspec.structs import replace as replace_batch

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.fleet import reduced
from ncclwatch.fleet.hearing import Hearing
from ncclwatch.fleet.reduced import BundleReader, Heard
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.values import Shared
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.failure import ProcessEnd
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.looks import ProcessLook
from ncclwatch.model.state import ProcessSample
from unit.batches import node_batches, ring_looks
from unit.fake_node import calls

NOW = 1_700_000_000 * 10**9


def of_job(sample: ProcessSample, number: int, host: str) -> ProcessSample:
    """The same process in another job, on a host of two jobs."""
    key = replace(sample.process.key, boot_id="boot-" + host, pid=sample.process.pid + 5000 * number)
    own = tuple(replace(c, hash=c.hash + number) for c in sample.communicators)
    operations = tuple(replace(o, comm_hash=o.comm_hash + number) for o in sample.operations)
    return replace(sample, process=replace(sample.process, key=key, host=host), communicators=own, operations=operations)


def two_jobs(looks: int) -> Iterator[NodeBatch]:
    """One node with two jobs of two ranks each; the second is stuck from the third look on."""
    fine, stuck = ring_looks(looks, world=2, victim=1), ring_looks(looks, world=2, stuck_from=2, victim=1)
    both = [[of_job(s, 0, "n") for s in a] + [of_job(s, 1, "n") for s in b] for a, b in zip(fine, stuck, strict=True)]
    yield from node_batches(both, hosts=("n",))


class Judge:
    """The other side of a worker: a session of each job."""

    def __init__(self) -> None:
        self.shared = Shared()
        self.readers: dict[int, BundleReader] = {}
        self.heard: dict[str, list[Heard]] = {}

    def take(self, messages: Sequence[tuple[str, bytes]]) -> None:
        for job, data in messages:
            message = reduced.decode(data)
            reader = self.readers.setdefault(message.bundle, BundleReader(self.shared))
            self.heard.setdefault(job, []).extend(reader.decode(message))
            assert not reader.needs_key


def through(hearing: Hearing, batches: Sequence[NodeBatch], *, flush_every: int = 1) -> Judge:
    judge, writers = Judge(), dict[str, BatchWriter]()
    for at, batch in enumerate(batches):
        writer = writers.setdefault(batch.host, BatchWriter(calls="all"))
        hearing.take("default", batch.host, "L" + batch.host, batch.sequence, writer.encode(batch), NOW)
        if at % flush_every == flush_every - 1:
            judge.take(hearing.flush())
    judge.take(hearing.flush())
    return judge


def test_what_a_judge_gets_is_what_a_node_said() -> None:
    batches = list(node_batches(list(ring_looks(4)), hosts=("node0",)))
    judge = through(Hearing(), batches)
    [(_, heard)] = judge.heard.items()
    assert [(one.first, one.last) for one in heard] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    for one, batch in zip(heard, batches, strict=True):
        assert one.batch.samples == batch.samples
        assert [w.process.key for w in one.batch.windows] == [w.process.key for w in batch.windows]
        assert (one.batch.host, one.batch.time_ns, one.batch.looked) == (batch.host, batch.time_ns, batch.looked)
        assert one.batch.planes == batch.planes


def test_two_jobs_on_one_node_are_judged_apart() -> None:
    judge = through(Hearing(), list(two_jobs(12)))
    assert len(judge.heard) == 2
    classes = {}
    for job, heard in judge.heard.items():
        session = DiagnosisSession()
        for one in heard:
            session.feed(one.batch)
            session.judge(one.batch.time_ns)
        assert session.verdict is not None
        classes[job] = str(session.verdict.verdict_class)
        assert len({s.process.key for s in session.samples.values()}) == 2
    assert sorted(classes.values()) == ["running", "stopped"]


def test_several_batches_become_one_and_nothing_of_them_is_lost() -> None:
    batches = list(node_batches(list(ring_looks(6)), hosts=("node0",)))
    for n, batch in enumerate(batches):
        batch.events = calls(list(batch.samples), 3)
        batch.notes = (f"note {n}",)
    judge = through(Hearing(), batches, flush_every=3)
    [(_, heard)] = judge.heard.items()
    assert [(one.first, one.last) for one in heard] == [(0, 2), (3, 5)]
    assert [one.batch.notes for one in heard] == [("note 0", "note 1", "note 2"), ("note 3", "note 4", "note 5")]
    sent = np.concatenate([batch.events for batch in batches if batch.events is not None])
    got = np.concatenate([one.batch.events for one in heard if one.batch.events is not None])
    assert np.array_equal(sent, got)
    assert heard[-1].batch.samples == batches[-1].samples


def test_a_process_that_ends_between_two_messages_is_told() -> None:
    first, second, third = node_batches(list(ring_looks(3)), hosts=("node0",))
    [sample] = second.samples
    second.samples = (replace(sample, run_state="X"),)
    third.samples = ()
    [(_, [one])] = through(Hearing(), [first, second, third], flush_every=3).heard.items()
    assert [s.run_state for s in one.batch.samples] == ["X"]


def test_batches_that_never_came_are_counted_and_those_that_came_twice_are_dropped() -> None:
    hearing, writer = Hearing(), BatchWriter(calls="all", key_every=1)
    batches = list(node_batches(list(ring_looks(6)), hosts=("node0",)))
    for n in (0, 1, 1, 4, 3, 5):
        hearing.take("default", "node0", "L", n, writer.encode(batches[n]), NOW)
    [(_, data)] = hearing.flush()
    [one] = BundleReader(Shared()).decode(reduced.decode(data))
    assert (one.first, one.last, one.missed) == (0, 5, 2)
    assert (hearing.counts.duplicates, hearing.counts.missed) == (2, 2)


def test_what_was_too_much_of_a_node_did_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.messaging.bus_batch.BURST", 2.0)
    monkeypatch.setattr("ncclwatch.messaging.bus_batch.RATE", 1.0)
    hearing, writer = Hearing(), BatchWriter(calls="all", key_every=1)
    batches = list(node_batches(list(ring_looks(6)), hosts=("node0",)))
    for n, later_s in ((0, 0), (1, 0), (2, 0), (3, 0), (5, 2)):
        hearing.take("default", "node0", "L", n, writer.encode(batches[n]), NOW, stored_ns=NOW + later_s * 10**9)
    assert (hearing.counts.batches, hearing.counts.flooded, hearing.counts.missed) == (3, 2, 1), "4 alone never came"


def test_a_batch_that_builds_on_what_was_not_heard_asks_for_a_key() -> None:
    hearing, writer = Hearing(), BatchWriter(calls="all")
    batches = list(node_batches(list(ring_looks(3)), hosts=("node0",)))
    writer.encode(batches[0])
    hearing.take("default", "node0", "L", 1, writer.encode(batches[1]), NOW)
    assert hearing.asks == [("default", "node0")]
    assert hearing.flush() == []
    writer.request_key()
    hearing.take("default", "node0", "L", 2, writer.encode(batches[2]), NOW)
    [(_, data)] = hearing.flush()
    [one] = BundleReader(Shared()).decode(reduced.decode(data))
    assert (one.first, one.last) == (1, 2)
    assert one.batch.samples == batches[2].samples


def test_a_batch_of_another_host_and_damaged_ones_are_refused_and_counted() -> None:
    hearing = Hearing()
    [batch] = node_batches(list(ring_looks(1)), hosts=("node0",))
    data = BatchWriter(calls="all").encode(batch)
    for n, (node, bad) in enumerate((("node1", data), ("node0", data[:-7]), ("node0", b"nothing"))):
        with pytest.raises(FormatError):
            hearing.take("default", node, "L", n, bad, NOW)
    assert hearing.counts.bad == 3
    assert hearing.flush() == []


def test_a_message_that_would_be_too_large_is_sent_in_parts() -> None:
    looks = list(ring_looks(3, world=8))
    batches = [b for host in range(8) for b in node_batches(looks, hosts=(f"node{host}",))]
    batches.sort(key=lambda b: b.sequence)
    whole = through(Hearing(), batches, flush_every=8)
    hearing = Hearing(max_bytes=6000)
    parts = through(hearing, batches, flush_every=8)
    assert hearing.counts.messages > 3
    assert hearing.counts.bad == 0
    [(_, one)], [(_, other)] = whole.heard.items(), parts.heard.items()
    assert len(one) == len(other) == 24
    assert {(h.node, h.last): h.batch.samples for h in one} == {(h.node, h.last): h.batch.samples for h in other}


def test_a_judge_that_begins_in_the_middle_needs_a_key() -> None:
    hearing, writer = Hearing(), BatchWriter(calls="all")
    batches = list(node_batches(list(ring_looks(4)), hosts=("node0",)))
    sent = []
    for batch in batches:
        batch.events = calls(list(batch.samples), 2)
        hearing.take("default", "node0", "L", batch.sequence, writer.encode(batch), NOW)
        sent += hearing.flush()
        hearing.request_keys(sent[-1][0]) if batch.sequence == 2 else None
    reader = BundleReader(Shared())
    [one] = reader.decode(reduced.decode(sent[2][1]))
    assert reader.needs_key
    assert not one.batch.looked
    assert one.batch.events is not None
    assert len(one.batch.events)
    [one] = reader.decode(reduced.decode(sent[3][1]))
    assert not reader.needs_key
    assert one.batch.samples == batches[3].samples


def test_messages_that_make_no_sense_are_refused() -> None:
    hearing = Hearing()
    [batch] = node_batches(list(ring_looks(1)), hosts=("node0",))
    hearing.take("default", "node0", "L", 0, BatchWriter(calls="all").encode(batch), NOW)
    [(_, data)] = hearing.flush()
    message = reduced.decode(data)
    for rows in ([0, 0, 0, 0, 0], [9, 1, 0, 0, 0], [1, 1, 0, 0], [-1, 1, 0, 0, 0]):
        message.parts[0].rows = rows
        with pytest.raises(FormatError):
            BundleReader(Shared()).decode(message)
    with pytest.raises(FormatError):
        reduced.decode(b"\x94\x01")


def test_a_part_of_the_nodes_is_let_go_of_as_a_whole() -> None:
    hearing = Hearing()
    [batch] = node_batches(list(ring_looks(1)), hosts=("node0",))
    hearing.take("default", "node0", "L", 0, BatchWriter(calls="all").encode(batch), NOW, "3")
    hearing.forget("4")
    assert len(hearing) == 1
    hearing.forget("3")
    assert len(hearing) == 0
    assert hearing.flush() == []


def test_calls_before_the_first_look_wait_for_it() -> None:
    hearing, writer = Hearing(), BatchWriter(calls="all")
    early, look = node_batches(list(ring_looks(2)), hosts=("node0",))
    early = replace_batch(early, looked=False, samples=(), windows=(), events=calls(list(look.samples), 4))
    hearing.take("default", "node0", "L", 0, writer.encode(early), NOW)
    assert hearing.flush() == []
    hearing.take("default", "node0", "L", 1, writer.encode(look), NOW)
    [(job, data)] = hearing.flush()
    [one] = BundleReader(Shared()).decode(reduced.decode(data))
    assert job == f"{0xA1:016x}"
    assert (one.first, one.last) == (0, 1)
    assert one.batch.events is not None
    assert len(one.batch.events) == len(early.events if early.events is not None else ())


def test_parts_of_a_job_that_were_two_are_sent_under_one_name() -> None:
    hearing = Hearing()
    for number, hashes in enumerate(([0xA1], [0xB1])):
        [look] = ring_looks(1, world=1)
        [own] = look[0].communicators
        sample = replace(look[0], communicators=tuple(replace(own, hash=h) for h in hashes), operations=())
        key = ProcessKey(f"b{number}", 7, 5, "ab" * 20)
        sample = replace(sample, process=replace(sample.process, key=key, host=f"m{number}"))
        [batch] = node_batches([[sample]], hosts=(f"m{number}",))
        hearing.take("default", f"m{number}", "L", 0, BatchWriter(calls="all").encode(batch), NOW + number)
    hearing.directory.join("default", [0xA1, 0xB1], NOW + 9)
    sent = hearing.flush()
    assert {job for job, _ in sent} == {f"{0xA1:016x}"}


def test_what_was_seen_of_processes_and_who_ended_is_told_of_every_batch_to_whose_it_is() -> None:
    hearing, writer = Hearing(), BatchWriter(calls="all")
    first, second = list(two_jobs(2))
    mine, others = (first.samples[at].process for at in (0, -1))
    looked = ProcessLook("n", mine.key.pid, 1.0, "S", kernel="sleeping")
    ended = ProcessEnd(others.key, "n", 1, 10, 20, 0, 1)
    first = replace_batch(first, looks=(looked,), ends=(ended,))
    for batch in (first, second):
        hearing.take("default", "n", "L", batch.sequence, writer.encode(batch), NOW)
    judge = Judge()
    judge.take(hearing.flush())
    told = {job: [one.batch for one in heard] for job, heard in judge.heard.items()}
    assert len(told) == 2
    of = {batch.samples[0].process.key.pid: batch for batches in told.values() for batch in batches}
    for batch in of.values():
        pids = {sample.process.key.pid for sample in batch.samples}
        assert batch.looks == ((looked,) if mine.key.pid in pids else ())
        assert batch.ends == ((ended,) if others.key.pid in pids else ())
