"""The hooks of packaging/hooks/, run as programs: against a scontrol and servers of this test, on loopback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from ncclwatch.model.verdict import Advice, Culprit, Ticket, Verdict, VerdictClass

HOOKS = Path(__file__).parents[2] / "packaging" / "hooks"


def _verdict(kind: VerdictClass = VerdictClass.HARDWARE, nodes: int = 1) -> bytes:
    culprits = tuple(
        Culprit(
            rank, rank, f"host{rank}", 7, 0, reason="its network port eth0 is down",
            ticket=Ticket(f"gpu{rank}", "4711", "ml", "train-3", gpu_uuid="GPU-12", nics=("mlx5_0",)),
        )
        for rank in range(nodes)
    )  # fmt: skip
    known = (Advice("port-down", "the port is down", "a cable", 0.9),)
    told = Verdict(
        kind, "rank 0 holds up the job; $(reboot)", culprits, confidence=0.93, time=1e9, next_steps=("look at the port",),
        knowledge=known,
    )  # fmt: skip
    return json.dumps(told.to_json()).encode()


def _run(name: str, *words: str, data: bytes | None = None) -> subprocess.CompletedProcess[str]:
    given = (data if data is not None else _verdict()).decode()
    return subprocess.run(
        [sys.executable, "-I", str(HOOKS / name), *words], input=given, capture_output=True, text=True, timeout=120, check=False
    )


class Recorded:
    """A server on loopback and what it was asked: (method, path, type of content, body)."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str, Any]] = []
        self.answers: dict[tuple[str, str], tuple[int, Any]] = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def _take(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.asked.append(
                    (self.command, self.path, self.headers.get("Content-Type", ""), json.loads(body) if body else None)
                )
                status, answer = outer.answers.get((self.command, self.path), (200, {}))
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            do_GET = do_POST = do_PATCH = _take  # noqa: N815 - their names there

            def log_message(self, *_words: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Recorded]:
    found = Recorded()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def scontrol(tmp_path: Path) -> Path:
    file = tmp_path / "scontrol"
    file.write_text(f'#!/bin/sh\nfor word in "$@"; do echo "$word" >>{tmp_path}/asked; done\n')
    file.chmod(0o755)
    return file


def test_slurm_drains_the_node_with_a_reason(scontrol: Path) -> None:
    done = _run("slurm-drain.py", "--scontrol", str(scontrol))
    assert (done.returncode, done.stdout.strip()) == (0, "drained gpu0")
    asked = (scontrol.parent / "asked").read_text().splitlines()
    assert asked[:3] == ["update", "NodeName=gpu0", "State=DRAIN"]
    for word in ("hardware (93%)", "rank 0", "GPU-12", "mlx5_0", "job 4711", "eth0 is down"):
        assert word in asked[3]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (_verdict(VerdictClass.NOT_ENTERED), []),
        (_verdict(nodes=2), []),
        (_verdict(), ["--dry-run"]),
        (_verdict().replace(b'"gpu0"', b'"gpu0 State=RESUME"'), []),
    ],
)
def test_slurm_drains_nothing_else(scontrol: Path, data: bytes, words: list[str]) -> None:
    done = _run("slurm-drain.py", "--scontrol", str(scontrol), *words, data=data)
    assert done.returncode == 0
    assert not (scontrol.parent / "asked").exists()


def test_slurm_says_what_failed() -> None:
    done = _run("slurm-drain.py", "--scontrol", "false")
    assert done.returncode == 1
    assert "failed for gpu0" in done.stdout


def _account(tmp_path: Path) -> str:
    (tmp_path / "token").write_text("t0ken\n")
    return str(tmp_path)


def test_kubernetes_gets_event_condition_and_taint(server: Recorded, tmp_path: Path) -> None:
    node = {"metadata": {"resourceVersion": "42"}, "spec": {"taints": [{"key": "other", "effect": "NoSchedule"}]}}
    server.answers["GET", "/api/v1/nodes/gpu0"] = (200, node)
    done = _run("kubernetes-mark.py", "--server", server.url, "--account", _account(tmp_path), "--taint")
    assert (done.returncode, done.stdout.strip()) == (0, "gpu0: event, condition, tainted")
    event, condition, _, taint = server.asked
    assert event[:2] == ("POST", "/api/v1/namespaces/default/events")
    assert event[3]["involvedObject"]["name"] == "gpu0"
    assert event[3]["reason"] == "NcclHardware"
    assert condition[:3] == ("PATCH", "/api/v1/nodes/gpu0/status", "application/strategic-merge-patch+json")
    assert condition[3]["status"]["conditions"][0]["type"] == "NcclwatchSuspect"
    assert taint[3]["metadata"]["resourceVersion"] == "42"
    assert [one["key"] for one in taint[3]["spec"]["taints"]] == ["other", "ncclwatch.io/suspect"]


def test_kubernetes_only_tells_of_what_is_no_fault_of_the_node(server: Recorded, tmp_path: Path) -> None:
    data = _verdict(VerdictClass.NOT_ENTERED)
    done = _run("kubernetes-mark.py", "--server", server.url, "--account", _account(tmp_path), "--taint", data=data)
    assert done.returncode == 0
    assert [asked[1] for asked in server.asked] == ["/api/v1/namespaces/default/events"]


def test_kubernetes_goes_on_where_one_step_fails(server: Recorded, tmp_path: Path) -> None:
    server.answers["POST", "/api/v1/namespaces/default/events"] = (409, {})
    server.answers["PATCH", "/api/v1/nodes/gpu0/status"] = (403, {})
    server.answers["GET", "/api/v1/nodes/gpu0"] = (200, {"metadata": {"resourceVersion": "1"}, "spec": {}})
    done = _run("kubernetes-mark.py", "--server", server.url, "--account", _account(tmp_path), "--taint")
    assert done.returncode == 1
    assert "condition: HTTP 403" in done.stdout
    assert "tainted" in done.stdout


