"""Work that several processes share, each piece held by one of them by a lease: nodes to hear, jobs to judge.

Every process says that it is there, by a lease of its own, and takes its share of what nobody holds. What is left over is
taken by whoever sees it first, share or not: nothing stays undone because one of those that share is slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import zlib
from collections.abc import Collection

from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError
from nats.js.kv import KeyValue

from ncclwatch.errors import NcclwatchError
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.lease import REFRESHES, TTL_S, Lease, bucket, held

LOOKS = 6.0
"""Looks at the bucket in the time that a lease runs for."""
SPARE_PART = 1 / 3
"""What nobody has taken for such a part of that time is taken by those that have their share."""
STUCK_S = 120.0
"""A process that works on one thing for longer is stuck: its leases run out."""


class Share:
    """The leases of one process. ``kind`` is what it does, ``name`` its own; ``wanted`` are all pieces there are.

    A thread of the connection keeps the leases. Whoever does the work calls ``beat`` while it does, and looks at ``mine``.
    """

    def __init__(self, connection: Connection, kind: str, name: str, *, ttl_s: float = TTL_S) -> None:
        self._connection, self._kind, self._name, self._ttl_s = connection, kind, name, ttl_s
        self.wanted: Collection[str] = ()
        self.share = 0
        """How many it may have as long as others want some."""
        self._bucket: KeyValue | None = None
        self._presence: Lease | None = None
        self._mine: dict[str, Lease] = {}
        self._free_since: dict[str, float] = {}
        self._refreshed: dict[str, float] = {}
        self._released: set[str] = set()
        self._beat = time.monotonic()
        self._stop = connection.spawn(self._keep())

    @property
    def mine(self) -> dict[str, Lease]:
        """What it holds now."""
        return {piece: lease for piece, lease in self._mine.copy().items() if lease.holds}

    @property
    def leaving(self) -> frozenset[str]:
        """What it is about to let go of."""
        return frozenset(self._released)

    def beat(self) -> None:
        """The work goes on."""
        self._beat = time.monotonic()

    def release(self, piece: str) -> None:
        """Let somebody else do this."""
        self._released.add(piece)

    def close(self) -> None:
        """Let others do all of it at once."""
        self._stop()
        with contextlib.suppress(NcclwatchError):
            self._connection.call(self._release_all())

    async def _release_all(self) -> None:
        leases = [*self._mine.values(), *([self._presence] if self._presence is not None else ())]
        self._mine.clear()
        await asyncio.gather(*(lease.release() for lease in leases))

    async def _keep(self) -> None:
        while True:
            try:
                if time.monotonic() - self._beat <= STUCK_S:
                    await self._look()
            except NotFoundError:
                # A server that has lost its store.
                self._bucket = None
            except (NatsError, TimeoutError, OSError):
                # Nothing can be refreshed now: each lease says by itself how long it is held.
                pass
            await asyncio.sleep(self._ttl_s / LOOKS)

    async def _look(self) -> None:
        if self._bucket is None:
            self._bucket = await bucket(self._connection.jetstream, self._ttl_s)
        if self._presence is None:
            self._presence = self._lease(self._bucket, f"{self._kind}s.{self._name}")
        if not self._presence.holds:
            await self._presence.acquire()
        for piece in list(self._released):
            if piece in self._mine:
                await self._mine.pop(piece).release()
                # Those who have less than their share come first.
                self._free_since[piece] = time.monotonic()
            self._released.discard(piece)
        await asyncio.gather(*map(self._refresh, [self._presence, *self._mine.values()]))
        self._mine = {piece: lease for piece, lease in self._mine.items() if lease.holds}
        await self._take(self._bucket)

    async def _refresh(self, lease: Lease) -> None:
        due = time.monotonic() - self._refreshed.get(lease.key, 0.0) >= self._ttl_s / REFRESHES
        if lease.holds and due and await lease.refresh():
            self._refreshed[lease.key] = time.monotonic()

    async def _take(self, entries: KeyValue) -> None:
        now, keys, wanted = time.monotonic(), await held(self._connection.jetstream), list(self.wanted)
        members = sum(key.startswith(f"{self._kind}s.") for key in keys)
        self.share = math.ceil(len(wanted) / max(1, members))
        free = [piece for piece in wanted if self._key(piece) not in keys and piece not in self._mine]
        self._free_since = {piece: self._free_since.get(piece, now) for piece in free}
        # Everybody begins elsewhere, so that two seldom want the same.
        free.sort(key=lambda piece: zlib.crc32(f"{self._name} {piece}".encode()))
        for piece in free:
            left_over = now - self._free_since[piece] >= SPARE_PART * self._ttl_s
            if len(self._mine) >= self.share and not left_over:
                continue
            lease = self._lease(entries, self._key(piece))
            if await lease.acquire():
                self._mine[piece] = lease
                self._refreshed[lease.key] = now

    def _key(self, piece: str) -> str:
        return f"{self._kind}.{piece}"

    def _lease(self, entries: KeyValue, key: str) -> Lease:
        return Lease(self._connection.jetstream, entries, key, self._name.encode(), self._ttl_s)
