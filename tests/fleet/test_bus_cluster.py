"""Three servers as a cluster, the stream of batches with three replicas: the server that all are connected to is killed."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

from nats.errors import Error as NatsError
from nats.js import api

from fleet.servers import NatsServer, free_port
from fleet.simulated import Agents
from ncclwatch.errors import NcclwatchError
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.worker import Worker
from ncclwatch.messaging import subjects
from ncclwatch.messaging.bus_keys import Access

PATIENCE_S = 300.0


def cluster(folder: Path) -> list[NatsServer]:
    """Three servers that know one another; not begun yet."""
    ports = [free_port() for _ in range(3)]
    routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in ports)
    servers = []
    for number, port in enumerate(ports):
        config = f'cluster {{ name: "three", listen: "127.0.0.1:{port}", routes: [{routes}] }}'
        server = NatsServer(folder / f"n{number}", config)
        server.config.write_text(server.config.read_text().replace('server_name: "test"', f'server_name: "n{number}"'))
        servers.append(server)
    return servers


def test_a_server_of_three_is_lost(tmp_path: Path) -> None:
    servers = cluster(tmp_path)
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.kill)
            server.start()
        bus = stack.enter_context(Connection(Access(servers[0].address)))
        config = api.StreamConfig(name=subjects.BATCHES, subjects=[subjects.ALL_BATCHES], num_replicas=3)
        limit = time.monotonic() + PATIENCE_S
        while True:
            # The three have to have chosen one of them first.
            try:
                bus.call(bus.jetstream.add_stream(config))
                break
            except (NatsError, NcclwatchError):
                assert time.monotonic() < limit, servers[0].log_text()
                time.sleep(0.5)
        worker = Worker(bus, ttl_s=10.0)
        agents = Agents(bus, world=2)
        agents.start()

        def hear(more: int) -> None:
            wanted, limit = worker.hearing.counts.batches + more, time.monotonic() + PATIENCE_S
            while worker.hearing.counts.batches < wanted:
                assert time.monotonic() < limit, worker.take_news()
                worker.step(0.1)

        hear(8)
        # With it go its copies; the stream of batches, and what the worker made beside it, have two more each.
        servers[0].kill()
        hear(8)
        agents.close()
        assert worker.hearing.counts.missed == 0 and worker.hearing.counts.bad == 0
        worker.close()
