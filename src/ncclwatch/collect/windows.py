"""The window of a rank: what a person watching the job, or the engine, wants to know of it right now."""

from __future__ import annotations

from dataclasses import dataclass

from ncclwatch.model.state import ProcessInfo
from ncclwatch.model.work import WorkWindow


@dataclass(frozen=True, slots=True)
class CurrentOperation:
    """What a rank is in the middle of. ``plane`` says who saw it: ``state`` (unfinished steps in NCCL's memory) or ``calls``.

    ``age_s`` is a lower bound when ``at_least``: the operation was open at the first look. ``count`` and ``nbytes`` are those of
    the newest call of this kind on this communicator, ``None`` when none was seen. ``others`` counts further open operations.
    ``steps_done`` of ``steps_total`` proxy steps are complete; both are 0 where no proxy is involved.
    """

    name: str
    plane: str
    comm_hash: int
    comm_rank: int | None
    nranks: int | None
    sequence: int | None
    age_s: float
    at_least: bool
    count: int | None = None
    nbytes: int | None = None
    protocol: str = ""
    algorithm: str = ""
    steps_done: int = 0
    steps_total: int = 0
    begun: bool = True
    blocked_call: bool = False
    others: int = 0


@dataclass(frozen=True, slots=True)
class LastCall:
    """The newest operation a rank launched, by host time; it says nothing about when the GPU ran it."""

    name: str
    comm_hash: int
    age_s: float
    count: int
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class RankWindow:
    """One process at one moment. What no plane saw is ``None``.

    ``operations_per_s`` is counted by ``rate_plane``: ``calls`` (every launch was seen) or ``state`` (NCCL's own counters,
    which some versions raise only where this rank has proxy work). ``bytes_per_s`` is algorithm bytes as nccl-tests counts them.
    ``still_s`` is how long no counter of NCCL has moved, ``None`` when it never stood still or was looked at once only.
    """

    time_ns: int
    process: ProcessInfo
    rank: int | None
    gpu: int | None
    run_state: str
    operation: CurrentOperation | None
    last_call: LastCall | None
    calls: int
    operations: int
    operations_per_s: float | None
    rate_plane: str
    bytes_per_s: float | None
    steps_per_s: float | None
    still_s: float | None
    torn: int = 0
    problem: str = ""
    """Why the newest look failed; empty when it succeeded."""
    work: WorkWindow | None = None
    """What its connections over a network carried, all ports together, in the newest window; it stays until there is another."""
