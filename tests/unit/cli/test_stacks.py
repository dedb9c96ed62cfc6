"""``ncclwatch stacks``, and what is told beside a verdict."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest

from ncclwatch.cli import stacks
from ncclwatch.cli.main import run
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from ncclwatch.target.python_stack import Frame, PythonStacks, PythonThread
from ncclwatch.target.stacks import ProcessStack
from ncclwatch.target.threads import ThreadRow

HOST = socket.gethostname()
SITE = "/opt/venv/lib/python3.11/site-packages/"


def test_a_process_that_is_no_rank_is_shown_too(capsys: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert run(["stacks", str(child.pid), "--json"]) == 0
        child.communicate(b"\n")
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["pid"], found["rank"], found["odd"]) == (child.pid, None, False)
    assert "main thread" in found["kernel"]


def _stack(pid: int, file: str) -> ProcessStack:
    frames = (Frame("wait", SITE + file, 3), Frame("main", "/home/user/train.py", 9))
    python = PythonStacks((PythonThread(pid, "MainThread", False, frames),), time=50.4)
    return ProcessStack(pid, "S", (ThreadRow(pid, "python", "sleeping", "futex_do_wait", "futex"),), python, time=50.4)


READ = {7: "torch/utils/data/dataloader.py", 8: "torch/distributed/distributed_c10d.py"}


def _verdict(pid: int = 7, host: str = HOST, kind: VerdictClass = VerdictClass.NOT_ENTERED) -> Verdict:
    return Verdict(kind, "", (Culprit(0, 0, host, pid, 0),), victims=(1, 2, 3), time=50.0, confidence=0.9)


def test_beside_a_verdict_the_culprit_and_a_peer_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def read(pids: Iterable[int], **_more: object) -> Iterator[ProcessStack]:
        for pid in pids:
            asked.append(pid)
            yield _stack(pid, READ[pid])

    monkeypatch.setattr(stacks, "read_stacks", read)
    (told,) = stacks.beside([_verdict()], {7: 0, 8: 1}, {}, pause=False)
    assert asked == [7, 8]
    assert told.culprits[0].doing == ("data-loader",)
    assert told.knowledge[0].row == "data-loader"
    assert "--ppid 7 " in told.knowledge[0].do[0]
    first, second = told.evidence
    assert first.startswith("rank 0 waits for its data loader: wait (torch/utils/data/dataloader.py:3) < main")
    assert first.endswith("(0.4s after the last sample)")
    assert second.startswith("meanwhile rank 1 is in a call to NCCL")


@pytest.mark.parametrize(
    "verdict",
    [_verdict(kind=VerdictClass.RUNNING), _verdict(host="elsewhere"), _verdict(pid=9)],
    ids=["well", "elsewhere", "unwatched"],
)
def test_nobody_else_is_looked_at(verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "read_stacks", lambda *_a, **_k: pytest.fail("was read"))
    assert stacks.beside([verdict], {7: 0, 8: 1}, {}, pause=False) == [verdict]


def test_one_that_was_not_read_says_so_and_changes_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "read_stacks", lambda pids, **_k: (ProcessStack(pid, "S", problem="not read") for pid in pids))
    (told,) = stacks.beside([_verdict()], {7: 0}, {}, pause=False)
    assert told.culprits[0].doing == ()
    assert told.knowledge == ()
    assert "not read" in told.evidence[0]
