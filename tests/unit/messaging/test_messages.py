"""Batches as bytes: everything comes back, little is sent twice, and nothing a peer sends does harm."""

from __future__ import annotations

import dataclasses
import math
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ncclwatch.collect.batch import Change, NodeBatch, ProcessChange
from ncclwatch.collect.cadence import Cadences
from ncclwatch.collect.windows import RankWindow
from ncclwatch.messaging import body as messages
from ncclwatch.messaging import packing
from ncclwatch.messaging import writer as writing
from ncclwatch.messaging.limits import MAX_FRAME, MAX_RAW, FormatError, VersionError
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.values import RECENT, Shared, ValueReader, ValueWriter
from ncclwatch.messaging.writer import BatchWriter, ledger_calls
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.network import (
    FlowKind,
    FlowRecord,
    FlowState,
    PathAnswer,
    QueuePairEnds,
    RdmaCounts,
    SocketFacts,
    StepRate,
)
from ncclwatch.model.state import (
    Direction,
    HostConnection,
    PendingOperation,
    ProcessSample,
    Transport,
)
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow
from ncclwatch.simulate.records import Observer
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import load
from unit.fake_node import FakeNode, calls
from unit.synthetic import Rank, frozen_ring, moved


def rich_ranks() -> list[Rank]:
    """Ranks that show a little of everything."""
    ranks = frozen_ring(2, 4)
    own = dataclasses.replace(
        ranks[0].communicators[0],
        hash=0xFEDC_BA98_7654_3210,
        parent_hash=(1 << 64) - 2,
        sequence_numbers={"AllReduce": 14, "Broadcast": 1},
        async_result="ncclInProgress",
        aborted=False,
        host_connections=(HostConnection(3, 1, Direction.RECV, 0, None, 1 << 40, Transport.SHM),),
        name="dp",
    )
    pending = PendingOperation(own.hash, Direction.SEND, 27, 0, 1, 4, "AllReduce", "LL", None)
    extra = {"pending": (pending,), "torn": 2, "truncated": ("peers",), "unavailable": {"a": "b"}, "cpu_time_ns": 5}
    ranks[0] = dataclasses.replace(ranks[0], communicators=(own, ranks[0].communicators[0]), extra=extra)
    return ranks


