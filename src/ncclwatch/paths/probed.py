"""What probes said of the paths from one host to another, as a file: source port → routers, and whether they were queued.

The file is JSON, ``schema`` = ``ncclwatch.pathprobe/1`` (docs/flow-map.md). What is read is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from ncclwatch.errors import UsageError
from ncclwatch.model.paths import Protocol
from ncclwatch.paths.bottlenecks import Load, PathKey, PathLoad
from ncclwatch.text import clean

SCHEMA = "ncclwatch.pathprobe/1"
MAX_BYTES = 4 << 20
"""Bound: a file."""

_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
_Part = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Name = Annotated[str, msgspec.Meta(max_length=256)]

Hops = tuple[str | None, ...]


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


@dataclass(frozen=True, slots=True)
class ProbeFile:
    """What 'ncclwatch paths probe' wrote on one host."""

    schema: _Name
    probes: Annotated[tuple[Probe, ...], msgspec.Meta(max_length=1024)]


def read(data: bytes, name: str) -> tuple[Probe, ...]:
    """The probes of a file. Raises :class:`UsageError` for anything else; ``name`` is what the file is called."""
    try:
        found = msgspec.json.decode(data, type=ProbeFile)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{clean(name)} is no file of 'ncclwatch paths probe': {clean(str(error), 200)}", "make it anew"
        ) from None
    if found.schema != SCHEMA:
        raise UsageError(f"{clean(name)} has the schema {clean(found.schema, 60)}", f"this release reads {SCHEMA}")
    return found.probes


def read_bytes(path: Path, most: int = MAX_BYTES, hint: str = "give a file") -> bytes:
    """A file of at most ``most`` bytes; ``hint`` says what to give instead of one that cannot be read. Raises
    :class:`UsageError`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise UsageError(f"{clean(str(path))} cannot be read: {error.strerror}", hint) from None
    if len(data) > most:
        raise UsageError(f"{clean(str(path))} is too large", f"at most {most >> 20} MiB are read")
    return data


def wrong_rate(looks: Sequence[Sequence[Hops]]) -> float:
    """Probability that a path is another one than was seen, from several looks at the same paths: (changed + 1) / (compared + 2).

    Laplace's rule of succession: never 0, and 1/2 where nothing could be compared. Only paths that some router told count.
    """
    pairs = [(a, b) for one, two in pairwise(looks) for a, b in zip(one, two, strict=True) if any(a) and any(b)]
    changed = sum(not alike(a, b) for a, b in pairs)
    return (changed + 1) / (len(pairs) + 2)


def alike(one: Hops, two: Hops) -> bool:
    """Whether two looks may be of one path: no router that answered in both differs."""
    return len(one) == len(two) and all(a == b or a is None or b is None for a, b in zip(one, two, strict=True))


def joined(one: Hops, two: Hops) -> Hops:
    """The newer look, with routers that were silent then from the older, where both are of one path."""
    return tuple(b or a for a, b in zip(one, two, strict=True)) if alike(one, two) else two
