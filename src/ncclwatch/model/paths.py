"""Elephant flows: which connection of a job goes from which port of a NIC to which, under which five-tuple (C4, on C4P)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import msgspec

from ncclwatch.model.network import FlowRecord, NicRecord


class Protocol(StrEnum):
    """What a switch hashes the ports of."""

    UDP = "udp"
    """RoCE v2: destination port 4791, the source port says the path."""
    TCP = "tcp"


class Origin(StrEnum):
    """How a five-tuple is known."""

    SEEN = "seen"
    """Read from the kernel's socket, or captured."""
    PREDICTED = "predicted"
    """Computed by the rule of the NIC's driver, from queue pair numbers."""


@dataclass(frozen=True, slots=True, order=True)
class NicPort:
    """One port of a NIC. ``link`` is the member of a bond, from 0; 0 where there is no bond."""

    host: str
    nic: str
    link: int = 0


@dataclass(frozen=True, slots=True, order=True)
class FiveTuple:
    """What a switch sees of a flow. Addresses are written as text, ports are 0 to 65535."""

    protocol: Protocol
    source: str
    source_port: int
    destination: str
    destination_port: int


@dataclass(frozen=True, slots=True)
class ElephantFlow:
    """One long-lived flow of a job, in one direction.

    ``rate`` is in bytes a second, ``share`` is the part of its operation's bytes that it carries (0 to 1); None where not known.
    ``adaptive``: the job is set up for adaptive routing, under which no port fixes a path.
    """

    job: str
    rank: int | None
    peer: int | None
    channel: int | None
    source: NicPort
    destination: NicPort
    tuple: FiveTuple | None = None
    origin: Origin = Origin.PREDICTED
    rate: float | None = None
    share: float | None = None
    queue_pair: int | None = None
    adaptive: bool = False


@dataclass(frozen=True, slots=True)
class NodeView:
    """What one node shows of its network. ``namespaces``: pid → network namespace where that is not the node's own."""

    host: str
    flows: Sequence[FlowRecord] = ()
    nics: Sequence[NicRecord] = ()
    namespaces: Mapping[int, int] = field(default_factory=dict)


# --- what probes told of paths ---

PathKey = tuple[int, int]
"""(destination port, source port): with two hosts and a protocol a five-tuple."""
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Part = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]

Hops = tuple[str | None, ...]


class Load(StrEnum):
    """What one way of a path was seen to be."""

    QUEUED = "queued"
    EMPTY = "empty"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class PathLoad:
    """One path in one direction. ``confidence`` (0 to 1) is that of ``load``; ``waited`` of ``probes`` probes were queued."""

    path: PathKey
    load: Load
    confidence: float
    waited: int
    probes: int


@dataclass(frozen=True, slots=True)
class SeenPath:
    """One source port. ``hops`` are routers in order, None for one that is silent; ``arrived``: the destination was reached.

    ``steady``: each look saw the same routers. ``live``: the five-tuple of a running flow. ``load`` is what queues told.
    """

    port: _Port
    source_port: _Port
    hops: Annotated[tuple[_Name | None, ...], msgspec.Meta(max_length=32)] = ()
    arrived: bool = False
    steady: bool = True
    live: bool = False
    load: Load = Load.UNKNOWN
    load_confidence: _Part = 0.0
    waited: Annotated[int, msgspec.Meta(ge=0)] = 0
    probes: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def path(self) -> PathKey:
        """(destination port, source port)."""
        return self.port, self.source_port

    @property
    def as_load(self) -> PathLoad:
        """What queues told."""
        return PathLoad(self.path, self.load, self.load_confidence, self.waited, self.probes)

    @property
    def told(self) -> bool:
        """Whether some router told where it goes."""
        return any(self.hops)


@dataclass(frozen=True, slots=True)
class Probe:
    """All paths that were asked from one host to one address. ``wrong``: probability that a path is not what was seen."""

    host: _Name
    source: _Name
    destination: _Name
    protocol: Protocol
    wall_s: float
    wrong: _Part
    paths: Annotated[tuple[SeenPath, ...], msgspec.Meta(max_length=4096)]
    notes: Annotated[tuple[Annotated[str, msgspec.Meta(max_length=1024)], ...], msgspec.Meta(max_length=64)] = ()
    nic: _Name = ""
    """The NIC it leaves by."""
    switch: _Name = ""
    """The switch that NIC is plugged into, as it says itself (LLDP), and the port there; empty where it was not asked."""
    switch_port: _Name = ""
