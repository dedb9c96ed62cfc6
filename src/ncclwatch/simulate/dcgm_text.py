"""SIMULATED answers of DCGM's exporter: what it would have said of the GPUs of a simulated job at a moment, one file a node.

Form as dcgm-exporter writes it (NVIDIA dcgm-exporter, ``etc/default-counters.csv``). Of faults only a GPU that computes slowly is
known to it: its clock is held down by its power limit. A kernel that does not end is no error to DCGM, and keeps its GPU busy.
Shares no code with what reads such text.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from ncclwatch.simulate.layout import node_of
from ncclwatch.simulate.observe import HOST_PREFIX, Cast
from ncclwatch.simulate.scenario import FaultKind
from ncclwatch.simulate.timeline import Timeline

CLOCK_MHZ, LOWEST_MHZ, POWER_CAP = 1980, 345, 0x4
"""Fact: an H100's highest and lowest SM clock; ``nvmlClocksEventReasonSwPowerCap``."""
_FIELDS = {
    "DCGM_FI_DEV_SM_CLOCK": "SM clock frequency (in MHz).",
    "DCGM_FI_DEV_GPU_UTIL": "GPU utilization (in %).",
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": "Current clock throttle reasons (bitmask of DCGM_CLOCKS_THROTTLE_REASON_*)",
    "DCGM_FI_DEV_XID_ERRORS": "Value of the last XID error encountered.",
}


def write_dcgm(timeline: Timeline, folder: Path, at_s: float) -> list[Path]:
    """Write ``HOST.prom`` of every observed node, as of a true time (seconds); their paths."""
    cast, layout = Cast(timeline.scenario), timeline.scenario.layout
    slow = {
        fault.rank: fault.strength for fault, start in timeline.disturbance.onsets
        if fault.kind is FaultKind.SLOW_GPU and start <= at_s < start + fault.duration_s
    }  # fmt: skip
    nodes: dict[str, dict[int, float]] = defaultdict(dict)
    for rank in range(layout.world):
        if cast.observed(rank):
            nodes[f"{HOST_PREFIX}{node_of(layout, rank)}"][rank % layout.ranks_per_node] = slow.get(rank, 1.0)
    paths = []
    for host, gpus in nodes.items():
        paths.append(folder / f"{host}.prom")
        paths[-1].write_text(_text(host, gpus), "ascii")
    return paths


def _text(host: str, gpus: dict[int, float]) -> str:
    """Each field with its samples; ``gpus``: how many times as slowly each computes."""
    lines = []
    for field, about in _FIELDS.items():
        lines += [f"# HELP {field} {about}", f"# TYPE {field} gauge"]
        for gpu, factor in gpus.items():
            labels = f'gpu="{gpu}",UUID="GPU-{gpu}",device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="{host}"'
            value = {
                "DCGM_FI_DEV_SM_CLOCK": max(LOWEST_MHZ, round(CLOCK_MHZ / factor)), "DCGM_FI_DEV_GPU_UTIL": 100,
                "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": POWER_CAP if factor > 1 else 0, "DCGM_FI_DEV_XID_ERRORS": 0,
            }[field]  # fmt: skip
            lines.append(f"{field}{{{labels}}} {value}")
    return "\n".join(lines) + "\n"
