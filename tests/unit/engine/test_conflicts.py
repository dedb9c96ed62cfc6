"""Calls of running jobs that contradict each other: named where the calls prove it, and nothing said where they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclwatch.engine import conflicts
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.state import Transport
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.synthetic import WORLD, Rank, address_of, communicator

KINDS = {
    "a": (Function.ALL_REDUCE, 64, 7),
    "b": (Function.ALL_REDUCE, 16, 7),
    "t": (Function.ALL_REDUCE, 64, 9),
    "r": (Function.REDUCE_SCATTER, 64, 7),
    "g": (Function.ALL_GATHER, 64, 7),
}


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round takes no second here."""
    monkeypatch.setattr(conflicts, "PAUSE", 0)
    monkeypatch.setattr(conflicts, "LEAST_PAUSE_S", 0.0)


def records(rank: int, called: str, begin_ns: int, *, born: bool) -> NDArray[Any]:
    events = np.zeros(len(called) + 1, EVENT_DTYPE)
    events["kind"], events["flags"] = Kind.ENTER, Flag.COMM_READ
    events["comm"], events["rank"], events["nranks"] = address_of(WORLD), rank, 4
    events["time_ns"] = begin_ns + np.arange(len(called) + 1)
    events["peer"], events["pid"] = -1, 1000 + rank
    events["kind"][0], events["function"][0] = Kind.LEAVE, Function.COMM_INIT_RANK
    for place, letter in enumerate(called, 1):
        events["function"][place], events["count"][place], events["datatype"][place] = KINDS[letter]
    return events if born else events[1:]


def run(called: list[str], *, born: bool = True, rounds: int = 4) -> tuple[LiveDiagnosis, list[Verdict]]:
    """A job that goes on: what was called before, then some more in every round."""
    live = LiveDiagnosis()
    ranks = [Rank(r, len(called), (communicator(r, len(called), transport=Transport.P2P),)) for r in range(len(called))]
    series = [rank.looks(rounds) for rank in ranks]
    told = []
    for number in range(rounds):
        for rank, text in enumerate(called):
            share = len(text) // rounds
            part = text[number * share : (number + 1) * share if number < rounds - 1 else None]
            live.add_calls(records(rank, part, (number + 1) * 1000, born=born and number == 0))
        told.append(live.update([samples[number] for samples in series]))
    return live, told


@pytest.mark.parametrize("odd", ["b", "t", "g"])
def test_another_size_type_or_operation_is_named_while_the_job_runs(odd: str) -> None:
    usual = "aarg" * 20
    _, told = run([usual, usual, usual[:40] + odd + usual[41:], usual])
    last = told[-1]
    assert last.verdict_class is VerdictClass.INCONSISTENT
    assert [culprit.rank for culprit in last.culprits] == [2] and last.victims == (0, 1, 3)
    assert "the job runs on with wrong results" in last.summary
    assert any("have been called since" in line for line in last.evidence), last.evidence
    assert not any(verdict.verdict_class.accuses for verdict in told[:2]), "it has not been called yet"


