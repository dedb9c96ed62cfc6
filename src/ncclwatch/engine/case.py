"""One job as it is judged: its records, what is known besides them, and what was concluded so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from ncclwatch.engine.hypotheses import Trail
from ncclwatch.engine.job import Job


@dataclass(slots=True)
class Case:
    """A job with everything a source may read and a rule may conclude from. ``still``: seconds without progress; ``time``: the
    newest sample, seconds since the epoch.
    """

    job: Job
    still: float
    time: float
    trail: Trail = field(default_factory=Trail)
