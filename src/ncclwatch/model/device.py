"""Records of the device plane: what the counter shim inside a process says about its GPU (``kernel_counters/frame.h``).

A record holds what was read and no judgement. Times ending in ``_ns`` are CLOCK_MONOTONIC of the machine, of the host's
side; durations are by the GPU's own clock where it gives one. ``None`` stands for what this way in does not give.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class KernelState(StrEnum):
    """Where the GPU is with one operation."""

    UNOBSERVED = "unobserved"
    """NCCL before 2.26 reports no kernels to a plugin, and a captured graph's replays are not reported."""
    NOT_STARTED = "not started"
    """The host has launched it; no channel's kernel has begun."""
    RUNNING = "running"
    """At least one channel has begun and not all have finished."""
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class DeviceOperation:
    """One operation as its GPU sees it.

    ``ordinal`` counts the communicator's operations as the shim saw them, from 1. ``sequence`` is NCCL's ``seqNumber`` of this
    function (collectives, where the interface gives it). ``channels`` is on how many channels it runs, ``started`` and
    ``finished`` on how many the GPU has begun and ended it.
    """

    ordinal: int
    function: str
    point_to_point: bool
    sequence: int | None
    count: int
    peer: int | None
    channels: int | None
    started: int
    finished: int
    observed: bool
    launched_ns: int
    started_ns: int | None = None
    finished_ns: int | None = None
    duration_ns: int | None = None

    @property
    def state(self) -> KernelState:
        """Where the GPU is with it. An operation whose channels are not known counts as finished once those begun have ended."""
        if not self.observed:
            return KernelState.UNOBSERVED
        if not self.started:
            return KernelState.NOT_STARTED
        wanted = max(self.started, self.channels or 0)
        return KernelState.FINISHED if self.finished >= wanted else KernelState.RUNNING


@dataclass(frozen=True, slots=True)
class DeviceChannel:
    """Works (parts of operations) that the GPU has begun and finished on one channel of a communicator."""

    channel: int
    started: int
    finished: int
    operation: int
    """Ordinal of the operation last begun."""


@dataclass(frozen=True, slots=True)
class DeviceCommunicator:
    """One communicator as the shim saw it.

    ``inside_address`` lies inside its ``ncclComm`` (or is its own address): that is what joins it with the state plane where hash
    and rank are unknown (profiler interfaces before v4, LD_PRELOAD).
    """

    hash: int | None
    inside_address: int
    rank: int | None
    nranks: int | None
    finished: bool
    operations: int
    collectives: int
    transfers: int
    channels: tuple[DeviceChannel, ...] = ()
    recent: tuple[DeviceOperation, ...] = ()
    """Operations that are not finished, and the last few that are; by ordinal."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class StepWait:
    """What one network transfer of an unfinished proxy operation waits for, and since when."""

    step: int
    state: str
    since_ns: int


@dataclass(frozen=True, slots=True)
class UnfinishedTransfer:
    """A proxy operation that has begun and not ended (ranks are of the communicator; ``owner_pid`` is told apart with PXN)."""

    hash: int | None
    rank: int | None
    channel: int
    peer: int
    is_send: bool
    nsteps: int
    steps_begun: int
    steps_finished: int
    chunk_bytes: int
    begun_ns: int
    changed_ns: int
    operation: int | None = None
    owner_pid: int | None = None
    waits: tuple[StepWait, ...] = ()


@dataclass(frozen=True, slots=True)
class ConnectionCounter:
    """One counter of a connection in GPU memory (CCL-D's SendCount and RecvCount): steps since the connection was made.

    ``head`` is what the receiver has consumed, read by the sender; ``tail`` what the sender has produced, read by the receiver.
    ``changes`` counts how often the value had changed between two rounds of copies.
    """

    comm_address: int
    channel: int
    peer: int
    is_send: bool
    connection_index: int
    counter: str
    value: int | None
    time_ns: int = field(default=0, compare=False)
    changes: int = 0
    changed_ns: int | None = None
    problem: str = ""
    """Why there is no value, or none of this moment."""
    steps_per_s: float | None = field(default=None, compare=False)
    """CCL-D's SendRate or RecvRate: steps a second since the look before; ``None`` at the first."""
    stale: bool = False
    """The value was read longer ago than the sampler's period allows: the process is stopped, or copies do not come back."""


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One look at the frame of one process.

    ``entry`` is ``plugin``, ``preload`` or ``injection``; ``interface`` the version of NCCL's profiler interface, 0 without.
    ``copy_pending_ns``: for how long a round of copies has been under way, ``None`` when none is; longer than a second means that
    the GPU's copy engine (or the driver) does not answer. Two samples are equal when nothing happened between them, whatever the
    time.
    """

    entry: str
    interface: int
    sampler: str
    time_ns: int = field(default=0, compare=False)
    communicators: tuple[DeviceCommunicator, ...] = ()
    transfers: tuple[UnfinishedTransfer, ...] = ()
    counters: tuple[ConnectionCounter, ...] = ()
    heartbeat_ns: int | None = field(default=None, compare=False)
    copy_pending_ns: int | None = None
    events: int = 0
    unmatched: int = 0
    refused: int = 0
    contended: int = 0
    torn: int = 0
    last_error: int = 0

    @property
    def copy_engine_silent(self) -> bool:
        """Whether copies were begun over a second ago and have not come back."""
        return self.copy_pending_ns is not None and self.copy_pending_ns > 1_000_000_000
