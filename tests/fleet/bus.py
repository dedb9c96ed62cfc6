"""Agents, an engine and viewers over a real nats-server, with prepared ranks in place of a job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ncclwatch.cli.engine_service import EngineService, Job
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.engine.session import Update
from ncclwatch.messaging.agent import Agent
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.messaging.nats_hub import NatsHub
from ncclwatch.messaging.nats_link import KEY_EVERY, NatsLink
from ncclwatch.messaging.nats_viewer import NatsViewer
from ncclwatch.messaging.transport import HubMaker
from ncclwatch.model.verdict import Verdict
from ncclwatch.remote.session import RemoteSession
from unit.fake_node import FakeNode
from unit.synthetic import frozen_ring

PATIENCE_S = 120.0


class Bench:
    """An engine and what it showed, stepped by the test."""

    def __init__(self, transport: HubMaker | None = None) -> None:
        self.service = EngineService("tcp://127.0.0.1:*", interval_s=0.05, transport=transport)
        self.taken: list[tuple[str, str, NodeBatch]] = []
        """Everything that was heard: job, life, batch."""
        self.told: list[tuple[str, Verdict]] = []
        original = self.service._take
        hub = self.service.hub

        def take(job: str, life: str, batch: NodeBatch) -> None:
            self.taken.append((job, life, batch))
            original(job, life, batch)

        hub._take = take  # type: ignore[attr-defined]

    @property
    def hub(self) -> NatsHub:
        """The hub, where it is that of a NATS server."""
        assert isinstance(self.service.hub, NatsHub)
        return self.service.hub

    def show(self, job: Job, update: Update) -> None:
        self.told += [(job.name, verdict) for verdict in update.told]

    def until(self, holds: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> None:
        limit = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < limit, f"{what} did not come: {self.service.hub.counts}, {self.service.hub.take_news()}"
            self.service.step(self.show, until=time.monotonic() + 0.05)

    def numbers(self) -> list[int]:
        """The sequence numbers of all batches that were heard, in order."""
        return [batch.sequence for _, _, batch in self.taken]


@contextmanager
def engine(access: Access | None, **options: float) -> Iterator[Bench]:
    """An engine on a NATS server; with ``None`` one of ZeroMQ."""
    bench = Bench(None if access is None else partial(NatsHub, access, **options))  # type: ignore[arg-type]
    try:
        if access is not None:
            # Prepared ranks show something new some times only: none of it may wait until there is a stream.
            bench.until(lambda: bench.hub.connected, "the stream")
        yield bench
    finally:
        bench.service.close()


@contextmanager
def agent(access: Access, *, host: str, token: str = "", spool: Path | None = None, flush_s: float = 5.0) -> Iterator[Agent]:
    """An agent on a NATS server."""
    sender = Agent(
        access.address, host=host, token=token, spool_folder=spool, link=partial(NatsLink, access), key_every=KEY_EVERY
    )
    sender.start()
    try:
        yield sender
    finally:
        sender.link.close(flush_s=flush_s)


@contextmanager
def viewing(access: Access, token: str = "") -> Iterator[RemoteSession]:
    """A viewer on a NATS server."""
    session = RemoteSession(access.address, transport=NatsViewer(access, token=token))
    try:
        yield session
    finally:
        session.close()


def rings(host: str, ranks: tuple[int, ...], looks: int = 600) -> FakeNode:
    """Some ranks of a ring of four in which rank 2 is stopped."""
    return FakeNode([rank for rank in frozen_ring(2, 4) if rank.rank in ranks], looks=looks, host=host)
