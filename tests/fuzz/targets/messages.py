"""What nodes, engines and viewers say to each other, and what a judgement makes of a hostile node's batches."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import msgspec

from fuzz.harness import Target
from fuzz.mutate import of_bytes, of_packed, of_parts, pack, parts
from ncclwatch.collect.batch import Change, NodeBatch, Overhead, PlaneState, ProcessChange
from ncclwatch.collect.windows import RankWindow
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.messaging import packing, protocol
from ncclwatch.messaging.hub import Hub
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.link import AgentLink
from ncclwatch.messaging.protocol import Ack, Batch, CountWork, Hello, History, NeedKey, Ping, Pong, Refused, Welcome
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.spool import Spool
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.network import (
    FlowKind,
    FlowRecord,
    FlowState,
    KernelLogLine,
    LinkChange,
    NetworkLook,
    NicRecord,
    PathAnswer,
    RdmaCounts,
    SocketFacts,
    StepRate,
)
from ncclwatch.model.state import Direction, ProcessSample
from ncclwatch.model.verdict import Verdict
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow
from ncclwatch.pathprobe.channel import Channel, admit, greet
from ncclwatch.remote.job_view import ViewReader, ViewWriter
from ncclwatch.view.builder import ViewBuilder
from ncclwatch.wire import orders
from ncclwatch.wire.orders import Bill, Follow, Order, Owner, Owners, Report, User
from unit.fake_node import FakeNode, calls
from unit.synthetic import frozen_ring

KEY = 1
_WORK = WorkWindow(
    Counting.BURSTS,
    10**15,
    10**15 + 7 * 10**9,
    0.0078125,
    posted=14,
    posted_bytes=14 << 20,
    completed=12,
    in_flight=2,
    errors=1,
    latency_p50_ns=24e3,
    throughput=2e9,
    uncertainty=0.03125,
    send_rate=0.125,
)


def targets() -> list[Target]:
    """All of this module."""
    bodies = of_parts(_of_tagged)
    return [
        Target("frame", "an encoded batch as bytes", _frames, _frame, of_bytes, 1 << 15),
        Target("batch", "bodies of the batches of one stream", _bodies, _batch, bodies, 1 << 15),
        Target("judge", "a hostile node's batches, judged beside an honest node's", _bodies, _judge, bodies, 1 << 15, quick=25),
        Target("control", "one control message", _controls, _control, of_packed, 1 << 12),
        Target("hub", "messages of several peers to an engine", _talks, _hub, of_parts(_of_tagged), 1 << 15),
        Target("link", "messages of an engine to an agent", _orders, _link, of_parts(of_packed), 1 << 12),
        Target("view", "views of a job that an engine sends to a viewer", _views, _view, of_parts(of_packed), 1 << 15, quick=80),
        Target(
            "probe",
            "the other end of a probe of a path, before and after its proof",
            _probes,
            _probe,
            of_parts(of_bytes),
            1 << 11,
        ),
        Target(
            "wire-child",
            "messages between the agent and its process that counts",
            _reports,
            _report,
            of_parts(of_packed),
            1 << 12,
        ),
    ]


# --- batches -----------------------------------------------------------------------------------------------------------


def _network() -> NetworkLook:
    tcp = SocketFacts(1, "10.0.0.1:5", "10.0.0.2:6", 100, 90, 3, 1, 10, 10**9, 4, 7, 8, 0.25)
    path = PathAnswer(10**9, "10.0.0.2", True, "tcp", "ok", "answered", 90.0)
    flows = (
        FlowRecord(
            1000, FlowKind.SOCKET, "Socket", "eth0", 0, FlowState.BLOCKED, "why", 0, 77, 0, 0, 1, Direction.SEND, 0, "", 1e9, 2e9,
            retries=3, steps=StepRate(100, 3.5, 4, 10, 5.0), socket=tcp, path=path,
        ),
        FlowRecord(
            1001, FlowKind.RDMA, "IB", "mlx5_0", 1, FlowState.STALLED, "why", 1, 77, 1, 0, 0, Direction.RECV, 0, "data",
            rdma=RdmaCounts(9, 10, 8, 2, True, 1e4, 2e4, {"retry-exc-err": 1}),
        ),
    )  # fmt: skip
    nic = NicRecord("b", "mlx5_0:1", "rdma", True, "active", 100.0, "eth0", "Ethernet", 1e9, 2e9, {"symbol_error": 3}, 2, (0,), 7)
    line = KernelLogLine("b", "xid", "3b:00", "fell off the bus", 10**9, 3, 79, 1000, 10**18)
    return NetworkLook((nic,), (LinkChange("b", "eth0", False, "no carrier", 10**9, 10**18),), (line,), flows, ("a note",))


@cache
def _encoded() -> tuple[tuple[bytes, ...], ...]:
    """Streams of encoded batches."""
    node = FakeNode(frozen_ring(2, 4), host="b")
    samples = [series[0] for series in node.series]
    writer, stream = BatchWriter(calls="all"), []
    flow = FlowWindow(
        1000, Scope.FLOW, _WORK, 0, "mlx5_0", 1, 77, 0, 0, 1, Direction.SEND, 0, 4711, role="data", order=3, host="b"
    )
    for number in range(3):
        info = samples[0].process
        batch = node.batch(
            changes=(ProcessChange(Change.EXITED, 7, info, "it went", "b"),),
            notes=("a note",),
            lost=3 * number,
            complete=True,
            problems=((info.key, "torn"),),
            events=calls(samples, 6, begin_ns=1 + number * 10**6),
            work=(flow,),
            planes=(PlaneState("wire", True),),
            network=_network(),
            overhead=Overhead(10.0, 0.01, 0.02, 1 << 26, 0.001, 0.01, 3),
            interval_s=0.5,
            clock_offset_ns=1000,
            clock_error_ns=10,
        )
        if number:
            batch.windows = [replace(window, work=_WORK) for window in batch.windows]
        stream.append(writer.encode(batch))
    small = BatchWriter()
    pair = FakeNode(frozen_ring(1, 2), host="b")
    return tuple(stream), tuple(small.encode(pair.batch()) for _ in range(2))


def _frames() -> list[bytes]:
    return [data for stream in _encoded() for data in stream]


def _frame(data: bytes) -> None:
    decoded = BatchReader().decode(data)
    list(decoded.batch.windows)


def _bodies() -> list[bytes]:
    found = []
    for stream in _encoded():
        raw = [packing.unframe(data) for data in stream]
        found.append(pack(bytes([key]) + body for body, key in raw))
    return found


def _of_tagged(data: bytes, source: random.Random) -> bytes:
    """A byte and msgpack behind it."""
    if not data or source.random() < 0.03:
        return of_bytes(data, source)
    return data[:1] + of_packed(data[1:], source)


def _decoded(data: bytes) -> list[NodeBatch]:
    reader, found = BatchReader(), []
    for part in parts(data, 6):
        try:
            frame = packing.frame(part[1:], key=bool(part[:1] and part[0] & KEY), level=0)
            found.append(reader.decode(frame).batch)
        except FormatError:
            continue
    return found


def _batch(data: bytes) -> None:
    for batch in _decoded(data):
        for window in batch.windows:
            repr(window)


def _judge(data: bytes) -> None:
    """As an engine does: whatever a node says, a judgement comes, and the honest node's job is judged."""
    session = DiagnosisSession(LiveDiagnosis())
    honest = FakeNode(frozen_ring(2, 4), host="a")
    for number, batch in enumerate(_decoded(data)):
        now = honest.series[0][0].time_ns + number * 10**9
        session.feed(honest.batch(), now, source="a", wall_ns=time.time_ns())
        session.feed(batch, now, source="b", wall_ns=time.time_ns())
        update = session.judge(now + 10**8)
        assert update.verdicts, "the honest node's job is judged"
        session.planes, session.overhead(), session.roles, session.layout


