"""Processes that are stopped or have ended, and ranks that are not among the processes of their host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ncclwatch.engine.case import Case
from ncclwatch.engine.evidence.base import FactKind, RankNode
from ncclwatch.engine.evidence.kernel import Census
from ncclwatch.model.state import ProcessSample
from unit.engine.evidence.said import case_of
from unit.synthetic import WORLD, frozen_ring, looks


def halted(case: Case) -> set[object]:
    return {fact.subject for fact in case.facts.of(FactKind.HALTED)}


def runs(samples: Sequence[Sequence[ProcessSample]], *complete_hosts: str) -> bool | None:
    """Whether the rank that nobody observed runs."""
    job = case_of(samples).job
    return Census.of(job, complete_hosts).runs(job.groups[WORLD], 3)


def test_the_operating_systems_word_is_a_fact() -> None:
    case = case_of(looks(frozen_ring(2, run_state="T"), count=3))
    (fact,) = case.facts.of(FactKind.HALTED)
    assert fact.subject == RankNode(2)
    assert fact.text.endswith("is stopped (state T) in 3 samples over 2.0 s")
    assert halted(case_of(looks(frozen_ring(2, run_state="Z")))) == {RankNode(2)}


def test_a_process_that_was_seen_stopped_only_once_may_just_be_traced() -> None:
    series = looks(frozen_ring(2, run_state="T"))
    series[2][0] = replace(series[2][0], run_state="S")
    assert halted(case_of(series)) == set()


def test_who_is_not_among_the_processes_of_a_host_that_was_seen_whole_has_ended() -> None:
    ranks = frozen_ring(2, run_state="S")
    for rank in ranks:
        rank.host = "node0"
        rank.communicators = tuple(replace(c, peers=tuple(replace(p, host_hash=7) for p in c.peers)) for c in rank.communicators)
    three = looks(ranks)[:3]
    assert runs(three, "node0") is False
    assert runs(three) is None, "others of its processes may not have been looked at"
    elsewhere = looks(frozen_ring(2, run_state="S"))[:3]
    assert runs(elsewhere, "node0") is None, "it should be on a host that nobody looked at"
