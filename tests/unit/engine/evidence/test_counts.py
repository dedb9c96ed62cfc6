"""NCCL's counts of collectives as facts: ranks whose counts contradict those of their peers."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.engine.evidence.base import Strength
from ncclwatch.engine.evidence.disagreements import SequenceCounts
from ncclwatch.engine.nodes import RankNode
from unit.engine.evidence.said import case_of
from unit.synthetic import Rank, communicator, looks

Counts = dict[str, int]


def test_counts_that_contradict_each_other_are_facts_and_a_tie_is_no_proof() -> None:
    def facts(*counts: Counts) -> list[tuple[object, Strength]]:
        own = [replace(communicator(rank, len(counts)), sequence_numbers=count) for rank, count in enumerate(counts)]
        case = case_of(looks([Rank(rank, len(counts), (one,)) for rank, one in enumerate(own)]))
        return [(fact.subject, fact.strength) for fact in SequenceCounts().facts(case)]

    usual, other = {"AllReduce": 9, "AllGather": 5}, {"AllReduce": 8, "AllGather": 6}
    assert facts(usual, usual, usual, other) == [(RankNode(3), Strength.PROVEN)]
    assert facts(usual, other) == [(RankNode(0), Strength.POSSIBLE), (RankNode(1), Strength.POSSIBLE)]
    assert facts(usual, {"AllReduce": 8, "AllGather": 5}) == [], "one that is behind has called nothing else"


def test_where_nccl_does_not_count_the_coverage_says_so() -> None:
    coverage = SequenceCounts().coverage(case_of(looks([Rank(rank, 2, (communicator(rank, 2),)) for rank in range(2)])))
    assert (coverage.seen, coverage.wanted, len(coverage.missing)) == (0, 2, 1)
