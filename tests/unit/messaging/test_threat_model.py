"""Claims of docs/threat-model.md that no other test shows: what a peer of an engine, and who had the spool before, can reach."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.messaging import packing, privileges, protocol
from ncclwatch.messaging.hub import MAX_BAD, Hub
from ncclwatch.messaging.keys import job_of
from ncclwatch.messaging.lives import FORGET_PEER_S
from ncclwatch.messaging.protocol import Batch, Hello, Message, Refused, Welcome
from ncclwatch.messaging.writer import BatchWriter
from unit.fake_node import FakeNode
from unit.synthetic import frozen_ring


class Frame:
    """A frame as ZeroMQ hands it over, of a peer whose key has this role."""

    def __init__(self, data: bytes, user: str) -> None:
        self.buffer, self._user = memoryview(data), user

    def get(self, _name: str) -> str:
        return self._user


class Line:
    """The engine's socket: keeps what is sent to whom."""

    def __init__(self) -> None:
        self.said: dict[bytes, list[Message]] = {}

    def send_multipart(self, frames: list[bytes], _flags: int = 0) -> None:
        self.said.setdefault(frames[0], []).append(protocol.decode(frames[1]))


class Engine:
    """A hub without a network, and the batches it took."""

    def __init__(self, hub: Hub) -> None:
        self.hub, self.line = hub, Line()
        hub._router.close(linger=0)
        hub._router = self.line  # type: ignore[assignment]
        self.taken: list[tuple[str, str, str]] = []

    def take(self, job: str, life: str, batch: NodeBatch) -> None:
        self.taken.append((job, life, batch.host))

    def hear(self, route: bytes, message: Message, payload: bytes | None = None, user: str = "agent:a") -> None:
        parts = [route, protocol.encode(message), *([payload] if payload is not None else [])]
        self.hub._hear([Frame(part, user) for part in parts])  # type: ignore[misc]


@contextmanager
def listening() -> Iterator[Engine]:
    taken: list[tuple[str, str, str]] = []
    hub = Hub("tcp://127.0.0.1:*", lambda job, life, batch: taken.append((job, life, batch.host)))
    engine = Engine(hub)
    engine.taken = taken
    try:
        yield engine
    finally:
        hub._monitor.close(linger=0)
        hub.door.close()
        hub._context.destroy(linger=0)


def hello(token: str = "", role: str = "agent", lives: tuple[str, ...] = ()) -> Hello:
    return Hello("0.1.0", packing.VERSION, role, "a", token, list(lives))


def a_batch(host: str = "a") -> bytes:
    return BatchWriter().encode(FakeNode(frozen_ring(2, 2), host=host).batch())


def test_naming_another_jobs_life_reaches_nothing_of_it() -> None:
    with listening() as engine:
        engine.hear(b"1", hello("one"))
        engine.hear(b"1", Batch("L1", 0), a_batch())
        engine.hear(b"2", hello("two", lives=("L1",)))
        welcome = engine.line.said[b"2"][-1]
        assert isinstance(welcome, Welcome)
        assert welcome.upto == {"L1": -1}, "nor whether it exists"
        engine.hear(b"2", Batch("L1", 1), a_batch())
        assert engine.hub.counts.bad == 1
        engine.hear(b"1", Batch("L1", 1), a_batch())
        assert engine.taken == [(job_of("one"), "L1", "a")] * 2


def test_a_node_that_takes_anothers_name_does_so_in_its_own_job_only() -> None:
    with listening() as engine:
        engine.hear(b"1", hello("one"))
        engine.hear(b"2", hello("two"))
        engine.hear(b"2", Batch("L2", 0), a_batch(host="a"))
        assert engine.taken == [(job_of("two"), "L2", "a")]


@pytest.mark.parametrize("message", [Batch("L1", 0), Welcome("x", "y", 1), protocol.CountWork(1, [4711]), protocol.NeedKey()])
def test_a_viewer_can_say_hello_and_ping_and_nothing_else(message: Message) -> None:
    with listening() as engine:
        engine.hear(b"1", hello(role="viewer"), user="viewer:v")
        for _ in range(MAX_BAD + 5):
            engine.hear(b"1", message, a_batch(), user="viewer:v")
        assert engine.taken == []
        assert engine.hub.counts.bad == MAX_BAD, "then it is not listened to any more"
        assert engine.hub.peers[b"1"].refused


