"""Operations of the Inspector as records: looks at the job, one a second, at what had ended by then."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.batch import NodeBatch, PlaneState
from ncclwatch.ingest.inspector_lines import Ended, InspectedRank, InspectorReader
from ncclwatch.model.device import DeviceCommunicator, DeviceOperation, DeviceSample
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Communicator, Direction, ProcessInfo, ProcessSample, Transport, VersionSource

LOOK_NS = 10**9
MAX_LOOKS = 900
"""Looks at most; of longer files they are further apart."""
RECENT = 32
"""Newest operations of a communicator that a look shows, as a frame of the shim keeps."""
FUNCTIONS = {
    "AllReduce": Function.ALL_REDUCE,
    "Broadcast": Function.BROADCAST,
    "Reduce": Function.REDUCE,
    "AllGather": Function.ALL_GATHER,
    "ReduceScatter": Function.REDUCE_SCATTER,
    "Send": Function.SEND,
    "Recv": Function.RECV,
}


@dataclass(slots=True)
class _Rank:
    """One rank with its operations by when they were known to have ended, looked at moment by moment.

    ``until``: how many had ended at the last moment, ``counts``: of each collective by then.
    """

    told: InspectedRank
    number: int
    operations: list[Ended]
    known: list[int] = field(init=False)
    calls: list[Ended] = field(init=False)
    until: int = 0
    called: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.operations.sort(key=lambda one: one.known_us)
        self.known = [one.known_us for one in self.operations]
        self.calls = sorted((one for one in self.operations if one.called_us and one.function in FUNCTIONS), key=_called)

    def go_on(self, moment: int) -> list[Ended]:
        """To a later moment; the calls that were made on the way."""
        until = bisect_right(self.known, moment // 1000)
        for one in self.operations[self.until : until]:
            if one.peer is None:
                self.counts[one.function] = max(self.counts.get(one.function, 0), one.sequence + 1)
        called = bisect_right(self.calls, moment // 1000, key=_called)
        made, self.until, self.called = self.calls[self.called : called], until, called
        return made


def _called(one: Ended) -> int:
    return one.called_us


def batches_of(reader: InspectorReader) -> list[NodeBatch]:
    """All looks, each with the calls since the one before; a batch a host."""
    hosts: dict[str, list[_Rank]] = defaultdict(list)
    numbers: dict[int, int] = {}
    for one in reader.ranks.values():
        number = numbers.setdefault(one.hash, len(numbers) + 1)
        hosts[one.host].append(_Rank(one, number, list(one.operations)))
    known = [time for ranks in hosts.values() for rank in ranks for time in rank.known]
    if not known:
        return []
    first, last = min(known) * 1000, max(known) * 1000
    apart = max(LOOK_NS, (last - first) // MAX_LOOKS)
    # The last look is at the newest operation: whatever comes after is not known, and nobody waits.
    moments = [*range(first + apart, last, apart), last] if last - first > apart else [first + 1, last + 2]
    return [_batch(host, ranks, number, moment, reader) for number, moment in enumerate(moments) for host, ranks in hosts.items()]


def _batch(host: str, ranks: Sequence[_Rank], number: int, moment: int, reader: InspectorReader) -> NodeBatch:
    events = _events([(one, rank) for rank in ranks for one in rank.go_on(moment)])
    return NodeBatch(
        host=host, boot_id=f"inspector {host}", sequence=number, time_ns=moment, wall_ns=moment, looked=True,
        samples=tuple(_samples(ranks, moment)), events=events, lost=reader.gaps, planes=(PlaneState("inspector", True),),
    )  # fmt: skip


def _samples(ranks: Sequence[_Rank], moment: int) -> Iterator[ProcessSample]:
    by_process: dict[tuple[str, int], list[_Rank]] = defaultdict(list)
    for rank in ranks:
        by_process[rank.told.host, rank.told.pid].append(rank)
    for (host, pid), own in by_process.items():
        info = ProcessInfo(ProcessKey(f"inspector {host}", pid, 0, ""), host, "", (), "", None, VersionSource.UNKNOWN)
        device = DeviceSample("inspector", 0, "", communicators=tuple(map(_device, own)))
        communicators = tuple(map(_communicator, own))
        yield ProcessSample(info, moment, moment, 0, "", communicators, device=device)


def _address(rank: _Rank) -> int:
    return 0x1000 * rank.number


def _communicator(rank: _Rank) -> Communicator:
    told = rank.told
    return Communicator(
        address=_address(rank), hash=told.hash, rank=told.rank, nranks=told.nranks, sequence_numbers=dict(rank.counts),
        finder="inspector", name=told.name if told.name != "unknown" else "",
        transports=((0, (told.rank + 1) % told.nranks, Direction.SEND, Transport.UNKNOWN),) if told.nranks > 1 else (),
    )  # fmt: skip


def _device(rank: _Rank) -> DeviceCommunicator:
    told, until = rank.told, rank.until
    first = max(0, until - RECENT)
    recent = tuple(_operation(one, first + at + 1) for at, one in enumerate(rank.operations[first:until]))
    return DeviceCommunicator(told.hash, _address(rank), told.rank, told.nranks, False, until, until, 0, recent=recent)


def _operation(one: Ended, ordinal: int) -> DeviceOperation:
    times = (one.began_us * 1000 or None, one.ended_us * 1000 or None)
    return DeviceOperation(
        ordinal, one.function, one.peer is not None, one.sequence, one.nbytes, one.peer, 1, 1, 1, True,
        launched_ns=(one.called_us or one.known_us - one.lasted_us) * 1000, started_ns=times[0], finished_ns=times[1],
        duration_ns=one.lasted_us * 1000,
    )  # fmt: skip


def _events(made: Sequence[tuple[Ended, _Rank]]) -> NDArray[Any]:
    """Calls that hosts made, where lines say when."""
    events = np.zeros(len(made), EVENT_DTYPE)
    for row, (one, rank) in zip(events, sorted(made, key=lambda call: call[0].called_us), strict=True):
        told = rank.told
        row["time_ns"], row["kind"], row["function"] = one.called_us * 1000, Kind.ENTER, FUNCTIONS[one.function]
        row["pid"] = row["tid"] = told.pid
        row["flags"], row["comm"], row["comm_hash"] = Flag.COMM_READ, _address(rank), told.hash
        row["rank"], row["nranks"], row["count"] = told.rank, told.nranks, one.nbytes
        row["op_count"], row["peer"] = one.sequence, -1 if one.peer is None else one.peer
    return events