# --- an engine and an agent --------------------------------------------------------------------------------------------


def _controls() -> list[bytes]:
    said: list[protocol.Message] = [
        Hello("0.1.0", packing.VERSION, "agent", "a", "token", ["L1", "L2"]),
        Hello("0.1.0", packing.VERSION, "viewer"),
        Welcome("e", "0.1.0", 1, {"L1": 4}),
        Refused("no", "hint"),
        Batch("L1", 1),
        History("L1"),
        Ack("L1", 3),
        NeedKey(),
        Ping(5),
        Pong(1, 2, 3),
        protocol.View(),
        CountWork(1, [4711], True),
        protocol.Farewell(),
    ]
    return [protocol.encode(message) for message in said]


def _control(data: bytes) -> None:
    protocol.encode(protocol.decode(data))


@dataclass
class _Heard:
    """A frame as ZeroMQ hands it over."""

    buffer: memoryview

    def get(self, _name: str) -> str:
        return "local:"


class _Silent:
    """A socket that takes everything and has what is put into it."""

    def __init__(self) -> None:
        self.waiting: list[list[bytes]] = []

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        assert all(isinstance(frame, bytes) for frame in frames)

    def recv_multipart(self) -> list[bytes]:
        return self.waiting.pop(0)


def _shown(_job: str, _life: str, batch: NodeBatch) -> None:
    list(batch.windows)