def near(ours: Any, theirs: Any) -> bool:
    """Equal, but for rates and ages, which travel with seven digits."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(near(ours[name], theirs[name]) for name in ours)
    return bool(ours == theirs)


def same(before: NodeBatch, after: NodeBatch, *, events: bool = True) -> None:
    for name in NodeBatch.__struct_fields__:
        ours, theirs = getattr(before, name), getattr(after, name)
        if name == "windows":
            for window, other in zip(ours, theirs, strict=True):
                assert near(dataclasses.asdict(window), dataclasses.asdict(other))
        elif name == "events":
            assert not events or ours is None or bool((ours == theirs).all())
        else:
            assert ours == theirs, name


def test_everything_comes_back() -> None:
    node = FakeNode(rich_ranks())
    node.series[1][2] = moved(node.series[1][2])
    writer, reader = BatchWriter(calls="all"), BatchReader()
    for i in range(4):
        info = node.series[0][0].process
        batch = node.batch(
            changes=(ProcessChange(Change.EXITED, 7, info, "it went", "node0"),), notes=("a note",), lost=3 * i,
            problems=((info.key, "torn"),), events=calls([series[0] for series in node.series], 10), complete=True,
        )  # fmt: skip
        decoded = reader.decode(writer.encode(batch))
        assert not decoded.needs_key
        same(batch, decoded.batch)


def test_every_field_of_the_model_travels() -> None:
    """A field that is added to a record is written without anybody thinking of it."""
    window_fields = {field.name for field in messages.window_type().fields}
    assert window_fields == {field.name for field in dataclasses.fields(RankWindow)}
    head, content = messages.sample_types()
    written = {field.name for part in (head, content) for field in part.fields}
    assert written == {field.name for field in dataclasses.fields(ProcessSample)}
    handled = {*messages.HEAD, *messages.IN_TABLES, *messages.more_fields()}
    assert handled == set(NodeBatch.__struct_fields__)
    assert {field.name for field in messages.flow_type().fields} == {field.name for field in dataclasses.fields(FlowRecord)}
    assert {field.name for field in messages.work_type().fields} == {field.name for field in dataclasses.fields(FlowWindow)}


WORK = WorkWindow(
    Counting.BURSTS, 10**15, 10**15 + 7 * 10**9, 0.0078125, posted=14, posted_bytes=14 << 20, completed=12, received=0,
    in_flight=2, errors=1, latency_p50_ns=24e3, throughput=2e9, uncertainty=0.03125, send_rate=0.125,
)  # fmt: skip


def windows_of_work(count: int) -> tuple[FlowWindow, ...]:
    socket = WorkWindow(Counting.TCP, 1, 2, 0.5, posted_bytes=1 << 50, uncertainty=0.0)
    flows = (
        FlowWindow(
            100 + number, Scope.FLOW, dataclasses.replace(WORK, posted=number), number, "mlx5_0", 1, (1 << 64) - 3, number, 0, 1,
            Direction.SEND, 0, 4711 + number, role="data", order=3, host="node0",
        )
        for number in range(count)
    )  # fmt: skip
    return (*flows, FlowWindow(7, Scope.PORT, WORK), FlowWindow(8, Scope.PEER, socket, remote="10.0.0.1:77", peer=3))


def test_windows_of_work_travel_with_the_batch_in_which_they_came() -> None:
    node = FakeNode(frozen_ring(2, 4))
    writer, reader = BatchWriter(), BatchReader()
    batch = node.batch(work=windows_of_work(3))
    batch.windows = [dataclasses.replace(window, work=WORK) for window in batch.windows]
    same(batch, reader.decode(writer.encode(batch)).batch)
    # Between two bursts there are none, also in batches without a look.
    without = node.batch(looked=False)
    assert reader.decode(writer.encode(without)).batch.work == ()
    later = node.batch(looked=False, work=windows_of_work(1))
    same(later, reader.decode(writer.encode(later)).batch)


def test_a_window_of_work_takes_some_forty_bytes() -> None:
    node = FakeNode(frozen_ring(2, 4))
    writer = BatchWriter()
    writer.encode(node.batch(work=windows_of_work(2)))
    plain, full = len(writer.encode(node.batch())), len(writer.encode(node.batch(work=windows_of_work(200))))
    assert (full - plain) / 202 < 40


def many_flows(count: int) -> tuple[FlowRecord, ...]:
    """Flows of a large node: two in three over queue pairs, one over sockets."""
    ends = (
        FlowRecord(
            100 + number % 8, FlowKind.RDMA if number % 3 else FlowKind.SOCKET, "IB", f"mlx5_{number % 8}", 1, FlowState.ACTIVE,
            global_rank=number % 8, comm_hash=(1 << 64) - 3, rank=number % 8, channel=number % 32, peer=(number + 1) % 8,
            direction=Direction.SEND, connection_index=0, role="data", bandwidth=2.5e9, steps=StepRate(number, 30.0, 5, 6, 1.0),
            rdma=RdmaCounts(number + 7, 12, 11, 1, False, errors={"retry-exc-err": 1}) if number % 3 else None,
            socket=None if number % 3 else SocketFacts(1, f"10.0.0.1:{number}", "10.0.0.2:4", rtt_us=80, min_rtt_us=40),
            path=PathAnswer(5, "10.0.0.2", True, "tcp", "ok") if number % 7 == 0 else None,
            ends=QueuePairEnds(number + 7, number % 2, "10.0.0.2") if number % 3 else None,
        )
        for number in range(count)
    )  # fmt: skip
    return tuple(ends)


def test_all_flows_of_a_large_node_travel_as_columns() -> None:
    node = FakeNode(frozen_ring(2, 4))
    writer, reader = BatchWriter(), BatchReader()
    batch = node.batch(all_flows=many_flows(500))
    same(batch, reader.decode(writer.encode(batch)).batch)
    assert reader.decode(writer.encode(node.batch())).batch.all_flows == ()
    plain, full = len(writer.encode(node.batch())), len(writer.encode(node.batch(all_flows=many_flows(4000))))
    assert (full - plain) / 4000 < 40


def test_windows_of_work_are_unknown_to_an_older_reader_and_missing_in_what_an_older_writer_wrote() -> None:
    """An older writer's layouts hold neither the table nor the field of a rank's window; an older reader skips both."""
    node = FakeNode(frozen_ring(2, 4))
    frame = BatchWriter().encode(node.batch(work=windows_of_work(2)))
    raw, key = packing.unframe(frame)
    body = msgspec.msgpack.decode(raw, type=messages.Body)
    body.layouts = {name: layout for name, layout in body.layouts.items() if "FlowWindow" not in name and "work" not in name}
    body.tables = [table for table in body.tables if table.layout in body.layouts]
    old = BatchReader().decode(packing.frame(msgspec.msgpack.encode(body), key=key)).batch
    assert old.work == () and len(old.samples) == 4
    assert all(window.work is None for window in old.windows)


def test_a_job_that_stands_still_costs_a_few_hundred_bytes_a_look() -> None:
    node, writer = FakeNode(frozen_ring(2, 8)), BatchWriter()
    first, *later = [len(writer.encode(node.batch())) for _ in range(6)]
    assert max(later) < 600
    assert max(later) < first / 3


def test_calls_for_the_ledger_are_a_few_bytes_each() -> None:
    samples = [series[0] for series in FakeNode(frozen_ring(2, 8)).series]
    node, writer = FakeNode(frozen_ring(2, 8)), BatchWriter()
    writer.encode(node.batch())
    without = len(writer.encode(node.batch(looked=False)))
    with_calls = len(writer.encode(node.batch(looked=False, events=calls(samples, 100))))
    assert (with_calls - without) / 800 < 4


def test_calls_grouped_by_process_come_back_in_the_order_of_time() -> None:
    samples = [series[0] for series in FakeNode(frozen_ring(2, 8)).series]
    node, events = FakeNode(frozen_ring(2, 8)), calls(samples, 100)
    source = np.random.default_rng(3)
    events["time_ns"] = np.sort(source.integers(1 << 40, 1 << 41, len(events)))
    events["pid"] = events["pid"][source.permutation(len(events))]
    # Addresses are each process's own.
    for name in ("comm", "stream"):
        events[name] = source.integers(1 << 40, 1 << 47, 1 << 16)[events["pid"] % (1 << 16)]
    # Of two threads of a process one may say its time before and its record after the other.
    late = np.flatnonzero(events["pid"][1:] == events["pid"][:-1])[:5]
    events["time_ns"][late] += 10 + events["time_ns"][late + 1] - events["time_ns"][late]
    sizes, whole = [], ledger_calls(events)
    for grouped in (False, True):
        writer, reader = BatchWriter(grouped=grouped), BatchReader()
        reader.decode(writer.encode(node.batch()))
        data = writer.encode(node.batch(looked=False, events=events))
        sizes.append(len(data))
        found = reader.decode(data).batch.events
        assert found is not None
        for pid in set(whole["pid"].tolist()):
            assert (found[found["pid"] == pid] == whole[whole["pid"] == pid]).all()
        assert np.count_nonzero(np.diff(found["time_ns"].astype(np.int64)) < 0) <= len(late)
        assert len(found) == len(whole)
    assert sizes[1] < 0.8 * sizes[0]


def test_what_was_missed_is_noticed_and_a_key_batch_mends_it() -> None:
    node, writer, reader = FakeNode(rich_ranks()), BatchWriter(), BatchReader()
    reader.decode(writer.encode(node.batch()))
    for place in (1, 2):
        node.series[0][place] = moved(node.series[0][place])
    writer.encode(node.batch())
    decoded = reader.decode(writer.encode(node.batch()))
    assert decoded.needs_key
    assert (decoded.batch.samples, decoded.batch.looked) == ((), False)
    writer.request_key()
    batch = node.batch()
    decoded = reader.decode(writer.encode(batch))
    assert not decoded.needs_key
    same(batch, decoded.batch)


def test_a_reader_that_comes_late_waits_for_a_key_batch_and_keeps_what_stands_by_itself() -> None:
    node, writer, reader = FakeNode(rich_ranks()), BatchWriter(key_every=3), BatchReader()
    needs: list[bool] = []
    for _ in range(5):
        data = writer.encode(node.batch(notes=("hello",)))
        if writer._since_key > 1 or needs:
            decoded = reader.decode(data)
            assert decoded.batch.notes == ("hello",)
            needs.append(decoded.needs_key)
    assert needs == [True, True, False, False]


def test_a_new_writer_is_a_new_stream() -> None:
    node, reader = FakeNode(rich_ranks()), BatchReader()
    streams = []
    for _ in range(2):
        decoded = reader.decode(BatchWriter().encode(node.batch()))
        assert not decoded.needs_key
        streams.append(decoded.stream)
    assert streams[0] != streams[1]


def test_an_epoch_ends_before_its_values_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "EPOCH_VALUES", 30)
    node, writer, reader = FakeNode(rich_ranks(), looks=40), BatchWriter(), BatchReader()
    for i in range(40):
        series = node.series[0]
        series[i] = dataclasses.replace(series[i], truncated=(f"bound {i}",))
        batch = node.batch()
        same(batch, reader.decode(writer.encode(batch)).batch)
        assert len(writer._values) < 60


def test_an_epoch_ends_once_most_of_its_values_are_of_processes_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "STALE_VALUES", 50)
    node, writer, reader = FakeNode(rich_ranks(), looks=400), BatchWriter(), BatchReader()
    keys, first = 0, 0
    for i in range(400):
        series = node.series[0]
        series[i] = dataclasses.replace(series[i], truncated=(f"process {i}",))
        batch = node.batch()
        same(batch, reader.decode(writer.encode(batch)).batch)
        keys += writer.was_key
        first = len(writer._values) if writer.was_key else first
        assert len(writer._values) <= 2 * first + 50 + 8, "eight values a batch at most are new here"
    assert 1 < keys < 12, "what lives on is not sent again and again"


def test_objects_of_processes_that_have_ended_are_not_held_for_long() -> None:
    values = ValueWriter()
    for i in range(2000):
        assert values.number(ProcessKey("boot", i % 7, 1, "build")) == i % 7 + 1
        values.take()
        assert len(values._by_id) + len(values._older) <= 2 * RECENT
    many = [ProcessKey("boot", i, 1, "build") for i in range(5 * RECENT)]
    for _ in range(4):
        numbers = [values.number(one) for one in many]
        values.take()
    assert len(values._by_id) + len(values._older) >= len(many), "those of one batch are known"
    assert len(set(numbers)) == len(many)


def rewritten(data: bytes, change: Any, *, version: int = packing.VERSION) -> bytes:
    body, key = packing.unframe(data)
    content = msgspec.msgpack.decode(body)
    change(content)
    return packing.frame(msgspec.msgpack.encode(content), key=key, version=version)


def test_a_version_apart_is_read_and_two_are_refused_with_a_line() -> None:
    batch = FakeNode(rich_ranks()).batch()
    data = BatchWriter().encode(batch)

    def add(content: dict[str, Any]) -> None:
        content["something_new"] = [1, 2]
        content["more"]["plane_of_tomorrow"] = {"x": 1}

    same(batch, BatchReader().decode(rewritten(data, add, version=packing.VERSION + 1)).batch)
    same(batch, BatchReader().decode(rewritten(data, add, version=packing.VERSION - 1)).batch)
    with pytest.raises(VersionError, match="one apart"):
        BatchReader().decode(rewritten(data, add, version=packing.VERSION + 2))


def relaid(content: dict[str, Any], table: str, layout: list[list[str]], records: np.ndarray) -> None:
    content["layouts"][table] = layout
    made = packing.pack(table, records)
    content["tables"] = [t for t in content["tables"] if t[0] != table] + [[made.layout, made.rows, made.data]]


def test_records_with_fields_more_and_fields_less_are_read() -> None:
    batch = FakeNode(rich_ranks()).batch()
    data = BatchWriter().encode(batch)
    kind = messages.window_type()

    def change(content: dict[str, Any]) -> None:
        [table] = [t for t in content["tables"] if t[0] == kind.name]
        records = packing.unpack(packing.Table(*table), kind.dtype)
        layout = [["of_tomorrow", "<u2"], *[[n, f] for n, f in kind.layout if n != "torn"]]
        new = np.zeros(len(records), packing.padded([(n, f) for n, f in layout]))
        for name, _ in layout[1:]:
            new[name] = records[name]
        relaid(content, kind.name, layout, new)

    windows = list(BatchReader().decode(rewritten(data, change)).batch.windows)
    assert [dataclasses.replace(window, torn=0) for window in batch.windows] == windows


def hostile() -> dict[str, Any]:
    def layout(content: dict[str, Any]) -> None:
        content["layouts"]["sample"] = [["time_ns", "O"]]

    def huge_row(content: dict[str, Any]) -> None:
        content["layouts"]["sample"] = [[f"f{i}", "<u8"] for i in range(200)]

    def rows(content: dict[str, Any]) -> None:
        content["tables"][0][1] = 1 << 40

    def ranks(content: dict[str, Any]) -> None:
        name = "content.communicators"
        [table] = [t for t in content["tables"] if t[0] == name]
        [kind] = [part for whole in messages.sample_types() for part in whole.every() if part.name == name]
        records = packing.unpack(packing.Table(*table), kind.dtype)
        records["nranks"] = 1 << 60
        relaid(content, name, [list(pair) for pair in kind.layout], records)

    def times(content: dict[str, Any]) -> None:
        [table] = [t for t in content["tables"] if t[0] == "sample"]
        kind = messages.sample_types()[0]
        records = packing.unpack(packing.Table(*table), kind.dtype)
        records["duration_ns"] = (1 << 63) - 1
        relaid(content, "sample", [list(pair) for pair in kind.layout], records)

    def counts(content: dict[str, Any]) -> None:
        name = "content"
        [table] = [t for t in content["tables"] if t[0] == name]
        kind = messages.sample_types()[1]
        records = packing.unpack(packing.Table(*table), kind.dtype)
        records["operations"] = 1 << 31
        relaid(content, name, [list(pair) for pair in kind.layout], records)

    def value(content: dict[str, Any]) -> None:
        content["values"] = [b"\xc1" for _ in content["values"]]

    def since(content: dict[str, Any]) -> None:
        content["since"] = []

    def wrong_type(content: dict[str, Any]) -> None:
        content["host"] = 5

    def deep(content: dict[str, Any]) -> None:
        content["more"]["notes"] = msgspec.Raw(b"\x91" * 5000 + b"\x90")

    found = (layout, huge_row, rows, ranks, times, counts, value, since, wrong_type, deep)
    return {function.__name__: function for function in found}


@pytest.mark.parametrize("name", hostile())
def test_what_makes_no_sense_is_refused(name: str) -> None:
    data = BatchWriter().encode(FakeNode(rich_ranks()).batch())
    with pytest.raises(FormatError):
        BatchReader().decode(rewritten(data, hostile()[name]))


def test_sizes_are_bounded_before_anything_is_made_of_them() -> None:
    bomb = zlib.compress(bytes(1 << 26), 9)
    for declared in (16, MAX_RAW, (1 << 32) - 1):
        with pytest.raises(FormatError):
            packing.unframe(struct.pack("<4sHHI", packing.MAGIC, packing.VERSION, 0, declared) + bomb)
    for data in (b"", b"ncwB", b"GET / HTTP/1.1\r\n\r\n", bytes(MAX_FRAME + 1)):
        with pytest.raises(FormatError):
            packing.unframe(data)


@pytest.mark.parametrize("seed", range(4))
def test_damaged_bytes_never_do_more_than_raise(seed: int) -> None:
    """Damage of what is inside the compression: what a hostile agent could send."""
    source = random.Random(seed)
    node, writer = FakeNode(rich_ranks()), BatchWriter(calls="all")
    data = [writer.encode(node.batch(events=calls([s[0] for s in node.series], 5))) for _ in range(2)]
    for _ in range(60):
        reader = BatchReader()
        for encoded in data:
            body = bytearray(packing.unframe(encoded)[0])
            for _ in range(source.randint(0, 4)):
                body[source.randrange(len(body))] = source.randrange(256)
            if source.random() < 0.2:
                del body[source.randrange(len(body)) :]
            try:
                batch = reader.decode(packing.frame(bytes(body), key=encoded is data[0])).batch
            except FormatError:
                continue
            assert batch.events is None or batch.events.dtype == EVENT_DTYPE
            list(batch.windows)


def test_groups_are_kept_where_they_hold_sends_or_receives() -> None:
    one, two = (1, 1), (1, 2)
    said = [
        (Function.GROUP_START, one),
        (Function.GROUP_START, two),
        (Function.ALL_REDUCE, two),
        (Function.SEND, one),
        (Function.GROUP_END, two),
        (Function.RECV, one),
        (Function.GROUP_END, one),
        (Function.ALL_REDUCE, one),
        (Function.GROUP_START, two),
    ]
    events = np.zeros(len(said), EVENT_DTYPE)
    for record, (function, (pid, tid)) in zip(events, said, strict=True):
        record["function"], record["pid"], record["tid"], record["kind"] = function, pid, tid, Kind.ENTER
        record["flags"] = Flag.COMM_READ if function < Function.GROUP_START else 0
    kept = ledger_calls(events)
    found = [(record["function"], (record["pid"], record["tid"])) for record in kept]
    assert found == said[:1] + said[2:4] + said[5:], "what the end of the batch cuts off may be a send"
    assert len(ledger_calls(events[:0])) == 0


def test_the_order_of_calls_is_the_same_through_an_agent_as_beside_the_job() -> None:
    scenario = load(Path(__file__).resolve().parent.parent.parent / "scenarios" / "quick-never-enters-pipeline.toml")
    records = Observer(simulate(scenario), [1.0]).until(3.0)
    for host, events in records.calls.items():
        beside, through = Cadences(), Cadences()
        beside.add_calls(events, source=host)
        for part in np.array_split(events, 7):
            through.add_calls(ledger_calls(part), source=host)
        assert beside.orders and beside.orders.keys() == through.orders.keys()
        for place, order in beside.orders.items():
            assert any(len(call.ways) > 1 for call in order.calls) or not any(call.ways[0] for call in order.calls)
            assert [(c.comm, c.what, c.ways) for c in order.calls] == [
                (c.comm, c.what, c.ways) for c in through.orders[place].calls
            ]


def test_values_in_common_are_decoded_once_and_kept_as_long_as_somebody_reads_them() -> None:
    """An engine hears many jobs one after another: what those that are over had must not stay."""
    shared, decoder = Shared(), msgspec.msgpack.Decoder(list[str])
    readers = [ValueReader(shared), ValueReader(shared)]
    for reader in readers:
        reader.add(1, [msgspec.msgpack.encode(["the peers of all"])])
    [first], [second] = (reader.column([1], "peers", decoder) for reader in readers)
    assert first is second and len(shared) == 1
    del readers[0], reader
    assert len(shared) == 1 and readers[0].column([1], "peers", decoder) == [first]
    del readers[0]
    assert len(shared) == 0, "nobody holds it any more"


def test_a_reader_keeps_nothing_of_the_epochs_before() -> None:
    """Neither of an agent whose epoch ends, nor of one that begins anew: each job leaves the names of its processes."""
    shared, held = Shared(), []
    reader = BatchReader(shared)
    for life in range(30):
        writer = BatchWriter(key_every=3)
        for number in range(5):
            node = FakeNode(frozen_ring(2, 4), host=f"node{life}-{number // 3}", begin=number)
            reader.decode(writer.encode(node.batch()))
            held.append(len(shared))
    assert max(held[-60:]) <= max(held[:10]), "as much after thirty lives as after the first"


def test_a_new_epoch_takes_over_what_the_one_before_had_decoded() -> None:
    """The list of a large job's peers is compared by identity first: decoding it anew each time would make that long."""
    node, writer, reader = FakeNode(frozen_ring(2, 4)), BatchWriter(), BatchReader()
    before = reader.decode(writer.encode(node.batch())).batch.samples
    writer.request_key()
    after = reader.decode(writer.encode(node.batch())).batch.samples
    assert [a.process is b.process for a, b in zip(after, before, strict=True)] == [True] * 4