def test_what_is_kept_no_longer_at_the_second_look_is_told_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that calls so often that a look finds nothing of what the one before has seen."""
    monkeypatch.setattr(conflicts, "COMPARED", 24)
    usual = "aarg" * 20
    live, told = run([usual, usual, usual[:45] + "b" + usual[46:], usual])
    assert [culprit.rank for culprit in told[-1].culprits] == [2]
    assert not told[-2].verdict_class.accuses, "it takes two looks"
    assert live.ledger.depth > 24


def test_of_two_ranks_the_one_that_calls_what_is_called_nowhere_else_here() -> None:
    usual = "aa" * 40
    _, told = run([usual, usual[:40] + "b" + usual[41:]])
    assert [culprit.rank for culprit in told[-1].culprits] == [1]


def test_of_two_ranks_the_one_that_calls_what_is_not_due_in_that_place_of_the_pattern() -> None:
    usual = "rgaa" * 20
    _, told = run([usual, usual[:40] + "g" + usual[41:]])
    assert usual[40] == "r" and [culprit.rank for culprit in told[-1].culprits] == [1]


def test_of_two_ranks_of_which_no_pattern_tells_both_are_named() -> None:
    before, after = "ab" * 18 + "tbta", "ba" * 20
    _, told = run([before + "r" + after, before + "g" + after])
    assert [culprit.rank for culprit in told[-1].culprits] == [0, 1]
    assert any("which of them is wrong does not show" in line for line in told[-1].evidence)


def test_every_iteration_anew() -> None:
    usual = "aarg" * 20
    _, told = run([usual, usual.replace("r", "b"), usual, usual])
    assert [culprit.rank for culprit in told[-1].culprits] == [1]
    assert any("so in 20 of" in line for line in told[-1].evidence) or "so in 19 of" in " ".join(told[-1].evidence)


@pytest.mark.parametrize("before", [10, 0], ids=["from-some-call-on", "from-its-first-call"])
def test_another_size_in_every_call_ever_since(before: int) -> None:
    """No place among the calls of the others agrees with it, for none of them calls that."""
    usual = "aarg" * 20
    _, told = run([usual, usual, usual[: 4 * before] + "bbrg" * (20 - before), usual])
    assert told[-1].verdict_class is VerdictClass.INCONSISTENT, told[-1].summary
    assert [culprit.rank for culprit in told[-1].culprits] == [2]
    assert any("so in " in line for line in told[-1].evidence), told[-1].evidence


@pytest.mark.parametrize(
    ("called", "born"),
    [
        # All alike, some further than others.
        (["aarg" * 20, "aarg" * 19, "aarg" * 20, "aarg" * 18], True),
        # One call further on from some point: it left one out, and is a hang to come, or its place is wrong.
        (["aarg" * 20, "aarg" * 10 + "arg" + "aarg" * 9, "aarg" * 20, "aarg" * 20], True),
        # Nothing proves at which call a rank that was attached to is.
        (["aarg" * 20, "aarg" * 20, "aarg" * 10 + "barg" + "aarg" * 9, "aarg" * 20], False),
        # The newest calls of all: nobody has agreed on anything since.
        (["aarg" * 20, "aarg" * 20, "aarg" * 19 + "aarb", "aarg" * 20], True),
        # A gap nobody knows of yet: from there on nearly everything differs.
        (["aarg" * 20, "aarg" * 10 + "aarga" * 8, "aarg" * 20, "aarg" * 20], True),
        # From some call on what others call elsewhere, ever since: its place may be wrong.
        (["aart" * 20, "aart" * 20, "aart" * 10 + "ttar" * 10, "aart" * 20], True),
        # Another size ever since, of a rank whose place nothing tells.
        (["aarg" * 20, "aarg" * 20, "bbrg" * 20, "aarg" * 20], False),
        # Equal sides of which neither is unheard of.
        (["ab" * 40, "ab" * 20 + "ba" + "ab" * 19], True),
    ],
)
def test_what_proves_nothing_is_not_told(called: list[str], born: bool) -> None:
    _, told = run(called, born=born)
    assert not any(verdict.verdict_class.accuses for verdict in told), told[-1].summary


def test_it_is_told_for_a_while_and_then_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conflicts, "COMPARED", 50)
    usual = "aarg" * 30
    called = [usual, usual[:20] + "b" + usual[21:], usual, usual]
    _, told = run(called, rounds=6)
    assert told[-1].verdict_class is VerdictClass.INCONSISTENT
    monkeypatch.setattr(conflicts, "KEPT_S", 0.0)
    live, told = run(called, rounds=6)
    assert not told[-1].verdict_class.accuses and any(verdict.verdict_class.accuses for verdict in told)
    assert len(live.closed) == 1


def test_after_a_loss_the_calls_of_a_node_prove_nothing() -> None:
    usual = "aarg" * 20
    called = [usual, usual[:40] + "b" + usual[41:], usual, usual]
    live, told = run(called)
    assert told[-1].verdict_class is VerdictClass.INCONSISTENT
    live.add_calls(records(0, "a", 9000, born=False), lost=3)
    series = [Rank(r, 4, (communicator(r, 4, transport=Transport.P2P),)).looks(6) for r in range(4)]
    assert not live.update([samples[5] for samples in series]).verdict_class.accuses