def test_a_viewers_key_cannot_say_that_it_is_an_agent() -> None:
    with listening() as engine:
        engine.hear(b"1", hello(role="agent"), user="viewer:v")
        engine.hear(b"1", Batch("L1", 0), a_batch(), user="viewer:v")
        assert (engine.taken, b"1" in engine.hub.peers) == ([], False)


def test_a_connection_belongs_to_the_key_it_was_greeted_with() -> None:
    with listening() as engine:
        engine.hear(b"1", hello())
        engine.hear(b"1", Batch("L1", 0), a_batch(), user="agent:somebody-else")
        assert engine.taken == []


def test_peers_and_lives_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.messaging.hub.MAX_PEERS", 3)
    monkeypatch.setattr("ncclwatch.messaging.hub.MAX_LIVES", 2)
    with listening() as engine:
        for number in range(5):
            engine.hear(b"%d" % number, hello())
        assert len(engine.hub.peers) == 3
        assert isinstance(engine.line.said[b"4"][-1], Refused)
        for number in range(5):
            engine.hear(b"0", Batch(f"L{number}", 0), a_batch())
        assert len(engine.hub._lives) == 2


def test_of_agents_that_are_gone_only_what_was_heard_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that ends and comes again, over and over, fills no memory; what the newest left is understood."""
    monkeypatch.setattr("ncclwatch.messaging.hub.READERS_OF_A_HOST", 2)
    with listening() as engine:
        engine.hear(b"0", hello())
        lives = [f"L{number}" for number in range(6)]
        writers = {life: BatchWriter() for life in lives}
        nodes = {life: FakeNode(frozen_ring(2, 2), host="a") for life in lives}
        for life in lives:
            engine.hear(b"0", Batch(life, 0), writers[life].encode(nodes[life].batch()))
        held = len(engine.hub._shared)
        for life in lives:
            engine.hub._lives[life].heard -= FORGET_PEER_S + 1
        engine.hear(b"0", Batch("L1", 1), writers["L1"].encode(nodes["L1"].batch()))
        engine.hub._next_sweep = 0.0
        engine.hub._tidy()
        known = [life for life in lives if engine.hub._lives[life].reader._epoch is not None]
        assert known == ["L1", "L5"], "the one that is heard, and the newest of the others"
        assert all(engine.hub._lives[life].upto == (1 if life == "L1" else 0) for life in lives)
        assert len(engine.hub._shared) <= held
        engine.hear(b"0", Batch("L5", 1), writers["L5"].encode(nodes["L5"].batch()))
        assert not any(isinstance(said, protocol.NeedKey) for said in engine.line.said[b"0"])
        engine.hear(b"0", Batch("L2", 1), writers["L2"].encode(nodes["L2"].batch()))
        assert isinstance(engine.line.said[b"0"][-1], protocol.NeedKey), "it can be had again"
        assert len(engine.taken) == 9


def test_the_life_that_was_silent_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.messaging.hub.MAX_LIVES", 3)
    with listening() as engine:
        engine.hear(b"0", hello())
        for number in range(5):
            engine.hear(b"0", Batch(f"L{number}", 0), a_batch())
            engine.hear(b"0", Batch("L0", number + 1), a_batch())
        assert list(engine.hub._lives) == ["L3", "L4", "L0"], "one that is heard keeps its place"


@pytest.mark.parametrize("kind", ["symbolic", "hard", "folder"])
def test_a_spool_gives_away_nothing_but_its_own_plain_files(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user an agent became may have put a link into the spool, to be given what is behind it at the agent's next start."""
    spool, theirs, own = tmp_path / "spool", tmp_path / "shadow", tmp_path / "spool" / "L-00000000.seg"
    spool.mkdir()
    theirs.write_bytes(b"root's")
    own.write_bytes(b"a batch")
    trap = spool / "X-00000000.seg"
    if kind == "symbolic":
        trap.symlink_to(theirs)
    elif kind == "hard":
        os.link(theirs, trap)
    else:
        trap.mkdir()
    given: list[int] = []
    monkeypatch.setattr(os, "fchown", lambda fd, uid, gid: given.append(os.fstat(fd).st_ino))
    monkeypatch.setattr(os, "chown", lambda path, uid, gid: given.append(Path(path).stat().st_ino))
    privileges._give(spool, 1000, 1000)
    assert given == [spool.stat().st_ino, own.stat().st_ino]
