"""Transfers over the network as facts: who waits for whom, and who could go on and does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ncclwatch.engine.case import Case
from ncclwatch.engine.edges import Stall, Why
from ncclwatch.engine.evidence.base import AbsentNode, Fact, FactKind, LinkNode, RankNode, one_by_one
from ncclwatch.engine.evidence.ends import Proxies
from unit.engine.evidence.said import case_of
from unit.synthetic import WORLD, absent_from_ring, frozen_ring, looks, silent_link


def said_of(case: Case) -> Iterator[Fact]:
    return one_by_one(Proxies().facts(case))


def test_a_rank_with_nothing_open_is_waited_for_from_both_sides() -> None:
    facts = list(said_of(case_of(looks(absent_from_ring(late=2)))))
    waits = {(fact.subject, fact.object): fact.text for fact in facts if fact.kind is FactKind.WAITS_FOR}
    assert Why.NO_OPERATION in waits[RankNode(1), RankNode(2)] and Why.NO_OPERATION in waits[RankNode(3), RankNode(2)]
    assert Why.GPU_NOT_READY in waits[RankNode(0), RankNode(3)]
    stalls = {fact.subject: fact.text for fact in facts if fact.kind is FactKind.STANDS}
    assert stalls.keys() == {RankNode(0), RankNode(3)}, "rank 2 could do nothing that shows"
    assert all(Stall.GPU_NOT_PRODUCING in text for text in stalls.values())


def test_data_on_its_way_is_a_wait_for_the_link() -> None:
    facts = said_of(case_of(looks(silent_link())))
    assert (RankNode(2), LinkNode(WORLD, 1, 2)) in {(fact.subject, fact.object) for fact in facts}


def test_a_rank_that_was_not_sampled_is_waited_for_as_such_and_told() -> None:
    case = case_of(looks(frozen_ring(2, run_state="S"))[:2])
    facts = said_of(case)
    assert AbsentNode(WORLD, 2) in {fact.object for fact in facts}


def test_a_job_without_operations_says_nothing() -> None:
    ranks = [replace(rank, operations=()) for rank in frozen_ring(2, run_state="S")]
    assert list(said_of(case_of(looks(ranks)))) == []
