"""Whether flows became slower when they took a plan: rates of what leaves a host before and after, compared.

An iteration of a ring is as fast as its slowest flow, so a look counts as the rate of the slowest one. Rates are those while
there was something to send: a job that computes longer is not taken for a slower path. The next communicator has flows of its
own, so what is compared is all that goes between the same addresses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import median

from ncclwatch.paths.measured import MeasuredFlow

Key = tuple[str, int, str, int]
"""(source, source port, destination, port)."""
FALL = 0.1
"""Rates have fallen when the median after is lower than the median before by this part."""
LOOKS = 3
"""So many looks are needed on either side, and so many of the newest after the plan are compared."""
KEPT = 60
"""Bound: looks before the plan that are kept."""
MOST = 0.5
"""Flows are on the plan when more than this part of them leaves by its ports."""


@dataclass(frozen=True, slots=True)
class Fall:
    """Bytes a second of the slowest flow, medians: ``before`` the plan was taken, and ``after``."""

    before: float
    after: float


@dataclass(slots=True)
class Trial:
    """One plan on trial; ``planned`` are its five-tuples. A new plan is a new trial."""

    planned: Collection[Key]
    _before: list[float] = field(default_factory=list)
    _after: list[float] = field(default_factory=list)

    @property
    def compares_with(self) -> float | None:
        """The median before; ``None`` until there were looks enough."""
        return median(self._before) if len(self._before) >= LOOKS else None

    def look(self, flows: Sequence[MeasuredFlow]) -> Fall | None:
        """Take one look at this host's flows; says so once when they have become slower on the plan than they were before."""
        pairs = {(source, destination) for source, _, destination, _ in self.planned}
        mine = [one for one in flows if (one.source, one.destination) in pairs and one.rate > 0]
        if not mine:
            return None
        on = sum((one.source, one.source_port, one.destination, one.port) in self.planned for one in mine)
        slowest = min(one.rate for one in mine)
        if on == 0:
            self._before = [*self._before, slowest][-KEPT:]
            self._after = []
        elif on > MOST * len(mine):
            self._after = [*self._after, slowest][-LOOKS:]
        if len(self._before) < LOOKS or len(self._after) < LOOKS:
            return None
        fall = Fall(median(self._before), median(self._after))
        # A look that was as slow before is no fall: it is how this job varies.
        if fall.after >= (1 - FALL) * fall.before or max(self._after) >= sorted(self._before)[len(self._before) // 10]:
            return None
        self._before = []
        return fall
