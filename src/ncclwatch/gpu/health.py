"""The GPUs of this node, asked for in a process of its own that may hang, lie or fail without harm."""

from __future__ import annotations

import sys
import time

import msgspec

from ncclwatch.bounded import run
from ncclwatch.model.gpu import GpuLook

TIMEOUT_S = 5.0
"""For an answer: NVML's first call on a node of eight GPUs without persistence mode takes seconds."""
KEEP = 1 << 20
"""Bytes of an answer; 64 GPUs take less than 100 KiB."""

_CHILD = (sys.executable, "-m", "ncclwatch.gpu.nvml")


def look_at_gpus(timeout_s: float = TIMEOUT_S) -> GpuLook:
    """What the driver says of the GPUs of this node; never raises: ``problem`` says why there is nothing."""
    outcome = run(_CHILD, timeout_s=timeout_s, keep=KEEP, flood=KEEP, errors=False)
    if outcome.why:
        return GpuLook(wall_ns=time.time_ns(), problem=f"the driver of the GPUs did not answer: {outcome.why}")
    try:
        return msgspec.json.decode(outcome.output, type=GpuLook)
    except msgspec.DecodeError:
        return GpuLook(wall_ns=time.time_ns(), problem=f"reading the GPUs ended with status {outcome.status}")
