"""A receiver of OTLP over HTTP for tests: decodes requests by OpenTelemetry's own messages.

Debian has no OpenTelemetry collector, and its Prometheus (2.42) takes no OTLP.
"""

from __future__ import annotations

import gzip
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest, ExportLogsServiceResponse
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Log:
    """A log record as it arrived, with the attributes of its resource."""

    name: str
    severity: str
    at_ns: int
    body: Any
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass(frozen=True)
class Point:
    """A data point: ``counter`` for a cumulative monotonic sum, else a gauge."""

    counter: bool
    value: float
    at_ns: int
    resource: dict[str, Any]


class Collector:
    """Listens on loopback; ``answer`` is called before each answer and may say a status, and headers, of its own."""

    def __init__(self, *, port: int = 0, certificate: Path | None = None, clients: Path | None = None) -> None:
        self.logs: list[Log] = []
        self.rounds: list[dict[str, dict[Labels, Point]]] = []
        """Metrics by request: name → labels → point."""
        self.headers: list[dict[str, str]] = []
        self.requests = 0
        self.answer: Callable[[str], tuple[int, dict[str, str], bytes] | None] = lambda path: None
        self._server = ThreadingHTTPServer(("127.0.0.1", port), self._handler())
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            if clients is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(clients)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self.url = f"https://localhost:{self.port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def wait(self, holds: Callable[[], object], timeout: float = 90.0) -> None:
        """Wait until something holds."""
        deadline = time.monotonic() + timeout
        while not holds():
            assert time.monotonic() < deadline, f"nothing of it came: {self.requests} requests, {len(self.logs)} logs"
            time.sleep(0.02)

    def _take(self, path: str, data: bytes) -> bytes:
        if path.endswith("/v1/logs"):
            logs = ExportLogsServiceRequest.FromString(data)
            for group in logs.resource_logs:
                resource = attributes(group.resource.attributes)
                self.logs += [
                    Log(
                        record.event_name, record.severity_text, record.time_unix_nano, plain(record.body),
                        attributes(record.attributes), resource,
                    )
                    for scope in group.scope_logs
                    for record in scope.log_records
                ]  # fmt: skip
            return bytes(ExportLogsServiceResponse().SerializeToString())
        found: dict[str, dict[Labels, Point]] = {}
        metrics = ExportMetricsServiceRequest.FromString(data)
        for group in metrics.resource_metrics:
            resource = attributes(group.resource.attributes)
            for metric in (metric for scope in group.scope_metrics for metric in scope.metrics):
                counter = metric.WhichOneof("data") == "sum"
                if counter:
                    assert metric.sum.is_monotonic and metric.sum.aggregation_temporality == 2
                points = metric.sum.data_points if counter else metric.gauge.data_points
                for point in points:
                    labels = frozenset(attributes(point.attributes).items())
                    found.setdefault(metric.name, {})[labels] = Point(
                        counter, point.as_double, point.time_unix_nano, resource
                    )  # fmt: skip
        self.rounds.append(found)
        return bytes(ExportMetricsServiceResponse().SerializeToString())

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests += 1
                outer.headers.append({name.lower(): value for name, value in self.headers.items()})
                said = outer.answer(self.path)
                if said is None and self.path.endswith(("/v1/logs", "/v1/metrics")):
                    assert self.headers["Content-Type"] == "application/x-protobuf"
                    body = outer._take(self.path, gzip.decompress(data) if self.headers["Content-Encoding"] == "gzip" else data)
                    said = 200, {"Content-Type": "application/x-protobuf"}, body
                status, headers, body = said or (404, {}, b"")
                self.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Requests are no news."""

        return Handler


def attributes(pairs: Any) -> dict[str, Any]:
    """``KeyValue`` messages as a dictionary."""
    return {pair.key: plain(pair.value) for pair in pairs}


def plain(value: Any) -> Any:
    """An ``AnyValue`` as plain data."""
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [plain(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return attributes(value.kvlist_value.values)
    return getattr(value, kind)
