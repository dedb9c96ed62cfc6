"""Batches over a real nats-server: judged as over ZeroMQ, and nothing is lost or heard twice, whoever goes down."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import replace
from pathlib import Path

import nats
from nats.aio.msg import Msg

from fleet.bus import PATIENCE_S, Bench, agent, engine, rings, viewing
from fleet.servers import NatsServer
from ncclwatch.collect.batch import PlaneState
from ncclwatch.messaging import protocol
from ncclwatch.messaging.agent import Agent
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.model.work import WorkOrder
from unit.fake_node import FakeNode
from unit.synthetic import silent_link

KILLS = int(os.environ.get("NCCLWATCH_KILLS", "5"))


def verdict_of(bench: Bench, left: Agent, right: Agent) -> dict[str, object]:
    """What is told of a ring whose rank 2 is stopped."""
    nodes = [(left, rings("a", (0, 1))), (right, rings("b", (2, 3)))]

    def step() -> bool:
        for sender, node in nodes:
            sender.take(node.batch())
        return bool(bench.told)

    bench.until(step, "a verdict")
    [(_, verdict)] = bench.told
    assert verdict.verdict_class is VerdictClass.STOPPED
    said: dict[str, object] = verdict.to_json()
    return {key: said[key] for key in ("class", "confidence", "culprits", "waiting", "operation", "communicator") if key in said}


def test_a_verdict_is_the_one_over_zeromq(nats_server: NatsServer) -> None:
    access = Access(nats_server.address)
    with engine(access) as bench, agent(access, host="a") as left, agent(access, host="b") as right:
        over_nats = verdict_of(bench, left, right)
    with engine(None) as bench:
        left, right = Agent(bench.service.hub.address, host="a"), Agent(bench.service.hub.address, host="b")
        for sender in (left, right):
            sender.start()
        over_zeromq = verdict_of(bench, left, right)
        for sender in (left, right):
            sender.link.close(flush_s=0.2)
    assert over_nats == over_zeromq
    assert over_nats["culprits"]


def test_a_viewer_sees_the_job_it_watches(nats_server: NatsServer) -> None:
    access, one, two = Access(nats_server.address), "one", "two"
    with engine(access) as bench, agent(access, host="a", token=one) as sender, viewing(access, one) as viewer:
        node = rings("a", (0, 1, 2, 3))

        def seen() -> bool:
            sender.take(node.batch())
            viewer._hear(0.01)
            return viewer.verdict is not None and viewer.verdict.verdict_class is VerdictClass.STOPPED

        bench.until(seen, "a view")
        assert [window.rank for window in viewer.windows] == [0, 1, 2, 3]
        assert len(viewer.samples) == 4
        with viewing(access, two) as stranger:
            bench.until(lambda: stranger._viewer.welcomed, "the server")
            begun = len(bench.told)
            for _ in range(5):
                sender.take(node.batch())
                bench.service.step(bench.show, until=time.monotonic() + 0.1)
                stranger._hear(0.01)
            assert (stranger.view, len(bench.told)) == (None, begun)


def test_orders_and_the_clock_reach_an_agent(nats_server: NatsServer) -> None:
    access = Access(nats_server.address)
    with engine(access) as bench, agent(access, host="node1") as sender:
        node, orders = FakeNode(silent_link(), looks=60, host="node1"), list[WorkOrder]()

        def ordered() -> bool:
            sender.take(node.batch(planes=(PlaneState("wire", True),)))
            orders.extend(sender.link.take_orders())
            return bool(orders) and sender.link.status.clock_offset_ns is not None

        bench.until(ordered, "an order, and the clock")
        assert orders[0].pids
        # An order to look is no order to count.
        bench.hub.order(sender.life, replace(orders[0], number=1 << 20, look=True))
        bench.until(lambda: ordered() and orders[-1].look, "an order to look")
        offset, error = sender.link.status.clock_offset_ns, sender.link.status.clock_error_ns
        assert offset is not None and error is not None and abs(offset) <= error


def test_the_clock_is_told_to_inboxes_alone(nats_server: NatsServer) -> None:
    """An engine may say anything in its account: whoever asks must not choose the subject."""
    with engine(Access(nats_server.address)) as bench:

        async def ask() -> list[str]:
            client, heard = await nats.connect(nats_server.address), list[str]()

            async def hear(message: Msg) -> None:
                heard.append(message.subject)

            await client.subscribe(">", cb=hear)
            ping = protocol.encode(protocol.Ping(1))
            for reply in ("ncw.ask.default.victim", "$JS.API.STREAM.PURGE.NCW_BATCHES", "_INBOX.>", "_INBOX.me"):
                await client.publish("ncw.ping.default.a", ping, reply=reply)
            limit = time.monotonic() + PATIENCE_S
            while "_INBOX.me" not in heard and time.monotonic() < limit:
                await asyncio.sleep(0.01)
            await client.close()
            return [subject for subject in heard if not subject.startswith("ncw.ping")]

        assert asyncio.run(ask()) == ["_INBOX.me"]
        assert bench.hub.counts.bad == 0


def test_all_is_well_reaches_an_agent(nats_server: NatsServer) -> None:
    access, eased = Access(nats_server.address), list[tuple[bool, bool]]()
    with engine(access) as bench, agent(access, host="a") as sender:
        sender.link.on_ease = lambda well, narrow: eased.append((well, narrow))
        sender.take(rings("a", (0, 1)).batch())
        bench.until(lambda: bench.taken, "a batch")

        def said() -> bool:
            bench.hub.ease(sender.life, well=True)
            return (True, False) in eased

        bench.until(said, "an allowance")
        bench.hub.ease(sender.life, well=False)
        bench.until(lambda: (False, False) in eased, "its end")


def test_without_a_server_batches_wait_in_the_spool(nats_server: NatsServer, tmp_path: Path) -> None:
    access = Access(nats_server.address)
    nats_server.kill()
    node = rings("a", (0, 1))
    with agent(access, host="a", spool=tmp_path / "spool", flush_s=0.0) as sender:
        for _ in range(20):
            sender.take(node.batch())
        limit = time.monotonic() + 60
        while sender.link.status.waiting < 20:
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert not sender.link.status.connected
    nats_server.start()
    # Its successor sends what was left, before its own; no engine has ever run here, so nobody has made the stream yet.
    with agent(access, host="a", spool=tmp_path / "spool") as sender:
        sender.take(rings("a", (0, 1)).batch())
        limit = time.monotonic() + 60
        while "stream" not in sender.link.status.reason:
            assert time.monotonic() < limit, sender.link.status
            time.sleep(0.01)
        with engine(access) as bench:
            bench.until(lambda: len(bench.taken) == 21, "all batches")
            assert bench.numbers() == [*range(20), 0]
            assert len({life for _, life, _ in bench.taken}) == 2
            bench.until(lambda: not sender.link.status.waiting, "an empty spool")
            assert sender.link.status.connected


def test_a_server_that_is_killed_loses_nothing_and_repeats_nothing(nats_server: NatsServer, tmp_path: Path) -> None:
    access = Access(nats_server.address)
    with engine(access) as bench, agent(access, host="a", spool=tmp_path / "spool") as sender:
        node, said = rings("a", (0, 1)), 0

        def say(number: int) -> None:
            nonlocal said
            for _ in range(number):
                sender.take(node.batch())
            said += number

        for _ in range(KILLS):
            say(30)
            bench.until(lambda: len(bench.taken) > said - 25, "some batches")
            # In the middle of the others.
            nats_server.kill()
            say(10)
            nats_server.start()
            say(10)
        bench.until(lambda: len(bench.taken) >= said, "every batch")
        bench.until(lambda: not sender.link.status.waiting, "an empty spool")
        assert bench.numbers() == list(range(said))
        assert bench.service.hub.counts.bad == 0


def test_an_engine_that_begins_anew_reads_the_last_minutes(nats_server: NatsServer) -> None:
    access = Access(nats_server.address)
    with agent(access, host="a") as left, agent(access, host="b") as right:
        with engine(access) as bench:
            before = verdict_of(bench, left, right)
            said = len(bench.taken)
        # Nobody hears these; they lie in the stream.
        with engine(access) as bench:
            after = verdict_of(bench, left, right)
            assert len(bench.taken) >= said
            assert after == before
        with engine(access, replay_s=0.0) as bench:
            bench.until(lambda: bench.hub._reader.replay_upto, "the stream")
            left.take(rings("a", (0, 1)).batch())
            bench.until(lambda: bench.taken, "a batch")
            assert bench.hub.counts.keys_asked <= 1
            assert len(bench.taken) < said


def test_a_server_that_begins_without_its_store_is_no_trouble(nats_server: NatsServer, tmp_path: Path) -> None:
    """Its stream is made again, and numbers begin anew."""
    access = Access(nats_server.address)
    with engine(access) as bench, agent(access, host="a") as sender:
        node = rings("a", (0, 1))
        for _ in range(10):
            sender.take(node.batch())
        bench.until(lambda: len(bench.taken) == 10, "the first batches")
        nats_server.kill()
        (nats_server.folder / "store").rename(tmp_path / "gone")
        nats_server.start()
        sender.take(node.batch())
        bench.until(lambda: len(bench.taken) == 11, "one over the new stream")
        assert bench.numbers() == list(range(11))
