"""Real jobs, one or more of whose processes say something else in well-formed records: what the wire lets through is judged.

An input is a byte that chooses a recording, and a change for each five bytes behind it: process, kind of object, which one of
them, field, value. A process says it in every sample.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any

import msgspec

from fuzz.harness import Target
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.state import ProcessSample
from score.archive import JOBS, batches_of

RECORDINGS = (
    "deadlock-of-four-2.32.3-shm-post-hang-0.ncclwatch",
    "drawn-801-27-link-down-2.27.5-socket-post-hang-0.ncclwatch",
    "drawn-802-54-never-enters-2.32.3-shm-post-hang-0.ncclwatch",
    "drawn-802-72-skip-2.27.5-socket-post-hang-0.ncclwatch",
    "drawn-1303-371-init-2.29.2-shm-post-hang-0.ncclwatch.xz",
    "drawn-1306-103-skip-2.29.2-socket-post-hang-0.ncclwatch.xz",
    "h3-gpu-stall-tensor-2.32.3-shm-post-hang-0.ncclwatch",
    "quick-gpu-stall@0-2-a-node-256-16777216-2.25.1-p2p-post-hang-0.ncclwatch.xz",
    "quick-proxy-stall@1-2-a-node-8-67108864-2.29.2-p2p-post-hang-0.ncclwatch.xz",
)
NEWEST = 2
"""Of the batches with samples the first and the newest: by then a job has stood for long enough to be judged."""
CHANGE = 5
"""Bytes of a change."""
MOST = 6
"""Changes of one input."""
NUMBERS = (0, 1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**64 - 1, -1, -2)


def targets() -> list[Target]:
    """All of this module."""
    return [Target("job", "well-formed records that cannot be true", _seeds, _judge, _mutate, 1 + CHANGE * MOST, quick=80)]


def _seeds() -> list[bytes]:
    return [bytes([number]) for number in range(len(RECORDINGS))]


def _mutate(data: bytes, source: random.Random) -> bytes:
    """One change more, or another one, or another job."""
    if not data or source.random() < 0.2:
        return bytes([source.randrange(len(RECORDINGS))]) + data[1:]
    changes = _changes(data)
    fresh = source.randbytes(CHANGE)
    if changes and (len(changes) == MOST or source.random() < 0.5):
        changes[source.randrange(len(changes))] = fresh
    else:
        changes.append(fresh)
    return data[:1] + b"".join(changes)


def _changes(data: bytes) -> list[bytes]:
    return [data[at : at + CHANGE] for at in range(1, len(data), CHANGE)][:MOST]


@cache
def _rounds(name: str) -> list[NodeBatch]:
    """Its first batch and the newest ones."""
    sampled = [batch for batch in batches_of(JOBS / name) if batch.samples]
    return [sampled[0], *sampled[-NEWEST:]]


def _judge(data: bytes) -> None:
    """As an engine does: a verdict on the job, whatever some of its processes say."""
    name = RECORDINGS[data[0] % len(RECORDINGS)] if data else RECORDINGS[0]
    session, writer, reader = DiagnosisSession(LiveDiagnosis()), BatchWriter(), BatchReader()
    for batch in _rounds(name):
        samples = list(batch.samples)
        for change in (change for change in _changes(data) if len(change) == CHANGE):
            at = change[0] % len(samples)
            samples[at] = _changed(samples[at], *change[1:])
        try:
            said = writer.encode(msgspec.structs.replace(batch, samples=tuple(samples)))
        except Exception:  # what our own writer cannot write is no record
            return
        try:
            sent = reader.decode(said).batch
        except FormatError:
            return
        session.feed(sent, batch.time_ns, source="a", wall_ns=batch.wall_ns)
        session.judge(batch.time_ns + 10**8)


def _changed(sample: ProcessSample, kind: int, item: int, field: int, value: int) -> ProcessSample:
    """The sample with one field of one of its objects replaced."""
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for one in _objects(sample):
        found[type(one).__name__].append(one)
    same = found[sorted(found)[kind % len(found)]]
    old = same[item % len(same)]
    name = fields(old)[field % len(fields(old))].name
    others = [getattr(one, name) for one in same]
    new = replace(old, **{name: _other(getattr(old, name), others, value)})
    changed: ProcessSample = _rebuilt(sample, lambda one: new if one is old else None)
    return changed


def _objects(value: Any) -> Iterator[Any]:
    """All dataclasses below, and itself."""
    if is_dataclass(value):
        yield value
        for one in fields(value):
            yield from _objects(getattr(value, one.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from _objects(part)


def _rebuilt(value: Any, exchanged: Callable[[Any], Any]) -> Any:
    """The same with what ``exchanged`` gives in place of an object."""
    if is_dataclass(value) and not isinstance(value, type):
        if (new := exchanged(value)) is not None:
            return new
        parts = {one.name: getattr(value, one.name) for one in fields(value)}
        made = {name: _rebuilt(part, exchanged) for name, part in parts.items()}
        changed = {name: part for name, part in made.items() if part is not parts[name]}
        return replace(value, **changed) if changed else value
    if isinstance(value, tuple):
        rebuilt = tuple(_rebuilt(part, exchanged) for part in value)
        return rebuilt if any(new is not old for new, old in zip(rebuilt, value, strict=True)) else value
    return value


def _other(old: Any, others: list[Any], choice: int) -> Any:
    """Another value of the same kind, as near as far away."""
    if choice < 64:
        return others[choice % len(others)]
    match old:
        case bool():
            return not old
        case Enum():
            return list(type(old))[choice % len(type(old))]
        case int():
            near = (*NUMBERS, old + 1, old - 1, old + 64, old * 2)
            return near[choice % len(near)]
        case float():
            return (0.0, -1.0, math.inf, math.nan, old * 2)[choice % 5]
        case str():
            return ("", "x" * 200, old + "1")[choice % 3]
        case tuple():
            return ((), old[1:], (*old, *old), old[::-1])[choice % 4]
        case None:
            return NUMBERS[choice % len(NUMBERS)]
    return None
