"""Nodes are divided into parts by the server: each worker reads its own alone, and where nothing is divided one hears all."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from nats.js import api

from fleet.servers import running
from fleet.simulated import Agents
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.worker import PIECES, UNMAPPED, Worker
from ncclwatch.messaging import subjects
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.messaging.nats_stream import ensure_stream

NODES = 16


def until(workers: list[Worker], holds: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < limit, f"not seen: {what}: {[worker.take_news() for worker in workers]}"
        for worker in workers:
            worker.step(0.05)
        time.sleep(0 if workers else 0.05)


def test_each_worker_reads_its_own_part_alone_and_takes_over_where_another_was(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(running(tmp_path / "nats"))
        bus, other = (stack.enter_context(Connection(Access(server.address))) for _ in range(2))
        workers, half = [Worker(bus, ttl_s=2.0), Worker(other, ttl_s=2.0)], len(PIECES) // 2
        until(workers, lambda: {len(worker.parts) for worker in workers} == {half, len(PIECES) - half}, "shares")
        agents = Agents(bus, world=NODES)
        agents.start()
        until(workers, lambda: sum(len(w.hearing) for w in workers) == NODES, "every node is heard by one worker")
        read = [worker.hearing.counts for worker in workers]
        assert all(counts.batches for counts in read), "with 16 nodes neither has none"
        assert sum(counts.duplicates for counts in read) == 0
        gone = workers.pop()
        heard = len(gone.hearing)
        gone.close()
        until(workers, lambda: len(workers[0].parts) == len(PIECES), "the parts of the other")
        until(workers, lambda: len(workers[0].hearing) == NODES, f"the {heard} nodes of the other")
        agents.close()
        # Every number that was said was heard by one of the two, and none by both: the positions in the bucket are of each part.
        until(workers, lambda: read[0].batches + read[1].batches >= agents.sent, "all that was said")
        assert read[0].batches + read[1].batches == agents.sent and read[0].missed + read[1].missed == 0
        workers[0].close()


def test_without_a_mapping_one_worker_hears_all(tmp_path: Path) -> None:
    with running(tmp_path / "nats", mapped=False) as server, Connection(Access(server.address)) as bus:
        worker = Worker(bus, ttl_s=2.0)
        agents = Agents(bus, world=4)
        agents.start()
        until([worker], lambda: len(worker.hearing) == 4, "all nodes")
        agents.close()
        assert {node.part for node in worker.hearing._nodes.values()} == {UNMAPPED}
        worker.close()


def test_a_stream_of_before_takes_mapped_batches_too(tmp_path: Path) -> None:
    with running(tmp_path / "nats") as server, Connection(Access(server.address)) as bus:
        config = api.StreamConfig(name=subjects.BATCHES, subjects=[subjects.SAID_BATCHES], max_age=77.0)
        bus.call(bus.jetstream.add_stream(config))
        bus.call(ensure_stream(bus.jetstream))
        found = bus.call(bus.jetstream.stream_info(subjects.BATCHES)).config
        assert (found.subjects, found.max_age) == ([subjects.ALL_BATCHES], 77.0)
        bus.call(bus.jetstream.publish(subjects.batch("j", "node0"), b"x"))
        message = bus.call(bus.jetstream.get_msg(subjects.BATCHES, seq=1))
        assert message.subject == "ncw.batch.7.j.node0"


def test_a_worker_that_does_not_keep_up_says_how_far_it_is_behind(tmp_path: Path) -> None:
    with running(tmp_path / "nats") as server, Connection(Access(server.address)) as bus:
        worker = Worker(bus, ttl_s=10.0)
        agents = Agents(bus, world=4)
        agents.start()
        until([worker], lambda: len(worker.hearing) == 4, "all nodes")
        # It is given nothing to do; what is read meanwhile waits.
        until([], lambda: worker.state.waiting > 8 and worker.state.lag_s > 1.0, "something that waits")
        agents.close()
        until([worker], lambda: (worker.state.waiting, worker.state.lag_s) == (0, 0.0), "all that was said")
        assert worker.state.nodes == 4 and worker.state.connected
        server.kill()
        until([], lambda: not worker.state.connected, "the broken connection")
        server.start()
        until([], lambda: worker.state.connected, "another")
        worker.close()
