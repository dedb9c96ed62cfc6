"""NCCL's counts of collectives as facts: ranks whose counts contradict those of their peers."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.engine.evidence.calls import SequenceCounts
from unit.engine.evidence.said import case_of
from unit.synthetic import Rank, communicator, looks

Counts = dict[str, int]


def test_counts_that_contradict_each_other_are_facts_and_a_tie_is_no_proof() -> None:
    def facts(*counts: Counts) -> list[tuple[list[int], bool]]:
        own = [replace(communicator(rank, len(counts)), sequence_numbers=count) for rank, count in enumerate(counts)]
        case = case_of(looks([Rank(rank, len(counts), (one,)) for rank, one in enumerate(own)]))
        return [(list(fact.odd), fact.tie) for fact in SequenceCounts().facts(case)]

    usual, other = {"AllReduce": 9, "AllGather": 5}, {"AllReduce": 8, "AllGather": 6}
    assert facts(usual, usual, usual, other) == [([3], False)]
    assert facts(usual, other) == [([0, 1], True)]
    assert facts(usual, {"AllReduce": 8, "AllGather": 5}) == [], "one that is behind has called nothing else"
