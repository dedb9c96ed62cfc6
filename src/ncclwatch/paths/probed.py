"""What probes said of the paths from one host to another, as a file: source port → routers, and whether they were queued.

The file is JSON, ``schema`` = ``ncclwatch.pathprobe/1`` (docs/flow-map.md). What is read is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from ncclwatch.errors import UsageError
from ncclwatch.model.paths import Hops, Probe
from ncclwatch.text import clean

SCHEMA = "ncclwatch.pathprobe/1"
MAX_BYTES = 4 << 20
"""Bound: a file."""


@dataclass(frozen=True, slots=True)
class ProbeFile:
    """What 'ncclwatch paths probe' wrote on one host."""

    schema: Annotated[str, msgspec.Meta(max_length=256)]
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


def remembered(before: Probe, after: Probe) -> Probe:
    """The newer look at the same paths, with routers that were silent in it from the older, where both are of one path.

    What a late answer leaves open would be like any path from then on, and no change of it would ever be seen.
    """
    old = {(seen.path, seen.arrived): seen.hops for seen in before.paths if not seen.live}
    known = (replace(seen, hops=joined(old.get((seen.path, seen.arrived), ()), seen.hops)) for seen in after.paths)
    return replace(after, paths=tuple(known))
