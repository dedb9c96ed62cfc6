"""A server with an operator: accounts and users are JWTs, and agents, workers and viewers use their creds as they use seeds."""

from __future__ import annotations

import time
from pathlib import Path

from fleet.bus import agent, engine, rings
from fleet.nats_operator import OperatorServer
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.worker import Worker
from ncclwatch.messaging.bus_keys import access


def test_creds_of_a_server_with_an_operator(tmp_path: Path) -> None:
    server = OperatorServer(tmp_path / "nats")
    batches, asks = ["ncw.batch.*.*", "ncw.ping.*.*"], ["ncw.ask.*.*"]
    engines, agents = server.keys("engine"), server.keys("agent", publish=batches, subscribe=asks)
    try:
        server.start()
        own, theirs = access(server.address, engines, "engine"), access(server.address, agents, "agent")
        assert own.jwt and theirs.jwt
        with engine(own) as bench, agent(theirs, host="a") as sender:
            node = rings("a", (0, 1, 2, 3))

            def told() -> bool:
                sender.take(node.batch())
                return bool(bench.told)

            bench.until(told, "the verdict")
            assert [culprit.rank for culprit in bench.told[0][1].culprits] == [2]
        # The account's mapping divides nodes for hearing workers, as that of a server's configuration does.
        with Connection(own) as bus:
            worker = Worker(bus, ttl_s=2.0)
            limit = time.monotonic() + 100
            while not worker.hearing.counts.batches:
                assert time.monotonic() < limit, worker.take_news()
                worker.step(0.1)
            assert {part.part for part in worker.hearing._nodes.values()} <= {str(number) for number in range(32)}
            worker.close()
    finally:
        server.kill()
