"""Lines of NCCL's Inspector, read into the operations of each rank, within bounds."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import IO, Annotated, NamedTuple

import msgspec

MAX_LINE_BYTES = 1 << 20
MAX_FILE_BYTES = 16 << 30
MAX_RANKS, MAX_SIZE = 1 << 16, 1 << 20
"""Ranks of all communicators together; ranks of one."""
KEPT_OPERATIONS = 8192
"""Newest operations of one rank of a communicator that are kept."""
MAX_KINDS, MAX_PROBLEMS = 4096, 64
LATE_SHARE, LEAST_S, LEAST_ROUNDS = 0.5, 0.002, 8
"""Chosen: told as evidence is who was in an operation for less than so much of the others' time, by more than so many seconds,
in so many operations at the least.
"""

_Time = Annotated[int, msgspec.Meta(ge=0, le=2**61)]
_Word = Annotated[str, msgspec.Meta(max_length=256)]
_Size = Annotated[int, msgspec.Meta(ge=-1, le=MAX_SIZE)]


class _Header(msgspec.Struct):
    id: _Word
    rank: _Size
    n_ranks: _Size
    comm_name: _Word = ""


class _Metadata(msgspec.Struct):
    dump_timestamp_us: _Time
    hostname: _Word = ""
    pid: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 0


class _Kernel(msgspec.Struct):
    kernel_start_ts: _Time = 0
    kernel_stop_ts: _Time = 0


class _Trace(msgspec.Struct):
    coll_start_ts: _Time = 0
    p2p_start_ts: _Time = 0
    kernel_events: Annotated[list[_Kernel], msgspec.Meta(max_length=1024)] = msgspec.field(default_factory=list)


class _Child(msgspec.Struct):
    """A channel's kernel, or a proxy's operation, where a line holds them as children of the operation."""

    event_trace_ts: _Kernel | None = None


_Children = Annotated[list[_Child], msgspec.Meta(max_length=4096)]


class _Stats(msgspec.Struct):
    """What stands before the operations of one dump of a communicator (v4.1 and later)."""

    coll_dropped_total: _Time = 0
    p2p_dropped_total: _Time = 0


class _Collective(msgspec.Struct):
    coll: _Word
    coll_sn: _Time
    coll_exec_time_us: _Time
    coll_msg_size_bytes: _Time = 0
    coll_timing_source: _Word = ""
    event_trace_ts: _Trace | None = None
    events: _Children = []


class _Message(msgspec.Struct):
    p2p: _Word
    p2p_sn: _Time
    p2p_exec_time_us: _Time
    p2p_peer: int = -1
    p2p_msg_size_bytes: _Time = 0
    event_trace_ts: _Trace | None = None
    events: _Children = []


class _Line(msgspec.Struct):
    header: _Header | None = None
    metadata: _Metadata | None = None
    dump_stats: _Stats | None = None
    coll_perf: _Collective | None = None
    p2p_perf: _Message | None = None


_DECODER = msgspec.json.Decoder(_Line)


class Ended(NamedTuple):
    """One operation that has ended; times in µs since the epoch by the host's clock, 0 where they are not told.

    ``sequence`` counts the operations of this function on the communicator (NCCL's ``seqNumber``). ``known_us`` is when it was
    known to have ended: its end, else when it was written.
    """

    function: str
    sequence: int
    nbytes: int
    lasted_us: int
    called_us: int
    began_us: int
    ended_us: int
    known_us: int
    peer: int | None


@dataclass(slots=True)
class InspectedRank:
    """One rank of one communicator."""

    host: str
    pid: int
    hash: int
    rank: int
    nranks: int
    name: str
    operations: deque[Ended] = field(default_factory=lambda: deque(maxlen=KEPT_OPERATIONS))
    numbers: dict[tuple[str, int | None], tuple[int, int, int]] = field(default_factory=dict)
    """Of each function (and peer): the lowest number, the highest, and how many there were."""
    overwritten: int = 0
    """Operations that the Inspector itself counts as overwritten before they were written (v4.1 and later)."""


class InspectorReader:
    """Takes lines of any number of processes. ``timed``: whether any line said when it began and ended."""

    def __init__(self) -> None:
        self.ranks: dict[tuple[str, int, int, int], InspectedRank] = {}
        self.problems: list[str] = []
        self.timed = False
        self.dropped = 0
        self._dump: tuple[_Header, _Metadata] | None = None

    @property
    def processes(self) -> set[tuple[str, int]]:
        """Host and pid of each."""
        return {(one.host, one.pid) for one in self.ranks.values()}

    @property
    def gaps(self) -> int:
        """Operations that are missing between others of the same function, or that were overwritten."""
        return sum(max(_between(rank), rank.overwritten) for rank in self.ranks.values())

    @property
    def overwritten(self) -> int:
        """Operations that the Inspector counts as overwritten."""
        return sum(rank.overwritten for rank in self.ranks.values())

    def begin(self) -> None:
        """A file begins: what the last one said of its dumps does not hold for it."""
        self._dump = None

    def problem(self, text: str) -> None:
        """Remember what could not be read."""
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(text)

    def take(self, raw: bytes) -> None:
        """Take one line. Raises ``msgspec.MsgspecError`` or ``ValueError`` where it is none of the Inspector's."""
        line = _DECODER.decode(raw)
        if line.dump_stats is not None and line.header is not None and line.metadata is not None:
            self._dump = line.header, line.metadata
        if line.header is not None and line.metadata is not None:
            head, meta = line.header, line.metadata
        elif self._dump is not None:
            # From v4.3 on the lines of a dump stand below one that says whose they are.
            head, meta = self._dump
        else:
            raise ValueError("nothing before it says of which communicator it is")
        key = meta.hostname, meta.pid, int(head.id, 16) & 0xFFFF_FFFF_FFFF_FFFF, head.rank
        if not 0 <= head.rank < head.n_ranks:
            raise ValueError(f"rank {head.rank} of {head.n_ranks}")
        if key not in self.ranks:
            if len(self.ranks) >= MAX_RANKS:
                raise ValueError("too many ranks")
            self.ranks[key] = InspectedRank(*key, head.n_ranks, head.comm_name)
        rank = self.ranks[key]
        if line.dump_stats is not None:
            counted = line.dump_stats.coll_dropped_total + line.dump_stats.p2p_dropped_total
            rank.overwritten = max(rank.overwritten, counted)
        operation = _collective(line.coll_perf, meta) if line.coll_perf else _message(line.p2p_perf, meta)
        if operation is None:
            return
        kind = operation.function, operation.peer
        least, most, number = rank.numbers.get(kind, (operation.sequence, operation.sequence, 0))
        if number or len(rank.numbers) < MAX_KINDS:
            rank.numbers[kind] = min(least, operation.sequence), max(most, operation.sequence), number + 1
        self.dropped += len(rank.operations) == KEPT_OPERATIONS
        rank.operations.append(operation)
        self.timed = self.timed or operation.ended_us > 0

    def shortest(self) -> Sequence[str]:
        """Ranks that were in collectives for much less time than the others, a line each: all ranks leave one at about the same
        time, so they came later (CCL-D, 4.2.2). Needs no clock.
        """
        rounds: dict[tuple[int, str, int], dict[int, int]] = defaultdict(dict)
        sizes: dict[int, int] = {}
        for one in self.ranks.values():
            sizes[one.hash] = one.nranks
            for operation in one.operations:
                if operation.peer is None:
                    rounds[one.hash, operation.function, operation.sequence][one.rank] = operation.lasted_us
        late: dict[tuple[int, int], list[float]] = defaultdict(list)
        whole = Counter[int]()
        for (group, _, _), lasted in rounds.items():
            if len(lasted) < max(2, sizes[group]):
                continue
            whole[group] += 1
            rank, shortest = min(lasted.items(), key=lambda item: item[1])
            others = median(value for number, value in lasted.items() if number != rank)
            if shortest < LATE_SHARE * others and (others - shortest) / 1e6 > LEAST_S:
                late[group, rank].append((others - shortest) / 1e3)
        said = []
        for (group, rank), times in sorted(late.items(), key=lambda item: -sum(item[1])):
            if len(times) >= max(LEAST_ROUNDS, whole[group] // 8):
                share = f"{len(times)} of {whole[group]} collectives for {median(times):.0f} ms less than the others"
                said.append(f"rank {rank} of communicator {group:016x} was in {share}: it came to them later")
        return said


def _between(rank: InspectedRank) -> int:
    """Operations that are missing between others of the same function."""
    return sum(max(0, most - least + 1 - number) for least, most, number in rank.numbers.values())


def _times(trace: _Trace | None, children: Sequence[_Child], meta: _Metadata) -> tuple[int, int, int, int]:
    """When it was called, began, ended, and was known to have ended."""
    if trace is None:
        return 0, 0, 0, meta.dump_timestamp_us
    kernels = [*trace.kernel_events, *(one.event_trace_ts for one in children if one.event_trace_ts is not None)]
    began = min((one.kernel_start_ts for one in kernels if one.kernel_start_ts), default=0)
    ended = max((one.kernel_stop_ts for one in kernels), default=0)
    return trace.coll_start_ts or trace.p2p_start_ts, began, ended, ended or meta.dump_timestamp_us


def _collective(one: _Collective, meta: _Metadata) -> Ended:
    return Ended(
        one.coll, one.coll_sn, one.coll_msg_size_bytes, one.coll_exec_time_us, *_times(one.event_trace_ts, one.events, meta), None
    )


def _message(one: _Message | None, meta: _Metadata) -> Ended | None:
    if one is None:
        return None
    times = _times(one.event_trace_ts, one.events, meta)
    return Ended(one.p2p, one.p2p_sn, one.p2p_msg_size_bytes, one.p2p_exec_time_us, *times, one.p2p_peer)


def read_lines(file: IO[bytes], source: str, reader: InspectorReader) -> None:
    """All lines of a file; of those that cannot be read the place is remembered, and the rest goes on."""
    reader.begin()
    for number, raw in enumerate(_lines(file), 1):
        if not raw.strip():
            continue
        try:
            reader.take(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
            reader.problem(f"{source}: line {number}: no line of the Inspector: {error}")


def _lines(file: IO[bytes]) -> Iterable[bytes]:
    left = MAX_FILE_BYTES
    while left > 0 and (raw := file.readline(MAX_LINE_BYTES)):
        left -= len(raw)
        yield raw
