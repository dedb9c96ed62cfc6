"""The thread that sends: events as they come, metrics once an interval, and a line when a receiver goes or comes back.

Whoever judges hands an event over, and never waits. While nobody answers, events wait in a bounded :class:`Outbox`; of metrics
only the newest round is ever sent.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from ncclwatch.errors import UsageError
from ncclwatch.export.base import Answer, JobMetrics, Sends
from ncclwatch.export.events import Event
from ncclwatch.export.outbox import Outbox
from ncclwatch.model.metric import Metric
from ncclwatch.text import clean, duration

INTERVAL_MS = 15_000
"""Between two rounds of metrics, unless ``OTEL_METRIC_EXPORT_INTERVAL`` says otherwise: what Prometheus scrapes at by habit."""
FIRST_RETRY_S, LAST_RETRY_S = 1.0, 30.0
CLOSE_S = 3.0
"""How long an end waits for what is still to be sent."""
QUIET_S = 60.0
"""A receiver that comes and goes is told about once in this time."""
MAX_LINES = 16


class Signal:
    """Metrics or events: whether they are taken, what is said of it, and when the next try is due after a failure."""

    def __init__(self, name: str, say: Callable[[str], None], clock: Callable[[], float]) -> None:
        self.name = name
        self.failures = 0
        self.retry_at = 0.0
        self._say = say
        self._clock = clock
        self._down_since: float | None = None
        self._told_at: float | None = None
        self._told = False
        self._lost = 0

    def came(self, answer: Answer, url: str, lost: int = 0) -> None:
        """A request has ended; ``lost``: how many of its kind were given up so far."""
        now = self._clock()
        if answer.ok:
            if self._down_since is not None and self._told:
                dropped = f"; {lost - self._lost} were dropped meanwhile" if lost > self._lost else ""
                self._say(f"{url} takes {self.name} again after {duration(now - self._down_since)}{dropped}")
            self._lost = lost
            self.failures, self.retry_at, self._down_since, self._told = 0, 0.0, None, False
            return
        self.retry_at = now + min(LAST_RETRY_S, FIRST_RETRY_S * 2 ** min(self.failures, 10))
        self.failures += 1
        if self._down_since is None:
            self._down_since = now
            if self._told_at is None or now - self._told_at >= QUIET_S:
                self._told_at, self._told = now, True
                self._say(f"{url} does not take {self.name} ({answer.reason}); watching goes on, and so do tries")


class Exporter:
    """Sends to ``receiver`` what ``metrics`` gives (called on the exporter's thread) and what :meth:`put` is shown. ``signals``:
    ``metrics``, ``events`` or both; by default what OpenTelemetry's variables leave. ``name`` begins every line.
    """

    def __init__(
        self,
        receiver: Sends,
        metrics: Callable[[], Sequence[JobMetrics]],
        *,
        outbox: Outbox | None = None,
        interval_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        signals: Sequence[str] | None = None,
        name: str = "OTLP",
    ) -> None:
        self.receiver, self._name = receiver, name
        self.outbox = Outbox() if outbox is None else outbox
        self.sent = 0
        self._metrics = metrics
        self._interval_s = interval_of_environment() if interval_s is None else interval_s
        self._clock = clock
        self._lines: queue.Queue[str] = queue.Queue(MAX_LINES)
        self._wake = threading.Event()
        self._closing = threading.Event()
        wanted = [one for one in ("metrics", "events") if not switched_off(one)] if signals is None else signals
        self._signals = {one: Signal(one, self._say, clock) for one in wanted}
        self._next_metrics = clock()
        self._thread = threading.Thread(target=self._work, name="otlp", daemon=True)
        self._thread.start()

    def put(self, event: Event) -> None:
        """Send an event when there is time. Never waits, never raises."""
        if "events" in self._signals:
            self.outbox.put(event)
            self._wake.set()

    def lines(self) -> list[str]:
        """What is to be said since the last time."""
        found: list[str] = []
        with suppress(queue.Empty):
            while True:
                found.append(self._lines.get_nowait())
        return found

    def close(self) -> None:
        """Send what waits, as far as the receiver takes it within :data:`CLOSE_S`; what is left is counted and said."""
        self._closing.set()
        self._wake.set()
        self._thread.join(CLOSE_S)
        self.receiver.close()
        if left := len(self.outbox):
            self._say(f"{left} events were not taken by {self.receiver.url} until the end")

    def _work(self) -> None:
        last = False
        while not last:
            self._wake.wait(max(0.05, self._due() - self._clock()))
            self._wake.clear()
            # What came while a round was under way is sent in one that begins after the end was said.
            last = self._closing.is_set()
            self._round()

    def _due(self) -> float:
        """When something is to be done unless an event comes."""
        times = [self._next_metrics if "metrics" in self._signals else float("inf")]
        if len(self.outbox):
            times.append(self._signals["events"].retry_at)
        return min(*times, self._clock() + self._interval_s)

    def _round(self) -> None:
        closing = self._closing.is_set()
        events = self._signals.get("events")
        # At the end nobody waits for a receiver that does not answer.
        if events is not None and self._clock() >= events.retry_at and not (closing and events.failures):
            self._send_events(events)
        signal = self._signals.get("metrics")
        if signal is not None and (self._clock() >= self._next_metrics or (closing and not signal.failures)):
            self._next_metrics = max(self._clock() + self._interval_s, signal.retry_at)
            try:
                answer = self.receiver.send_metrics([*self._metrics(), self._own()])
            except Exception as error:
                # Whatever a view or a library does, watching goes on.
                answer = Answer(ok=False, reason=f"{type(error).__name__}: {clean(str(error), 120)}")
            signal.came(answer, self.receiver.url)

    def _send_events(self, signal: Signal) -> None:
        while batch := self.outbox.take():
            try:
                answer = self.receiver.send_events(batch)
            except Exception as error:
                answer = Answer(ok=False, reason=f"{type(error).__name__}: {clean(str(error), 120)}")
            if answer.ok:
                self.sent += len(batch)
            elif answer.again:
                self.outbox.back(batch)
            else:
                self.outbox.give_up(batch)
            signal.came(answer, self.receiver.url, lost=self.outbox.dropped)
            if not answer.ok:
                return

    def _own(self) -> JobMetrics:
        """What the exporter counts itself."""
        told: tuple[tuple[str, str, float], ...] = (
            ("ncclwatch_otlp_events_sent_total", "Events that were taken by the receiver.", self.sent),
            ("ncclwatch_otlp_events_dropped_total", "Events that were dropped or refused.", self.outbox.dropped),
        )
        metrics = [Metric(name, "counter", text, (({}, value),)) for name, text, value in told]
        left_out = Metric(
            "ncclwatch_otlp_points_left_out", "gauge", "Data points without room in the last round.",
            (({}, self.receiver.left_out),),
        )  # fmt: skip
        return JobMetrics("", time.time_ns(), [*metrics, left_out])

    def _say(self, text: str) -> None:
        with suppress(queue.Full):
            self._lines.put_nowait(f"{self._name}: {text}")


def switched_off(signal: str) -> bool:
    """Whether ``OTEL_METRICS_EXPORTER`` or ``OTEL_LOGS_EXPORTER`` is ``none``: for receivers that take one of the two."""
    return os.environ.get({"metrics": "OTEL_METRICS_EXPORTER", "events": "OTEL_LOGS_EXPORTER"}[signal], "").strip() == "none"


def interval_of_environment() -> float:
    """Seconds between two rounds of metrics. Raises :class:`UsageError`."""
    text = os.environ.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip() or str(INTERVAL_MS)
    if not text.isascii() or not text.isdigit() or not 100 <= int(text[:12]) <= 86_400_000:
        raise UsageError(f"OTEL_METRIC_EXPORT_INTERVAL={clean(text, 40)} is no time", "write milliseconds, from 100 on")
    return int(text) / 1000
