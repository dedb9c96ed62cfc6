"""What one node saw since the last time it said so: the unit that is judged, sent to an engine, and recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from numpy.typing import NDArray

from ncclwatch.collect.windows import RankWindow
from ncclwatch.model.failure import ProcessEnd
from ncclwatch.model.gpu import GpuLook
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.looks import ProcessLook
from ncclwatch.model.network import FlowRecord, NetworkLook
from ncclwatch.model.paths import Probe
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.model.work import FlowWindow


class Change(StrEnum):
    """What happened to a process."""

    STARTED = "started"
    EXITED = "exited"
    REPLACED = "replaced"
    UNREADABLE = "unreadable"
    READABLE = "readable"


@dataclass(frozen=True, slots=True)
class ProcessChange:
    """Something that happened to one process, in words."""

    change: Change
    pid: int
    info: ProcessInfo | None
    detail: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class PlaneState:
    """One way of looking at the processes of a node (``state``, ``calls``, ``wire``, ``nic``, ``device``, ``paths``, ``stacks``):
    whether it works.
    """

    name: str
    running: bool
    reason: str = ""
    """Why it does not; empty while it does."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """What watching costs: probe hits and their estimated cost as a share of one core; our own CPU share and memory.

    ``wire_share`` is the largest share of its time that any thread has paid for bursts of probes on work requests so far, by the
    governor's bill, ``wire_budget`` the share it may be, ``wire_bursts`` how many there were. ``search_share`` is the
    share of all the node's CPUs that samples take while a culprit is looked for.
    """

    hits_per_s: float | None
    probe_share: float | None
    own_share: float
    rss_bytes: int
    wire_share: float | None = None
    wire_budget: float | None = None
    wire_bursts: int = 0
    search_share: float = 0.0


class BatchHead(msgspec.Struct, kw_only=True):
    """Whose batch it is, of when, and how much it says.

    ``sequence`` counts the batches of one life of a collector from 0, so that a missing one is noticed. ``time_ns`` is
    CLOCK_MONOTONIC of the node and ``wall_ns`` its CLOCK_REALTIME, both when the batch was closed. A batch with ``looked`` holds
    the newest sample of every process that could be read (one that ended with run state ``X``) and a window for every process;
    one without holds only what came in between. ``lost`` counts call records lost since the collector began.
    """

    host: str
    boot_id: str
    sequence: int
    time_ns: int
    wall_ns: int
    interval_s: float = 1.0
    """Seconds between two looks: who hears nothing for much longer must not go on believing the last one."""
    looked: bool = False
    complete: bool = False
    """Every NCCL process of the host is watched, so that one that is not in ``samples`` does not exist."""
    lost: int = 0
    finished: str = ""
    """Why this was the last batch; empty while the collector goes on."""


class NodeBatch(BatchHead, kw_only=True):
    """Everything one node has to say since its last batch."""

    samples: tuple[ProcessSample, ...] = ()
    windows: Sequence[RankWindow] = ()
    problems: tuple[tuple[ProcessKey, str], ...] = ()
    """Processes whose newest look failed, and why; their sample is the one before."""
    events: NDArray[Any] | None = None
    """Call records (``EVENT_DTYPE``) in the order of the ring; ``None`` or empty when there were none."""
    changes: tuple[ProcessChange, ...] = ()
    ends: tuple[ProcessEnd, ...] = ()
    """Watched processes that have ended, when and how; also of one that is a zombie yet."""
    looks: tuple[ProcessLook, ...] = ()
    """Processes that an order wanted looked at."""
    gpus: GpuLook | None = None
    """The state of this node's GPUs, with such looks."""
    notes: tuple[str, ...] = ()
    planes: tuple[PlaneState, ...] = ()
    overhead: Overhead | None = None
    """Over the last seconds; not with every batch."""
    network: NetworkLook | None = None
    """NICs, at every look; changes of links and lines of the kernel's log whenever there are any."""
    all_flows: Sequence[FlowRecord] = ()
    """Every flow, where there are more than ``network`` holds; not with every batch."""
    paths: tuple[Probe, ...] = ()
    """Which source port takes which path, as 'ncclwatch paths probe' told; when that is new, and twice a minute."""
    work: Sequence[FlowWindow] = ()
    """Windows of work requests and of sockets that came since the last batch: none between two bursts."""
    clock_offset_ns: int | None = None
    """What has to be added to ``wall_ns`` to give the engine's CLOCK_REALTIME, measured by messages there and back."""
    clock_error_ns: int | None = None
    """By how much that is off at most."""
