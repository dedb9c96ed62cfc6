"""A judge's transport on a real nats-server: what two workers sent of one node is heard once, and gaps stay gaps."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from fleet.servers import NatsServer
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.fleet import reduced, streams
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.judge_hub import SILENT_S, JudgeHub
from ncclwatch.fleet.reduced import BundleWriter, Heard
from ncclwatch.messaging import subjects
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.model.work import WorkOrder
from unit.batches import node_batches, ring_looks
from unit.fake_node import calls

JOB = "00000000000000a1"
Taken = tuple[str, str, NodeBatch]


@pytest.fixture
def bus(nats_server: NatsServer) -> Iterator[Connection]:
    with Connection(Access(nats_server.address)) as connection:
        connection.call(streams.ensure(connection.jetstream, subjects.REDUCED))
        yield connection


def say(bus: Connection, worker: str, data: bytes) -> None:
    bus.call(bus.jetstream.publish(subjects.reduced(JOB, worker), data))


def hear(hub: JudgeHub, taken: list[Taken], number: int) -> None:
    until = time.monotonic() + 60
    while len(taken) < number:
        assert time.monotonic() < until, f"{len(taken)} of {number} batches came"
        hub.poll(0.2)


def test_what_two_workers_sent_on_is_heard_once(bus: Connection) -> None:
    taken: list[Taken] = []
    holds = True
    hub = JudgeHub(bus, lambda job, life, batch, at_ns: taken.append((job, life, batch)), lambda job: holds)
    hub.add(JOB, 60.0)
    batches = list(node_batches(list(ring_looks(10)), hosts=("node0",)))
    for batch in batches:
        batch.events = calls(list(batch.samples), 2)
    one, two = BundleWriter(0), BundleWriter(0)
    say(bus, "one", one.encode([Heard("default", "node0", "L", 0, 1, batches[1])]))
    say(bus, "one", one.encode([Heard("default", "node0", "L", 2, 3, batches[3], missed=1)]))
    # The first worker died before it could write down how far it got: another sends the same, and more.
    say(bus, "two", two.encode([Heard("default", "node0", "L", 2, 3, batches[3])]))
    say(bus, "two", two.encode([Heard("default", "node0", "L", 3, 5, batches[5])]))
    say(bus, "two", two.encode([Heard("default", "node0", "L", 8, 8, batches[8])]))
    say(bus, "two", b"nothing that makes sense")
    say(bus, "two", two.encode([Heard("default", "node0", "M", 0, 0, batches[9])]))
    hear(hub, taken, 5)
    assert [(job, life) for job, life, _ in taken] == [(JOB, "L")] * 4 + [(JOB, "M")]
    # What was missed is a gap in the numbers of batches; calls that may have been heard before are left out: a gap too.
    assert [batch.sequence for _, _, batch in taken] == [0, 2, 4, 7, 0]
    assert [batch.events is None for _, _, batch in taken] == [False, False, True, False, False]
    assert (hub.counts.duplicates, hub.counts.bad) == (1, 1)
    assert hub.npeers == 2
    # The worker that died keeps nobody waiting: another hears its nodes.
    time.sleep(SILENT_S + 0.5)
    say(bus, "two", reduced.present(1.0))
    while not hub.poll(0.2):
        pass
    assert hub.unheard_s == 0.0
    assert hub.order("L", WorkOrder(1, "node0", (7,), True))
    holds = False
    # Who may not speak for a job any more says nothing to its agents.
    assert not hub.order("L", WorkOrder(2, "node0", (7,), True))
    hub.close()


def test_a_judge_that_begins_in_the_middle_asks_for_a_key(bus: Connection) -> None:
    taken: list[Taken] = []
    asked: list[bytes] = []

    async def listen() -> None:
        async def needed(message: object) -> None:
            asked.append(message.data)  # type: ignore[attr-defined]

        await bus.client.subscribe(streams.need("one"), cb=needed)

    bus.call(listen())
    hub = JudgeHub(bus, lambda job, life, batch, at_ns: taken.append((job, life, batch)), lambda job: True)
    batches = list(node_batches(list(ring_looks(3)), hosts=("node0",)))
    writer = BundleWriter(0)
    writer.encode([Heard("default", "node0", "L", 0, 0, batches[0])])
    hub.add(JOB, 60.0)
    say(bus, "one", writer.encode([Heard("default", "node0", "L", 1, 1, batches[1])]))
    hear(hub, taken, 1)
    assert not taken[0][2].looked
    until = time.monotonic() + 60
    while not asked:
        assert time.monotonic() < until
        time.sleep(0.02)
    assert asked == [JOB.encode()]
    writer.request_key()
    say(bus, "one", writer.encode([Heard("default", "node0", "L", 2, 2, batches[2])]))
    hear(hub, taken, 2)
    assert taken[1][2].samples == batches[2].samples
    say(bus, "one", reduced.present(1.0))
    say(bus, "one", reduced.present(1.0, leaves=True))
    while hub.npeers:
        assert time.monotonic() < until
        hub.poll(0.2)
    hub.close()


def test_a_worker_that_says_something_every_ten_seconds_is_late_after_twenty(
    bus: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = JudgeHub(bus, lambda job, life, batch, at_ns: taken.append((job, life, batch)), lambda job: True)
    taken: list[Taken] = []
    [batch] = list(node_batches(list(ring_looks(1)), hosts=("node0",)))
    hub.add(JOB, 60.0)
    say(bus, "one", BundleWriter(0, 10.0).encode([Heard("default", "node0", "L", 0, 0, batch)]))
    hear(hub, taken, 1)
    until = time.monotonic() + 60
    while hub.is_behind(JOB):
        assert time.monotonic() < until, "everything was heard"
        hub.poll(0.1)
    [worker] = hub._feeds[JOB].workers.values()
    # What a node would have said may wait at the worker all the while: silence of nodes does not count as such.
    for silent_s, late, unheard, there in ((9.0, False, True, 1), (21.0, True, True, 1), (90.0, False, False, 0)):
        worker.heard = time.monotonic() - silent_s
        assert (hub.is_behind(JOB), hub.unheard_s > 0, hub.npeers) == (late, unheard, there), silent_s
    hub.close()
