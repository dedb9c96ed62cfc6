"""SIMULATED Flight Recorder dumps of a simulated job, as PyTorch's watchdog would have written them.

It shares no code with what reads them (``ncclwatch.ingest``): fields and their order are those of ``FlightRecorder::dump_dict``
(torch/csrc/distributed/c10d/FlightRecorderDetail.hpp, format 2.10), which PyTorch's own ``torchfrtrace`` takes.
"""

from __future__ import annotations

import math
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ncclwatch.simulate.layout import groups, membership
from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.scenario import FaultKind, Layout
from ncclwatch.simulate.timeline import Block, Timeline

TIMEOUT_S = 600.0
RING = 2000
"""Entries that PyTorch keeps of a rank (``TORCH_FR_BUFFER_SIZE``)."""
NO_DUMP = frozenset({FaultKind.STOP, FaultKind.KILL, FaultKind.CRASH, FaultKind.INIT_MISSING})
"""Faults after which a process cannot write."""
_NAMES = {
    "AllReduce": "all_reduce",
    "AllGather": "_all_gather_base",
    "ReduceScatter": "_reduce_scatter_base",
    "AlltoAll": "all_to_all",
    "Broadcast": "broadcast",
}
_TYPES = {1: "Char", 2: "BFloat16", 4: "Float", 8: "Double"}


class DumpWriter:
    """Dumps of every rank of a simulated job that could write one at true time ``at`` (seconds)."""

    def __init__(self, timeline: Timeline, *, timing: bool = True) -> None:
        self.timeline, self.timing = timeline, timing
        self.cast = Cast(timeline.scenario)
        hung = timeline.hung
        self.at = timeline.end + (TIMEOUT_S if hung else 0.0)
        """The moment of the dump: a timeout after the last thing happened, of a job that ends its end."""

    def write(self, folder: Path) -> list[Path]:
        """One file a rank; its time is that of the dump."""
        files = []
        for rank in range(self.timeline.scenario.layout.world):
            if not self._writes(rank):
                continue
            file = folder / f"nccl_trace_rank_{rank}"
            file.write_bytes(pickle.dumps(self.dump(rank), 2))
            stamp = self.cast.clock(rank).wall_ns(self.at)
            os.utime(file, ns=(stamp, stamp))
            files.append(file)
        return files

    def _writes(self, rank: int) -> bool:
        lost = any(f.rank == rank and f.kind in NO_DUMP and math.isinf(f.duration_s) for f in self.timeline.scenario.faults)
        killed = any(f.rank == rank and f.kind in (FaultKind.KILL, FaultKind.CRASH) for f in self.timeline.scenario.faults)
        return self.cast.observed(rank) and not lost and not killed and rank not in self.timeline.never_initialised

    def dump(self, rank: int) -> dict[str, Any]:
        """What the watchdog of a rank would have pickled."""
        layout, calls = self.timeline.scenario.layout, Counter[tuple[str, bool]]()
        entries: list[dict[str, Any]] = []
        for block, place in self._calls(rank):
            entries += self._entries(rank, block, place, calls, len(entries))
        named = ["world", *(role for role in self.cast.roles if role != "world")]
        config = {_name(layout, role, rank): _group(layout, role, rank) for role in named}
        status = {
            str(named.index(role)): {
                "last_enqueued_collective": calls[role, False],
                "last_started_collective": -1,
                "last_completed_collective": -1,
            }
            for role in named
            if not calls[role, True]
        }
        return {
            "version": "2.10", "pg_config": config, "comm_lib_version": self.timeline.scenario.network.nccl,
            "pg_status": status, "entries": entries[-RING:],
        }  # fmt: skip

    def _calls(self, rank: int) -> Iterator[tuple[Block, int]]:
        """The operations that a rank has called by then, in the order of its calls, with its place in each."""
        found = []
        for block in self.timeline.blocks:
            first = int(block.ranks[0])
            place = rank - first
            if 0 <= place < len(block.ranks) and int(block.ranks[place]) == rank:
                pass
            else:
                places = (block.ranks == rank).nonzero()[0]
                if not places.size:
                    continue
                place = int(places[0])
            if block.called[place] <= self.at:
                found.append((block, place))
        yield from sorted(found, key=lambda one: float(one[0].called[one[1]]))

    def _entries(
        self, rank: int, block: Block, place: int, calls: Counter[tuple[str, bool]], record: int
    ) -> Iterator[dict[str, Any]]:
        layout, message = self.timeline.scenario.layout, bool(block.transfers)
        calls[block.role, message] += 1
        own, size = block.calling(rank), groups(layout, block.role).shape[1]
        mine = int(membership(layout, block.role)[1][rank])
        whole = own.nbytes // max(1, own.element_bytes)
        given, taken = (whole // size if own.function == "AllGather" else whole), whole
        if own.function == "ReduceScatter":
            taken = whole // size
        names = [f"send {mine}->{t.peer}" if t.send else f"recv {mine}<-{t.peer}" for t in block.transfers]
        names = names or [_NAMES.get(own.function, "all_reduce")]
        if len(names) > 1:
            names.append("coalesced")
        clock, roles = self.cast.clock(rank), ["world", *(role for role in self.cast.roles if role != "world")]
        begun, ended = (times[place] <= self.at for times in (block.started, block.finished))
        for number, name in enumerate(names):
            # Inside a coalesced group PyTorch keeps no events: only the group has a state.
            blank = len(names) > 1 and name != "coalesced"
            started = clock.wall_ns(float(block.started[place])) if begun and self.timing and not blank else None
            completed = clock.wall_ns(float(block.finished[place])) if ended and not blank else None
            yield {
                "frames": [
                    {"name": name, "filename": "/torch/distributed/distributed_c10d.py", "line": 1},
                    {"name": block.label or block.role, "filename": "/simulated/train.py", "line": 1 + block.iteration},
                ],
                "record_id": record + number, "pg_id": roles.index(block.role),
                "process_group": (_name(layout, block.role, rank), _about(block.role)),
                "collective_seq_id": calls[block.role, False], "p2p_seq_id": calls[block.role, True],
                "op_id": calls[block.role, False] + calls[block.role, True],
                "profiling_name": f"nccl:{name}", "time_created_ns": clock.wall_ns(float(block.called[place])),
                "input_sizes": [[given]], "input_dtypes": [_TYPES.get(own.element_bytes, "Float")],
                "output_sizes": [[taken]], "output_dtypes": [_TYPES.get(own.element_bytes, "Float")],
                "state": "completed" if completed else "started" if started else "scheduled",
                "time_discovered_started_ns": started, "time_discovered_completed_ns": completed,
                "retired": bool(completed), "timeout_ms": int(TIMEOUT_S * 1000), "is_p2p": message,
            }  # fmt: skip


def _about(role: str) -> str:
    return "default_pg" if role == "world" else role


def _name(layout: Layout, role: str, rank: int) -> str:
    """PyTorch numbers groups over the job; here by role and number, so that a reader can tell them."""
    return "0" if role == "world" else f"{role}_{int(membership(layout, role)[0][rank])}"


def _group(layout: Layout, role: str, rank: int) -> dict[str, str]:
    members = groups(layout, role)[int(membership(layout, role)[0][rank])].tolist()
    return {"name": _name(layout, role, rank), "desc": _about(role), "ranks": str(members)}
