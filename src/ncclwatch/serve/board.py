"""All jobs of the page, and who looks at them: a moment is made and encoded once, however many look.

Everything here runs in the loop of the server. Whoever does not keep up gets the newest moment whole instead of what it missed:
nobody is ever behind by more than what its own connection holds.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from ncclwatch.serve.feed import Feed
from ncclwatch.serve.snapshot import Snapshot

MAX_PENDING = 4
"""Moments that wait for a reader; one more, and they are replaced by the newest, whole."""
LIST_EVERY_S = 1.0
"""Between two looks at the list of jobs."""
HEARTBEAT_S = 10.0
"""Something is said at least that often, so that a dead connection is found out on both sides."""
MAX_READERS = 1000

_encode = msgspec.json.Encoder().encode


class Reader:
    """One tab: the job it looks at, if any, and what it has not been sent yet."""

    def __init__(self, job: str) -> None:
        self.job = job
        self.moments: list[bytes] = []
        self.jobs: dict[str, bytes] = {}
        self.wake = asyncio.Event()
        self.replaced = 0
        """How often it was so slow that moments were left out."""

    def take(self) -> bytes:
        """What is to be sent now, as server-sent events."""
        told = []
        if self.jobs:
            told.append(b"event: jobs\ndata: [%s]\n\n" % b",".join(self.jobs.values()))
            self.jobs = {}
        told += [b"event: moment\ndata: %s\n\n" % moment for moment in self.moments]
        self.moments = []
        self.wake.clear()
        return b"".join(told)


class Board:
    """The jobs, by their names, in order."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self.feeds: dict[str, Feed] = {feed.job: feed for feed in feeds}
        self._readers: set[Reader] = set()
        self._lines: dict[str, bytes] = {}
        self._before: dict[str, Snapshot] = {}
        self.heard: Callable[[Feed], None] = lambda _feed: None
        """Is told of every moment of every job."""
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def readers(self) -> int:
        """How many tabs are served now."""
        return len(self._readers)

    def start(self) -> None:
        """Begin, in the running loop."""
        loop = self._loop = asyncio.get_running_loop()
        for feed in self.feeds.values():
            self._begin(feed)
        self._tasks.add(loop.create_task(self._keep_list()))

    def add(self, feed: Feed) -> None:
        """One more job, from any thread; one that is there already stays as it is."""
        self._in_loop(self._add, feed)

    def _add(self, feed: Feed) -> None:
        if feed.job not in self.feeds and not self._ended:
            self.feeds[feed.job] = feed
            self._begin(feed)

    def _begin(self, feed: Feed) -> None:
        feed.tell = lambda feed, snapshot: self._in_loop(self._told, feed, snapshot)
        feed.start()

    def _in_loop(self, call: Callable[..., None], *arguments: object) -> None:
        # The loop may be closed by now: then nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call, *arguments)

    async def stop(self) -> None:
        """End all streams and feeds."""
        self._end()
        for task in self._tasks:
            task.cancel()
        for feed in self.feeds.values():
            feed.stop()
        await asyncio.gather(*(asyncio.to_thread(feed.join) for feed in self.feeds.values()))

    def end_streams(self) -> None:
        """Let every reader go; from any thread."""
        self._in_loop(self._end)

    def _end(self) -> None:
        self._ended = True
        for reader in self._readers:
            reader.wake.set()

    async def stream(self, job: str) -> AsyncIterator[bytes]:
        """Server-sent events for one tab, until it goes away: the jobs, and moments of the one it looks at."""
        reader = Reader(job)
        reader.jobs = dict(self._list())
        feed = self.feeds.get(job)
        if feed is not None:
            feed.watched = True
            if feed.newest is not None:
                # What comes next builds on what this loop was told last; the feed's thread may be ahead of it.
                reader.moments.append(self._before.setdefault(job, feed.newest).whole)
        self._readers.add(reader)
        reader.wake.set()
        try:
            while not self._ended:
                try:
                    await asyncio.wait_for(reader.wake.wait(), HEARTBEAT_S)
                except TimeoutError:
                    yield b": still here\n\n"
                    continue
                told = reader.take()
                if told:
                    yield told
        finally:
            self._readers.discard(reader)
            if feed is not None:
                feed.watched = any(other.job == job for other in self._readers)

    def _told(self, feed: Feed, snapshot: Snapshot | None) -> None:
        """Hand a moment on to whoever looks at this job."""
        if snapshot is None:
            self._update_list()
            return
        self.heard(feed)
        before = self._before.get(feed.job)
        if before is not None and snapshot.n <= before.n:
            # A reader that came just now has it already.
            return
        self._before[feed.job] = snapshot
        looking = [reader for reader in self._readers if reader.job == feed.job]
        if not looking:
            return
        change = snapshot.since(before) if before is not None else snapshot.whole
        for reader in looking:
            if len(reader.moments) >= MAX_PENDING:
                reader.moments = [snapshot.whole]
                reader.replaced += 1
            else:
                reader.moments.append(change)
            reader.wake.set()

    def _list(self) -> dict[str, bytes]:
        return {job: _encode(feed.summary()) for job, feed in self.feeds.items()}

    async def _keep_list(self) -> None:
        while True:
            self._update_list()
            await asyncio.sleep(LIST_EVERY_S)

    def _update_list(self) -> None:
        """Tell everybody which lines of the list are others than before."""
        if not self._readers:
            return
        lines = self._list()
        changed = {job: line for job, line in lines.items() if self._lines.get(job) != line}
        self._lines = lines
        for reader in self._readers if changed else ():
            reader.jobs |= changed
            reader.wake.set()
