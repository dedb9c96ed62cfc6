"""Somebody hostile with an agent's key, or another tenant's, before a fleet: nothing gets through, and each try is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from nats.aio.client import Client

from fleet.bus import PATIENCE_S, rings
from fleet.hostile import BLUE, RED, batch, bound, damaged, marks, two_tenants, with_client
from fleet.servers import PackagedServer
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.fleet import streams
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.judge_hub import JudgeHub
from ncclwatch.fleet.worker import Worker
from ncclwatch.messaging import subjects
from ncclwatch.messaging.bus_keys import access
from ncclwatch.messaging.keys import job_of
from ncclwatch.messaging.writer import BatchWriter

STREAMS = (subjects.BATCHES, subjects.REDUCED, subjects.VERDICTS, streams.JOBS)
VICTIM = "v"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PackagedServer]:
    with two_tenants(tmp_path / "nats") as made:
        yield made


@dataclass
class Tenant:
    """A worker and the transport of a judge, stepped by the test; ``taken``: life and batch of all that the judge heard."""

    bus: Connection
    worker: Worker
    hub: JudgeHub
    taken: list[tuple[str, NodeBatch]] = field(default_factory=list)
    added: set[str] = field(default_factory=set)

    def until(self, holds: Callable[[], object], what: str) -> None:
        limit = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < limit, f"{what} did not come: {self.worker.hearing.counts}, {self.worker.take_news()}"
            self.worker.step(0.05)
            for job in set(self.worker.hearing.jobs) - self.added:
                self.added.add(job)
                self.hub.add(job, 60.0)
            self.hub.poll(0.01)

    def of(self, life: str) -> int:
        """Batches of an agent that the judge knows of, in however few messages they came."""
        return sum(1 for found, _ in self.taken if found == life)


@contextmanager
def fleet_of(server: PackagedServer) -> Iterator[Tenant]:
    with Connection(access(server.address, server.keys(RED), "engine")) as bus:
        bus.call(streams.ensure(bus.jetstream, *STREAMS), 30.0)
        taken: list[tuple[str, NodeBatch]] = []
        hub = JudgeHub(bus, lambda job, life, heard, at_ns: taken.append((life, heard)), lambda job: True)
        whole = Tenant(bus, Worker(bus, interval_s=0.2, ttl_s=10.0), hub, taken)
        try:
            whole.until(lambda: len(whole.worker.parts) > 1, "its share")
            yield whole
        finally:
            hub.close()
            whole.worker.close()


def sizes(bus: Connection) -> list[int]:
    async def read() -> list[int]:
        return [(await bus.jetstream.stream_info(name)).state.messages for name in STREAMS]

    return bus.call(read(), 30.0)


def test_what_workers_and_judges_say_cannot_be_said_with_other_keys(server: PackagedServer) -> None:
    with fleet_of(server) as red:
        before = sizes(red.bus)
        said = [
            subjects.reduced("j", "w"), subjects.verdict("j"), streams.claims("w"), streams.need("w"), subjects.ask("j", VICTIM),
            f"$KV.{subjects.LEASES}.judge.j", f"$KV.{streams.HEARD}.3", f"ncw.batch.3.j.{VICTIM}",
            "$JS.API.STREAM.PURGE.NCW_VERDICTS", "$JS.API.STREAM.DELETE.NCW_JOBS",
        ]  # fmt: skip

        async def forge(client: Client) -> None:
            for subject in said:
                await client.publish(subject, batch(VICTIM), headers=marks("forged", 0))

        for role in ("agent", "viewer"):
            refused = with_client(access(server.address, server.keys(RED), role), forge, len(said))
            assert len([line for line in refused if "permissions violation for publish" in line]) == len(said)
        assert server.log_text().count("Publish Violation") == 2 * len(said), "the server writes each down"
        # Another tenant's engine may say all of it, where nobody of this one hears it.
        with_client(access(server.address, server.keys(BLUE), "engine"), forge)
        red.until(lambda: red.worker.share.mine, "a moment")
        assert sizes(red.bus) == before and red.worker.hearing.counts.batches == 0


def test_replayed_damaged_and_forged_batches_are_counted_and_change_nothing(server: PackagedServer) -> None:
    with fleet_of(server) as red:
        counts, own = red.worker.hearing.counts, subjects.batch("j", VICTIM)
        node, writer = rings(VICTIM, (0, 1, 2, 3)), BatchWriter()
        batches = [writer.encode(node.batch()) for _ in range(4)]

        def saying(*words: tuple[str, bytes, dict[str, str]]) -> None:
            async def say(client: Client) -> None:
                for subject, data, headers in words:
                    await client.publish(subject, data, headers=headers or None)

            with_client(access(server.address, server.keys(RED), "agent"), say)

        saying(*((own, data, marks("V", n)) for n, data in enumerate(batches[:3])))
        red.until(lambda: counts.batches == 3 and red.of("V"), "the honest batches")
        jobs = set(red.worker.hearing.jobs)
        saying(*((own, batches[1], marks("V", 1)) for _ in range(7)))
        red.until(lambda: counts.duplicates == 7, "the repetitions")
        forms = damaged(batch("a"))
        saying(*((subjects.batch("j", "a"), data, headers) for data, headers in forms), (own, batch("a"), marks("W", 0)))
        red.until(lambda: counts.bad == len(forms) + 1, "what is damaged, and what names another host than its subject")
        assert any("makes no sense" in line for line in red.worker.take_news())
        assert (counts.batches, set(red.worker.hearing.jobs)) == (3, jobs)
        # Another node names the victim's life, and a number that would make all that the victim says next old.
        saying((subjects.batch("j", "a"), batch("a"), marks("V", 10**9)))
        red.until(lambda: red.hub.counts.bad == 1, "the judge's refusal")
        heard = red.of("V")
        saying((own, batches[3], marks("V", 3)))
        red.until(lambda: red.of("V") > heard, "what the victim says next")
        assert {one.host for _, one in red.taken} == {VICTIM}

        # A key that is bound to another job shows communicators of the victim's: they are of a job of their own.
        async def show(client: Client) -> None:
            await client.publish(subjects.batch(job_of("one"), "a"), batch("a"), headers=marks("B", 0))

        with_client(bound(server), show)
        red.until(lambda: red.of("B"), "the other job")
        assert len(set(red.worker.hearing.jobs)) == len(jobs) + 1


def test_a_node_that_floods_is_not_heard_beyond_its_allowance_and_delays_nobody(
    server: PackagedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ncclwatch.messaging.bus_batch.BURST", 100.0)
    monkeypatch.setattr("ncclwatch.messaging.bus_batch.RATE", 1.0)
    flood, said = 2000, 20
    with fleet_of(server) as red:
        counts, data = red.worker.hearing.counts, batch("a")
        writer, node = BatchWriter(), rings(VICTIM, (0, 1, 2, 3))

        async def pour(client: Client) -> None:
            for n in range(flood):
                await client.publish(subjects.batch("j", "a"), data, headers=marks("F", n))
                if n % (flood // said) == 0:
                    number = n // (flood // said)
                    await client.publish(subjects.batch("j", VICTIM), writer.encode(node.batch()), headers=marks("V", number))
                    await client.flush()

        with_client(access(server.address, server.keys(RED), "agent"), pour)
        red.until(lambda: counts.batches + counts.flooded >= flood + said, "all of it")
        assert counts.flooded > flood / 2 and counts.batches + counts.flooded == flood + said
        assert any("says more than is heard of one node" in line for line in red.worker.take_news())
        red.until(lambda: red.of("V"), "the victim")
        assert counts.missed == 0 and counts.bad == 0
