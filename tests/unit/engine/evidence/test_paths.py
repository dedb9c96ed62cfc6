"""Paths of flows as a source: collisions of the job's own flows, with what they cost, beside its verdict."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.collect.network_memory import NetworkMemory
from ncclwatch.engine.beside import add_paths
from ncclwatch.engine.case import Case
from ncclwatch.engine.evidence.base import FactKind
from ncclwatch.engine.evidence.paths import PathFact, Paths
from ncclwatch.model.network import NetworkLook
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.paths.findings import MOVE_APART
from unit.engine.evidence.said import case_of
from unit.paths.test_findings import live, socket
from unit.synthetic import WORLD, frozen_ring, looks


def colliding(comm_hash: int = WORLD, *, probed: bool = True) -> Case:
    """A ring of four, two flows of which share an uplink while another is empty."""
    memory = NetworkMemory()
    ends = [socket(number, 500 + number) for number in (0, 1)]
    for host, side in (("a", 0), ("b", 1)):
        flows = tuple(replace(pair[side], comm_hash=comm_hash) for pair in ends)
        memory.feed(host, NetworkLook(flows=flows), 10**9)
    if probed:
        memory.ways.take([live(0, 0)])
    return case_of(looks(frozen_ring()), network=memory, sources=(Paths(),))


RUNS = Verdict(VerdictClass.RUNNING, "NCCL makes progress", next_steps=("watch",))


def test_a_collision_is_a_fact_of_the_job_whose_flows_collide() -> None:
    (fact,) = colliding().facts.of(FactKind.PATH, PathFact)
    assert fact.value == 0.5 and fact.text.startswith("2 flows cross ") and fact.finding.step == MOVE_APART
    assert not colliding(0x777).facts.of(FactKind.PATH), "those of another job are none of this one's"
    assert not colliding(probed=False).facts.of(FactKind.PATH)


def test_the_verdict_says_so_with_what_it_costs() -> None:
    said = add_paths(colliding(), RUNS, lambda _: (0.5, None))
    assert said.id == RUNS.id and said.next_steps == (MOVE_APART, "watch")
    assert (
        said.summary.startswith("NCCL makes progress; flows collide, ")
        and "at most 50% of an iteration (0.25 s of 0.50 s)" in said.summary
    )
    assert "PREDICTED" in said.evidence[-1]
    slowed = add_paths(colliding(), RUNS, lambda _: (0.5, 0.2))
    assert "at most 20% of an iteration (0.10 s of 0.50 s)" in slowed.summary, "no cause costs more than is lost"


def test_what_hangs_or_is_known_otherwise_is_left_as_it_is() -> None:
    stopped = replace(RUNS, verdict_class=VerdictClass.STOPPED)
    assert add_paths(colliding(), stopped, lambda _: (None, None)) is stopped
    assert add_paths(colliding(0x777), RUNS, lambda _: (None, None)) is RUNS


def test_pairs_that_nobody_probed_are_not_observed() -> None:
    case = colliding()
    assert list(Paths().coverage(case)) == []
    memory = case.known.network
    memory.ways.take([replace(live(0, 0), source="10.9.9.9", wall_s=2.0)])
    memory.ways.probes.pop(("10.0.0.1", "10.0.1.1", "tcp"))
    assert not case.facts.of(FactKind.PATH)
    (line,) = Paths().coverage(case)
    assert "between 1 pairs of addresses" in line
