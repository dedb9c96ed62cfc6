"""Simulated records through bytes and back: what comes out was built from the model's fields alone."""

from __future__ import annotations

import io
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ncclwatch.model.events import EVENT_DTYPE
from ncclwatch.model.network import NetworkLook
from ncclwatch.model.state import Communicator, PeerInfo, ProcessSample

Events = NDArray[np.void]
Kept = TypeVar("Kept")
Once = TypeVar("Once", bound=Hashable)

TIMING_DTYPE = np.dtype(
    [
        ("pid", "<u4"), ("rank", "<i4"), ("nranks", "<i4"), ("function", "<u2"), ("comm_hash", "<u8"), ("sequence", "<u8"),
        ("bytes", "<u8"), ("peer", "<i4"), ("called_ns", "<u8"), ("started_ns", "<u8"), ("finished_ns", "<u8"),
    ]
)  # fmt: skip
"""One operation of one rank as a profiler or the ledger knows it: ``rank`` and ``peer`` (−1: none) of the communicator, times
of the node's CLOCK_REALTIME, 0 for not yet. ``function`` is that of the call events.
"""


@dataclass(slots=True)
class RecordSet:
    """Everything an engine would have at one moment. ``samples`` holds one sequence per observed process, in time order.

    ``calls`` and ``timings`` are by host, in order of arrival; ``lost`` counts records known to be lost, by host. ``network`` is
    what hosts said of their connections, each with host and its CLOCK_MONOTONIC and CLOCK_REALTIME (ns), in order of arrival. A
    plane that is not in ``planes`` was not collected anywhere; a host that is missing has no agent. ``lost_after``: of every
    record of ``lost`` how many of ``calls`` had come before it, rising, where that is known (kept in no file).
    """

    samples: list[list[ProcessSample]] = field(default_factory=list)
    calls: dict[str, Events] = field(default_factory=dict)
    timings: dict[str, Events] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=dict)
    planes: tuple[str, ...] = ()
    network: list[tuple[str, int, int, NetworkLook]] = field(default_factory=list)
    lost_after: dict[str, NDArray[np.int64]] = field(default_factory=dict)


class _Document(msgspec.Struct, array_like=True):
    """The samples without their lists of peers, which all ranks of a communicator have alike: those are named by number, for each
    communicator of each sample, and ``peers`` holds the lists that the reader has not had before.
    """

    samples: list[list[ProcessSample]]
    numbers: list[list[tuple[int, ...]]]
    peers: list[tuple[PeerInfo, ...]]
    hosts: tuple[list[str], list[str]]
    lost: dict[str, int]
    planes: tuple[str, ...]
    network: list[tuple[str, int, int, NetworkLook]]


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Document)


class WrittenPeers:
    """Lists of peers written so far, each once."""

    def __init__(self) -> None:
        self._new: list[tuple[PeerInfo, ...]] = []
        self._numbers: dict[int, tuple[int, tuple[PeerInfo, ...]]] = {}

    def number(self, peers: tuple[PeerInfo, ...]) -> int:
        """The list's number; the tuple itself is kept, so that its identity stays its own."""
        if id(peers) not in self._numbers:
            self._numbers[id(peers)] = (len(self._numbers), peers)
            self._new.append(peers)
        return self._numbers[id(peers)][0]

    def take_new(self) -> list[tuple[PeerInfo, ...]]:
        """The lists met since this was asked last."""
        new, self._new = self._new, []
        return new


def encode(records: RecordSet, peers: WrittenPeers | None = None) -> bytes:
    """The records as bytes: a length, a MessagePack document, and the arrays as NumPy writes them (no pickle).

    ``peers`` remembers the lists that the reader has from earlier records.
    """
    peers = peers or WrittenPeers()
    numbers = [[tuple(peers.number(c.peers) for c in s.communicators) for s in series] for series in records.samples]
    samples = [[_without_peers(s) for s in series] for series in records.samples]
    hosts = sorted(records.calls), sorted(records.timings)
    text = _ENCODER.encode(_Document(samples, numbers, peers.take_new(), hosts, records.lost, records.planes, records.network))
    out = io.BytesIO()
    out.write(len(text).to_bytes(8, "little") + text)
    for host in sorted(records.calls):
        np.save(out, records.calls[host].astype(EVENT_DTYPE), allow_pickle=False)
    for host in sorted(records.timings):
        np.save(out, records.timings[host].astype(TIMING_DTYPE), allow_pickle=False)
    return out.getvalue()


def decode(data: bytes, peers: list[tuple[PeerInfo, ...]] | None = None) -> RecordSet:
    """Inverse of :func:`encode`; raises ``ValueError`` for anything else. ``peers`` are the lists read so far."""
    return _decode(data, peers if peers is not None else [], {})


def _decode(data: bytes, peers: list[tuple[PeerInfo, ...]], known: dict[Any, Any]) -> RecordSet:
    size = int.from_bytes(data[:8], "little")
    document = _DECODER.decode(data[8 : 8 + size])
    rest = io.BytesIO(data[8 + size :])
    calls, timings = ({host: np.load(rest, allow_pickle=False) for host in hosts} for hosts in document.hosts)
    peers += document.peers
    samples = [
        [_with_peers(sample, [peers[number] for number in own], known) for sample, own in zip(series, numbers, strict=True)]
        for series, numbers in zip(document.samples, document.numbers, strict=True)
    ]
    return RecordSet(samples, calls, timings, document.lost, document.planes, document.network)


def _without_peers(sample: ProcessSample) -> ProcessSample:
    return replace(sample, communicators=tuple([replace(own, peers=()) if own.peers else own for own in sample.communicators]))


def _with_peers(sample: ProcessSample, peers: Sequence[tuple[PeerInfo, ...]], known: dict[Any, Any]) -> ProcessSample:
    """The sample with its lists of peers; parts that many ranks have alike are taken from ``known``, each kept once."""

    def once(part: Once) -> Once:
        found: Once = known.setdefault(part, part)
        return found

    def whole(own: Communicator, listed: tuple[PeerInfo, ...]) -> Communicator:
        rings, transports, steps = once(own.rings), once(own.transports), once(own.net_steps)
        connections = once(own.host_connections)
        return replace(own, peers=listed, rings=rings, transports=transports, net_steps=steps, host_connections=connections)

    return replace(sample, communicators=tuple(map(whole, sample.communicators, peers)))


class Wire:
    """Sends samples through bytes; both ends remember the lists of peers that were sent."""

    def __init__(self) -> None:
        self._written, self._read = WrittenPeers(), list[tuple[PeerInfo, ...]]()
        self._known: dict[Any, Any] = {}

    def send(self, samples: Sequence[ProcessSample]) -> list[ProcessSample]:
        """The samples as they come out."""
        data = encode(RecordSet([[sample] for sample in samples]), self._written)
        return [series[0] for series in _decode(data, self._read, self._known).samples]


def sharing(before: ProcessSample, after: ProcessSample) -> ProcessSample:
    """``after``, of which what has not changed since ``before`` is kept once: so the looks at thousands of ranks fit."""
    known = {own.address: own for own in before.communicators}
    communicators = tuple([_unless_equal(known.get(own.address), own) for own in after.communicators])
    return replace(
        after,
        process=_unless_equal(before.process, after.process),
        communicators=_unless_equal(before.communicators, communicators),
        operations=_unless_equal(before.operations, after.operations),
        pending=_unless_equal(before.pending, after.pending),
        unavailable=_unless_equal(before.unavailable, after.unavailable),
    )


def _unless_equal(before: Kept | None, after: Kept) -> Kept:
    return before if before is not None and before == after else after