@cache
def _engine() -> Hub:
    hub = Hub("tcp://127.0.0.1:*", _shown)
    hub._router.close(linger=0)
    hub._router = _Silent()  # type: ignore[assignment]
    return hub


def _talks() -> list[bytes]:
    """Parts in turns: who speaks (0 to 3) and the control message, then its payload with a byte before it."""
    hello, viewer, *_ = _controls()
    first, second = (packing.unframe(data) for data in _encoded()[1])
    batch = [b"\0" + protocol.encode(Batch("L1", number)) for number in range(2)]
    bodies = [bytes([key]) + body for body, key in (first, second)]
    return [
        pack([b"\0" + hello, b"", batch[0], bodies[0], batch[1], bodies[1], b"\0" + protocol.encode(Ping(7)), b""]),
        pack([b"\1" + viewer, b"", b"\1" + protocol.encode(Batch("L1", 1)), bodies[0], b"\2" + hello, b"", batch[0], bodies[1]]),
        pack(
            [
                b"\0" + hello,
                b"",
                b"\0" + protocol.encode(History("L9")),
                bodies[0],
                b"\0" + protocol.encode(protocol.Farewell()),
                b"",
            ]
        ),
    ]


def _hub(data: bytes) -> None:
    hub = _engine()
    hub.peers.clear()
    hub._lives.clear()
    found = parts(data)
    for said, payload in zip(found[::2], [*found[1::2], b""], strict=False):
        frames = [said[:1] or b"\0", said[1:]]
        if payload:
            frames.append(packing.frame(payload[1:], key=bool(payload[0] & KEY), level=0) if payload[0] < 128 else payload)
        hub._hear([_Heard(memoryview(frame)) for frame in frames])  # type: ignore[misc]
    hub._next_acks = hub._next_sweep = 0.0
    hub._tidy()
    hub.take_news()
    assert len(hub._lines.last) <= 1000


def _orders() -> list[bytes]:
    one = _controls()
    return [pack(one[2:9]), pack([one[2], one[11], one[7], one[9]]), pack([one[3], one[2], one[12]])]


@cache
def _agent() -> AgentLink:
    return AgentLink("tcp://127.0.0.1:1", Spool("L1"), history=lambda _: b"past")


def _link(data: bytes) -> None:
    link = _agent()
    link._welcomed, link._sent, link._refused_until = False, 0, 0.0
    for number in range(2):
        link.spool.append(number, b"x", relevant=True)
    dealer = _Silent()
    for part in parts(data):
        dealer.waiting.append([part])
        link._hear(dealer)  # type: ignore[arg-type]
        _ = link.status.clock_offset_ns
    assert len(link.take_orders()) <= 16
    assert len(link.take_news()) <= 100
    link.spool.acknowledge("L1", 1 << 62)


