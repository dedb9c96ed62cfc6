"""What we ourselves cost the node: CPU time and memory of this process."""

from __future__ import annotations

import resource
import time
from pathlib import Path


class OwnCost:
    """CPU share of this process between two questions."""

    def __init__(self) -> None:
        self._cpu_ns = time.process_time_ns()
        self._at_ns = time.monotonic_ns()

    def share(self) -> float:
        """Share of one core since this was last asked."""
        now_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        own = (cpu_ns - self._cpu_ns) / max(now_ns - self._at_ns, 1)
        self._cpu_ns, self._at_ns = cpu_ns, now_ns
        return own

    @staticmethod
    def resident_bytes() -> int:
        """Resident memory now."""
        try:
            pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        except (OSError, ValueError, IndexError):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return pages * resource.getpagesize()
