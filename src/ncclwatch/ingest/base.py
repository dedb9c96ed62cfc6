"""What a format of another tool is, and what is read from its files: batches, as a node's collector would have sent them.

A format is recognised by content, never by a file's name alone. What its files do not say stays unknown in the records: no
time is made up, no count filled in. Files are untrusted: what is read of them is bounded in size and in memory.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.ledger import DEEPEST
from ncclwatch.errors import TargetError
from ncclwatch.model.verdict import Verdict

HEAD_BYTES = 4096
"""Bytes from the beginning of a file by which its format is told."""
NEWEST_S = 1 << 33
"""Bound: seconds since the epoch (the year 2242): nanoseconds are kept in 63 bits."""


class IngestError(TargetError):
    """A file of another tool that cannot be read; the message names the file and the place in it."""


def changed_ns(status: os.stat_result) -> int:
    """When a file was changed last, CLOCK_REALTIME; a file may bring any time with it."""
    return min(max(status.st_mtime_ns, 0), NEWEST_S * 1_000_000_000)


def unchanged(verdict: Verdict) -> Verdict:
    """What nobody has anything to add to."""
    return verdict


def nothing(_: Verdict) -> bool:
    """No verdict."""
    return False


@dataclass(frozen=True, slots=True)
class View:
    """The same job by another count that its files keep (what GPUs have begun, what they have ended), as batches.

    It is judged where all before it named nobody, or where it is finer (``over``); with one that is not, those behind it are not
    judged, either. ``amend`` puts the verdict into the words of
    that count.
    """

    batches: Sequence[NodeBatch]
    amend: Callable[[Verdict], Verdict] = unchanged
    over: Callable[[Verdict], bool] = nothing
    """Whether it takes the place of a verdict that names somebody, where it names somebody, too."""
    in_order: bool = True
    """Whether its records are all that a process called, in the order of its calls: else that order proves nothing."""


@dataclass(frozen=True, slots=True)
class Ingested:
    """What the files of one format say of one job.

    ``batches`` in the order of their time, for :class:`ncclwatch.engine.session.DiagnosisSession`. ``problems``: files, or parts
    of them, that could not be read, a line each with file and place; the rest was read. ``blind``: what this format cannot tell,
    a line each, for "not observed".
    """

    batches: Sequence[NodeBatch] = ()
    problems: Sequence[str] = ()
    blind: Sequence[str] = ()
    notes: Sequence[str] = field(default=())
    """What a reader ought to know besides, a line each."""
    job: str = ""
    """What tells this job from others of the same format, as the names of its files have it; empty where nothing does."""
    source: object = None
    """What it was made of, for who joins it with another format of the same job (:mod:`ncclwatch.ingest.joined`)."""
    stages: bool = True
    """Whether stages of an iteration may be learned from its calls: that takes long, and a format may name them itself."""
    slowness: bool = True
    """Whether slowness may show in its calls: else the times of iterations, which take long, are left alone."""
    depth: int = DEEPEST
    """Collectives of one rank on one communicator that its batches hold at most: for more no room is made."""
    views: Sequence[View] = ()
    """Further views of the job, in the order in which they are judged."""
    large: bool = False
    """Whether a view takes so long to be judged that two are judged at a time."""
    amend: Callable[[Verdict], Verdict] = unchanged
    """Adds to each verdict what no record of the engine holds: names of groups, times of calls."""
    finish: Callable[[Verdict], Verdict] = unchanged
    """Adds to what stands in the end what takes long to find: lines of a program."""


class Format(ABC):
    """One format of another tool."""

    name: str
    """Short, as ``--format`` and the documents have it: ``flight-recorder``."""
    what: str
    """One clause for people: ``PyTorch Flight Recorder dump``."""

    @abstractmethod
    def recognises(self, head: bytes, path: Path) -> bool:
        """Whether a file that begins with ``head`` (at most ``HEAD_BYTES``) is of this format. Reads no more than that, except
        where content cannot be told otherwise (the tables of an SQLite file), and then bounded."""

    @abstractmethod
    def read(self, files: Sequence[Path]) -> Sequence[Ingested]:
        """The jobs in files of this format, one item a job. Raises :class:`IngestError` when nothing at all could be read."""