@cache
def _view_seeds() -> tuple[bytes, ...]:
    writer, session, found = ViewWriter("e"), DiagnosisSession(LiveDiagnosis()), []
    node = FakeNode(frozen_ring(2, 3), looks=12)
    for number in range(8):
        batch = node.batch()
        session.feed(batch)
        update = session.judge(batch.time_ns)
        if number in (0, 6, 7):
            found.append(writer.encode(session, update, [b"x"], interval_s=1.0, behind_s=0.0))
    return tuple(found)


def _views() -> list[bytes]:
    return [pack(_unpacked(data) for data in _view_seeds()), pack([_unpacked(_view_seeds()[0])])]


def _unpacked(view: bytes) -> bytes:
    """A view whose batch is not compressed, so that mutations reach it."""
    tree = msgspec.msgpack.decode(view)
    body, key = packing.unframe(tree["batch"])
    tree["batch"] = [key, body]
    return msgspec.msgpack.encode(tree)


class _Told:
    """What a viewer's session holds."""

    verdicts: Sequence[Verdict] = ()
    windows: Sequence[RankWindow] = ()
    samples: Mapping[ProcessKey, ProcessSample] = {}
    planes: Sequence[PlaneState] = ()
    lost = 0

    def overhead(self) -> None:
        """Nothing is known of it."""


def _view(data: bytes) -> None:
    """As the dashboard shows it."""
    reader, builder, told = ViewReader(), ViewBuilder(), _Told()
    for part in parts(data, 4):
        try:
            found = reader.decode(_packed(part))
        except FormatError:
            continue
        if found is not None:
            _, batch, update = found
            told.verdicts, told.windows, told.lost, told.planes = update.verdicts, update.windows or (), update.lost, batch.planes
            told.samples = {sample.process.key: sample for sample in batch.samples}
            repr(builder.feed(told, update, time.time()))


def _packed(part: bytes) -> bytes:
    try:
        tree = msgspec.msgpack.decode(part)
        key, body = tree["batch"]
        tree["batch"] = packing.frame(body, key=bool(key), level=0)
        return msgspec.msgpack.encode(tree)
    except (msgspec.MsgspecError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return part


# --- probes of paths, the process that counts ---------------------------------------------------------------------------


def _probes() -> list[bytes]:
    nonce = b"00" * 32
    return [
        pack([b"\0", b'{"nonce": "' + nonce + b'", "mac": "00"}', b'{"op": "ping", "n": 1}']),
        pack([b"\1", b'{"protocol": "ncclwatch-probe/1", "nonce": "' + nonce + b'"}', b'{"mac": "00"}']),
        pack([b"\2", b"\0\0\0\x05hello"]),
    ]


def _probe(data: bytes) -> None:
    """The far end says these messages whatever we say; what the code refuses with is documented at :class:`Channel`."""
    tag, *said = parts(data) or [b""]
    here, there = socket.socketpair()
    with here, there:
        there.setblocking(False)
        for part in said:
            try:
                there.send(part if tag[:1] == b"\2" else len(part).to_bytes(4, "big") + part)
            except OSError:
                break
        there.shutdown(socket.SHUT_WR)
        channel = Channel(here, time.monotonic() + 5)
        try:
            (greet if tag[:1] == b"\1" else admit)(channel, b"token")
            while True:
                channel.receive()
        except OSError:
            pass


def _reports() -> list[bytes]:
    flow = FlowWindow(
        1000, Scope.FLOW, _WORK, 0, "mlx5_0", 1, 77, 0, 0, 1, Direction.SEND, 0, 4711, role="data", order=3, host="b"
    )
    owner = Owner(7, 8, 9, 10, 0, 0, 1, Direction.SEND)
    said = (
        Report((flow,), True, "", {7: "no"}, Bill(0.01, 3, 0.001)),
        Follow((User(7, ("IB",)),)),
        Owners((owner,)),
        Order(3, (7,), 0.25),
    )
    return [pack([orders.framed(one)[4:]]) for one in said]


def _report(data: bytes) -> None:
    for frames in (orders.reports(), orders.orders()):
        for part in parts(data):
            for message in frames.feed(len(part).to_bytes(4, "little") + part):
                repr(message)
