"""What an answer of NCCL's RAS says, whatever form it came in.

Text names the ranks that are outliers and counts the others; JSON (2.28.7 and later) names every rank. What an answer does not
say is ``None``. Source: NCCL ``src/ras/client_support.cc``, 2.24.3 to 2.32.3.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_BYTES = 128 << 20
"""Bytes of one answer: 180,000 ranks of communicators in JSON."""
MAX_RANKS = 1 << 20
"""Ranks of a communicator that are believed."""
MAX_NAMED = 1 << 20
"""Ranks of all communicators of an answer together."""


@dataclass(slots=True)
class RasPlace:
    """A rank of a communicator, and which process it is: ``device`` is the CUDA device, ``host`` an address; empty with ``pid`` 0
    where the answer does not say.
    """

    rank: int
    host: str = ""
    pid: int = 0
    device: int | None = None


@dataclass(slots=True)
class RasRank(RasPlace):
    """One that answered. ``counts``: calls of each collective by its name, since the communicator was made; ``None`` where the
    answer tells none.
    """

    counts: dict[str, int] | None = None
    init_state: str | None = None
    async_error: str | None = None
    finalize_called: bool | None = None
    destroyed: bool | None = None
    aborted: bool | None = None


@dataclass(slots=True)
class RasMissing(RasPlace):
    """One of which there is no data. ``unresponsive``: its process did not answer; ``dead``: RAS has not reached that
    process for a minute and counts on it no longer. Neither: its process answered and does not hold the communicator (any more).
    """

    unresponsive: bool | None = None
    dead: bool | None = None


@dataclass(slots=True)
class RasCommunicator:
    """One communicator. ``id`` is the hash with what tells equal hashes apart, where it is given."""

    hash: int
    size: int
    id: str = ""
    ranks: list[RasRank] = field(default_factory=list)
    missing: list[RasMissing] = field(default_factory=list)


@dataclass(slots=True)
class RasProcess:
    """A process that RAS names for itself: one that is dead, or of which data is missing."""

    pid: int
    host: str
    dead: bool
    device: int | None = None


@dataclass(slots=True)
class RasAnswer:
    """One answer. ``time_s``: seconds since the epoch, by its own time stamp, else by when the file was written.

    ``sound``: communicators in which the text found nothing to tell (it names no rank of them), as a line for people.
    """

    source: str
    time_s: float
    stamped: bool = False
    version: tuple[int, int, int] | None = None
    communicators: list[RasCommunicator] = field(default_factory=list)
    processes: list[RasProcess] = field(default_factory=list)
    """Only in text; JSON says it of each missing rank."""
    timeouts: int = 0
    every_rank: bool = False
    """Whether every rank that answered is named with its counts (JSON)."""
    sound: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


RESULTS = (
    "ncclSuccess",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "ncclRemoteError",
    "ncclInProgress",
    "ncclTimeout",
)
"""``ncclResult_t`` by number (``src/nccl.h.in``; the last from 2.30 on)."""


def result_name(number: int) -> str:
    """The name of an ``ncclResult_t``."""
    return RESULTS[number] if 0 <= number < len(RESULTS) else f"ncclResult {number}"


def version_of(text: str) -> tuple[int, int, int] | None:
    """``2.28.7`` or ``2.28.7+cuda12.9`` as numbers."""
    parts = text.partition("+")[0].split(".")[:3]
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 6 for part in parts):
        return None
    major, minor, patch = map(int, parts)
    return major, minor, patch
