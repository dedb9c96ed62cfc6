"""Chrome traces of PyTorch's profiler (Kineto): NCCL kernels of one rank a file, also gzip'ed.

Facts: pytorch/kineto ``libkineto/src/output_json.cpp`` (``distributedInfo``, ``baseTimeNanoseconds``, what is copied from a
collective to its kernel), pytorch/pytorch ``torch/csrc/profiler/util.cpp`` (``saveNcclMeta``). ``Seq`` (pytorch#177148) and
``Comms Id`` (kineto#1299) are in traces from 2026 on. ``ts`` and ``dur`` are microseconds, ``ts`` since ``baseTimeNanoseconds``
where that is there. Traces of PyTorch before 2.3 say nothing of groups (and the oldest have categories ``Kernel`` and
``Runtime``): which ranks share a communicator follows then from when collectives end on their streams (:mod:`.kernel_groups`).
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ncclwatch.collect.functions import TYPES
from ncclwatch.ingest.base import Format, Ingested, IngestError
from ncclwatch.ingest.json_stream import head_of, members, opened
from ncclwatch.ingest.kernel_groups import MOST_STREAMS, Seen, join
from ncclwatch.ingest.kernels import Kernel, KernelRank, function_of, job_of, sends
from ncclwatch.model.events import Function
from ncclwatch.text import clean

MOST_KERNELS = 200_000
"""Bound: NCCL kernels of a rank that are kept; of more the first."""
MOST_CALLS = 400_000
MOST_RANKS = 1024
MOST_PROBLEMS = 50
LARGEST_GROUP = 1 << 20
LONGEST_ID = 40
"""Bound: characters of a communicator's number."""
_EXCHANGES, _MESSAGES = ("nccl:all_to_all", "nccl:alltoall"), ("nccl:send", "nccl:recv", "nccl:coalesced")
"""How PyTorch names what it calls on the host."""
_HEAD = (b'"traceEvents"', b'"schemaVersion"', b'"distributedInfo"', b'"deviceProperties"')
FUNCTIONS = {
    "allreduce": Function.ALL_REDUCE, "allreduce_coalesced": Function.ALL_REDUCE, "broadcast": Function.BROADCAST,
    "_broadcast_oop": Function.BROADCAST, "reduce": Function.REDUCE, "_reduce_oop": Function.REDUCE,
    "allgather": Function.ALL_GATHER, "_allgather_base": Function.ALL_GATHER, "all_gather": Function.ALL_GATHER,
    "all_gather_into_tensor_coalesced": Function.ALL_GATHER, "allgather_into_tensor_coalesced": Function.ALL_GATHER,
    "reduce_scatter": Function.REDUCE_SCATTER, "_reduce_scatter_base": Function.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": Function.REDUCE_SCATTER, "alltoall": Function.ALL_TO_ALL,
    "alltoall_base": Function.ALL_TO_ALL, "all_to_all": Function.ALL_TO_ALL, "all_to_allv": Function.ALL_TO_ALL,
    "gather": Function.GATHER, "scatter": Function.SCATTER, "send": Function.SEND, "recv": Function.RECV,
    "barrier": Function.ALL_REDUCE,
}  # fmt: skip
"""What PyTorch calls collectives (``Collective name``)."""
_TYPES = {
    "Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "Double": "float64", "Int": "int32", "Long": "int64",
    "Char": "int8", "Byte": "uint8", "Bool": "uint8",
}  # fmt: skip
_NUMBERS = {name: number for number, (name, _) in enumerate(TYPES)}


class _Call(NamedTuple):
    """A call of a collective on the host: its time (us), and what it was."""

    time: float
    args: Mapping[str, Any]


@dataclass(slots=True)
class _Trace:
    """What is kept of one file: kernels as (begin, duration, name, arguments), calls by their external id."""

    path: Path
    kernels: list[tuple[float, float, str, Mapping[str, Any]]] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    launches: dict[int, float] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    base_ns: int = 0
    more: int = 0
    exchanges: bool = False
    """Whether it shows all-to-alls, and neither sends nor receives: then kernels of messages are all-to-alls."""
    messages: bool = False
    streams: dict[int, list[Seen]] = field(default_factory=lambda: defaultdict(list))
    """Of kernels of which nothing says the group."""
    communicators: dict[str, list[Seen]] = field(default_factory=lambda: defaultdict(list))
    """Of kernels of which only the communicator's number is told, and not who is in it."""


