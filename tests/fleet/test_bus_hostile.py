"""A hostile tenant on the server that packaging/nats describes: nothing of his gets through, and what he tries is counted."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from nats.aio.client import Client
from nats.errors import Error, NoServersError

from fleet.bus import Bench, agent, engine, rings, viewing
from fleet.hostile import BLUE, RED, batch, bound, damaged, marks, two_tenants, with_client
from fleet.servers import NatsServer, PackagedServer
from ncclwatch.errors import UsageError
from ncclwatch.messaging import subjects
from ncclwatch.messaging.bus_keys import Access, access, add_user
from ncclwatch.messaging.keys import KeyFileError, job_of
from ncclwatch.messaging.nats_stream import MAX_OF_A_NODE
from ncclwatch.messaging.transport import EngineUnreachableError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PackagedServer]:
    with two_tenants(tmp_path / "nats") as made:
        yield made


def settle(bench: Bench, seconds: float = 0.5) -> None:
    """Hear whatever is still to come."""
    end = time.monotonic() + seconds
    bench.until(lambda: time.monotonic() > end, "time")


def test_tenants_see_nothing_of_each_other(server: PackagedServer) -> None:
    red, blue = server.keys(RED), server.keys(BLUE)
    with (
        engine(access(server.address, red, "engine")) as one,
        engine(access(server.address, blue, "engine")) as two,
        agent(access(server.address, blue, "agent"), host="a") as sender,
        viewing(access(server.address, red, "viewer")) as viewer,
        viewing(access(server.address, blue, "viewer")) as own,
    ):
        node, eased = rings("a", (0, 1, 2, 3)), list[tuple[bool, bool]]()
        sender.link.on_ease = lambda well, narrow: eased.append((well, narrow))

        def told() -> object:
            sender.take(node.batch())
            one.service.step(one.show, until=time.monotonic() + 0.01)
            viewer._hear(0.01)
            own._hear(0.01)
            two.hub.ease(sender.life, well=True)
            return two.told and eased and own.verdict is not None and sender.link.status.clock_offset_ns is not None

        two.until(told, "a verdict, a view, an allowance and the clock for blue")
        settle(one)
        assert (one.taken, viewer.view) == ([], None)

    async def listen(client: Client) -> None:
        for subject in ("ncw.batch.>", "ncw.verdict.>", ">", "$JS.API.>", "_INBOX.>"):
            await client.subscribe(subject)

    refused = with_client(access(server.address, red, "agent"), listen, 5)
    assert len([line for line in refused if "permissions violation for subscription" in line]) == 5


def test_a_key_speaks_for_its_job_and_node_alone(server: PackagedServer) -> None:
    with engine(access(server.address, server.keys(RED), "engine")) as bench:
        one, two = job_of("one"), job_of("two")

        async def forge(client: Client) -> None:
            for subject in (
                subjects.batch(two, "a"),
                subjects.batch(one, "b"),
                subjects.batch("*", "a"),
                "ncw.ask.x.y",
                "ncw.view.x",
            ):
                for n in range(5):
                    await client.publish(subject, batch(), headers=marks("forged", n))
            await client.publish(subjects.batch(one, "a"), batch("b"), headers=marks("other-host", 0))
            await client.publish(subjects.batch(one, "a"), batch("a"), headers=marks("honest", 0))

        refused = with_client(bound(server), forge, 25)
        bench.until(lambda: bench.taken, "the honest batch")
        settle(bench)
        assert [(job, life, one.host) for job, life, one in bench.taken] == [(one, "honest", "a")]
        assert bench.service.hub.counts.bad == 1, "the batch that says it is of another node than its key and subject"
        assert len([line for line in refused if "permissions violation for publish" in line]) == 25
        assert server.log_text().count("Publish Violation") == 25, "the server writes each down"


def test_an_answer_of_the_stream_cannot_be_turned_against_it(server: PackagedServer) -> None:
    """JetStream answers where the sender says. Within one account that can be its own interface: a purge, a deletion."""
    with engine(access(server.address, server.keys(RED), "engine")) as bench:
        honest = access(server.address, server.keys(RED), "agent")
        with agent(honest, host="v") as victim:
            node = rings("v", (0, 1))
            for _ in range(10):
                victim.take(node.batch())
            bench.until(lambda: len(bench.taken) == 10, "the victim's batches")

        async def misuse(client: Client) -> None:
            own = subjects.batch("j", "a")
            for n, reply in enumerate(
                (
                    "$JS.API.STREAM.PURGE.NCW_BATCHES",
                    "$JS.API.STREAM.MSG.DELETE.NCW_BATCHES",
                    "$JS.API.STREAM.DELETE.NCW_BATCHES",
                    subjects.batch("other", "v"),
                    subjects.ask("default", "v"),
                )
            ):
                await client.publish(own, batch(), reply=reply, headers=marks("attacker", n))
            await client.publish(own, batch(), headers=marks("attacker", 9, **{"Nats-Rollup": "all"}))
            await client.publish("ncw.ping.j.a", b"\x81", reply="$JS.API.STREAM.DELETE.NCW_BATCHES")

        with_client(honest, misuse)
        bench.until(lambda: len(bench.taken) >= 15, "what he said on his own subject")
        settle(bench)
        assert {life for _, life, _ in bench.taken} == {victim.life, "attacker"}
        with engine(access(server.address, server.keys(RED), "engine")) as anew:
            anew.until(lambda: len(anew.taken) >= 15, "the stream, read again")
            settle(anew)
            assert len([life for _, life, _ in anew.taken if life == victim.life]) == 10, "nothing is gone from the stream"
            assert {job for job, _, _ in anew.taken} == {"default", "j"}


def test_replayed_and_damaged_batches_are_counted(server: PackagedServer) -> None:
    who = access(server.address, server.keys(RED), "agent")
    good = batch()
    with engine(access(server.address, server.keys(RED), "engine")) as bench:
        counts = bench.service.hub.counts

        async def replay(client: Client) -> None:
            for n in range(3):
                await client.publish(subjects.batch("j", "a"), good, headers=marks("L", n))
            for _ in range(7):
                await client.publish(subjects.batch("j", "a"), good, headers=marks("L", 1))
            # Another job, or another node, names a life that is not its own.
            await client.publish(subjects.batch("k", "a"), good, headers=marks("L", 3))
            await client.publish(subjects.batch("j", "b"), batch("b"), headers=marks("L", 3))

        with_client(who, replay)
        bench.until(lambda: counts.duplicates == 7 and counts.bad == 2, "the repetitions")
        assert [(job, life) for job, life, _ in bench.taken] == [("j", "L")] * 3

        forms = damaged(good)

        async def damage(client: Client) -> None:
            for data, headers in forms:
                await client.publish(subjects.batch("j", "a"), data, headers=headers or None)

        with_client(who, damage)
        bench.until(lambda: counts.bad == 2 + len(forms), "the damaged ones")
        settle(bench, 0.2)
        assert len(bench.taken) == 3
        assert any("makes no sense" in line for line in bench.service.hub.take_news())


def test_a_flood_pushes_out_nothing_of_others(server: PackagedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.messaging.bus_batch.BURST", 300.0)
    who = access(server.address, server.keys(RED), "agent")
    flood = MAX_OF_A_NODE + 4000
    with engine(access(server.address, server.keys(RED), "engine")) as bench:
        counts, node, said = bench.service.hub.counts, rings("v", (0, 1, 2, 3), looks=2000), 0
        with agent(who, host="v") as victim:

            def victims(heard: Bench) -> int:
                return sum(life == victim.life for _, life, _ in heard.taken)

            def say() -> bool:
                nonlocal said
                victim.take(node.batch())
                said += 1
                return said >= 20

            bench.until(say, "twenty batches")
            bench.until(lambda: victims(bench) == said, "the victim's batches")

            async def pour(client: Client) -> None:
                data = batch()
                for n in range(flood):
                    await client.publish(subjects.batch("j", "a"), data, headers=marks("F", n))
                    if n % 500 == 0:
                        await client.flush()

            with_client(who, pour)
            bench.until(lambda: say() and bench.told, "a verdict beside the flood")
            bench.until(lambda: victims(bench) == said, "the victim beside the flood")
        bench.until(lambda: sum(life == "F" for _, life, _ in bench.taken) + counts.flooded + counts.missed >= flood, "all of it")
        assert counts.flooded + counts.missed > 3000
    with engine(access(server.address, server.keys(RED), "engine")) as anew:
        anew.until(lambda: anew.taken and not anew.hub._reader.pending and not anew.hub._reader.waiting, "the stream, read again")
        assert victims(anew) == said, "the flood pushed out its own beginning alone"


def test_nobody_is_heard_without_a_key_or_spoken_to_without_a_certificate(server: PackagedServer, tmp_path: Path) -> None:
    keys = server.keys(RED)
    context = ssl.create_default_context(cafile=keys / "ca.pem")

    async def connect(**options: object) -> None:
        client = await nats.connect(server.address, allow_reconnect=False, max_reconnect_attempts=1, **options)
        await client.close()

    for options in ({"tls": context}, {"tls": context, "user": "red", "password": "red"}):
        with pytest.raises((Error, NoServersError)):
            asyncio.run(connect(**options))
    add_user(tmp_path, RED, "agent", "agent")
    (tmp_path / RED / "ca.pem").write_bytes((keys / "ca.pem").read_bytes())
    stranger = access(server.address, tmp_path / RED, "agent")
    (tmp_path / RED / "ca.pem").unlink()
    unsigned = access(server.address, tmp_path / RED, "agent")
    for who, why in ((stranger, "does not take this key"), (unsigned, "TLS failed")):
        with agent(who, host="a", flush_s=0.0) as sender:
            sender.take(rings("a", (0, 1)).batch())
            limit = time.monotonic() + 60
            while why not in sender.link.status.reason:
                assert time.monotonic() < limit, sender.link.status
                time.sleep(0.02)
            assert sender.link.status.sent_batches == 0


def test_a_server_that_denies_tls_is_told_nothing(server: PackagedServer, nats_server: NatsServer) -> None:
    """Whoever stands between could say that no TLS is spoken here."""
    who = Access(nats_server.address.replace("nats://", "tls://"), ca=(server.keys(RED) / "ca.pem").read_text())
    with agent(who, host="a", flush_s=0.0) as sender:
        sender.take(rings("a", (0, 1)).batch())
        limit = time.monotonic() + 60
        while "does not speak TLS" not in sender.link.status.reason:
            assert time.monotonic() < limit, sender.link.status
            time.sleep(0.02)
        assert sender.link.status.sent_batches == 0


def test_a_viewers_key_is_refused_where_it_may_not_look(server: PackagedServer) -> None:
    keys = server.keys(RED)
    as_viewer = access(server.address, keys, "agent")
    with viewing(as_viewer) as viewer, pytest.raises(EngineUnreachableError, match="refuses"):
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            viewer._hear(0.05)


def test_beyond_this_machine_there_is_no_speaking_without_keys(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no keys"):
        access("tls://engine-host:4222", None, "agent")
    with pytest.raises(UsageError, match="not encrypted"):
        access("nats://engine-host:4222", tmp_path, "agent")
    add_user(tmp_path, RED, "agent", "agent")
    secret = tmp_path / RED / "agent.nk"
    secret.chmod(0o644)
    with pytest.raises(KeyFileError, match="read by others"):
        access("tls://engine-host:4222", tmp_path / RED, "agent")
