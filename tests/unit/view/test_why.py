"""The way to a verdict in words: every kind of step, nothing told twice, nothing of a target that is more than text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ncclwatch.cli import main
from ncclwatch.engine.rules import RULES
from ncclwatch.model.verdict import Step, StepKind, Verdict, VerdictClass
from ncclwatch.text import Style
from ncclwatch.view.why import NO_TRAIL, NO_TRAIL_SLOW, Part, derivation, parts, why_lines

TRAIL = (
    Step(StepKind.FACT, "", "rank 3 waits for rank 2"),
    Step(StepKind.FACT, "", "the kernel's log names pid 7"),
    Step(StepKind.DRAWN, "hidden-peer", "rank 1 waits for rank 3"),
    Step(StepKind.DRAWN, "message-owed", "rank 0 waits for rank 1"),
    Step(StepKind.RETRACTED, "not-begun", "rank 2 waits for rank 0"),
    Step(StepKind.LOST, "link", "hardware: the link 2 → 3", "rank-behind"),
    Step(StepKind.LOST, "unseen", "nobody is named", "rank-behind"),
    Step(StepKind.STANDS, "unseen", ""),
    Step(StepKind.STANDS, "rank-behind", "hardware: rank 2: its GPU stands"),
    Step(StepKind.MISSING, "", "rank 5: not read"),
    Step(StepKind.MISSING, "", "what NVLink carries"),
)


def verdict(trail: tuple[Step, ...] = TRAIL, kind: VerdictClass = VerdictClass.HARDWARE) -> Verdict:
    return Verdict(kind, "s", evidence=("rank 3 waits for rank 2",), unobserved=("rank 5: not read",), trail=trail)


def test_each_kind_of_step_has_its_part_in_order() -> None:
    assert parts(verdict()) == [
        Part("seen: the evidence above, and", ("the kernel's log names pid 7",)),
        Part("concluded by rule hidden-peer", ("rank 1 waits for rank 3",), derivation("hidden-peer")),
        Part("concluded by rule message-owed", ("rank 0 waits for rank 1",), derivation("message-owed")),
        Part("taken back by rule not-begun: a wait that has not started", ("rank 2 waits for rank 0",), derivation("not-begun")),
        Part(
            "weighed, and lost",
            (
                "hardware: the link 2 → 3  [rule link, against rank-behind]",
                "nobody is named  [rule unseen, against rank-behind]",
            ),
        ),
        Part("made from what rule unseen says", (), derivation("unseen")),
        Part("stands by rule rank-behind", ("hardware: rank 2: its GPU stands",), derivation("rank-behind")),
        Part("not seen, and might tell otherwise", ("what NVLink carries",)),
    ]


def test_what_the_verdict_says_above_is_not_told_again() -> None:
    told = (
        Step(StepKind.FACT, "", "rank 3 waits for rank 2"),
        Step(StepKind.FACT, "", "… 2 more"),
        Step(StepKind.MISSING, "", "rank 5: not read"),
    )
    assert parts(verdict(told)) == [Part("seen: the evidence above")]
    assert parts(replace(verdict(told), evidence=())) == [Part("seen", ("rank 3 waits for rank 2", "… 2 more"))]


def test_a_rule_says_why_it_is_true() -> None:
    assert {rule.id: derivation(rule.id) for rule in RULES} == {rule.id: rule.derivation for rule in RULES}
    assert "/proc/PID/stat" in derivation("halted")
    assert derivation("no such rule") == ""
    line = next(line for line in why_lines(verdict(), Style(enabled=False)) if "because: " in line)
    assert derivation("hidden-peer") in line


def test_without_a_trail_it_says_so() -> None:
    assert parts(verdict(())) == [Part(NO_TRAIL)]
    assert parts(verdict((), VerdictClass.SLOW_COMPUTATION)) == [Part(NO_TRAIL_SLOW)]


def test_lines_are_only_text() -> None:
    evil = "\x1b[2J\r\n\u202e"
    trail = tuple(Step(kind, evil, evil, evil) for kind in StepKind)
    lines = list(why_lines(verdict(trail), Style(enabled=False)))
    assert len(lines) > len(StepKind)
    assert all(line.isprintable() for line in lines)


KEPT = Path(__file__).parents[2] / "fixtures" / "jobs" / "drawn-801-51-gpu-stall-2.27.5-socket-post-hang-0.ncclwatch"


def test_diagnose_says_why_when_it_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["diagnose", str(KEPT)]) == 0
    plain = capsys.readouterr().out
    assert main.run(["diagnose", str(KEPT), "--why"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(plain.rstrip("\n"))
    why = said[len(plain.rstrip("\n")) :].splitlines()
    assert why[1:3] == ["  why", "    seen: the evidence above"]
    assert "    taken back by rule not-begun: a wait that has not started" in why
    assert f"      because: {derivation('not-begun')}" in why
    assert "    stands by rule rank-behind" in why
