"""One process looked at again and again: what is said of it when a look fails."""

from __future__ import annotations

import gc
import weakref

from ncclwatch.collect.watched import Problem, Watched
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.errors import TargetError
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.target.held import HeldError
from unit.fake_targets import FakeTarget, Look
from unit.synthetic import frozen_ring, moved


def looked(looks: list[Look], times: int) -> Watched:
    one = Watched(FakeTarget(looks))
    for _ in range(times):
        one.look()
    return one


def samples() -> list[ProcessSample]:
    """Of a rank that moved between two looks, with operations under way."""
    first = frozen_ring()[0].looks(1)[0]
    return [first, moved(first)]


def test_what_a_held_process_did_is_not_taken_for_what_it_does() -> None:
    before = samples()
    pid = before[0].process.pid
    one = looked([*before, HeldError(pid)], 4)
    last = one.last
    assert last is not None and one.stands, "not known to have moved since"
    assert (last.communicators, list(last.operations), last.pending) == (before[1].communicators, [], ())
    (line,) = last.unavailable.items()
    assert line[0] == f"memory of process {pid}" and "holds its memory map" in line[1]


def test_after_another_failure_the_last_look_stays() -> None:
    before = samples()
    assert looked([*before, TargetError("torn", "look again")], 4).last == before[1]


def test_a_rank_that_is_held_is_named_and_the_verdict_says_that_it_could_not_be_read() -> None:
    series = []
    for rank in frozen_ring(run_state="S"):
        first, *rest = rank.looks(8)
        held = [HeldError(first.process.pid)] if rank.rank == 2 else rest
        series.append(looked([first, *held], 8).history)
    verdict = diagnose(series)
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED, verdict
    assert [one.rank for one in verdict.culprits] == [2]
    assert any("cannot be read now" in line for line in verdict.unobserved), verdict.unobserved


class Held:
    """What was read of a process."""


def test_a_problem_that_is_kept_holds_nothing_that_was_read_before_it() -> None:
    alive = []

    def look() -> None:
        read = Held()
        alive.append(weakref.ref(read))
        try:
            raise OSError(3, "no such process")
        except OSError as error:
            raise TargetError("torn", "look again") from error

    kept = None
    try:
        look()
    except TargetError as error:
        kept = Problem("pid 7", 7, error)
    gc.collect()
    assert kept is not None and kept.line == "pid 7: torn: look again"
    assert alive[0]() is None
