"""What an exporter and a receiver have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ncclwatch.export.events import Event
from ncclwatch.model.metric import Metric


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request; ``again``: it is worth being sent once more."""

    ok: bool
    again: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class JobMetrics:
    """The metrics of one job at a time (ns, CLOCK_REALTIME); ``job`` is empty for a session without one."""

    job: str
    at_ns: int
    metrics: Sequence[Metric]


class Sends(Protocol):
    """What an exporter needs of a receiver."""

    url: str
    left_out: int
    """Data points that there was no room for in the newest round."""

    def send_metrics(self, jobs: Sequence[JobMetrics]) -> Answer:
        """Send a round of metrics."""

    def send_events(self, events: Sequence[Event]) -> Answer:
        """Send events."""

    def close(self) -> None:
        """Give up what is under way, and send nothing more."""
