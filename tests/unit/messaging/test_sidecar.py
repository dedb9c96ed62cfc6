"""Agents, an engine and viewers over real sockets on this machine, with prepared ranks in place of a job."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from ncclwatch.cli.engine_log import EngineLog
from ncclwatch.cli.engine_service import EngineService, Job
from ncclwatch.collect.batch import PlaneState
from ncclwatch.collect.cost import OwnCost
from ncclwatch.engine.session import Update
from ncclwatch.errors import UsageError
from ncclwatch.messaging import packing, protocol
from ncclwatch.messaging.agent import Agent
from ncclwatch.messaging.hub import Hub
from ncclwatch.messaging.keys import Key, KeyFileError, KnownKeys, client_keys, make_key, own_key, read_key, write_key
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.link import POLL_S, AgentLink
from ncclwatch.messaging.protocol import Batch, CountWork, Hello, Refused, Welcome
from ncclwatch.messaging.spool import Spool
from ncclwatch.messaging.transport import EngineUnreachableError
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.model.work import WorkOrder
from ncclwatch.remote.session import RemoteSession
from unit.fake_node import FakeNode, calls
from unit.synthetic import frozen_ring, silent_link

ONE, TWO = "one", "two"
LOOPBACK = "tcp://127.0.0.1:*"


class Bench:
    """An engine and what it showed, stepped by the test."""

    def __init__(self, address: str = LOOPBACK, keys: tuple[Key, KnownKeys] | None = None) -> None:
        self.service = EngineService(address, keys=keys, interval_s=0.05)
        self.address = self.service.hub.address
        self.shown: list[tuple[str, Update]] = []

    def _show(self, job: Job, update: Update) -> None:
        self.shown.append((job.name, update))

    def until(self, holds: Callable[[], object], what: str, seconds: float = 120) -> None:
        limit = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < limit, f"{what} did not come"
            self.service.step(self._show, until=time.monotonic() + 0.05)

    def told(self, job: str = "default") -> list[VerdictClass]:
        return [verdict.verdict_class for name, update in self.shown if name == job for verdict in update.told]

    def notes(self) -> list[str]:
        return [text for _, update in self.shown for text in update.notes]


@contextmanager
def engine(address: str = LOOPBACK, keys: tuple[Key, KnownKeys] | None = None) -> Iterator[Bench]:
    bench = Bench(address, keys)
    try:
        yield bench
    finally:
        bench.service.close()


@contextmanager
def agent(address: str, **options: object) -> Iterator[Agent]:
    sender = Agent(address, **options)  # type: ignore[arg-type]
    sender.start()
    try:
        yield sender
    finally:
        sender.link.close(flush_s=0.2)


@contextmanager
def viewing(address: str, token: str = "") -> Iterator[RemoteSession]:
    session = RemoteSession(address, token=token)
    try:
        yield session
    finally:
        session.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("engine", "agent", "viewer"):
        write_key(tmp_path / "keys", make_key(name, name))
    return tmp_path / "keys"


def engine_side(folder: Path) -> tuple[Key, KnownKeys]:
    return own_key(folder, "engine"), KnownKeys(folder)


def rings(host: str, ranks: tuple[int, ...]) -> FakeNode:
    """Some ranks of a ring of four in which rank 2 is stopped."""
    return FakeNode([rank for rank in frozen_ring(2, 4) if rank.rank in ranks], looks=60, host=host)


def test_two_nodes_make_one_verdict_and_a_viewer_sees_it() -> None:
    with engine() as bench, agent(bench.address) as left, agent(bench.address) as right, viewing(bench.address) as viewer:
        nodes = [(left, rings("a", (0, 1))), (right, rings("b", (2, 3)))]
        seen: list[Update] = []

        def round_trip() -> bool:
            for sender, node in nodes:
                sender.take(node.batch())
            viewer._hear(0.01)
            if viewer.view is not None:
                seen.append(viewer.step())
            return bool(bench.told()) and viewer.verdict is not None and viewer.verdict.verdict_class is VerdictClass.STOPPED

        bench.until(round_trip, "a verdict")
        assert bench.told() == [VerdictClass.STOPPED]
        verdict = viewer.verdict
        assert verdict is not None
        assert [culprit.rank for culprit in verdict.culprits] == [2]
        assert [window.rank for window in viewer.windows] == [0, 1, 2, 3]
        assert len(viewer.samples) == 4


def plane(*, running: bool) -> tuple[PlaneState, ...]:
    return (PlaneState("wire", running, "" if running else "no process uses RDMA"),)


def test_an_engine_orders_counts_of_a_job_that_stands() -> None:
    with engine() as bench, agent(bench.address) as sender:
        node, orders = FakeNode(silent_link(), looks=60, host="node1"), list[WorkOrder]()

        def ordered() -> bool:
            sender.take(node.batch(planes=plane(running=True)))
            orders.extend(sender.link.take_orders())
            return bool(orders)

        bench.until(ordered, "an order")
        assert orders == [WorkOrder(1, orders[0].host, (1001,), standing=True)]


def test_an_agent_that_cannot_count_or_is_older_gets_no_orders() -> None:
    for planes in (plane(running=False), ()):
        with engine() as bench, agent(bench.address) as sender:
            node = FakeNode(silent_link(), looks=60, host="node1")

            def told(
                node: FakeNode = node, bench: Bench = bench, sender: Agent = sender, planes: tuple[PlaneState, ...] = planes
            ) -> bool:
                sender.take(node.batch(planes=planes))
                return bool(bench.told())

            bench.until(told, "a verdict")
            assert sender.link.take_orders() == []


def test_an_engine_says_with_its_acknowledgements_whether_few_looks_will_do_or_more_are_wanted() -> None:
    with engine() as bench, agent(bench.address) as sender:
        said: list[tuple[bool, bool]] = []
        sender.link.on_ease = lambda well, narrow: said.append((well, narrow))
        node = FakeNode(silent_link(), looks=60, host="node1")

        def told(well: bool, narrow: bool) -> bool:
            sender.take(node.batch())
            return bool(said) and said[-1] == (well, narrow)

        bench.until(lambda: told(False, False), "a word that all is not well")
        [job] = bench.service.jobs.values()
        job.session.settled = lambda: frozenset({"node1"})  # type: ignore[method-assign]
        bench.until(lambda: told(True, False), "a word that all is well")
        job.session.settled = frozenset  # type: ignore[method-assign]
        job.session.searching = lambda: frozenset({"node1"})  # type: ignore[method-assign]
        bench.until(lambda: told(False, True), "a word that a culprit is looked for")


def test_an_acknowledgement_of_an_older_engine_says_nothing_of_looks() -> None:
    older = msgspec.msgpack.encode({"type": "ack", "life": "a", "upto": 7})
    assert protocol.decode(older) == protocol.Ack("a", 7, None)


def test_orders_are_bounded(tmp_path: Path) -> None:
    good = CountWork(1, [4711], True)
    assert protocol.decode(protocol.encode(good)) == good
    bad: list[tuple[Any, Any]] = [
        (0, [1]),
        (1 << 62, [1]),
        (1, []),
        (1, [0]),
        (1, [1 << 23]),
        (1, list(range(1, 66))),
        (1, ["x"]),
    ]
    for number, pids in bad:
        with pytest.raises(FormatError):
            protocol.decode(protocol.encode(CountWork(number, pids)))
    link = AgentLink("tcp://127.0.0.1:1", Spool("L1", tmp_path / "spool"))
    for number in range(1, 100):
        link._hear(Heard(CountWork(number, [1])))  # type: ignore[arg-type]
    assert [order.number for order in link.take_orders()] == list(range(84, 100)), "the newest"
    assert link.take_orders() == []


def test_acknowledged_batches_leave_the_spool() -> None:
    with engine() as bench, agent(bench.address) as sender:
        node = rings("a", (0, 1, 2, 3))
        for _ in range(30):
            sender.take(node.batch())
        bench.until(lambda: bench.service.hub.counts.batches == 30 and not len(sender.spool), "all batches")
        assert bench.service.hub.counts.duplicates == 0
        assert sender.link.status.clock_offset_ns is not None
        assert abs(sender.link.status.clock_offset_ns) < 1_000_000_000


class Heard:
    """A socket on which these messages lie, and that takes what is said."""

    def __init__(self, *messages: protocol.Message) -> None:
        self.waiting = [protocol.encode(message) for message in messages]

    def recv_multipart(self) -> list[bytes]:
        return [self.waiting.pop(0)]

    def send_multipart(self, frames: list[bytes], flags: int) -> None:
        """Anything."""


def test_a_link_sleeps_until_there_is_something_to_say_and_never_spins(tmp_path: Path) -> None:
    link = AgentLink("tcp://127.0.0.1:1", Spool("L1", tmp_path / "spool"))
    now, (least, most) = time.monotonic(), POLL_S
    assert link._rest_s() == least, "a hello is due, and cannot be said before the other side is there"
    link._next_hello = now + 100
    assert link._rest_s() == most
    link._hear(Heard(Welcome("engine-1", "1", packing.VERSION, {})))  # type: ignore[arg-type]
    link._next_ping = now + 0.6
    assert least < link._rest_s() <= 0.6
    link._stop.set()
    assert link._rest_s() == least


def test_a_second_welcome_of_the_same_engine_sends_nothing_again(tmp_path: Path) -> None:
    """The handshake may be told of after the first hello is out: then there are two."""
    link = AgentLink("tcp://127.0.0.1:1", Spool("L1", tmp_path / "spool"))
    welcome = Welcome("engine-1", "1", packing.VERSION, {})
    dealer = Heard(welcome, welcome, Welcome("engine-2", "1", packing.VERSION, {}))
    link._hear(dealer)  # type: ignore[arg-type]
    link._sent = 3
    link._hear(dealer)  # type: ignore[arg-type]
    assert link._sent == 3
    link._hear(dealer)  # type: ignore[arg-type]
    assert link._sent == 0, "another engine has none of it"


def test_an_engine_that_begins_anew_is_told_everything(tmp_path: Path) -> None:
    with engine() as first:
        address = first.address
        sender = Agent(address, spool_folder=tmp_path / "spool")
        sender.start()
        node = rings("a", (0, 1, 2, 3))
        samples = [series[0] for series in node.series]
        for i in range(5):
            sender.take(node.batch(events=calls(samples, 10, begin_ns=1 + i * 100_000)))
        first.until(lambda: len(first.service.jobs) == 1 and not len(sender.spool), "the batches")
        before = first.service.jobs["default"].session.diagnosis.ledger.called[:4].tolist()
    # While nobody listens the agent goes on.
    sender.take(node.batch(events=calls(samples, 10, begin_ns=900_000)))
    with engine(address) as second:
        second.until(lambda: second.service.jobs and not len(sender.spool), "the batches")

        def goes_on() -> list[VerdictClass]:
            # Looks that come all at once are judged as one.
            sender.take(node.batch())
            return second.told()

        second.until(goes_on, "the verdict")
        assert second.told() == [VerdictClass.STOPPED]
        ledger = second.service.jobs["default"].session.diagnosis.ledger
        assert before == [50] * 4
        assert ledger.called[:4].tolist() == [60] * 4
        sender.close()


def test_an_agent_that_comes_again_sends_what_its_predecessor_left(tmp_path: Path) -> None:
    node = rings("a", (0, 1, 2, 3))
    samples = [series[0] for series in node.series]
    with engine() as bench:
        address = bench.address
    with agent(address, spool_folder=tmp_path) as gone:
        for i in range(3):
            gone.take(node.batch(events=calls(samples, 10, begin_ns=1 + i * 100_000)))
        while gone.link.status.waiting < 3:
            time.sleep(0.01)
    with engine(address) as bench:
        again = Agent(address, spool_folder=tmp_path)
        notes = again.start()
        assert any("no agent ran here for" in note for note in notes)
        assert "3 batches of the agent before are sent first" in notes
        fresh = rings("a", (0, 1, 2, 3))
        again.take(fresh.batch(notes=tuple(notes)))
        bench.until(lambda: bench.service.hub.counts.batches == 4 and bench.notes(), "the batches of both")
        session = bench.service.jobs["default"].session
        assert session.diagnosis.ledger.lossy == {"a"}, "calls between the two were not seen: no history can be continued"
        assert any("no agent ran here" in text for text in bench.notes())
        again.close()


def test_a_silent_agent_is_said_and_its_ranks_are_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.engine.session.SHORTEST_LOOK_S", 0.17)
    monkeypatch.setattr("ncclwatch.engine.session.STALE_LOOKS", 0.1)
    with engine() as bench, agent(bench.address) as left, agent(bench.address) as right:
        nodes = [(left, rings("a", (0, 1))), (right, rings("b", (2, 3)))]

        def both() -> bool:
            for sender, node in nodes:
                sender.take(node.batch())
            return len(bench.service.jobs) == 1 and len(bench.service.jobs["default"].session.nodes) == 2

        bench.until(both, "both nodes")
        bench.shown.clear()

        def only_left() -> bool:
            left.take(nodes[0][1].batch())
            return any("said nothing" in text for text in bench.notes()) and len(bench.shown) > 20

        bench.until(only_left, "silence")
        session = bench.service.jobs["default"].session
        assert session.nodes["b"].silent
        verdict = session.verdict
        assert verdict is not None
        assert not verdict.verdict_class.accuses
        assert any("b: its agent has been silent" in line for line in verdict.unobserved)


def test_an_engine_that_cannot_hear_everything_says_so_and_calls_nobody_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ncclwatch.engine.session.SHORTEST_LOOK_S", 0.34)
    monkeypatch.setattr("ncclwatch.engine.session.STALE_LOOKS", 0.1)
    with engine() as bench, agent(bench.address) as left, agent(bench.address) as right:
        nodes, log = [(left, rings("a", (0, 1))), (right, rings("b", (2, 3)))], EngineLog(as_json=False)

        def both() -> bool:
            for sender, node in nodes:
                sender.take(node.batch())
            jobs = bench.service.jobs
            return len(jobs) == 1 and len(jobs["default"].session.nodes) == 2

        bench.until(both, "both nodes")
        job = bench.service.jobs["default"]
        # The left one says more than is heard, one message at a time; then the right one falls silent.
        monkeypatch.setattr("ncclwatch.messaging.hub.PER_POLL", 1)

        def is_overloaded() -> bool:
            for _ in range(5):
                left.take(nodes[0][1].batch())
            if job.unheard_s < 0.1:
                right.take(nodes[1][1].batch())
            return job.unheard_s > 2.0

        bench.shown.clear()
        bench.until(is_overloaded, "the overload")
        log.update(job, Update(0))
        assert "agents have sent more than it can hear" in capsys.readouterr().out
        assert not job.session.nodes["b"].silent, "it may be waiting to be heard"
        monkeypatch.undo()
        monkeypatch.setattr("ncclwatch.engine.session.SHORTEST_LOOK_S", 0.34)
        monkeypatch.setattr("ncclwatch.engine.session.STALE_LOOKS", 0.1)
        bench.until(lambda: job.session.nodes["b"].silent and not job.unheard_s, "silence")
        log.update(job, Update(0))
        assert "keeps up again" in capsys.readouterr().out


def test_a_job_that_breaks_our_judgement_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCLWATCH_DEBUG", raising=False)
    with engine() as bench, agent(bench.address, token=ONE) as odd, agent(bench.address, token=TWO) as sound:
        odd_node, sound_node = rings("a", (0, 1)), rings("b", (0, 1, 2, 3))

        def step() -> bool:
            odd.take(odd_node.batch())
            sound.take(sound_node.batch())
            session = bench.service.jobs.get(protocol_job(ONE))
            if session is not None:
                monkeypatch.setattr(session.session, "judge", lambda now: 1 // 0)
            return bool(bench.told(protocol_job(TWO))) and bench.service.failures > 0

        bench.until(step, "the other job's verdict")
        assert any("ZeroDivisionError" in text for text in bench.service.hub.take_news())


def test_jobs_with_different_tokens_see_nothing_of_each_other() -> None:
    with (
        engine() as bench,
        agent(bench.address, token=ONE) as one,
        agent(bench.address, token=TWO) as two,
        viewing(bench.address, TWO) as viewer,
    ):
        one_node, two_node = rings("a", (0, 1, 2, 3)), rings("b", (0, 1))

        def step() -> bool:
            one.take(one_node.batch())
            two.take(two_node.batch())
            viewer._hear(0.01)
            return len(bench.service.jobs) == 2 and len(viewer.windows) > 0 and bool(bench.told(protocol_job("one")))

        bench.until(step, "both jobs")
        assert {window.process.host for window in viewer.windows} == {"node0", "node1"}
        assert [window.rank for window in viewer.windows] == [0, 1]
        assert bench.told(protocol_job("two")) == []


def protocol_job(token: str) -> str:
    from ncclwatch.messaging.keys import job_of

    return job_of(token)


# --- who may speak -----------------------------------------------------------------------------------------------------


def test_known_keys_work_and_everybody_else_is_turned_away(folder: Path, tmp_path: Path) -> None:
    stranger, other_engine = make_key("stranger", "agent"), make_key("engine", "engine")
    own, known_engine = own_key(folder, "agent"), read_key(folder / "engine.pub").public
    with engine(keys=engine_side(folder)) as bench:
        node = rings("a", (0, 1, 2, 3))
        with agent(bench.address, keys=(own, known_engine)) as sender:
            sender.take(node.batch())
            bench.until(lambda: bench.service.hub.counts.batches == 1, "the known agent")
        for name, keys in (
            ("unknown key", (stranger, known_engine)), ("wrong engine", (own, other_engine.public)), ("no key", None),
        ):  # fmt: skip
            with agent(bench.address, keys=keys) as refused:
                refused.take(node.batch())
                hub = bench.service.hub
                assert isinstance(hub, Hub)
                before = hub.counts.failed_handshakes + hub.door.refused
                bench.until(lambda h=hub, b=before: h.counts.failed_handshakes + h.door.refused > b, name)  # type: ignore[misc]
                assert not refused.link.status.connected
                assert bench.service.hub.counts.batches == 1
        assert any("not known" in text or "turned away" in text for text in bench.service.hub.take_news())
        # A key that is added later is known at once.
        write_key(folder, stranger)
        with agent(bench.address, keys=(stranger, known_engine)) as sender:
            sender.take(rings("c", (0, 1)).batch())
            bench.until(lambda: bench.service.hub.counts.batches == 2, "the agent that was made known")


def test_an_agent_says_why_it_is_refused(folder: Path) -> None:
    stranger, known_engine = make_key("stranger", "agent"), read_key(folder / "engine.pub").public
    with engine(keys=engine_side(folder)) as bench, agent(bench.address, keys=(stranger, known_engine)) as refused:
        bench.until(lambda: "does not know this agent" in refused.link.status.reason, "the reason")


def test_a_viewer_key_cannot_send_batches(folder: Path) -> None:
    viewer, known_engine = own_key(folder, "viewer"), read_key(folder / "engine.pub").public
    with engine(keys=engine_side(folder)) as bench, agent(bench.address, keys=(viewer, known_engine)) as sender:
        sender.take(rings("a", (0, 1)).batch())
        bench.until(lambda: bench.service.hub.counts.bad > 0, "the refusal")
        assert bench.service.hub.counts.batches == 0


def test_without_keys_only_this_machine_is_listened_to_or_spoken_to(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keys"):
        Hub("tcp://0.0.0.0:17399", lambda *_: None)
    with pytest.raises(UsageError, match="keys"):
        client_keys("tcp://10.0.0.1:7311", None, "agent")
    assert client_keys("tcp://127.0.0.1:7311", None, "agent") is None
    with pytest.raises(KeyFileError, match="cannot read"):
        client_keys("tcp://10.0.0.1:7311", tmp_path, "agent")


def test_key_files(folder: Path) -> None:
    with pytest.raises(UsageError, match="exists already"):
        write_key(folder, make_key("agent", "agent"))
    assert (folder / "agent.key").stat().st_mode & 0o777 == 0o600
    (folder / "agent.key").chmod(0o644)
    with pytest.raises(KeyFileError, match="can be read by others"):
        own_key(folder, "agent")
    with pytest.raises(KeyFileError, match="holds no secret"):
        read_key(folder / "engine.pub", secret=True)
    (folder / "odd.key").write_bytes(b"public " + b"\xff" * 40)
    with pytest.raises(KeyFileError, match="is no key"):
        read_key(folder / "odd.key")
    for name in ("../x", "", "a b", ".hidden"):
        with pytest.raises(UsageError):
            make_key(name, "agent")


def test_a_viewer_without_an_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.remote.session.CONNECT_S", 0.3)
    session = RemoteSession("tcp://127.0.0.1:9")
    with pytest.raises(EngineUnreachableError, match="no engine answers"):
        session.start()
    session.close()


# --- hostile and broken peers ------------------------------------------------------------------------------------------


def dealer(address: str) -> tuple[zmq.Context[zmq.Socket[bytes]], zmq.Socket[bytes]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.connect(address)
    return context, socket


def test_an_engine_of_another_version_refuses_with_a_line() -> None:
    with engine() as bench:
        context, socket = dealer(bench.address)
        socket.send(protocol.encode(Hello("9.9", packing.VERSION + 2, "agent", "far")))
        bench.until(lambda: socket.poll(0), "an answer")
        answer = protocol.decode(socket.recv())
        assert isinstance(answer, Refused)
        assert "one apart" in answer.hint
        assert any("refused" in text for text in bench.service.hub.take_news())
        context.destroy(linger=0)


def test_replayed_batches_are_dropped_and_counted() -> None:
    with engine() as bench:
        context, socket = dealer(bench.address)
        socket.send(protocol.encode(Hello("0.1.0", packing.VERSION, "agent", "a", lives=["L1"])))
        bench.until(lambda: socket.poll(0), "an answer")
        assert isinstance(protocol.decode(socket.recv()), Welcome)
        from ncclwatch.messaging.writer import BatchWriter

        data = BatchWriter().encode(rings("a", (0, 1)).batch())
        for _ in range(100):
            socket.send_multipart([protocol.encode(Batch("L1", 0)), data])
        bench.until(lambda: bench.service.hub.counts.duplicates == 99, "the replays")
        assert bench.service.hub.counts.batches == 1
        context.destroy(linger=0)


@pytest.mark.parametrize("seed", [1, 20, 300, 4000])
def test_fuzzed_frames_cost_a_counted_line(seed: int) -> None:
    fuzz(seed)


@pytest.mark.skipif(
    "NCCLWATCH_FUZZ_S" not in os.environ, reason="set NCCLWATCH_FUZZ_S to seconds, NCCLWATCH_SEED to where to begin"
)
def test_fuzzed_frames_for_as_long_as_one_wants() -> None:
    until = time.monotonic() + float(os.environ["NCCLWATCH_FUZZ_S"])
    seed = int(os.environ.get("NCCLWATCH_SEED", "1"))
    while time.monotonic() < until:
        try:
            fuzz(seed)
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error
        seed += 1


def fuzz(seed: int) -> None:
    """Frames that are noise, cut off, giant or well-formed nonsense; the engine goes on with those who speak sense."""
    from ncclwatch.messaging.writer import BatchWriter

    source = random.Random(seed)
    good = BatchWriter().encode(rings("a", (0, 1)).batch())
    hello = protocol.encode(Hello("0.1.0", packing.VERSION, "agent", "a", lives=["L1"]))

    def nonsense() -> list[bytes]:
        kind = source.randrange(5)
        if kind == 0:
            return [source.randbytes(source.randrange(200)) for _ in range(source.randint(1, 5))]
        data = bytearray(good)
        for _ in range(source.randint(1, 8)):
            data[source.randrange(len(data))] = source.randrange(256)
        if kind == 1:
            return [protocol.encode(Batch("L1", source.randrange(-5, 1 << 40))), bytes(data)]
        if kind == 2:
            return [protocol.encode(Batch("L1", source.randrange(1 << 40))), good[: source.randrange(len(good))]]
        if kind == 3:
            return [hello[: source.randrange(len(hello))], bytes(source.randrange(1 << 20))]
        return [protocol.encode(Welcome("x", "y", 1)), good]

    with engine() as bench:
        memory = OwnCost.resident_bytes()
        for _ in range(6):
            context, socket = dealer(bench.address)
            socket.setsockopt(zmq.SNDHWM, 1000)
            socket.send(hello)
            bench.until(lambda s=socket: s.poll(0), "the welcome")  # type: ignore[misc]
            for _ in range(120):
                with suppress(zmq.Again):
                    socket.send_multipart(nonsense(), zmq.NOBLOCK)
            bench.until(lambda: bench.service.hub.poll(0.2) == 0, "quiet")
            context.destroy(linger=0)
        counts = bench.service.hub.counts
        assert counts.bad > 100
        assert counts.refused_peers > 0
        assert OwnCost.resident_bytes() - memory < 200 << 20
        assert len(bench.service.hub.take_news()) < 20
        with agent(bench.address) as sender:
            node = rings("z", (0, 1, 2, 3))
            before = counts.batches

            def step() -> bool:
                sender.take(node.batch())
                return counts.batches > before + 3

            bench.until(step, "a peer that makes sense")


def test_a_frame_that_is_too_large_ends_the_connection_and_nothing_else() -> None:
    with engine() as bench:
        context, socket = dealer(bench.address)
        socket.send(bytes(protocol.MAX_MESSAGE + 1))
        with agent(bench.address) as sender:
            sender.take(rings("a", (0, 1)).batch())
            bench.until(lambda: bench.service.hub.counts.batches == 1, "the batch of the other")
        assert bench.service.hub.counts.bad == 0, "it never reached us"
        context.destroy(linger=0)


def test_an_engine_that_does_not_read_slows_no_agent() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mute = context.socket(zmq.ROUTER)
    mute.setsockopt(zmq.LINGER, 0)
    port = mute.bind_to_random_port("tcp://127.0.0.1")
    with agent(f"tcp://127.0.0.1:{port}") as sender:
        node = rings("a", (0, 1))
        begun = time.process_time()
        for _ in range(500):
            sender.take(node.batch())
        assert time.process_time() - begun < 5.0
        limit = time.monotonic() + 120
        while sender.link.status.waiting < 500 and time.monotonic() < limit:
            time.sleep(0.02)
        assert sender.link.status.waiting == 500
    context.destroy(linger=0)
