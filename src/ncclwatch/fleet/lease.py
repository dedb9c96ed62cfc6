"""Leases: who does something that only one may do, in a bucket of JetStream whose entries vanish when they are not refreshed.

Whoever holds a lease counts its time by a clock that goes on while the process is stopped and the machine sleeps, from *before*
the request that refreshed it. So it never thinks that it holds one for longer than the server does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from nats.errors import Error as NatsError
from nats.js import JetStreamContext, api
from nats.js.errors import KeyNotFoundError, KeyWrongLastSequenceError
from nats.js.kv import KeyValue

from ncclwatch.messaging.nats_stream import replicas
from ncclwatch.messaging.subjects import LEASES

TTL_S = 3.0
"""So long after its last refresh an entry is gone. A judge that dies is replaced after that and one look at the bucket."""
REFRESHES = 3.0
"""Refreshes in that time."""
MARGIN = 0.9
"""Part of the time that a holder counts on: clocks of two machines may run a little apart."""


def boot_clock() -> float:
    """Seconds since the machine started, asleep too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


async def bucket(jetstream: JetStreamContext, ttl_s: float = TTL_S) -> KeyValue:
    """The bucket of leases, made when it is not there. On disk, so that revisions go on rising when the server starts anew."""
    try:
        return await jetstream.key_value(LEASES)
    except NatsError:
        copies = await replicas(jetstream)
        return await jetstream.create_key_value(
            api.KeyValueConfig(bucket=LEASES, ttl=ttl_s, history=1, storage=api.StorageType.FILE, replicas=copies)
        )


async def held(jetstream: JetStreamContext) -> frozenset[str]:
    """Keys of all leases that somebody holds now."""
    info = await jetstream.stream_info(f"KV_{LEASES}", subjects_filter=f"$KV.{LEASES}.>")
    return frozenset(subject.removeprefix(f"$KV.{LEASES}.") for subject in info.state.subjects or ())


@dataclass(slots=True)
class Lease:
    """One lease. ``value`` is another for everybody who may want it. ``epoch`` rises with every holder; 0: not held."""

    jetstream: JetStreamContext
    bucket: KeyValue
    key: str
    value: bytes
    ttl_s: float = TTL_S
    clock: Callable[[], float] = boot_clock
    epoch: int = 0
    _revision: int = 0
    _until: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether it is held now, as far as can be known without asking."""
        return self.clock() < self._until

    async def acquire(self) -> bool:
        """Take it if nobody has it; whether it is held now."""
        began = self.clock()
        try:
            self._revision = await self.bucket.create(self.key, self.value)
        except (KeyWrongLastSequenceError, KeyNotFoundError):
            # Somebody has it, or had it until just now.
            return False
        self.epoch = self._revision
        self._until = began + self.ttl_s * MARGIN
        return True

    async def refresh(self) -> bool:
        """Hold it for longer; ``False`` when it was lost. Raises errors of the connection: it is held until its time is over."""
        if not self.epoch:
            return False
        began = self.clock()
        try:
            revision = await self.bucket.update(self.key, self.value, last=self._revision)
        except KeyWrongLastSequenceError:
            found = await self._mine()
            if found is None:
                self.give_up()
                return False
            # A refresh before this one arrived, and its answer did not.
            self._revision = found
            return self.holds
        self._revision = revision
        self._until = began + self.ttl_s * MARGIN
        return True

    async def _mine(self) -> int | None:
        try:
            entry = await self.bucket.get(self.key)
        except KeyNotFoundError:
            return None
        return entry.revision if entry.value == self.value else None

    def give_up(self) -> None:
        """Do as if it was not held."""
        self._until = 0.0
        self.epoch = 0

    async def release(self) -> None:
        """Let somebody else have it at once."""
        mine, revision = self.epoch != 0, self._revision
        self.give_up()
        if mine:
            # Up to its own number, so that nobody else's is touched; what cannot be released runs out by itself.
            with contextlib.suppress(NatsError, TimeoutError):
                await self.jetstream.purge_stream(f"KV_{LEASES}", seq=revision + 1, subject=f"$KV.{LEASES}.{self.key}")
