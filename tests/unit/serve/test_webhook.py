"""The page's own webhook: each verdict once, its end when it is settled, and nobody waits for a receiver."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.cli.output import plain
from ncclwatch.cli.page_webhook import posting
from ncclwatch.errors import UsageError
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.serve.webhook import Webhook, WebhookReceiver
from unit.views import verdict_of

PATIENCE_S = 60.0


class Receiver(HTTPServer):
    """Answers with ``status`` and keeps what it was told."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.told: list[tuple[dict[str, str], dict[str, Any]]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook/secret"


class _Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.told.append((dict(self.headers), body))
        self.send_response(self.server.status)
        self.send_header("location", self.server.url + "/elsewhere")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.shutdown()
    server.server_close()


def until(holds: Callable[[], object]) -> None:
    limit = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.02)


def webhook(receiver: Receiver, settled_s: float = 0.0, header: tuple[str, str] | None = None) -> Webhook:
    found = WebhookReceiver(receiver.url, header)
    return Webhook(found, "https://watch.example/", lambda verdict: plain(verdict.to_json()), settled_s=settled_s)


def test_a_verdict_is_told_once_with_a_link_and_so_is_its_end(receiver: Receiver) -> None:
    hook, stopped = webhook(receiver, header=("Authorization", "Bearer x")), verdict_of(VerdictClass.STOPPED, 2, 8)
    for _ in range(3):
        hook.take("llama", [stopped])
    hook.take("other", [])
    hook.take("llama", [verdict_of(VerdictClass.RUNNING, 0, 8)])
    until(lambda: len(receiver.told) == 2)
    (headers, first), (_, second) = receiver.told
    assert headers["Authorization"] == "Bearer x"
    assert [(told["event"], told["id"], told["job"]) for told in (first, second)] == [
        ("verdict", stopped.id, "llama"), ("over", stopped.id, "llama"),
    ]  # fmt: skip
    assert first["page"].startswith("https://watch.example/?job=llama&t=")
    assert second["duration_s"] >= 0
    hook.exporter.close()


def test_a_job_that_is_without_a_verdict_for_a_moment_has_not_recovered(receiver: Receiver) -> None:
    hook, stopped = webhook(receiver, settled_s=3600.0), verdict_of(VerdictClass.STOPPED, 2, 8)
    for verdicts in ([stopped], [], [stopped]):
        hook.take("llama", verdicts)
    until(lambda: receiver.told)
    hook.exporter.close()
    assert len(receiver.told) == 1


def test_what_is_not_taken_is_tried_again_and_what_is_refused_is_not(receiver: Receiver) -> None:
    receiver.status = 503
    hook = webhook(receiver, settled_s=3600.0)
    hook.take("llama", [verdict_of(VerdictClass.STOPPED, 2, 8)])
    until(lambda: receiver.told)
    receiver.status = 200
    until(lambda: hook.exporter.sent == 1)
    receiver.status = 307
    before = len(receiver.told)
    hook.take("llama", [verdict_of(VerdictClass.STOPPED, 3, 8)])
    until(lambda: hook.exporter.outbox.dropped == 1)
    assert len(receiver.told) == before + 1, "nobody is led elsewhere"
    hook.exporter.close()
    lines = hook.exporter.lines()
    assert lines and all("secret" not in line for line in lines)


@pytest.mark.parametrize("url", ["chat.example/hook", "file:///etc/passwd", "https://", "ftp://x/y"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(UsageError):
        WebhookReceiver(url)


@pytest.mark.parametrize("text", ["", "no header\n", "Bad Name: x\n", "A: \x01\n"])
def test_a_file_without_a_header_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "header"
    file.write_text(text)
    with pytest.raises(UsageError), posting("https://chat.example/hook", file, "http://127.0.0.1/"):
        pass
    with pytest.raises(UsageError), posting(None, file, "http://127.0.0.1/"):
        pass
