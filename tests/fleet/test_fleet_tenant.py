"""The fleet of a tenant on the server that ``packaging/nats`` describes, with TLS and keys: another tenant sees nothing of it."""

from __future__ import annotations

import time
from pathlib import Path

from fleet.servers import PackagedServer
from fleet.simulated import Agents
from ncclwatch.fleet import streams
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.worker import Worker
from ncclwatch.messaging import subjects
from ncclwatch.messaging.bus_keys import access, add_user, write_tenants


async def messages(bus: Connection, stream: str) -> int:
    return (await bus.jetstream.stream_info(stream)).state.messages


def test_a_worker_of_one_tenant_hears_its_agents_and_no_others(tmp_path: Path) -> None:
    server = PackagedServer(tmp_path / "nats")
    for tenant in ("red", "blue"):
        add_user(server.folder / "tenants", tenant, "engine", "engine")
    write_tenants(server.folder / "tenants")
    try:
        server.start()
        with (
            Connection(access(server.address, server.keys("red"), "engine")) as red,
            Connection(access(server.address, server.keys("blue"), "engine")) as blue,
        ):
            workers = [Worker(red, ttl_s=10.0), Worker(blue, ttl_s=10.0)]
            agents = Agents(red, world=2)
            agents.start()
            until = time.monotonic() + 100
            while not workers[0].hearing.counts.messages or red.call(messages(red, streams.JOBS)) == 0:
                assert time.monotonic() < until, f"nothing was heard: {workers[0].take_news()}"
                for worker in workers:
                    worker.step(0.1)
            agents.close()
            assert workers[0].hearing.jobs == [agents.name_of(0)]
            assert workers[1].hearing.counts.batches == 0
            for stream in (subjects.BATCHES, subjects.REDUCED, streams.JOBS):
                assert blue.call(messages(blue, stream)) == 0
            for worker in workers:
                worker.close()
    finally:
        server.kill()