def test_kubernetes_dry_run_asks_nobody(server: Recorded) -> None:
    done = _run("kubernetes-mark.py", "--server", server.url, "--taint", "--dry-run")
    assert done.stdout.strip() == "gpu0: would set event, would set condition, would set taint"
    assert server.asked == []


def test_the_rights_are_those_that_the_hook_uses() -> None:
    _, role, binding = yaml.safe_load_all((HOOKS / "kubernetes-rbac.yaml").read_text())
    granted = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert granted == {("events", "create"), ("nodes", "get"), ("nodes", "patch"), ("nodes/status", "patch")}
    assert binding["roleRef"]["name"] == role["metadata"]["name"]


def test_an_alertmanager_gets_an_alert(server: Recorded) -> None:
    done = _run("webhook.py", "--alertmanager", server.url)
    assert (done.returncode, done.stdout.strip()) == (0, "sent: HTTP 200")
    ((method, path, _, (alert,)),) = server.asked
    assert (method, path) == ("POST", "/api/v2/alerts")
    labels = alert["labels"]
    assert (labels["alertname"], labels["severity"], labels["node"], labels["slurm_job"]) == (
        "NcclVerdict",
        "critical",
        "gpu0",
        "4711",
    )
    assert all(isinstance(value, str) for value in labels.values())
    assert alert["annotations"]["next"] == "look at the port"
    assert "a cable" in alert["annotations"]["known"]
    assert alert["startsAt"] < alert["endsAt"]


def test_a_webhook_gets_what_alertmanager_sends(server: Recorded) -> None:
    done = _run("webhook.py", "--url", server.url + "/hook")
    assert done.returncode == 0
    ((_, path, kind, body),) = server.asked
    assert (path, kind) == ("/hook", "application/json")
    assert (body["version"], body["status"], len(body["alerts"])) == ("4", "firing", 1)
    assert {"receiver", "groupKey", "groupLabels", "commonLabels", "commonAnnotations", "externalURL"} <= set(body)


def test_a_webhook_that_is_not_there_is_a_line() -> None:
    done = _run("webhook.py", "--url", "http://127.0.0.1:1/")
    assert done.returncode == 1
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[int]:
    """A named pipe as PyTorch's ``DumpPipe`` makes it for rank 3, open for reading and not waited for."""
    os.mkfifo(tmp_path / "trace_3.pipe")
    reading = os.open(tmp_path / "trace_3.pipe", os.O_RDONLY | os.O_NONBLOCK)
    yield reading
    os.close(reading)


def test_the_flight_recorder_of_every_rank_of_the_node_is_asked_for_its_dump(tmp_path: Path, pipe: int) -> None:
    os.mkfifo(tmp_path / "trace_4.pipe")
    (tmp_path / "trace_5.pipe").write_text("")
    (tmp_path / "trace_6.pipe").symlink_to(tmp_path / "trace_3.pipe")
    done = _run("dumps.py", "--pipe", f"{tmp_path}/trace_")
    assert done.returncode == 0, done.stderr
    said = dict(line.removeprefix(f"{tmp_path}/").split(": ", 1) for line in done.stdout.splitlines())
    assert said["trace_3.pipe"] == "asked for its dump" and os.read(pipe, 100) == b"1\n"
    assert said["trace_4.pipe"] == "nobody listens"
    assert said["trace_5.pipe"] == "no pipe" and (tmp_path / "trace_5.pipe").read_text() == ""
    assert "asked" not in said["trace_6.pipe"], "whoever may write there could have another file written to"


def test_a_dry_run_of_dumps_asks_nobody(tmp_path: Path, pipe: int) -> None:
    words = ["--pipe", f"{tmp_path}/trace_", "--ras", "127.0.0.1:1", "--keep", str(tmp_path), "--dry-run"]
    done = _run("dumps.py", *words)
    assert done.returncode == 0 and "would be asked" in done.stdout and "would keep" in done.stdout
    with pytest.raises(BlockingIOError):
        os.set_blocking(pipe, False)
        with os.fdopen(os.open(tmp_path / "trace_3.pipe", os.O_WRONLY | os.O_NONBLOCK), "wb"):
            os.read(pipe, 100)
    assert not list(tmp_path.glob("*.txt"))


def test_stacks_of_culprits_on_this_node_are_kept(tmp_path: Path) -> None:
    spy = tmp_path / "spy"
    spy.write_text('#!/bin/sh\necho "$@"\n')
    spy.chmod(0o755)
    here = _verdict().replace(b'"host0"', json.dumps(socket.gethostname()).encode())
    words = ["--py-spy", "--program", str(spy), "--keep", str(tmp_path)]
    assert _run("dumps.py", *words, data=here).returncode == 0
    (kept,) = tmp_path.glob("*-pid-7.txt")
    assert kept.read_text() == "dump --nonblocking --pid 7\n"
    again = _run("dumps.py", *words, data=here)
    assert again.returncode == 1 and "not kept" in again.stdout, "what lies there is not written over"
    assert _run("dumps.py", *words).stdout == "", "of a culprit elsewhere nothing is known here"


def test_dumps_that_cannot_be_made_are_a_line(tmp_path: Path) -> None:
    done = _run("dumps.py", "--ras", "127.0.0.1:1", "--keep", str(tmp_path))
    assert done.returncode == 1 and "not kept" in done.stdout and not done.stderr
    assert "nothing to do" in _run("dumps.py", "--pipe", "x", data=_verdict(VerdictClass.SLOW_COMPUTATION)).stdout
    assert _run("dumps.py", "--ras", "127.0.0.1:1").returncode == 2
