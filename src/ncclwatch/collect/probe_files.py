"""Files of 'ncclwatch paths probe', read again when they change: what they tell goes into this node's batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ncclwatch.errors import NcclwatchError
from ncclwatch.model.paths import Probe

AGAIN_S = 30.0
"""All is told again after so long: an engine may have come later, or anew."""


class ProbeFiles:
    """``news`` are the probes of the files: at first, whenever one has changed, and after :data:`AGAIN_S`."""

    def __init__(self, files: Sequence[Path] = ()) -> None:
        self._files = list(files)
        self._stamps: list[tuple[int, int, int] | None] = []
        self._next = 0.0
        self._notes: list[str] = []

    def news(self, now: float) -> tuple[Probe, ...]:
        """The probes where they are due, by time of ``time.monotonic``; else nothing. A file that cannot be read is noted."""
        if not self._files:
            return ()
        stamps = [_stamp(file) for file in self._files]
        if stamps == self._stamps and now < self._next:
            return ()
        from ncclwatch.paths import probed

        changed, self._stamps, self._next = stamps != self._stamps, stamps, now + AGAIN_S
        found: list[Probe] = []
        for file in self._files:
            try:
                found += probed.read(probed.read_bytes(file, hint="run 'ncclwatch paths probe -o FILE'"), str(file))
            except NcclwatchError as error:
                self._notes += [f"probes of paths: {error}"] if changed else []
        return tuple(found)

    def notes(self) -> tuple[str, ...]:
        """What could not be read, since the last time."""
        notes, self._notes = tuple(self._notes), []
        return notes


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
