"""Recorded calls as facts: who has not called what others have, and who called something else."""

from __future__ import annotations

from ncclwatch.collect.ledger import Ledger
from ncclwatch.engine.case import Case
from ncclwatch.engine.evidence.base import FactKind
from ncclwatch.engine.evidence.calls import Called, Calls
from unit.engine.evidence.said import case_of
from unit.engine.test_calls import calls
from unit.synthetic import WORLD, Rank, communicator, looks


def recorded(*counts: list[int]) -> Case:
    """Ranks of a job, each with the elements of its AllReduces in their order."""
    ledger = Ledger()
    for rank, own in enumerate(counts):
        ledger.add_calls(calls(rank, own))
    return case_of(looks([Rank(rank, 4, (communicator(rank, 4),)) for rank in range(4)]), ledger=ledger)


def said(case: Case) -> Called:
    (fact,) = case.facts.of(FactKind.CALLED, Called)
    return fact


def test_who_has_not_called_what_the_others_have() -> None:
    fact = said(recorded([64, 64, 64], [64, 64, 64], [64, 64], [64, 64, 64]))
    assert (fact.subject, fact.finding.behind, fact.finding.sequence) == (WORLD, [2], 2)
    assert "rank 2 has not called #2 (AllReduce of 64 x float32), 3 other ranks have" in fact.text


def test_who_called_something_else() -> None:
    fact = said(recorded([64, 64], [64, 64], [64, 64], [64, 32]))
    assert fact.finding.behind == [] and fact.finding.groups
    (odd,) = fact.finding.odd
    assert (odd.text(), fact.finding.groups[odd], fact.finding.how) == ("AllReduce of 32 x float32", [3], "")


def test_ranks_that_called_the_same_say_nothing_and_coverage_tells_whose_calls_are_known() -> None:
    whole = recorded([64], [64], [64], [64])
    assert (said(whole).finding.behind, said(whole).finding.groups) == ([], {})
    assert list(Calls().coverage(whole)) == []
    assert list(Calls().coverage(case_of(looks([Rank(0, 4, (communicator(0, 4),))])))) == ["no calls were recorded"]
