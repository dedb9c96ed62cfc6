"""SIMULATED traces of GPUs: what PyTorch's profiler (Kineto) and Nsight Systems would have recorded of a simulated job.

Kineto: form as in pytorch/kineto ``libkineto/src/output_json.cpp``, one file a rank. Nsight Systems: tables and columns as in
NVIDIA's "SQLite Schema Reference", one file a node; with the ranges that NCCL names to NVTX (``nvtx_payload_schemas.h``). Kernels
that had not ended are in neither. Shares no code with what reads such files.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ncclwatch.simulate.gpu_kernels import Kernel, kernels_of
from ncclwatch.simulate.layout import node_of
from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.timeline import Timeline

_NAMES = {
    "AllReduce": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "AllGather": "ncclDevKernel_AllGather_RING_LL",
    "ReduceScatter": "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "Broadcast": "ncclDevKernel_Broadcast_RING_LL",
}  # fmt: skip
_MESSAGES = "ncclDevKernel_SendRecv"
_COLLECTIVES = {
    "AllReduce": "allreduce", "AllGather": "_allgather_base", "ReduceScatter": "_reduce_scatter_base", "Broadcast": "broadcast",
    "AlltoAll": "all_to_allv", "SendRecv": "send",
}  # fmt: skip
_TYPES = {1: "Byte", 2: "BFloat16", 4: "Float", 8: "Double"}
_DOMAIN, _CALL, _MAKING = 3, 7, 9
"""Numbers of NVTX' domain, and of the payloads of a call and of the making of a communicator; any do."""
_SCHEMAS = {
    _CALL: (("NCCL communicator ID", 0), ("Message size [bytes]", 8)),
    _MAKING: (("NCCL communicator ID", 0), ("No. of ranks", 8), ("Rank", 12), ("CUDA device", 16)),
}
_PUSH_POP = 59
"""Fact: ``eventType`` of a range that was pushed and popped."""
_TABLES = (
    "StringIds (id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL)",
    "TARGET_INFO_SESSION_START_TIME (utcEpochNs INTEGER, utcTime TEXT, localTime TEXT)",
    "CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER, "
    "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, "
    "shortName INTEGER NOT NULL)",
    "CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER NOT NULL, end INTEGER NOT NULL, eventClass INTEGER NOT NULL, globalTid INTEGER, "
    "correlationId INTEGER, nameId INTEGER NOT NULL, returnValue INTEGER NOT NULL)",
    "NVTX_PAYLOAD_SCHEMA_ENTRIES (domainId INTEGER NOT NULL, schemaId INTEGER NOT NULL, idx INTEGER NOT NULL, flags INTEGER, "
    "type INTEGER, name TEXT, description TEXT, arrayOrUnionDetail INTEGER, offset INTEGER)",
    "NVTX_EVENTS (start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, category INTEGER, "
    "color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, domainId INTEGER, binaryData BLOB)",
)


# --- Kineto --------------------------------------------------------------------------------------------------------------


def write_kineto(timeline: Timeline, folder: Path) -> list[Path]:
    """Write ``rankN.pt.trace.json`` of every observed rank; their paths."""
    cast, paths = Cast(timeline.scenario), []
    for rank, kernels in sorted(kernels_of(timeline, cast).items()):
        clock, base = cast.clock(rank), cast.clock(rank).wall_ns(0.0)
        told = [
            {"pg_name": str(at), "pg_desc": one.role, "pg_size": len(one.members), "ranks": [*one.members]}
            for at, one in enumerate(cast.memberships(rank))
        ]
        info = {"backend": "nccl", "rank": rank, "world_size": timeline.scenario.layout.world, "pg_config": told}
        events = [event for kernel in kernels for event in _events(kernel, cast, clock.wall_ns, base)]
        document = {"schemaVersion": 1, "distributedInfo": info, "traceEvents": events, "baseTimeNanoseconds": base}
        paths.append(folder / f"rank{rank}.pt.trace.json")
        paths[-1].write_text(json.dumps(document), "ascii")
    return paths


def _name(kernel: Kernel) -> str:
    return _NAMES.get(kernel.function, _MESSAGES)


