"""SIMULATED files of NCCL's Inspector: what it would have written of a simulated job, a line an operation that ended.

Form as output format v4.0 (NCCL v2.29.2, ``ext-profiler/inspector``), with ``NCCL_INSPECTOR_DUMP_VERBOSE=1``. Exchanges with
other stages are messages and left out. Shares no code with what reads such files.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from ncclwatch.simulate.gpu_kernels import Kernel, kernels_of
from ncclwatch.simulate.layout import node_of
from ncclwatch.simulate.observe import HOST_PREFIX, Cast
from ncclwatch.simulate.timeline import Timeline

SMALLEST_BYTES = 8192
"""Fact: smaller operations are not written by default (``NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES``)."""
_MESSAGES = ("SendRecv", "AlltoAll")


def write_inspector(timeline: Timeline, folder: Path) -> list[Path]:
    """Write ``HOST-pidN.log`` of every observed rank; their paths."""
    cast, paths = Cast(timeline.scenario), []
    for rank, kernels in sorted(kernels_of(timeline, cast).items()):
        host, counted = f"{HOST_PREFIX}{node_of(timeline.scenario.layout, rank)}", Counter[tuple[int, str]]()
        lines = []
        for kernel in kernels:
            if kernel.function in _MESSAGES:
                continue
            number = counted[kernel.own.hash, kernel.function]
            counted[kernel.own.hash, kernel.function] += 1
            if kernel.nbytes >= SMALLEST_BYTES:
                lines.append(json.dumps(_line(kernel, cast, host, number)))
        paths.append(folder / f"{host}-pid{10_000 + rank}.log")
        paths[-1].write_text("".join(f"{line}\n" for line in lines), "ascii")
    return paths


def _line(kernel: Kernel, cast: Cast, host: str, number: int) -> dict[str, object]:
    """One operation; times in microseconds of the node's clock."""
    called, begin, end = (cast.clock(kernel.rank).wall_ns(time) // 1000 for time in (kernel.called, kernel.begin, kernel.end))
    own = kernel.own
    trace = {"channel_id": 0, "kernel_start_ts": begin, "kernel_stop_ts": end, "kernel_record_ts": end}
    return {
        "header": {"id": f"{own.hash:#x}", "rank": own.rank, "n_ranks": len(own.members), "nnodes": len(set(own.nodes))},
        "metadata": {
            "inspector_output_format_version": "v4.0", "git_rev": "v2.29.2-1", "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": end + 500_000, "hostname": host, "pid": 10_000 + kernel.rank,
        },
        "coll_perf": {
            "coll": kernel.function, "coll_sn": number, "coll_msg_size_bytes": kernel.nbytes,
            "coll_exec_time_us": end - begin, "coll_timing_source": "kernel_gpu", "coll_algobw_gbs": 0.0, "coll_busbw_gbs": 0.0,
            "event_trace_ts": {"coll_start_ts": called, "coll_stop_ts": called + 5, "kernel_events": [trace]},
        },
    }  # fmt: skip
