"""The GPUs of this node, asked for in a process of its own that may hang, lie or fail without harm."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass, field

import msgspec

from ncclwatch.bounded import run
from ncclwatch.model.gpu import GpuLook

TIMEOUT_S = 5.0
"""For an answer: NVML's first call on a node of eight GPUs without persistence mode takes seconds."""
KEEP = 1 << 20
"""Bytes of an answer; 64 GPUs take less than 100 KiB."""
FRESH_S = 10.0
"""An answer is taken for so long before it is asked again."""

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


@dataclass
class GpuWatch:
    """The newest look, taken again in a thread when it is older than ``every_s``; who asks never waits."""

    every_s: float = FRESH_S
    _look: GpuLook = field(default_factory=GpuLook)
    _taken: float = float("-inf")
    _thread: threading.Thread | None = None

    def newest(self) -> GpuLook:
        """What was read last; the first answer is empty."""
        running = self._thread is not None and self._thread.is_alive()
        if not running and time.monotonic() - self._taken >= self.every_s:
            self._thread = threading.Thread(target=self._take, name="ncclwatch-gpus", daemon=True)
            self._thread.start()
        return self._look

    def _take(self) -> None:
        self._look = look_at_gpus()
        self._taken = time.monotonic()
