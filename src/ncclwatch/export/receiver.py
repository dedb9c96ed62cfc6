"""A receiver of OTLP over HTTP, by OpenTelemetry's own exporters: encoding, retries and TLS are theirs, and so are the ``OTEL_*``
variables (headers, certificates, compression, timeout, resource attributes).

An exporter says no more than that something failed, so the connection below it remembers why.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from ncclwatch import __version__
from ncclwatch.errors import NcclwatchError, UsageError
from ncclwatch.export.base import Answer, JobMetrics
from ncclwatch.export.events import Event
from ncclwatch.model.metric import Metric
from ncclwatch.text import clean

try:
    import requests
    from opentelemetry._logs import LogRecord, SeverityNumber
    from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk._logs import ReadableLogRecord
    from opentelemetry.sdk._logs.export import LogRecordExportResult
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        MetricExportResult,
        MetricsData,
        NumberDataPoint,
        ResourceMetrics,
        ScopeMetrics,
        Sum,
    )
    from opentelemetry.sdk.metrics.export import Metric as SdkMetric
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
except ImportError:
    raise NcclwatchError("OpenTelemetry is not installed", "pip install 'ncclwatch[otlp]'") from None

MAX_ANSWER = 64 << 10
"""Bound: bytes of an answer that are read."""
MAX_POINTS = 200_000
"""Bound: data points of one round, of all jobs together."""
REQUEST_POINTS = 16_384
"""Bound: data points of one request: some 3 MiB. Collectors refuse more than 20 MiB unless told otherwise."""
TAKE_AGAIN = frozenset({408, 429})
"""Statuses of 4xx after which the same request is to be sent again; 408 is HTTP's, 429 OTLP's."""

_SCOPE = InstrumentationScope("ncclwatch", __version__)
_ERRNO = re.compile(r"\[Errno -?\d+\] ([A-Za-z][^'\"()]{2,80})")


class Connection(requests.Session):
    """Reads a bounded part of every answer, takes a redirect for a failure, and remembers how the newest request ended."""

    def __init__(self) -> None:
        super().__init__()
        self.status = 0
        self.reason = ""
        self.newest = b""

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        """As of the session; raises what that raises."""
        self.status, self.reason = 0, ""
        try:
            # As an argument: what a session has of its own gives way to REQUESTS_CA_BUNDLE.
            answer = super().request(*args, **{**kwargs, "stream": True, "verify": self.verify})
            with answer:
                self.status = answer.status_code
                self.newest = answer._content = answer.raw.read(MAX_ANSWER, decode_content=False)
        except Exception as error:
            self.reason = in_words(error)
            raise
        if self.status >= 300:
            self.reason = f"it answers {self.status} {clean(str(answer.reason or ''), 60)}".rstrip()
        if 300 <= self.status < 400:
            raise requests.RequestException(self.reason)
        return answer

    def answer(self, *, ok: bool) -> Answer:
        """How the newest request ended, given whether the exporter was content."""
        refused = 400 <= self.status < 500 and self.status not in TAKE_AGAIN
        return Answer(ok, not ok and not refused, "" if ok else self.reason or "it takes no such request")


class Receiver:
    """Where metrics and events go. ``url`` is the base: ``/v1/metrics`` and ``/v1/logs`` are added to it.

    Raises :class:`UsageError` where it makes no sense. Calls wait as long as the network lets them, ten seconds unless
    ``OTEL_EXPORTER_OTLP_TIMEOUT`` says otherwise: they belong on a thread of their own.
    """

    def __init__(self, url: str) -> None:
        self.url = base_url(url)
        for name in ("opentelemetry", "urllib3"):
            # What they would say once a request is said once here.
            logging.getLogger(name).addHandler(logging.NullHandler())
            logging.getLogger(name).propagate = False
        self._begun_ns = time.time_ns()
        self._resources: dict[str, Resource] = {}
        self._connections = Connection(), Connection()
        self._metrics = OTLPMetricExporter(
            endpoint=self._endpoint("METRICS"), session=self._connections[0], max_export_batch_size=REQUEST_POINTS
        )
        self._logs = OTLPLogExporter(endpoint=self._endpoint("LOGS"), session=self._connections[1])
        self.left_out = 0

    def _endpoint(self, signal: str) -> str | None:
        """Where a signal goes; ``None`` where a variable says it, which the exporter reads."""
        return None if os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") else f"{self.url}/v1/{signal.lower()}"

    def send_metrics(self, jobs: Sequence[JobMetrics]) -> Answer:
        """Send a round of metrics."""
        self.left_out, room = 0, MAX_POINTS
        # By job: of two that say the same of themselves the encoder keeps the last.
        found: dict[str, list[SdkMetric]] = {}
        for one in jobs:
            for metric in one.metrics:
                if len(metric.samples) > room:
                    self.left_out += len(metric.samples)
                    continue
                room -= len(metric.samples)
                found.setdefault(one.job, []).append(self._metric(metric, one.at_ns))
        by_job = [ResourceMetrics(self._resource(job), [ScopeMetrics(_SCOPE, told, "")], "") for job, told in found.items()]
        done = self._metrics.export(MetricsData(by_job))
        return self._connections[0].answer(ok=done is MetricExportResult.SUCCESS)

    def send_events(self, events: Sequence[Event]) -> Answer:
        """Send events as log records."""
        done = self._logs.export([self._record(event) for event in events])
        return self._connections[1].answer(ok=done is LogRecordExportResult.SUCCESS)

    def close(self) -> None:
        """Give up what is under way, and send nothing more."""
        self._metrics.shutdown()
        self._logs.shutdown()  # type: ignore[no-untyped-call]

    def _metric(self, metric: Metric, at_ns: int) -> SdkMetric:
        begun = self._begun_ns if metric.kind == "counter" else 0
        points = [
            NumberDataPoint({name: str(value) for name, value in labels.items()}, begun, at_ns, float(value))
            for labels, value in metric.samples
        ]
        data = Sum(points, AggregationTemporality.CUMULATIVE, True) if metric.kind == "counter" else Gauge(points)
        # No unit: the names carry it, and a receiver that adds units to names would add it again.
        return SdkMetric(metric.name, metric.text, "", data)

    def _record(self, event: Event) -> ReadableLogRecord:
        record = LogRecord(
            timestamp=event.at_ns,
            observed_timestamp=event.at_ns,
            severity_text=event.severity,
            severity_number=SeverityNumber[event.severity],
            body=json.loads(event.body),
            attributes=dict(event.attributes),
            event_name=event.name,
        )
        return ReadableLogRecord(record, self._resource(event.job), _SCOPE)

    def _resource(self, job: str) -> Resource:
        """Who speaks, of which job; what ``OTEL_RESOURCE_ATTRIBUTES`` and ``OTEL_SERVICE_NAME`` say comes first."""
        if job not in self._resources:
            if len(self._resources) > 4096:
                self._resources.clear()
            host = socket.gethostname()
            own = {
                "service.name": "ncclwatch",
                "service.version": __version__,
                "service.instance.id": f"{host}:{os.getpid()}",
                "host.name": host,
            }
            named = {"ncclwatch.job": clean(job, 200)} if job else {}
            self._resources[job] = Resource({**own, **named}).merge(OTELResourceDetector().detect())
        return self._resources[job]


def base_url(text: str) -> str:
    """The URL that paths are added to. Raises :class:`UsageError`."""
    try:
        parts = urlsplit(text.strip())
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.username is not None or parts.query or parts.fragment:
        raise UsageError(
            f"'{clean(text.rpartition('@')[2], 80)}' is no address of an OTLP receiver",
            "write http://HOST:4318; who may send is told by OTEL_EXPORTER_OTLP_HEADERS",
        )
    return parts.geturl().rstrip("/")


def in_words(error: Exception) -> str:
    """Why a request failed, for a line."""
    if isinstance(error, requests.Timeout):
        return "no answer in time"
    text = str(error)
    if isinstance(error, requests.exceptions.SSLError):
        return f"TLS: {clean(text.rpartition('SSLError(')[2] or text, 120)}"
    if found := _ERRNO.search(text):
        return found[1].strip()
    if isinstance(error, requests.ConnectionError):
        return "no connection"
    return clean(text, 160) or type(error).__name__
