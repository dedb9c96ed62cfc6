"""Records the batches of a node in a thread of its own: whoever collects hands them over and never waits for a disk."""

from __future__ import annotations

import json
import platform
import queue
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ncclwatch import __version__
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.messaging.packing import is_key
from ncclwatch.messaging.writer import BatchWriter, Calls
from ncclwatch.store.container import Kind
from ncclwatch.store.writer import ContainerWriter, Full, TooLarge

QUEUE = 256
"""Batches that may wait: a minute of a disk that does not answer."""
SYNC_S = 10.0
RETRY_S = 5.0
"""How often a full disk is tried again."""
KEY_EVERY = 240
"""Batches between two that build on nothing: about a minute, the finest grain of a seek."""


@dataclass(frozen=True, slots=True)
class Status:
    """How a recording is going. ``problem`` is a line for people, empty while everything is written."""

    batches: int
    written: int
    dropped: int
    problem: str


class Recorder:
    """Writes batches to a file until ``close``. Raises ``UsageError`` when the file cannot be made; later nothing is raised."""

    def __init__(
        self, path: Path, *, cap_bytes: int | None = None, calls: Calls = "ledger", about: dict[str, Any] | None = None
    ) -> None:
        self.path = path
        self._file = ContainerWriter(path, cap_bytes=cap_bytes)
        self._encoder = BatchWriter(calls=calls, key_every=KEY_EVERY)
        self._meta = meta(about or {})
        self._queue: queue.Queue[NodeBatch | None] = queue.Queue(QUEUE)
        self._sequence = 0
        self._batches = 0
        self._dropped = 0
        self._unsaid = 0
        self._problem = ""
        self._retry_at = 0.0
        self._synced = time.monotonic()
        self._reason = "ended"
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    @property
    def status(self) -> Status:
        """How it is going."""
        return Status(self._batches, self._file.written, self._dropped, self._problem)

    def put(self, batch: NodeBatch) -> None:
        """Hand over a batch. Never waits: where the disk does not keep up it is dropped and counted."""
        if is_empty(batch):
            return
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            self._lose("the disk does not keep up")

    def close(self, reason: str = "ended") -> Status:
        """Write what waits, say why it ended, and close the file."""
        self._reason = reason
        try:
            self._queue.put(None, timeout=5.0)
        except queue.Full:
            return self.status
        self._thread.join(10.0)
        return self.status

    # --- in the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            batch = self._queue.get()
            if batch is None:
                break
            self._write(batch)
            if time.monotonic() - self._synced > SYNC_S:
                self._file.sync()
                self._synced = time.monotonic()
        try:
            if self._file.segment:
                self._file.append(Kind.END, _json({"reason": self._reason, "dropped": self._dropped}), time_ns=time.time_ns())
        except (Full, TooLarge):
            pass
        self._file.sync()
        self._file.close()

    def _write(self, batch: NodeBatch) -> None:
        if self._retry_at and time.monotonic() < self._retry_at:
            self._lose(self._problem)
            return
        self._sequence += 1
        batch = msgspec.structs.replace(batch, sequence=self._sequence)
        try:
            if not self._file.segment or self._unsaid:
                self._begin(batch.wall_ns)
            self._append(self._encoder.encode(batch), batch)
        except Full as error:
            self._retry_at = time.monotonic() + RETRY_S
            self._lose(f"{self.path} cannot be written ({error}): recording pauses, and goes on when there is room")
            return
        except TooLarge:
            self._lose("a look is larger than a slot of the ring: allow the recording more room (--max-size)")
            return
        self._retry_at, self._problem = 0.0, ""
        self._batches += 1

    def _append(self, data: bytes, batch: NodeBatch) -> None:
        key = is_key(data)
        if not self._file.room(len(data)):
            # The next slot has to be readable by itself.
            self._begin(batch.wall_ns)
            data, key = self._encoder.encode(batch), True
        elif key and self._file.header.slot_bytes == 0:
            self._file.begin_segment()
        self._file.append(Kind.BATCH, data, time_ns=batch.wall_ns, key=key)

    def _begin(self, wall_ns: int) -> None:
        """Begin a segment: who we are, what is missing, and then a batch that builds on nothing."""
        self._encoder.request_key()
        self._file.begin_segment()
        try:
            self._file.append(Kind.META, self._meta, time_ns=wall_ns, key=True)
        except Full:
            # Tried again in the same slot: the others hold what was recorded before.
            self._file.segment -= 1
            raise
        if self._unsaid:
            self._file.append(Kind.GAP, _json({"dropped": self._unsaid, "reason": self._problem}), time_ns=wall_ns)
            self._unsaid = 0

    def _lose(self, problem: str) -> None:
        self._dropped += 1
        self._unsaid += 1
        self._problem = problem


def is_empty(batch: NodeBatch) -> bool:
    """Whether a batch says nothing."""
    events = batch.events is not None and len(batch.events) > 0
    said = batch.looked or events or batch.changes or batch.notes or batch.finished or batch.problems
    return not said and getattr(batch, "network", None) is None


def meta(about: dict[str, Any]) -> bytes:
    """What begins every segment: who recorded what, where."""
    return _json(
        {
            "ncclwatch": __version__,
            "host": platform.node(),
            "kernel": platform.release(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            **about,
        }
    )


def _json(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()
