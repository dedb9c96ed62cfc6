"""Debian's Prometheus and Alertmanager for tests, on free ports of loopback, and a webhook that alerts arrive at."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from testbed.job import die_with_parent
from testbed.sidecar import free_port

RULES = Path(__file__).parents[2] / "packaging" / "prometheus" / "ncclwatch-alerts.yml"
PATIENCE_S = 300.0
"""Each is there in a second; a machine that is busy with real jobs may need longer."""


def program(name: str) -> str:
    """The path of a program of Debian's packages (tests/packages.txt)."""
    found = shutil.which(name)
    assert found, f"{name} is not installed (tests/packages.txt)"
    return found


def wait(holds: Callable[[], Any], what: str, timeout: float = PATIENCE_S) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + timeout
    while not (found := holds()):
        assert time.monotonic() < deadline, f"{what} did not come within {timeout:.0f} s"
        time.sleep(0.1)
    return found


class Server:
    """A server that is ready once ``/-/ready`` answers, and is gone at the end of the block."""

    def __init__(self, folder: Path, command: list[str], config: Mapping[str, Any]) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "config.yml"
        file.write_text(yaml.safe_dump(dict(config)))
        self._log = folder / "log"
        self._command = [*command, f"--config.file={file}", f"--web.listen-address=127.0.0.1:{self.port}"]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, preexec_fn=die_with_parent)  # noqa: PLW1509
        try:
            wait(self._ready, f"{self._command[0]}")
        except AssertionError:
            self.__exit__(None, None, None)
            raise AssertionError(self._log.read_text("utf-8", "replace")[-3000:]) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ready(self) -> bool:
        assert self._process is not None and self._process.poll() is None, "it has ended"
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=10) as answer:  # noqa: S310 - loopback
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """What its API answers."""
        query = f"?{urllib.parse.urlencode(parameters)}" if parameters else ""
        try:
            with urllib.request.urlopen(f"{self.url}{path}{query}", timeout=60) as answer:  # noqa: S310 - loopback
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}{query}: {error.read().decode()[:500]}") from error


class Prometheus(Server):
    """Scrapes ``targets`` (addresses, by name of the job) every second, with the alert rules."""

    def __init__(self, folder: Path, targets: Mapping[str, Sequence[str]], alertmanager: Alertmanager | None = None) -> None:
        config: dict[str, Any] = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "scrape_configs": [{"job_name": name, "static_configs": [{"targets": list(to)}]} for name, to in targets.items()],
            "rule_files": [str(RULES)],
        }
        if alertmanager is not None:
            to = [{"targets": [f"127.0.0.1:{alertmanager.port}"]}]
            config["alerting"] = {"alertmanagers": [{"static_configs": to}]}
        super().__init__(folder, [program("prometheus"), f"--storage.tsdb.path={folder / 'data'}"], config)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """What an expression gives now: series with ``metric`` and ``value``."""
        found: list[dict[str, Any]] = self.get("/api/v1/query", query=expression)["data"]["result"]
        return found

    def targets(self) -> dict[str, str]:
        """Whether each target answers, by its address: ``up`` or the error."""
        active = self.get("/api/v1/targets")["data"]["activeTargets"]
        return {target["labels"]["instance"]: target["lastError"] or target["health"] for target in active}


class Alertmanager(Server):
    """Sends every alert to a webhook, at once."""

    def __init__(self, folder: Path, webhook: Webhook) -> None:
        config = {
            "route": {"receiver": "test", "group_by": ["alertname", "id"], "group_wait": "0s", "group_interval": "1s"},
            "receivers": [{"name": "test", "webhook_configs": [{"url": webhook.url, "send_resolved": True}]}],
        }
        command = [program("prometheus-alertmanager"), f"--storage.path={folder / 'data'}", "--cluster.listen-address="]
        super().__init__(folder, command, config)


class Webhook:
    """Keeps the alerts that an Alertmanager sends (webhook, version 4)."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/alerts"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str, status: str) -> list[dict[str, Any]]:
        """The alerts of a rule that came, firing or resolved."""
        return [alert for alert in self.alerts if alert["labels"]["alertname"] == name and alert["status"] == status]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert told["version"] == "4"
                outer.alerts += told["alerts"]
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Requests are no news."""

        return Handler
