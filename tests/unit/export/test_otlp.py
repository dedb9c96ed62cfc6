"""OTLP: what arrives at a receiver that decodes it by the protocol's own messages, and what happens when none is there."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from ncclwatch.cli.otlp import in_the_clear
from ncclwatch.cli.output import plain
from ncclwatch.errors import UsageError
from ncclwatch.export.base import JobMetrics
from ncclwatch.export.events import Event, recovery_event, verdict_event
from ncclwatch.export.exporter import Exporter, interval_of_environment
from ncclwatch.export.outbox import BATCH_EVENTS, Outbox
from ncclwatch.export.receiver import Receiver, base_url
from ncclwatch.model.verdict import VerdictClass, schema
from ncclwatch.report.metrics import Counts, families
from testbed.sidecar import free_port
from unit.dashboard.test_goldens import with_network
from unit.export.collector import Collector, Labels
from unit.report.test_metrics import page_of, parse, with_work
from unit.views import verdict_of, view

AT = 1_700_000_000_000_000_000


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


def event(number: int = 0, size: int = 0) -> Event:
    return Event("ncclwatch.verdict", "ERROR", AT + number, "", json.dumps({"number": number, "pad": "x" * size}), {})


def numbers(collector: Collector) -> list[int]:
    return [log.body["number"] for log in collector.logs]


def exporter_to(url: str, **options: object) -> Exporter:
    return Exporter(Receiver(url), list, interval_s=3600.0, **options)  # type: ignore[arg-type]


def test_metrics_are_those_of_the_prometheus_endpoint(collector: Collector) -> None:
    shown, counts = with_work(with_network(view(8, VerdictClass.STOPPED, lost=3))), Counts()
    counts.told([verdict_of(VerdictClass.STOPPED, 2, 8)])
    told = list(families(shown, counts))
    assert Receiver(collector.url).send_metrics([JobMetrics("llama", AT, told)]).ok
    [found] = collector.rounds
    text = parse(page_of(shown, counts))
    assert set(found) == set(text)
    for name, samples in text.items():
        by_text = {labels_of(labels): value for labels, value in samples}
        assert {labels: point.value for labels, point in found[name].items()} == pytest.approx(by_text), name
        assert {point.counter for point in found[name].values()} == {name.endswith("_total")}
    [build] = found["ncclwatch_build_info"].values()
    assert build.at_ns == AT
    assert build.resource["service.name"] == "ncclwatch" and build.resource["ncclwatch.job"] == "llama"
    assert build.resource["host.name"] and build.resource["service.version"] and build.resource["service.instance.id"]


def labels_of(text: str) -> Labels:
    inner = text.strip("{}")
    pairs = [pair.partition('="') for pair in inner.split('",')] if inner else []
    return frozenset((name, value.rstrip('"')) for name, _, value in pairs)


def test_a_verdict_arrives_whole_and_can_be_filtered_by(collector: Collector) -> None:
    hang, slow = verdict_of(VerdictClass.STOPPED, 2, 8), verdict_of(VerdictClass.SLOW_COMPUTATION, 3, 8)
    document = plain(hang.to_json())
    receiver = Receiver(collector.url)
    events = [
        verdict_event(hang, document, "llama", AT),
        verdict_event(slow, plain(slow.to_json()), "llama", AT + 1),
        recovery_event(document, 12.5, "llama", AT + 2),
    ]
    assert receiver.send_events(events).ok
    first, second, third = collector.logs
    assert (first.name, first.severity, first.at_ns) == ("ncclwatch.verdict", "ERROR", AT)
    assert first.body == {**document, "job": "llama", "at_ns": AT}
    jsonschema.validate({key: first.body[key] for key in document}, schema())
    assert first.attributes["ncclwatch.id"] == hang.id and first.attributes["ncclwatch.class"] == "stopped"
    assert first.attributes["ncclwatch.culprit.hosts"] == ["node000"]
    assert first.resource["ncclwatch.job"] == "llama"
    assert second.severity == "WARN"
    assert (third.name, third.severity, third.body["duration_s"]) == ("ncclwatch.recovery", "INFO", 12.5)


def test_a_receiver_that_is_down_is_one_line_and_gets_what_waited_when_it_is_back() -> None:
    port = free_port()
    exporter = exporter_to(f"http://127.0.0.1:{port}", outbox=Outbox(max_events=100))
    try:
        for number in range(300):
            exporter.put(event(number))
        lines = wait_lines(exporter, 1)
        for number in range(300, 400):
            exporter.put(event(number))
        assert len(exporter.outbox) <= 100
        with Collector(port=port) as collector:
            collector.wait(lambda: 399 in numbers(collector))
            got = numbers(collector)
            assert got == sorted(set(got)) and len(got) >= 100
            lines += [line for line in wait_lines(exporter, 1) if "events" in line]
        assert exporter.sent == len(got)
        assert exporter.outbox.dropped == 400 - len(got)
    finally:
        exporter.close()
    down = [line for line in lines if "does not take events" in line]
    back = [line for line in lines if "takes events again" in line]
    assert len(down) == 1 and "Connection refused" in down[0] and len(back) == 1
    assert f"{400 - len(got)} were dropped meanwhile" in back[0]


def wait_lines(exporter: Exporter, count: int) -> list[str]:
    found: list[str] = []
    deadline = time.monotonic() + 90
    while len([line for line in found if "events" in line]) < count:
        found += exporter.lines()
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    return found


def test_a_receiver_that_hangs_holds_nobody_up(collector: Collector) -> None:
    let_go = threading.Event()

    def hang(path: str) -> None:
        let_go.wait(90)

    collector.answer = hang
    exporter = exporter_to(collector.url, outbox=Outbox(max_events=10))
    try:
        collector.wait(lambda: collector.requests)
        for number in range(1000):
            exporter.put(event(number))
        # The sending thread still sits in its request: the caller was never made to wait, and nothing has grown.
        assert not let_go.is_set() and exporter.sent == 0
        assert len(exporter.outbox) <= 10 and exporter.outbox.dropped >= 900
    finally:
        let_go.set()
        exporter.close()


@pytest.mark.parametrize(("status", "words"), [(401, "401 Unauthorized"), (404, "404 Not Found"), (413, "413")])
def test_what_a_receiver_refuses_is_dropped_counted_and_said_once(collector: Collector, status: int, words: str) -> None:
    collector.answer = lambda path: (status, {}, b"no")
    exporter = exporter_to(collector.url)
    try:
        for number in range(200):
            exporter.put(event(number))
        collector.wait(lambda: exporter.outbox.dropped >= BATCH_EVENTS)
        [line] = [line for line in wait_lines(exporter, 1) if "events" in line]
        assert words in line
    finally:
        exporter.close()


def test_one_that_is_busy_is_asked_again_and_a_redirect_is_no_success(collector: Collector) -> None:
    said = iter([(503, {"Retry-After": "0"}, b""), (429, {"Retry-After": "0"}, b"")])
    collector.answer = lambda path: next(said, None)
    receiver = Receiver(collector.url)
    assert receiver.send_events([event()]).ok and numbers(collector) == [0]
    collector.answer = lambda path: (302, {"Location": f"{collector.url}/v1/elsewhere"}, b"")
    answer = receiver.send_events([event(1)])
    assert not answer.ok and "302" in answer.reason and numbers(collector) == [0]


def test_of_an_answer_no_more_than_a_little_is_read(collector: Collector) -> None:
    flood = b"x" * (8 << 20)
    collector.answer = lambda path: (200, {}, flood)
    receiver = Receiver(collector.url)
    assert receiver.send_events([event()]).ok
    assert len(receiver._connections[1].newest) <= 64 << 10


def test_headers_compression_and_names_come_from_the_standard_variables(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc,x-scope=team")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "ncclwatch.job=from-slurm,deployment=eu")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", f"{collector.url}/elsewhere/v1/logs")
    assert Receiver("http://127.0.0.1:9").send_events([event()]).ok
    [log], [headers] = collector.logs, collector.headers
    assert headers["authorization"] == "Bearer abc" and headers["x-scope"] == "team" and headers["content-encoding"] == "gzip"
    assert log.resource["deployment"] == "eu" and log.resource["ncclwatch.job"] == "from-slurm"
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "2500")
    assert interval_of_environment() == 2.5
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "soon")
    with pytest.raises(UsageError, match="OTEL_METRIC_EXPORT_INTERVAL"):
        interval_of_environment()


def test_a_signal_can_be_switched_off(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_LOGS_EXPORTER", "none")
    exporter = exporter_to(collector.url)
    exporter.put(event())
    collector.wait(lambda: collector.rounds)
    exporter.close()
    assert not collector.logs and not len(exporter.outbox)


def test_tls_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server, client = certificate(tmp_path, "localhost"), certificate(tmp_path, "agent")
    with Collector(certificate=server, clients=client) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        stranger = Receiver(collector.url).send_events([event()])
        assert not stranger.ok and stranger.again and "TLS" in stranger.reason
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_TIMEOUT")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(server))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(client))
        assert Receiver(collector.url).send_events([event(7)]).ok
        assert numbers(collector) == [7]


def certificate(folder: Path, name: str) -> Path:
    """A key and a certificate that signs itself, in one file."""
    key, made, both = folder / f"{name}.key", folder / f"{name}.crt", folder / f"{name}.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-keyout", str(key), "-out", str(made)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    both.write_text(key.read_text() + made.read_text())
    return both


def test_large_events_are_bounded_in_bytes() -> None:
    outbox = Outbox(max_events=1000, max_bytes=10_000)
    for number in range(50):
        outbox.put(event(number, size=1000))
    assert len(outbox) == 9 and outbox.dropped == 41
    taken = outbox.take()
    outbox.put(event(99, size=9000))
    outbox.back(taken)
    assert [json.loads(one.body)["number"] for one in outbox.take()] == [99], "of what is too much the oldest goes"


def test_metrics_that_are_too_many_are_left_out_and_counted(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.export.receiver.MAX_POINTS", 40)
    receiver = Receiver(collector.url)
    told = list(families(view(64), Counts()))
    assert receiver.send_metrics([JobMetrics("", AT, told)]).ok
    points = sum(len(points) for points in collector.rounds[0].values())
    assert points <= 40 and receiver.left_out == sum(len(metric.samples) for metric in told) - points


def test_what_waits_is_sent_at_the_end(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.export.exporter.CLOSE_S", 60.0)  # This machine may be busy.
    exporter = Exporter(
        Receiver(collector.url), lambda: [JobMetrics("", AT, list(families(view(2), Counts())))], interval_s=3600.0
    )
    collector.wait(lambda: collector.rounds)
    exporter.put(event(5))
    exporter.close()
    assert numbers(collector) == [5] and exporter.lines() == []
    own = collector.rounds[-1]
    assert [point.value for point in own["ncclwatch_otlp_events_sent_total"].values()] == [1.0]
    assert "ncclwatch_ranks" in own


def test_what_comes_while_metrics_are_told_is_sent_at_the_end(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.export.exporter.CLOSE_S", 60.0)
    under_way, told = threading.Event(), threading.Event()

    def slow() -> list[JobMetrics]:
        under_way.set()
        told.wait(60)
        return []

    exporter = Exporter(Receiver(collector.url), slow, interval_s=3600.0)
    assert under_way.wait(60)
    exporter.put(event(7))
    closing = threading.Thread(target=exporter.close)
    closing.start()
    while not exporter._closing.is_set():
        time.sleep(0.01)
    told.set()
    closing.join()
    assert numbers(collector) == [7] and exporter.lines() == []


def test_a_view_that_cannot_be_told_ends_nothing(collector: Collector) -> None:
    def broken() -> list[JobMetrics]:
        raise RuntimeError("broken view")

    exporter = Exporter(Receiver(collector.url), broken, interval_s=3600.0)
    exporter.put(event(1))
    collector.wait(lambda: numbers(collector) == [1])
    exporter.close()
    assert any("broken view" in line for line in exporter.lines())


@pytest.mark.parametrize(
    "text", ["", "collector:4318", "ftp://a", "http://", "http://u:secret@a:1", "http://a/?x=1", "http://a:99999", "http://[::1"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no address of an OTLP receiver") as caught:
        base_url(text)
    assert "secret" not in str(caught.value)


def test_addresses() -> None:
    assert base_url("http://a:4318/") == "http://a:4318"
    assert base_url("https://a/api/v1/otlp") == "https://a/api/v1/otlp"
    assert in_the_clear("http://a:4318") and not in_the_clear("https://a") and not in_the_clear("http://[::1]:4318")
