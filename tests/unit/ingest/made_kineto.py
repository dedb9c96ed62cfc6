"""Made-up traces of PyTorch's profiler, by the form that Kineto writes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

BASE_NS = 1_755_590_100_000_000_000


def events(
    rank: int, world: int, *, rounds: int = 30, late: int | None = None, late_us: float = 9_000, old_names: bool = False,
    seq: bool = True, calls: bool = True,
) -> list[dict[str, Any]]:  # fmt: skip
    """Trace events of one rank: an AllReduce of all ranks every 20 ms; the GPU of ``late`` comes that much later to it."""
    made: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "kernel", "name": "sgemm", "pid": 0, "tid": 7, "ts": 1.0, "dur": 5.0, "args": {"stream": 7}},
    ]
    for number in range(rounds):
        due = 1_000.0 + 20_000 * number
        begin = due + 100 + (late_us if rank == late else 0.0)
        end = due + 100 + (late_us if late is not None else 0.0) + 900
        told: dict[str, Any] = {
            "Collective name": "allreduce", "In msg nelems": 4096, "Out msg nelems": 4096, "Group size": world, "dtype": "Float",
            "Process Group Name": "0", "Process Group Description": "default_pg",
            "Process Group Ranks": json.dumps([*range(world)]),
        }  # fmt: skip
        if seq:
            told["Seq"] = number + 1
        if calls:
            call = {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1, "tid": 1, "ts": due, "dur": 30.0}
            made.append({**call, "args": {**told, "External id": number + 10}})
        name = "ncclKernel_AllReduce_RING_LL_Sum_float" if old_names else "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"
        kernel = {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 20, "ts": begin, "dur": end - begin}
        made.append({**kernel, "args": {**told, "External id": number + 10, "correlation": number + 90, "stream": 20}})
    return made


def write(folder: Path, rank: int, world: int, made: list[dict[str, Any]], *, packed: bool = False, info: bool = True) -> Path:
    """One file; ``distributedInfo`` comes first, ``baseTimeNanoseconds`` last, as Kineto does."""
    group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": world, "ranks": [*range(world)]}
    told = {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": [group], "nccl_version": "2.21.5"}
    document = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "(made up)"}]}
    document |= {"distributedInfo": told} if info else {}
    document |= {"traceEvents": made, "baseTimeNanoseconds": BASE_NS}
    data = json.dumps(document, indent=2).encode()
    path = folder / (f"rank{rank}.pt.trace.json.gz" if packed else f"rank{rank}.pt.trace.json")
    path.write_bytes(gzip.compress(data) if packed else data)
    return path
