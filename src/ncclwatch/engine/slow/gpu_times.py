"""What the GPUs themselves say of a slow job, where the shim times their kernels: who comes to collectives later than the others.

All ranks leave a collective at about the same time, so who was in it for a shorter time came later (CCL-D 4.2.2): that compares
durations, and needs no clock. How well clocks of different hosts could be compared is told beside it: where one rank always comes
last, its lateness and a wrong clock look alike.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ncclwatch.engine.job import Job
from ncclwatch.engine.slow.clocks import ClockModel, estimate
from ncclwatch.engine.slow.rounds import Round, Rounds

KEPT_ROUNDS = 512
LOOKED_AT = 20_000
"""Times of ranks in the newest rounds that are compared."""
LEAST_ROUNDS = 3
LEAST_S = 0.001


@dataclass(frozen=True, slots=True)
class Start:
    """How much later than the others one rank's GPU comes to collectives: median over ``rounds``, seconds."""

    late_s: float
    rounds: int

    def text(self) -> str:
        """One line of evidence, without the rank's name."""
        late = f"{self.late_s * 1e3:.0f} ms later than the others"
        return f"its GPU comes to collectives {late}, in the middle of {self.rounds} (shim)"


@dataclass(slots=True)
class GpuTimes:
    """The newest rounds of one job as its GPUs timed them."""

    rounds: Rounds = field(default_factory=Rounds)
    kept: deque[Round] = field(default_factory=lambda: deque(maxlen=KEPT_ROUNDS))

    def take(self, job: Job) -> None:
        """Take what the newest samples tell; nothing where no process has the shim."""
        if any(member.last.device is not None for member in job.members):
            self.kept.extend(self.rounds.take(job, [None] * len(job.members)))

    def _newest(self) -> list[Round]:
        largest = max((len(done.durations) for done in self.kept), default=1)
        return list(self.kept)[-max(LEAST_ROUNDS, LOOKED_AT // largest) :]

    def starts(self, since: float) -> dict[int, Start]:
        """By index of the member: whose GPU has come late to collectives since a moment (wall time)."""
        late: dict[int, list[float]] = {}
        for done in self._newest():
            if done.time >= since and len(done.durations) > 1:
                usual = float(np.median(list(done.durations.values())))
                for at, lasted in done.durations.items():
                    late.setdefault(at, []).append(usual - lasted)
        found = {at: Start(float(np.median(times)), len(times)) for at, times in late.items() if len(times) >= LEAST_ROUNDS}
        return {at: start for at, start in found.items() if start.late_s >= LEAST_S}

    def clocks(self, job: Job) -> ClockModel:
        """The hosts' clocks, numbered as hosts come up in the job; of one host nothing."""
        hosts: dict[str, int] = {}
        node = {member.index: hosts.setdefault(member.info.host, len(hosts)) for member in job.members}
        rows = [
            (node[at], number, begin, begin + done.durations[at])
            for number, done in enumerate(self._newest())
            for at, begin in done.begins.items()
            if at in node
        ]
        if len(hosts) < 2 or not rows:
            return ClockModel()
        table = np.array(rows, np.float64)
        return estimate(table[:, 0].astype(np.int64), table[:, 1].astype(np.int64), table[:, 2], table[:, 3])

    def clocks_text(self, job: Job) -> str:
        """How well clocks of hosts can be compared, in words; empty where there is one host, or nothing to tell it by."""
        known = list(self.clocks(job).clocks.values())
        if len(known) < 2:
            return ""
        apart, error = max(abs(clock.offset_s) for clock in known), max(clock.error_s for clock in known)
        if not np.isfinite(error):
            return "clocks of hosts cannot be compared: they have no operation in common"
        known_to = f"known to ±{error * 1e3:.1f} ms by operations in common"
        return f"clocks of {len(known)} hosts differ by up to {apart * 1e3:.1f} ms, {known_to}"
