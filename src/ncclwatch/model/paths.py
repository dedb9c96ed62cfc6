"""Elephant flows: which connection of a job goes from which port of a NIC to which, under which five-tuple (C4, on C4P)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

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


@dataclass(frozen=True, slots=True)
class NodeView:
    """What one node shows of its network. ``namespaces``: pid → network namespace where that is not the node's own."""

    host: str
    flows: Sequence[FlowRecord] = ()
    nics: Sequence[NicRecord] = ()
    namespaces: Mapping[int, int] = field(default_factory=dict)
