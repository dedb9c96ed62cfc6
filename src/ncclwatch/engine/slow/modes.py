"""By which rule jobs that run are judged."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ncclwatch.engine.slow.ccld import CcldWatch
from ncclwatch.engine.slow.watch import SlowWatch


class SlowMode(StrEnum):
    """The rules there are."""

    OWN = "ncclwatch"
    CCL_D = "ccl-d"


@dataclass(frozen=True, slots=True)
class SlowRule:
    """A rule and its settings. ``t_base_s`` is CCL-D's T_base(init), in seconds, ``theta`` its threshold of R."""

    mode: SlowMode = SlowMode.OWN
    t_base_s: float | None = None
    theta: float = 3.0

    def watch(self) -> SlowWatch:
        """A watch that judges by it, for one session."""
        if self.mode is SlowMode.CCL_D:
            return CcldWatch(t_base_s=self.t_base_s, theta=self.theta)
        return SlowWatch()