def _events(kernel: Kernel, cast: Cast, wall_ns: Callable[[float], int], base: int) -> Iterator[dict[str, Any]]:
    """The call of an operation, and its kernel."""
    called, begin, end = ((wall_ns(time) - base) / 1e3 for time in (kernel.called, kernel.begin, kernel.end))
    count = kernel.nbytes // kernel.element_bytes
    args = {
        "Collective name": _COLLECTIVES[kernel.function], "In msg nelems": count, "Out msg nelems": count,
        "Group size": len(kernel.own.members), "dtype": _TYPES.get(kernel.element_bytes, "Float"),
        "Process Group Name": str(cast.memberships(kernel.rank).index(kernel.own)),
        "Process Group Ranks": json.dumps([*kernel.own.members]), "External id": kernel.number, "Seq": kernel.sequence + 1,
    }  # fmt: skip
    yield {
        "ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1, "tid": 1, "ts": called, "dur": 5.0, "args": args,
    }  # fmt: skip
    stream = 20 + cast.roles.index(kernel.own.role)
    yield {
        "ph": "X", "cat": "kernel", "name": _name(kernel), "pid": 0, "tid": stream, "ts": begin, "dur": end - begin,
        "args": {**args, "correlation": kernel.number, "stream": stream},
    }  # fmt: skip


# --- Nsight Systems ------------------------------------------------------------------------------------------------------


def write_nsight(timeline: Timeline, folder: Path) -> list[Path]:
    """Write ``node-N.sqlite`` of every observed node; their paths."""
    cast, nodes = Cast(timeline.scenario), defaultdict[int, list[list[Kernel]]](list)
    for rank, kernels in sorted(kernels_of(timeline, cast).items()):
        nodes[node_of(timeline.scenario.layout, rank)].append(kernels)
    paths = []
    for node, ranks in nodes.items():
        paths.append(folder / f"node-{node}.sqlite")
        with sqlite3.connect(paths[-1]) as database:
            for table in _TABLES:
                database.execute(f"CREATE TABLE {table}")
            _fill(database, cast, ranks)
        database.close()
    return paths


def _fill(database: sqlite3.Connection, cast: Cast, ranks: Iterable[list[Kernel]]) -> None:
    """The rows of a node."""
    texts = [*_NAMES.values(), _MESSAGES, "cudaLaunchKernelExC_v11060"]
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(texts))
    for schema, fields in _SCHEMAS.items():
        rows = [(_DOMAIN, schema, at, name, offset or None) for at, (name, offset) in enumerate(fields)]
        database.executemany("INSERT INTO NVTX_PAYLOAD_SCHEMA_ENTRIES VALUES (?, ?, ?, NULL, 18, ?, NULL, NULL, ?)", rows)
    for at, kernels in enumerate(ranks):
        rank = kernels[0].rank
        clock, base = cast.clock(rank), cast.clock(rank).wall_ns(0.0)
        if at == 0:
            database.execute("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (?, '', '')", (base,))
        process = 1 << 48 | 10_000 + rank << 24
        thread, device = process + 1, rank % cast.scenario.layout.ranks_per_node
        for own in cast.memberships(rank):
            made = clock.wall_ns(0.0) - base
            _range(database, made, thread, _MAKING, struct.pack("<Qiii", own.hash, len(own.members), own.rank, device))
        for kernel in kernels:
            called, begin, end = (clock.wall_ns(time) - base for time in (kernel.called, kernel.begin, kernel.end))
            stream, name = 20 + cast.roles.index(kernel.own.role), texts.index(_name(kernel))
            database.execute(
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, 1, ?, ?, ?, ?, ?)",
                (begin, end, device, stream, kernel.number, process, name, name),
            )
            launch = (called + 100, called + 5_000, 0, thread, kernel.number, len(texts) - 1, 0)
            database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?, ?, ?)", launch)
            _range(database, called, thread, _CALL, struct.pack("<QQ", kernel.own.hash, kernel.nbytes))


def _range(database: sqlite3.Connection, begin: int, thread: int, schema: int, payload: bytes) -> None:
    """A range of NCCL with its payload, behind the head of 32 bytes that Nsight puts before it."""
    data = struct.pack("<IIIIQQ", _DOMAIN, 0, schema, 0, len(payload), 32 + len(payload)) + payload
    database.execute(
        "INSERT INTO NVTX_EVENTS (start, end, eventType, globalTid, domainId, binaryData) VALUES (?, ?, ?, ?, ?, ?)",
        (begin, begin + 5_100, _PUSH_POP, thread, _DOMAIN, data),
    )