class Kineto(Format):
    """Traces of the ranks of a job, one file each; files of one folder are one job."""

    name = "kineto"
    what = "PyTorch profiler (Kineto) trace"

    def recognises(self, head: bytes, path: Path) -> bool:
        """A JSON object with the members of such a trace, or an array of trace events."""
        text = head_of(head)
        start = text.lstrip()[:1]
        return (start == b"{" and any(word in text for word in _HEAD)) or (start == b"[" and b'"ph"' in text and b'"ts"' in text)

    def read(self, files: Sequence[Path]) -> Sequence[Ingested]:
        """A job a folder. Raises :class:`IngestError` where none of its files could be read."""
        folders: dict[Path, list[Path]] = defaultdict(list)
        for file in files:
            folders[file.parent].append(file)
        return [self._job(folder, sorted(found)) for folder, found in folders.items()]

    @staticmethod
    def _job(folder: Path, files: Sequence[Path]) -> Ingested:
        problems: list[str] = []
        ranks: dict[int, KernelRank] = {}
        lists: dict[str, list[tuple[KernelRank, list[Seen]]]] = defaultdict(list)
        for file in files[:MOST_RANKS]:
            try:
                trace = _read(file)
            except IngestError as error:
                problems.append(str(error))
                continue
            except OSError as error:
                problems.append(f"{clean(str(file), 200)}: {error.strerror or 'cannot be read'}")
                continue
            one = _rank_of(trace, len(ranks))
            if one.rank in ranks:
                problems.append(f"{clean(str(file), 200)}: rank {one.rank} is in {ranks[one.rank].source} already; left out")
                continue
            ranks[one.rank] = one
            lists[""] += ((one, sorted(own, key=_begin)) for own in sorted(trace.streams.values(), key=len)[-MOST_STREAMS:])
            for known, own in trace.communicators.items():
                lists[known].append((one, sorted(own, key=_begin)))
            if trace.more:
                problems.append(
                    f"{clean(str(file), 200)}: {trace.more} NCCL kernels beyond the first {MOST_KERNELS} were left out"
                )
        if not ranks:
            raise IngestError(problems[0] if problems else "no trace was read", "give the traces that torch.profiler exports")
        left = sum(join(own, known) for known, own in lists.items())
        notes = [] if any(one.kernels for one in ranks.values()) else ["the traces hold no NCCL kernel of a known communicator"]
        if left:
            notes.append(f"{left} NCCL kernels of which the trace names no group were left out: no other rank's end with them")
        return job_of([ranks[rank] for rank in sorted(ranks)], problems[:MOST_PROBLEMS], notes, clean(str(folder), 200))


def _read(path: Path) -> _Trace:
    """What a file holds of NCCL, event by event."""
    trace = _Trace(path)
    with opened(path) as file:
        for name, value in members(path, file, "traceEvents"):
            if name == "traceEvents":
                if isinstance(value, dict) and value.get("ph") == "X":
                    _take(trace, value)
            elif name == "distributedInfo" and isinstance(value, dict):
                trace.info = value
            elif name == "baseTimeNanoseconds" and isinstance(value, int) and 0 <= value < 1 << 62:
                trace.base_ns = value
    return trace


def _take(trace: _Trace, event: Mapping[str, Any]) -> None:
    category, name, time, args = event.get("cat"), event.get("name"), event.get("ts"), event.get("args")
    if not isinstance(time, int | float) or not isinstance(name, str) or not abs(time) < 1e19:
        return
    if name.startswith("nccl:"):
        trace.exchanges |= name.startswith(_EXCHANGES)
        trace.messages |= name.startswith(_MESSAGES)
    if not isinstance(args, dict):
        return
    category = category.lower() if isinstance(category, str) else ""
    if category == "kernel" and name.startswith("nccl"):
        duration = event.get("dur")
        if not isinstance(duration, int | float) or not 0 <= duration < 1e15:
            return
        if len(trace.kernels) < MOST_KERNELS:
            trace.kernels.append((float(time), float(duration), name, args))
        else:
            trace.more += 1
    elif name == "record_param_comms" and isinstance(args.get("External id"), int) and len(trace.calls) < MOST_CALLS:
        trace.calls.setdefault(args["External id"], _Call(float(time), args))
    elif (
        category in ("cuda_runtime", "runtime") and isinstance(args.get("correlation"), int) and len(trace.launches) < MOST_CALLS
    ):
        trace.launches[args["correlation"]] = float(time)


def _rank_of(trace: _Trace, number: int) -> KernelRank:
    """The rank that a trace is of, with its kernels."""
    info = trace.info
    rank = info.get("rank")
    if not isinstance(rank, int) or not 0 <= rank < LARGEST_GROUP:
        digits = re.findall(r"(?:rank|worker)[_-]?(\d{1,7})", trace.path.name)
        rank = int(digits[-1]) if digits else number
    world = info.get("world_size")
    known = _groups(info.get("pg_config"))
    one = KernelRank(rank, clean(trace.path.name, 80), world if isinstance(world, int) and 0 < world < LARGEST_GROUP else None)
    for begin, duration, name, args in trace.kernels:
        external, correlation = args.get("External id"), args.get("correlation")
        call = trace.calls.get(external) if isinstance(external, int) else None
        told = {**(call.args if call is not None else {}), **args}
        launched = call.time if call is not None else begin
        if call is None and isinstance(correlation, int):
            launched = trace.launches.get(correlation, begin)
        times = (min(launched, begin), begin, begin + duration)
        kernel = _kernel(trace.base_ns, rank, known, told, name, times)
        if kernel is not None:
            one.kernels.append(kernel)
        elif (seen := _seen(trace, told, name, times)) is not None:
            own = _communicator(told)
            (trace.communicators[own] if own else trace.streams[seen[0]]).append(seen[1])
        else:
            one.nameless += 1
    return one


