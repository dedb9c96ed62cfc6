"""How NCCL's choices use the links they were given: what was seen in some seconds, and what is advised.

Plain data. Rates are bytes a second, shares lie between 0 and 1, ``None`` is not known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """An operation as NCCL chose to run it: ``AllReduce``, ``Ring``, ``LL``."""

    collective: str
    algorithm: str
    protocol: str

    def __str__(self) -> str:
        return f"{self.collective} by {self.algorithm}/{self.protocol}"


@dataclass(frozen=True, slots=True)
class FlowUse:
    """A connection that sent something. ``busy`` is the share of the time in which it had something under way.

    ``sockets`` is 0 where it is none of TCP's. ``resent`` is the share of what it sent that was sent again, ``window_limited``
    that of its busy time in which the window of the other end was full.
    """

    comm_hash: int
    rank: int
    peer: int
    channel: int
    rate: float | None
    busy: float
    sockets: int = 0
    rtt_us: int | None = None
    min_rtt_us: int | None = None
    resent: float | None = None
    window_limited: float | None = None


class CapacityFrom(StrEnum):
    """Who says what a link can carry."""

    TOLD = "told"
    DRIVER = "driver"


@dataclass(frozen=True, slots=True)
class LinkUse:
    """A NIC and what the job sent through it. ``moving`` is the share of the time in which an operation of a process that uses it
    was under way; ``capacity`` is of one direction.
    """

    host: str
    namespace: int
    name: str
    moving: float
    send_rate: float | None
    receive_rate: float | None
    flows: tuple[FlowUse, ...]
    capacity: float | None = None
    capacity_from: CapacityFrom | None = None

    @property
    def rate_moving(self) -> float | None:
        """The direction that carried more, while operations moved."""
        rates = [rate for rate in (self.send_rate, self.receive_rate) if rate is not None]
        return max(rates) / self.moving if rates and self.moving else None


@dataclass(frozen=True, slots=True)
class CommunicatorUse:
    """A communicator that moved data over a network: ``kinds`` share the time in which its operations moved.

    ``moving`` is the share of all time, ``operations`` how many were begun meanwhile by one of its ranks.
    """

    comm_hash: int
    nranks: int
    nnodes: int | None
    ranks: tuple[int, ...]
    kinds: dict[Kind, float]
    moving: float
    operations: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """A process: ``periods`` are (begin, length) in seconds of the times in which any of its operations moved, each complete."""

    pid: int
    rank: int | None
    moving: float
    periods: tuple[tuple[float, float], ...] = ()
    settings: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TuningLook:
    """What was seen in ``seconds``, by looks ``interval_s`` apart on average."""

    seconds: float
    interval_s: float
    links: tuple[LinkUse, ...]
    communicators: tuple[CommunicatorUse, ...]
    processes: tuple[ProcessUse, ...]


class Exposure(StrEnum):
    """Whether the job waits for its communication: all the time, in part, not (it computes meanwhile), or nobody knows."""

    BOUND = "bound"
    EXPOSED = "exposed"
    HIDDEN = "hidden"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to try. ``faster`` is how many times as fast the operations would be, at least and at most; ``saved`` is what
    this would save of the job's time at most, as a share, ``None`` where it is not known what waits for communication.
    """

    rule: str
    communicator: int
    seen: str
    change: str
    faster: tuple[float, float]
    saved: float | None
    provided: str = ""


@dataclass(frozen=True, slots=True)
class LinkAdvice:
    """What is said of one link: how full it was while operations moved, why nothing is advised, or what is."""

    link: LinkUse
    fill: float | None
    exposure: Exposure
    says: str
    advice: tuple[Advice, ...] = ()
