"""Recordings read back: batches of one file or several in the order of time, and the judging session fed with them."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.session import Update
from ncclwatch.errors import TargetError
from ncclwatch.knowledge.session import InformedSession
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.model.paths import Probe
from ncclwatch.remote.iterations import Timed, recent_iterations
from ncclwatch.slow_modes import SlowRule
from ncclwatch.store.container import Container, FrameRef, Kind
from ncclwatch.text import clean, duration, size

MAX_META = 1 << 16
MAX_PROBLEMS = 100
JUDGE_NS = 200_000_000
"""Looks of several nodes within this time of each other are judged together."""


@dataclass(slots=True)
class Recording:
    """One file: its frames, what it says of itself, and what is wrong with it. Times are ns since the epoch."""

    path: Path
    container: Container
    frames: list[FrameRef] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    dropped: int = 0
    """Batches that the recorder could not write."""
    ended: str = ""
    """Why it ended, as the recorder said; empty when it was killed or still runs."""
    problems: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path) -> Recording:
        """Read the list of frames. Raises ``TargetError`` when it holds nothing."""
        recording = cls(path, Container(path))
        for frame in recording.container.frames():
            if frame.kind == Kind.BATCH:
                recording.frames.append(frame)
            elif frame.kind in (Kind.META, Kind.GAP, Kind.END):
                recording._take(frame)
        name = clean(path.name, 80)
        damaged = recording.container.damaged
        if not recording.frames:
            recording.container.close()
            raise TargetError(f"{name} holds no look", "the recorder was stopped before its first look was written")
        if damaged:
            cut = " at its end: the recorder was killed, or still writes" if recording.container.cut_off else ""
            recording.problems.append(f"{name}: {size(damaged)} could not be read{cut}")
        if recording.dropped:
            recording.problems.append(f"{name}: {recording.dropped} batches were not recorded (disk full, or too slow)")
        return recording

    def _take(self, frame: FrameRef) -> None:
        try:
            data = json.loads(self.container.payload(frame)) if frame.length <= MAX_META else None
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            return
        if frame.kind == Kind.META and not self.meta:
            self.meta = data
        elif frame.kind == Kind.GAP:
            dropped = data.get("dropped")
            self.dropped += dropped if isinstance(dropped, int) and 0 < dropped < 1 << 40 else 0
        elif frame.kind == Kind.END:
            self.ended = clean(str(data.get("reason", "")), 200)

    def start(self, time_ns: int) -> int:
        """Index of the last key frame at or before a time, 0 when there is none."""
        return max((i for i, frame in enumerate(self.frames) if frame.key and frame.time_ns <= time_ns), default=0)


class Recordings:
    """One recording or several, of one node or many; a context manager.

    Raises ``TargetError`` when one cannot be read at all.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._stack = ExitStack()
        self.files: list[Recording] = []
        try:
            for path in paths:
                recording = Recording.open(path)
                self._stack.callback(recording.container.close)
                self.files.append(recording)
        except BaseException:
            self._stack.close()
            raise
        self.begin_ns = min(recording.frames[0].time_ns for recording in self.files)
        self.end_ns = max(recording.frames[-1].time_ns for recording in self.files)

    def __enter__(self) -> Recordings:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    @property
    def problems(self) -> list[str]:
        """What is wrong with the files, in words."""
        return [line for recording in self.files for line in recording.problems]

    def batches(self, from_ns: int = 0) -> Iterator[tuple[int, str, NodeBatch]]:
        """(time, source, batch) in the order of time, from the last key frames before ``from_ns`` on.

        Several recordings of one host are different sources. What cannot be decoded is left out and told in ``problems``.
        """
        streams = [self._batches(i, recording, from_ns) for i, recording in enumerate(self.files)]
        yield from heapq.merge(*streams, key=lambda item: item[0])

    def _batches(self, number: int, recording: Recording, from_ns: int) -> Iterator[tuple[int, str, NodeBatch]]:
        reader = BatchReader()
        failed = 0
        newest = 0
        for frame in recording.frames[recording.start(from_ns) :]:
            try:
                decoded = reader.decode(recording.container.payload(frame))
            except FormatError as error:
                failed += 1
                if failed == 1 and len(recording.problems) < MAX_PROBLEMS:
                    recording.problems.append(f"{clean(recording.path.name, 80)}: a look could not be read: {error}")
                continue
            if decoded.needs_key:
                continue
            # The node's clock may have been set back; what was written later happened later.
            newest = max(newest, frame.time_ns)
            yield newest, f"{decoded.batch.host}#{number}", decoded.batch


class Replay(InformedSession):
    """The judging session over recordings; what surfaces ask of a live session can be asked of it too. ``probes`` are of paths,
    beside those that were recorded.
    """

    def __init__(self, recordings: Recordings, slow: SlowRule | None = None, probes: Sequence[Probe] = ()) -> None:
        self._probes = probes
        self._slow = slow or SlowRule()
        super().__init__(LiveDiagnosis(slow=self._slow.watch()))
        self.recordings = recordings
        self.looks = 0

    def updates(self, from_ns: int = 0) -> Iterator[tuple[int, Update]]:
        """(time in ns since the epoch, update) after every look; the session shows the state of that moment."""
        super().__init__(LiveDiagnosis(slow=self._slow.watch()))
        self.network.ways.take(self._probes)
        self.looks = 0
        due: int | None = None
        time_ns = from_ns
        for time_ns, source, batch in self.recordings.batches(from_ns):
            if due is not None and time_ns - due >= (JUDGE_NS if len(self.recordings.files) > 1 else 0):
                yield due, self.judge(due)
                due = None
            self.feed(batch, time_ns, source=source)
            if batch.looked and due is None:
                due = time_ns
            if batch.looked:
                self.looks += 1
        if due is not None:
            time_ns = max(due, time_ns)
            yield time_ns, self.judge(time_ns)

    # --- what surfaces ask ---------------------------------------------------------------------------------------------

    @property
    def iterations(self) -> list[Timed]:
        """The newest iterations of the moment."""
        return recent_iterations(self.diagnosis)

    def about(self) -> str:
        """The recordings in a line."""
        recordings = self.recordings
        hosts = sorted({clean(str(recording.meta.get("host", "?")), 64) for recording in recordings.files})
        span = duration((recordings.end_ns - recordings.begin_ns) / 1e9)
        return f"{span} of {', '.join(hosts[:4])}{' …' if len(hosts) > 4 else ''}"
