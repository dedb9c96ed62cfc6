"""A judge's side of the fleet: what workers reduced of the jobs it holds, each batch once; orders to agents, views to viewers.

It is an :class:`~ncclwatch.messaging.transport.EngineTransport`, so that jobs are judged by what judges them with one engine.
"""

from __future__ import annotations

import re
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.fleet import reduced, streams
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.follow import Follower, Message
from ncclwatch.fleet.reduced import BundleReader, Heard
from ncclwatch.messaging import protocol, subjects
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.lines import Lines
from ncclwatch.messaging.protocol import Ack, CountWork
from ncclwatch.messaging.transport import HubCounts
from ncclwatch.messaging.values import Shared
from ncclwatch.model.work import WorkOrder

if TYPE_CHECKING:
    from nats.aio.msg import Msg

PER_POLL = 64
"""Messages of one job that are taken at a time; each is of up to 64 nodes."""
SILENT_S, GONE_S = 2.0, 15.0
"""A worker that has said nothing for so long may have died: its nodes are not silent until another hears them."""
LATE = 2.0
"""Intervals of a worker after which it is late."""
MAX_WORKERS, MAX_BUNDLES, MAX_LIVES = 256, 8192, 131072
"""Of one job, what is remembered of workers, of what their messages build on, and of agents."""
ASK_AGAIN_S = 1.0
VIEWER_S, MAX_VIEWERS = 8.0, 1024
"""A viewer says every two seconds that it is there."""
EASE_AGAIN_S = 2.0
"""An allowance holds for five seconds, the wish for more looks 2.5 (``collect.ease``)."""
_VIEWER = re.compile(rb"[0-9a-f]{16}\Z")

TakeAt = Callable[[str, str, NodeBatch, int], None]
"""What is done with a batch: its job, the life it is of, the batch, and when a worker sent it on (CLOCK_REALTIME, ns)."""


@dataclass(slots=True)
class _Agent:
    """One life of a node's agent: up to which batch it is known, and how many of its batches were handed on or missed."""

    token: str
    node: str
    worker: str = ""
    """Who heard it last."""
    last: int = -1
    sequence: int = -1
    well: bool = False
    narrow: bool = False
    eased_at: float = 0.0


@dataclass(slots=True)
class _Worker:
    """When a worker was heard last, and how often it says something."""

    heard: float
    interval_s: float

    @property
    def gone_s(self) -> float:
        """After so long it is of the past."""
        return GONE_S + LATE * self.interval_s


@dataclass(slots=True)
class _Feed:
    """What comes of one job."""

    follower: Follower
    readers: OrderedDict[tuple[str, int], BundleReader] = field(default_factory=OrderedDict)
    agents: OrderedDict[str, _Agent] = field(default_factory=OrderedDict)
    workers: OrderedDict[str, _Worker] = field(default_factory=OrderedDict)
    emptied: float = field(default_factory=time.monotonic)
    """When everything that had come was heard."""
    asked: dict[str, float] = field(default_factory=dict)

    @property
    def is_behind(self) -> bool:
        """Whether something waits, or may wait in the stream since the connection was made again."""
        return len(self.follower) > 0 or (self.follower.caught_up and not self.follower.current)

    def unheard_s(self, now: float) -> float:
        """For how long a worker has said nothing whose nodes nobody else hears yet; else 0."""
        return self._silent(now, lambda worker: SILENT_S)

    def is_late(self, now: float) -> bool:
        """Whether it should have said something by now."""
        return self._silent(now, lambda worker: LATE * worker.interval_s) > 0

    def _silent(self, now: float, after_s: Callable[[_Worker], float]) -> float:
        silent = {name: now - w.heard for name, w in self.workers.items() if after_s(w) < now - w.heard < w.gone_s}
        if not silent:
            return 0.0
        waited_for = {agent.worker for agent in self.agents.values()}
        return max((silence for name, silence in silent.items() if name in waited_for), default=0.0)


