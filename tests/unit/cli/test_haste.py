"""Starting on a crowded node: a word before anything is loaded, more priority while it starts, and back."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from ncclwatch.cli import haste
from ncclwatch.cli.haste import BUDGET_S, NICE, Haste


@pytest.fixture
def nices(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """What was set, by thread, instead of the real thing."""
    found: dict[int, int] = {}
    monkeypatch.setattr(os, "getpriority", lambda _, who: found.get(who, 0))
    monkeypatch.setattr(os, "setpriority", lambda _, who, nice: found.__setitem__(who, nice))
    return found


def test_the_priority_is_given_back_in_every_thread(nices: dict[int, int]) -> None:
    one, done = Haste(), threading.Event()
    assert one.begin() and nices == {0: NICE}
    thread = threading.Thread(target=done.wait)
    thread.start()
    one.end()
    done.set()
    assert {nices[threading.main_thread().native_id or 0], nices[thread.native_id or 0]} == {0}
    assert not one.active


def test_it_is_given_back_when_the_budget_is_spent(nices: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    one = Haste()
    one.begin()
    monkeypatch.setattr("time.process_time", lambda: BUDGET_S - 1)
    one.check()
    assert one.active
    monkeypatch.setattr("time.process_time", lambda: BUDGET_S + 1)
    one.check()
    assert not one.active


def test_who_was_started_with_another_priority_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpriority", lambda *_: 5)
    monkeypatch.setattr(os, "setpriority", lambda *_: pytest.fail("it was nice on purpose"))
    assert not Haste().begin()


@pytest.mark.parametrize(
    ("words", "threads", "told"),
    [
        (["attach", "--all"], 500, True),
        (["attach", "--all"], 1, False),
        (["ps"], 500, False),
        (["attach", "-h"], 500, False),
        ([], 500, False),
    ],
)
def test_it_hurries_where_it_is_crowded_and_somebody_waits(
    words: list[str],
    threads: int,
    told: bool,
    nices: dict[int, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(haste, "runnable", lambda: threads * (os.cpu_count() or 1))
    monkeypatch.setattr(haste, "HASTE", Haste())
    haste.at_start(words)
    assert bool(nices) == told
    assert ("nice -10" in capsys.readouterr().err) == told


def test_into_a_pipe_with_json_nothing_is_said_and_it_hurries_all_the_same(
    nices: dict[int, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(haste, "runnable", lambda: 500 * (os.cpu_count() or 1))
    monkeypatch.setattr(haste, "HASTE", Haste())
    haste.at_start(["attach", "--json", "--all"])
    assert nices and capsys.readouterr().err == ""


def test_the_word_comes_before_the_command_line_is_loaded() -> None:
    code = (
        "import sys; from ncclwatch.cli import main, haste; haste.runnable = lambda: 10**6;"
        "haste.Haste.begin = lambda self: False; haste.at_start(['attach']); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert "crowded node" in done.stderr
    assert not {"typer", "numpy", "ncclwatch.engine", "ncclwatch.cli.attach"} & set(done.stdout.split())