def _communicator(told: Mapping[str, Any]) -> str:
    """The name of a communicator by its number; empty where that is not told."""
    number = told.get("Comms Id")
    return f"communicator {number}" if isinstance(number, int | str) and number and len(str(number)) <= LONGEST_ID else ""


def _begin(seen: Seen) -> int:
    return seen.begin


def _seen(
    trace: _Trace, told: Mapping[str, Any], name: str, times: tuple[float, float, float]
) -> tuple[int, Seen] | None:  # fmt: skip
    """A collective of which nothing says the group, and its stream; ``None`` where nothing says what it is."""
    function = FUNCTIONS.get(str(told.get("Collective name", "")).lower()) or function_of(name)
    if function is None and sends(name) and trace.exchanges and not trace.messages:
        function = Function.ALL_TO_ALL
    stream = told.get("stream")
    launched, begin, end = (trace.base_ns + round(time * 1000) for time in times)
    if function in (None, Function.SEND, Function.RECV) or type(stream) is not int or begin <= 0 or end >= 1 << 62:
        return None
    return stream, Seen(int(function), begin, end, max(launched, 1), *_message(told))


def _kernel(
    base_ns: int, rank: int, known: Mapping[str, tuple[int, ...]], told: Mapping[str, Any], name: str,
    times: tuple[float, float, float],
) -> Kernel | None:  # fmt: skip
    """One operation; ``None`` where nothing says what it is, or of which ranks."""
    group = str(told.get("Process Group Name", ""))
    ranks = known.get(group) or _ranks(told.get("Process Group Ranks")) or _even(told)
    function = FUNCTIONS.get(str(told.get("Collective name", "")).lower()) or function_of(name)
    if function is None or ranks is None or rank not in ranks:
        return None
    sequence = told.get("Seq")
    launched, begin, end = (base_ns + round(time * 1000) for time in times)
    if begin <= 0 or end >= 1 << 62:
        return None
    peer = told.get("Dst Rank") if function is Function.SEND else told.get("Src Rank") if function is Function.RECV else None
    return Kernel(
        (group, ranks), int(function), sequence if isinstance(sequence, int) and 0 <= sequence < 1 << 60 else None,
        *_message(told), peer if isinstance(peer, int) and 0 <= peer < len(ranks) else -1,
        max(launched, 1), begin, end,
    )  # fmt: skip


def _message(told: Mapping[str, Any]) -> tuple[int, int]:
    """Elements and type; 0 and -1 where they are not told."""
    count = told.get("In msg nelems")
    return (
        count if isinstance(count, int) and 0 <= count < 1 << 60 else 0,
        _NUMBERS.get(_TYPES.get(str(told.get("dtype")), ""), -1),
    )


def _even(told: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The ranks of a group that lie evenly, by the first, the distance and their number: a long list is cut."""
    first, apart, size = told.get("Global rank start"), told.get("Global rank stride"), told.get("Group size")
    if not isinstance(first, int) or not isinstance(apart, int) or not isinstance(size, int):
        return None
    if first < 0 or apart < 1 or not 0 < size <= LARGEST_GROUP or first + apart * size > LARGEST_GROUP:
        return None
    return tuple(range(first, first + apart * size, apart))


def _groups(config: object) -> dict[str, tuple[int, ...]]:
    """Ranks of the job in each process group, by its name (``pg_config``)."""
    found = {}
    for one in config if isinstance(config, list) else ():
        if isinstance(one, dict) and (ranks := _ranks(one.get("ranks"))) is not None:
            found[str(one.get("pg_name", ""))] = ranks
    return found


def _ranks(value: object) -> tuple[int, ...] | None:
    """A list of ranks, which may be written as text; long ones are cut there (``[0, 1, ..., 31]``) and say nothing."""
    if isinstance(value, str) and len(value) < 1 << 16:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not isinstance(value, list) or not 0 < len(value) <= LARGEST_GROUP:
        return None
    if not all(isinstance(one, int) and 0 <= one < LARGEST_GROUP for one in value) or len(set(value)) < len(value):
        return None
    return tuple(sorted(value))
