"""``--on-verdict``: once a verdict, sure enough, not too often, and never more than a line of harm."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from ncclwatch import bounded
from ncclwatch.cli import hooks
from ncclwatch.cli.hooks import Hook, HookOptions, hook_options, run, words
from ncclwatch.errors import UsageError
from ncclwatch.model.verdict import Culprit, Ticket, Verdict, VerdictClass, schema

VERDICT = Verdict(
    VerdictClass.STOPPED, "rank 2 \x1b[31mholds", (Culprit(2, 2, "node1", 7, 0, ticket=Ticket("gpu17", "4711")),), confidence=0.9
)


def _script(tmp_path: Path, body: str) -> tuple[str, ...]:
    file = tmp_path / "hook.sh"
    file.write_text("#!/bin/sh\n" + body)
    file.chmod(0o755)
    return (str(file),)


def _lines(hook: Hook, wanted: Callable[[list[str]], bool], seconds: float = 60.0) -> list[str]:
    found: list[str] = []
    until = time.monotonic() + seconds
    while not wanted(found) and time.monotonic() < until:
        found += hook.lines()
        time.sleep(0.02)
    assert wanted(found), found
    return found


def test_the_verdict_is_read_from_standard_input_once(tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    hook = Hook(HookOptions(_script(tmp_path, f'cat >>{out}; echo "told $NCCLWATCH_VERDICT_CLASS"'), log=log))
    for _ in range(3):
        hook.take([VERDICT])
    (line,) = _lines(hook, bool)
    hook.close()
    assert line.startswith(f"hook: verdict {VERDICT.id} (stopped, 90%): done in ")
    assert line.endswith("told stopped")
    told = json.loads(out.read_text())
    jsonschema.validate(told, schema())
    assert told["culprits"][0]["ticket"]["node"] == "gpu17"
    assert "\x1b" not in told["summary"]
    (kept,) = map(json.loads, log.read_text().splitlines())
    assert kept["result"]["status"] == 0
    assert kept["verdict"]["id"] == VERDICT.id


def test_a_floor_and_a_cooldown_hold_it_back(tmp_path: Path) -> None:
    now = [0.0]
    hook = Hook(HookOptions(_script(tmp_path, f"echo x >>{tmp_path}/runs"), floor=0.8, cooldown_s=100.0), clock=lambda: now[0])
    hook.take([replace(VERDICT, confidence=0.7), replace(VERDICT, verdict_class=VerdictClass.RUNNING)])
    hook.take([VERDICT])
    _lines(hook, bool)
    other = replace(VERDICT, culprits=(Culprit(3, 3, "node1", 8, 0),))
    hook.take([other])
    assert "not run" in _lines(hook, bool)[0]
    elsewhere = replace(VERDICT, culprits=(Culprit(9, 9, "node2", 8, 0),))
    hook.take([elsewhere])
    _lines(hook, bool)
    now[0] = 101.0
    hook.take([replace(VERDICT, culprits=(Culprit(4, 4, "node1", 9, 0),))])
    _lines(hook, bool)
    hook.close()
    assert (tmp_path / "runs").read_text().count("x") == 3


def test_one_that_comes_back_runs_it_again_after_the_cooldown(tmp_path: Path) -> None:
    now = [0.0]
    hook = Hook(HookOptions(_script(tmp_path, "echo ran"), cooldown_s=100.0), clock=lambda: now[0])
    hook.take([VERDICT], "a")
    assert "ran" in _lines(hook, bool)[0]
    for _ in range(5):
        hook.take([], "b")  # another job has nothing to say of it
        hook.take([VERDICT], "a")
        hook.take([], "a")
        hook.take([VERDICT], "a")
    (held,) = _lines(hook, bool)
    assert "not run" in held, "and that is said once"
    now[0] = 101.0
    hook.take([], "a")
    hook.take([VERDICT], "a")
    assert "ran" in _lines(hook, bool)[0]
    hook.close()


def test_what_grows_sure_later_runs_it_then(tmp_path: Path) -> None:
    hook = Hook(HookOptions(_script(tmp_path, "echo ran")))
    hook.take([replace(VERDICT, confidence=0.5)])
    time.sleep(0.3)
    assert hook.lines() == []
    assert not hook._done
    hook.take([VERDICT])
    assert "ran" in _lines(hook, bool)[0]
    hook.close()


def test_a_dry_run_says_what_it_would_do_and_does_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    hook = Hook(HookOptions(_script(tmp_path, f"touch {tmp_path}/ran"), dry_run=True, log=log))
    hook.take([VERDICT])
    assert "would run" in _lines(hook, bool)[0]
    hook.close()
    assert not (tmp_path / "ran").exists()
    assert json.loads(log.read_text())["dry_run"] is True


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("trap '' TERM; echo begun; sleep 600", "ENDED: it took too long: begun"),
        ("sleep 600 & sleep 600", "ENDED: it took too long"),
        ("exec 1>&-; sleep 600", "ENDED: it took too long"),
        ("echo no; exit 3", "FAILED with status 3"),
        ("kill -9 $$", "FAILED with status -9"),
        ("yes", "it wrote more than 1 MiB"),
        ("sleep 600 & echo left", "done in"),
        ("printf '\\033[2J\\377bad'", "done in"),
    ],
)
def test_one_that_hangs_fails_or_floods_is_a_line(body: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "GRACE_S", 0.3)
    timeout = 60.0 if "done" in says or "FAILED" in says or "wrote" in says else 1.0
    large = replace(VERDICT, evidence=("x" * 1000,) * 1000)
    outcome = run(_script(tmp_path, body), large, "", timeout, threading.Event())
    assert says in words(outcome)
    assert "\x1b" not in words(outcome)
    assert len(outcome.output) <= hooks.KEPT
    assert outcome.seconds < 60.0


def test_watching_never_waits_for_it_and_its_end_is_soon(tmp_path: Path) -> None:
    hook = Hook(HookOptions(_script(tmp_path, "sleep 600"), cooldown_s=0.0))
    began = time.monotonic()
    for rank in range(100):
        hook.take([replace(VERDICT, culprits=(Culprit(rank, rank, "node1", rank, 0),))])
    assert time.monotonic() - began < 5.0
    assert any("are waiting" in line for line in hook.lines())
    hook.close()
    hook._thread.join(30.0)
    assert not hook._thread.is_alive()


def test_a_log_that_cannot_be_written_is_a_line(tmp_path: Path) -> None:
    hook = Hook(HookOptions(_script(tmp_path, "true"), log=tmp_path / "gone" / "log"))
    hook.take([VERDICT])
    assert any("log cannot be written" in line for line in _lines(hook, lambda found: len(found) == 2))
    hook.close()


def test_a_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "MAX_LOG", 100)
    log = tmp_path / "log"
    hook = Hook(HookOptions(("true",), dry_run=True, log=log, cooldown_s=0.0))
    for rank in range(3):
        hook.take([replace(VERDICT, culprits=(Culprit(rank, rank, "node1", rank, 0),))])
    hook.close()
    assert len(log.read_text().splitlines()) == 1
    assert (tmp_path / "log.1").exists()


def test_options_that_make_no_sense_are_said(tmp_path: Path) -> None:
    assert hook_options(None, 0.8, 600.0, None, dry_run=False) is None
    for command, log, dry in (("/no/such thing", None, False), ("'", None, False), ("", None, False), (None, None, True)):
        with pytest.raises(UsageError):
            hook_options(command, 0.8, 600.0, log, dry_run=dry)
    with pytest.raises(UsageError):
        hook_options("true", 0.8, 600.0, tmp_path / "no" / "log", dry_run=False)
    found = hook_options("true 'a b'", 0.5, 1.0, None, dry_run=True)
    assert found is not None
    assert found.command == ("true", "a b")
