"""The agent of a node: the collector's batches, encoded, put into the spool, and carried to the engine by a link."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.messaging.keys import Key
from ncclwatch.messaging.link import AgentLink
from ncclwatch.messaging.spool import Spool
from ncclwatch.messaging.transport import AgentTransport, LinkMaker
from ncclwatch.messaging.writer import BatchWriter, ledger_calls
from ncclwatch.model.rows import joined

HISTORY_CALLS = 120_000
"""Calls kept for an engine that begins anew: several times what its ledger keeps of eight ranks."""
KEY_EVERY = 600
"""Batches after which one builds on nothing, so that a spool of which the beginning was dropped can be read again."""


class History:
    """The newest calls, by the number of the batch they were in. Used by two threads.

    They are kept as they were sent: an agent holds them for days and may never be asked, so they are not encoded for that.
    """

    def __init__(self, max_calls: int = HISTORY_CALLS) -> None:
        self._lock = threading.Lock()
        self._kept: deque[tuple[int, bytes, int]] = deque()
        self._writer = BatchWriter(calls="all", grouped=True)
        self._calls = 0
        self._max = max_calls

    def add(self, n: int, batch: NodeBatch, data: bytes) -> None:
        """Keep the calls of a batch, which are those of a ledger; ``data`` is the batch as it was sent."""
        events = batch.events
        if events is None or not len(events):
            return
        # Samples and windows are several times what calls take.
        kept = self._writer.encode(_calls_alone(batch)) if batch.looked else data
        with self._lock:
            self._kept.append((n, kept, len(events)))
            self._calls += len(events)
            while self._calls > self._max and len(self._kept) > 1:
                self._calls -= self._kept.popleft()[2]

    def before(self, n: int) -> NodeBatch | None:
        """A batch of the calls of batches before number ``n``."""
        from ncclwatch.messaging.reader import BatchReader

        with self._lock:
            found = [kept for number, kept, _ in self._kept if number < n]
        # Each by a reader of its own: calls build on nothing.
        batches = [BatchReader().decode(kept).batch for kept in found]
        if not batches:
            return None
        newest = _calls_alone(batches[-1])
        newest.events = joined([batch.events for batch in batches if batch.events is not None])
        return newest


def _calls_alone(batch: NodeBatch) -> NodeBatch:
    """A batch without what a look showed and what happened."""
    return replace(
        batch,
        samples=(),
        windows=(),
        changes=(),
        ends=(),
        looks=(),
        gpus=None,
        notes=(),
        problems=(),
        network=None,
        all_flows=(),
        paths=(),
        work=(),
        looked=False,
    )


class Agent:
    """Takes batches and gets them to an engine. ``spool_folder`` ``None`` keeps what is not sent in memory.

    ``link`` makes another transport than ZeroMQ to ``address``; of its batches one in ``key_every`` builds on nothing.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: tuple[Key, bytes] | None = None,
        token: str = "",
        host: str = "",
        spool_folder: Path | None = None,
        spool_bytes: int = 64 << 20,
        spool_age_s: float = 3600.0,
        link: LinkMaker | None = None,
        key_every: int = KEY_EVERY,
    ) -> None:
        self.life = os.urandom(8).hex()
        self.spool = Spool(self.life, spool_folder, spool_bytes, spool_age_s)
        self._left_behind = len(self.spool)
        self.writer = BatchWriter(calls="all", key_every=key_every, grouped=True)
        self._history = History()
        self._key_wanted = threading.Event()
        self._n = 0
        self._lost = 0
        make = link or partial(AgentLink, address, keys=keys)
        self.link: AgentTransport = make(self.spool, host=host, token=token, request_key=self._key_wanted.set, history=self._past)

    @property
    def missed_s(self) -> float | None:
        """For how long no agent ran here before this one, as far as the spool tells."""
        return None if self.spool.last_alive is None else max(0.0, time.time() - self.spool.last_alive)

    def engine_time_ns(self) -> int:
        """CLOCK_REALTIME of the engine, as far as it is known."""
        return time.time_ns() + (self.link.status.clock_offset_ns or 0)

    def start(self) -> list[str]:
        """Connect. Returns what has to be said with the first batch: what this agent's predecessor left, what nobody saw."""
        notes = []
        if self.missed_s is not None:
            notes.append(f"no agent ran here for {self.missed_s:.1f} s: calls of that time were not seen")
        if self._left_behind:
            notes.append(f"{self._left_behind} batches of the agent before are sent first")
        self.link.start()
        return notes

    def take(self, batch: NodeBatch) -> None:
        """Send a batch, now or when the engine can be reached. Never waits."""
        status = self.link.status
        batch.clock_offset_ns, batch.clock_error_ns = status.clock_offset_ns, status.clock_error_ns
        if self._key_wanted.is_set():
            self._key_wanted.clear()
            self.writer.request_key()
        self.writer.changed = 0
        batch.events = None if batch.events is None else ledger_calls(batch.events)
        data = self.writer.encode(batch)
        # What verdicts are made of: what happened, what was lost, and a standstill (which is when nobody shows anything new).
        happened = bool(batch.changes or batch.ends or batch.looks or batch.notes or batch.finished or batch.lost != self._lost)
        relevant = happened or (batch.looked and not self.writer.changed) or self.writer.was_key
        self._lost = batch.lost
        self._history.add(self._n, batch, data)
        self.link.offer(self._n, data, relevant=relevant)
        self._n += 1

    def close(self) -> None:
        """Send what can still be sent, and end."""
        self.link.close()

    def _past(self, n: int) -> bytes | None:
        past = self._history.before(n)
        return None if past is None else BatchWriter(calls="all").encode(past)
