"""Flight Recorder dumps by the definition of the format: small jobs of which every entry is written down."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECOND = 1_000_000_000
BEGAN = 1_700_000_000 * SECOND
TIMEOUT_MS = 600_000
WORLD = "0"


@dataclass
class Dumps:
    """A job of ``world`` ranks with process groups by name; ``call`` appends entries, ``write`` makes files."""

    world: int
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    version: str = "2.10"
    backend: str = "nccl"
    timing: bool = True
    """Whether beginnings are recorded (TORCH_NCCL_ENABLE_TIMING)."""
    about: Mapping[str, str] = field(default_factory=dict)
    entries: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    counts: dict[tuple[int, str, bool], int] = field(default_factory=dict)

    def members(self, group: str) -> list[int]:
        return list(range(self.world)) if group == WORLD else list(self.groups[group])

    def call(
        self, rank: int, name: str = "all_reduce", *, group: str = WORLD, state: str = "completed", size: int = 1024,
        at_s: float = 0.0,        dtype: str = "Float", line: int = 10, **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """One entry of a rank, with the next number of its group."""
        message = name.startswith(("send", "recv"))
        self.counts[rank, group, message] = number = self.counts.get((rank, group, message), 0) + 1
        made = BEGAN + int(at_s * SECOND) + len(self.entries.get(rank, ())) * SECOND
        begun = made + 1000 if state != "scheduled" and self.timing else None
        whole = size * len(self.members(group)) if name.startswith(("_all_gather", "all_gather")) else size
        about = "default_pg" if group == WORLD else self.about.get(group, "undefined")
        entry = {
            "frames": [
                {"name": "all_reduce", "filename": "/x/torch/distributed/distributed_c10d.py", "line": 2501},
                {"name": "step", "filename": "/job/train.py", "line": line},
            ],
            "record_id": len(self.entries.get(rank, ())),
            "pg_id": 0 if group == WORLD else 1 + list(self.groups).index(group),
            "process_group": (group, about),
            "collective_seq_id": 0 if message else number,
            "p2p_seq_id": number if message else 0,
            "op_id": number,
            "profiling_name": f"{self.backend}:{name}",
            "time_created_ns": made,
            "input_sizes": [[size]],
            "input_dtypes": [dtype],
            "output_sizes": [[whole]],
            "output_dtypes": [dtype],
            "state": state,
            "time_discovered_started_ns": begun,
            "time_discovered_completed_ns": made + 2000 if state == "completed" else None,
            "retired": state == "completed",
            "timeout_ms": TIMEOUT_MS,
            "is_p2p": message,
        }
        entry.update(more)
        self.entries.setdefault(rank, []).append(entry)
        return entry

    def all_call(self, name: str = "all_reduce", *, group: str = WORLD, times: int = 1, **more: Any) -> None:
        """The same call of every rank of a group."""
        for _ in range(times):
            for rank in self.members(group):
                self.call(rank, name, group=group, **more)

    def dump(self, rank: int) -> dict[str, Any]:
        """What PyTorch would write of a rank."""
        entries = self.entries.get(rank, [])
        named = [WORLD, *(group for group in self.groups if rank in self.groups[group])]
        config = {
            name: {
                "name": name,
                "desc": "default_pg" if name == WORLD else self.about.get(name, "undefined"),
                "ranks": str(self.members(name)),
            }
            for name in named
        }
        status = {}
        for entry in entries:
            group = [WORLD, *self.groups][entry["pg_id"]]
            status[str(entry["pg_id"])] = {
                "last_enqueued_collective": self.counts.get((rank, group, False), -1),
                "last_started_collective": -1,
                "last_completed_collective": -1,
            }
        found = {
            "version": self.version,
            "pg_config": config,
            "pg_status": status,
            "comm_lib_version": "2.27.5",
            "entries": entries,
        }
        if self.backend == "gloo":
            found["pg_config"] = {"": {"name": "", "desc": "", "ranks": str(list(range(self.world)))}}
        return found

    def write(self, folder: Path, *, prefix: str = "nccl_trace_rank_", without: Sequence[int] = (), form: str = "pickle") -> Path:
        """Files of all ranks but some."""
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self.world):
            if rank not in without:
                data = self.dump(rank)
                text = pickle.dumps(data, 2) if form == "pickle" else json.dumps(data).encode()
                (folder / f"{prefix}{rank}{'' if form == 'pickle' else '.json'}").write_bytes(text)
        return folder
