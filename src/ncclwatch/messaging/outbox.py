"""What every agent's side of a transport has: batches on their way into the spool, news and orders on their way out of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ncclwatch.messaging.spool import Spool
from ncclwatch.messaging.transport import LinkStatus
from ncclwatch.model.work import WorkOrder

MAX_ORDERS = 16
"""Orders that wait to be taken; of more the newest count."""
MAX_WAITING = 4096
"""Batches handed over and not yet in the spool; the thread takes them at once unless the disk hangs."""
MAX_NEWS = 100


@dataclass(frozen=True, slots=True)
class Given:
    """A batch that was handed over."""

    n: int
    data: bytes
    relevant: bool


class Outbox:
    """Between an agent's own thread, which offers batches and takes news, and the thread that owns spool and connection."""

    def __init__(self, spool: Spool) -> None:
        self.spool, self.status = spool, LinkStatus()
        self.on_order: Callable[[], None] = lambda: None
        """Called, by the link's own thread, when an order has come."""
        self.on_ease: Callable[[bool, bool], None] = lambda _, __: None
        """The same when the engine says whether all goes well, and whether more looks are wanted."""
        self._given: deque[Given] = deque()
        self._news: deque[str] = deque(maxlen=MAX_NEWS)
        self._orders: deque[WorkOrder] = deque(maxlen=MAX_ORDERS)

    # --- for the agent's own thread ------------------------------------------------------------------------------------

    def offer(self, n: int, data: bytes, *, relevant: bool) -> None:
        """Hand over a batch; returns at once."""
        if len(self._given) >= MAX_WAITING:
            self._given.popleft()
            self._tell("batches were dropped: the spool's disk does not take them")
        self._given.append(Given(n, data, relevant))
        self._wake()

    def take_news(self) -> list[str]:
        """What happened to the connection since the last time, in words."""
        found = []
        while self._news:
            found.append(self._news.popleft())
        return found

    def take_orders(self) -> list[WorkOrder]:
        """What the engine has ordered since the last time."""
        found = []
        while self._orders:
            found.append(self._orders.popleft())
        return found

    # --- for the thread of the connection ------------------------------------------------------------------------------

    def _wake(self) -> None:
        """Let the thread of the connection know that there is something to do."""
        raise NotImplementedError

    def _take_given(self) -> int:
        """Into the spool, within its limits; returns how many batches these cost, so that positions in it have changed."""
        while self._given:
            given = self._given.popleft()
            self.spool.append(given.n, given.data, relevant=given.relevant)
        gone = self.spool.enforce()
        if gone:
            dropped = self.spool.take_dropped()
            if dropped.batches:
                begin, end = (time.strftime("%H:%M:%S", time.localtime(t)) for t in (dropped.first, dropped.last))
                self._tell(f"{dropped.batches} batches from {begin} to {end} were dropped: the spool is full or they are too old")
        self.status.waiting = len(self.spool)
        return gone

    def _tell(self, text: str) -> None:
        if not self._news or self._news[-1] != text:
            self._news.append(text)
