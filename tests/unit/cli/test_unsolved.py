"""Standstills that accuse nobody are told once, and once that they are over."""

from __future__ import annotations

from ncclwatch.cli.unsolved import TELL_AFTER_S, Standstill, Unsolved
from ncclwatch.engine.session import Update
from ncclwatch.model.verdict import Verdict, VerdictClass


def told(unsolved: Unsolved, verdict_class: VerdictClass, *seconds: float) -> list[tuple[float, bool]]:
    """What is told of looks at these times, as seconds it lasted and whether it is over."""
    found: list[Standstill] = []
    for second in seconds:
        verdict = Verdict(verdict_class, "made up")
        one = unsolved.take(Update(int(second * 1e9), windows=[], verdicts=[verdict]))
        found += [one] if one is not None else []
    return [(one.seconds, one.over) for one in found]


def test_a_standstill_is_told_once_it_has_lasted_and_once_that_it_is_over() -> None:
    unsolved = Unsolved()
    assert told(unsolved, VerdictClass.RUNNING, 0, 1) == []
    assert told(unsolved, VerdictClass.UNKNOWN, *range(2, 92)) == [(TELL_AFTER_S, False)]
    assert told(unsolved, VerdictClass.RUNNING, 92, 93) == [(90.0, True)]


def test_a_short_pause_is_not_told() -> None:
    unsolved = Unsolved()
    for start in range(0, 600, 30):
        assert told(unsolved, VerdictClass.UNKNOWN, *range(start, start + 29)) == []
        assert told(unsolved, VerdictClass.RUNNING, start + 29) == []


def test_a_job_that_pauses_again_and_again_is_given_longer() -> None:
    unsolved = Unsolved()
    assert told(unsolved, VerdictClass.UNKNOWN, *range(41)) == [(TELL_AFTER_S, False)]
    assert told(unsolved, VerdictClass.RUNNING, 41) == [(41.0, True)]
    assert told(unsolved, VerdictClass.UNKNOWN, *range(50, 110)) == []
    assert told(unsolved, VerdictClass.RUNNING, 110) == []
    assert told(unsolved, VerdictClass.UNKNOWN, *range(200, 300)) == [(82.0, False)]


def test_somebody_who_is_named_ends_it_and_teaches_nothing() -> None:
    unsolved = Unsolved()
    assert told(unsolved, VerdictClass.UNKNOWN, 0, 60) == [(60.0, False)]
    assert told(unsolved, VerdictClass.STOPPED, 61) == [(61.0, True)]
    assert told(unsolved, VerdictClass.UNKNOWN, 70, 101) == [(31.0, False)]


def test_steps_between_looks_say_nothing() -> None:
    unsolved = Unsolved()
    assert told(unsolved, VerdictClass.UNKNOWN, 0, 20) == []
    assert unsolved.take(Update(int(25e9))) is None
    assert told(unsolved, VerdictClass.UNKNOWN, 31) == [(31.0, False)]
