"""How batches get from agents to engines: what a transport offers to either side, whatever carries the bytes.

An agent's side takes encoded batches and never makes the collector wait; a batch leaves the spool when the other side vouches
for it. An engine's side hands on decoded batches, each once, and carries orders and allowances back. ZeroMQ (``link.py``,
``hub.py``) needs no server; NATS JetStream (``nats_link.py``, ``nats_hub.py``) holds what an engine has not heard yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.errors import NcclwatchError
from ncclwatch.messaging.spool import Spool
from ncclwatch.model.work import WorkOrder

NOT_YET = "not connected yet"

Take = Callable[[str, str, NodeBatch], None]
"""What is done with a batch: its job, the life of an agent it is of, the batch."""


@dataclass(slots=True)
class LinkStatus:
    """How it stands; read by other threads, each field by itself."""

    connected: bool = False
    reason: str = NOT_YET
    """Why not; empty while connected."""
    engine: str = ""
    sent_batches: int = 0
    sent_bytes: int = 0
    waiting: int = 0
    """Batches in the spool that the other side does not vouch for."""
    clock_offset_ns: int | None = None
    clock_error_ns: int | None = None


@dataclass(slots=True)
class HubCounts:
    """What was heard and what was turned away since the beginning."""

    batches: int = 0
    nbytes: int = 0
    duplicates: int = 0
    bad: int = 0
    refused_keys: int = 0
    failed_handshakes: int = 0
    refused_peers: int = 0
    keys_asked: int = 0
    flooded: int = 0
    """Batches that were not heard because their node said too many."""
    missed: int = 0
    """Batches that a stream lost before they were heard."""


class EngineUnreachableError(NcclwatchError):
    """No engine answers, or it does not take us."""


class AgentTransport(Protocol):
    """Carries the batches of one agent. All methods return at once, but ``close``."""

    status: LinkStatus
    on_order: Callable[[], None]
    """Called, by a thread of the transport, when an order has come."""
    on_ease: Callable[[bool, bool], None]
    """The same when the engine says whether all goes well, and whether more looks are wanted."""

    def start(self) -> None:
        """Begin to connect."""

    def offer(self, n: int, data: bytes, *, relevant: bool) -> None:
        """Hand over batch number ``n``; ``relevant``: a verdict is made of it, so the spool keeps it longest."""

    def take_news(self) -> list[str]:
        """What happened to the connection since the last time, in words."""

    def take_orders(self) -> list[WorkOrder]:
        """What the engine has ordered since the last time."""

    def close(self, *, flush_s: float = 2.0) -> None:
        """Send what can be sent in ``flush_s`` seconds, and end; the rest stays in the spool."""


class LinkMaker(Protocol):
    """Makes the transport of an agent, which owns its spool from then on (but for ``lives`` and ``last_alive``)."""

    def __call__(
        self,
        spool: Spool,
        *,
        host: str,
        token: str,
        request_key: Callable[[], None],
        history: Callable[[int], bytes | None],
    ) -> AgentTransport:
        """``request_key`` and ``history`` as of :class:`ncclwatch.messaging.link.AgentLink`."""


class EngineTransport(Protocol):
    """What an engine hears and says. Not for several threads at once."""

    counts: HubCounts
    engine: str
    """A random name of this life of the engine."""
    address: str

    @property
    def npeers(self) -> int:
        """Agents and viewers that are there."""

    @property
    def unheard_s(self) -> float:
        """For how long there has always been more to hear than was heard; 0 while everything is."""

    def poll(self, timeout_s: float) -> int:
        """Hear what there is, waiting at most ``timeout_s`` for the first; returns how many messages were taken."""

    def take_news(self) -> list[str]:
        """Lines about what was turned away, each kind at most once a minute."""

    def tell(self, kind: str, text: str) -> None:
        """Say something with the next news, each kind at most once a minute."""

    def viewers(self, job: str) -> Sequence[bytes]:
        """Those who want to see a job; a new one needs a view that builds on none before it."""

    def show(self, job: str, payload: bytes) -> None:
        """Send a view to all viewers of a job; who does not read it misses it."""

    def order(self, number: str, order: WorkOrder) -> bool:
        """Send an order to the agent of this life; whether it could be sent."""

    def ease(self, number: str, *, well: bool, narrow: bool = False) -> None:
        """Let the agent of this life know whether few looks at its node will do, or more are wanted."""

    def close(self) -> None:
        """Let go."""


HubMaker = Callable[[Take], EngineTransport]
"""Makes the transport of an engine that takes batches so."""


class ViewerTransport(Protocol):
    """What a viewer hears of one job. Not for several threads at once."""

    address: str
    heard: float
    """When the engine was last heard, by ``time.monotonic``."""

    @property
    def welcomed(self) -> bool:
        """Whether somebody takes us."""

    def hear(self, timeout_s: float) -> bytes | None:
        """The next view, waiting at most so long. Raises ``EngineUnreachableError`` when we are refused."""

    def take_news(self) -> list[str]:
        """What is to be said since the last time."""

    def close(self) -> None:
        """Leave."""