class JudgeHub:
    """Hears the jobs that are added. ``take`` gets their batches, in the thread that polls; ``holds`` tells whether we may still
    speak for a job.
    """

    def __init__(self, connection: Connection, take: TakeAt, holds: Callable[[str], bool]) -> None:
        self.counts = HubCounts()
        self.engine = secrets.token_hex(8)
        self.address = connection.address
        self._connection, self._take, self._holds = connection, take, holds
        self._lines = Lines()
        self._shared = Shared()
        self._bell = threading.Event()
        self._feeds: dict[str, _Feed] = {}
        self._viewers: OrderedDict[tuple[str, bytes], float] = OrderedDict()
        self._heard = time.monotonic()
        connection.call(self._listen())

    async def _listen(self) -> None:
        async def watched(message: Msg) -> None:
            if not _VIEWER.match(message.data):
                self.counts.bad += 1
                return
            key = (message.subject.rpartition(".")[2], message.data)
            self._viewers[key] = time.monotonic()
            self._viewers.move_to_end(key)
            if len(self._viewers) > MAX_VIEWERS:
                self._viewers.popitem(last=False)

        await self._connection.client.subscribe(subjects.ALL_WATCHES, cb=watched)

    # --- jobs ----------------------------------------------------------------------------------------------------------

    def add(self, job: str, back_s: float) -> None:
        """Hear a job, from so many seconds ago on."""
        follower = Follower(self._connection, subjects.REDUCED, streams.all_reduced(job), self._bell, back_s=back_s)
        self._feeds[job] = _Feed(follower)

    def remove(self, job: str) -> None:
        """Hear it no longer."""
        feed = self._feeds.pop(job, None)
        if feed is not None:
            feed.follower.close()

    def caught_up(self, job: str) -> bool:
        """Whether what was said of a job before it was added has been handed on."""
        feed = self._feeds[job]
        return feed.follower.caught_up and not len(feed.follower)

    # --- what an engine asks of its transport ----------------------------------------------------------------------------

    @property
    def npeers(self) -> int:
        """Hearing workers that were heard of late, and viewers."""
        now = time.monotonic()
        workers = {name for feed in self._feeds.values() for name, w in feed.workers.items() if now - w.heard < w.gone_s}
        return len(workers) + len(self._viewers)

    @property
    def unheard_s(self) -> float:
        """For how long something may have been waiting to be heard, here, at a worker, or because NATS is away; else 0."""
        now = time.monotonic()
        behind = max((self._heard - feed.emptied for feed in self._feeds.values()), default=0.0)
        return max(0.0, behind, *(feed.unheard_s(now) for feed in self._feeds.values()))

    def is_behind(self, job: str) -> bool:
        """Whether something of a job waits to be heard, or a worker should have said something by now."""
        feed = self._feeds[job]
        return self._heard > feed.emptied or feed.is_late(time.monotonic())

    def poll(self, timeout_s: float) -> int:
        """Hear what there is, waiting at most ``timeout_s`` for the first; returns how many messages were taken."""
        if not any(len(feed.follower) for feed in self._feeds.values()):
            self._bell.wait(max(0.0, timeout_s))
        self._bell.clear()
        self._heard = time.monotonic()
        taken = 0
        for job, feed in list(self._feeds.items()):
            for message in feed.follower.take(PER_POLL):
                taken += 1
                try:
                    self._hear(job, feed, message)
                except FormatError as error:
                    self.counts.bad += 1
                    self._lines.tell(f"bad {message.subject}", f"a message of {message.subject} makes no sense: {error.message}")
            if self._connection.connected and not feed.is_behind:
                feed.emptied = time.monotonic()
        return taken

    def take_news(self) -> list[str]:
        """Lines about what was turned away, each kind at most once a minute."""
        for text in self._connection.take_news():
            self._lines.tell(text, text)
        return self._lines.take()

    def tell(self, kind: str, text: str) -> None:
        """Say something with the next news, each kind at most once a minute."""
        self._lines.tell(kind, text)

    def viewers(self, job: str) -> Sequence[bytes]:
        """Those who said of late that they want to see a job."""
        since = time.monotonic() - VIEWER_S
        return [viewer for (wanted, viewer), heard in list(self._viewers.items()) if wanted == job and heard > since]

    def show(self, job: str, payload: bytes) -> None:
        """Send a view to all viewers of a job."""
        if self._holds(job):
            self._say(self._connection.client.publish(subjects.view(job), payload))

    def order(self, number: str, order: WorkOrder) -> bool:
        """Send an order to the agent of this life; whether it could be sent."""
        agent = self._agent(number)
        if agent is None or not self._connection.connected:
            return False
        self._ask(agent, CountWork.of(order))
        return True

    def ease(self, number: str, *, well: bool, narrow: bool = False) -> None:
        """Let the agent of this life know whether few looks at its node will do, or more are wanted."""
        agent, now = self._agent(number), time.monotonic()
        if agent is None:
            return
        new = (agent.well, agent.narrow) != (well, narrow)
        agent.well, agent.narrow = well, narrow
        if new or ((well or narrow) and now - agent.eased_at > EASE_AGAIN_S):
            agent.eased_at = now
            self._ask(agent, Ack(number, agent.last, well, narrow))

    def close(self) -> None:
        """Let go of all jobs."""
        for job in list(self._feeds):
            self.remove(job)

    def _agent(self, life: str) -> _Agent | None:
        for job, feed in self._feeds.items():
            if life in feed.agents:
                return feed.agents[life] if self._holds(job) else None
        return None

    def _ask(self, agent: _Agent, message: protocol.Message) -> None:
        self._say(self._connection.client.publish(subjects.ask(agent.token, agent.node), protocol.encode(message)))

    def _say(self, words: Coroutine[Any, Any, None]) -> None:
        self._connection.spawn(words)

    # --- hearing -------------------------------------------------------------------------------------------------------

    def _hear(self, job: str, feed: _Feed, message: Message) -> None:
        worker = message.subject.rpartition(".")[2]
        said = reduced.decode(message.data)
        self.counts.nbytes += len(message.data)
        feed.workers[worker] = _Worker(time.monotonic() - max(0.0, time.time() - message.time_ns / 1e9), said.interval_s)
        feed.workers.move_to_end(worker)
        if said.bundle < 0:
            if said.number == reduced.LEAVES:
                del feed.workers[worker]
            return
        reader = feed.readers.get((worker, said.bundle))
        if reader is None:
            reader = feed.readers[worker, said.bundle] = BundleReader(self._shared)
        feed.readers.move_to_end((worker, said.bundle))
        found = reader.decode(said)
        if reader.needs_key and time.monotonic() - feed.asked.get(worker, 0.0) > ASK_AGAIN_S:
            feed.asked[worker] = time.monotonic()
            self.counts.keys_asked += 1
            self._say(self._connection.client.publish(streams.need(worker), job.encode()))
        for heard in found:
            self._take_heard(job, feed, heard, worker, message.time_ns)
        for kept, most in ((feed.readers, MAX_BUNDLES), (feed.workers, MAX_WORKERS), (feed.agents, MAX_LIVES)):
            while len(kept) > most:
                kept.popitem(last=False)

    def _take_heard(self, job: str, feed: _Feed, heard: Heard, worker: str, at_ns: int) -> None:
        agent = feed.agents.get(heard.life)
        if agent is None:
            agent = feed.agents[heard.life] = _Agent(heard.token, heard.node, last=heard.first - 1)
        elif (agent.token, agent.node) != (heard.token, heard.node):
            # Who names the life of another node's agent would have what that says next count as said before.
            self.counts.bad += 1
            self._lines.tell(f"life {heard.life}", f"node {heard.node} of job {heard.token} names the life of another's agent")
            return
        agent.worker = worker
        if heard.last <= agent.last:
            # Sent on by two workers, one of which died before it could write down that it had.
            self.counts.duplicates += 1
            return
        batch = heard.batch
        missed = heard.missed + max(0, heard.first - agent.last - 1)
        if heard.first <= agent.last:
            # Of a part of it the calls are known: which, nobody can tell any more.
            batch.events, missed = None, missed + 1
        agent.last, agent.sequence = heard.last, agent.sequence + 1 + missed
        batch.sequence = agent.sequence
        self.counts.batches += 1
        self._take(job, heard.life, batch, at_ns)
