"""Paths over which TCP gets no answer, below a standstill whose waits end at a rank that shows nothing."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.engine.case import Known
from ncclwatch.engine.dead_paths import DeadPath
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.engine.hypotheses import Cause
from ncclwatch.engine.network import NetworkMemory
from ncclwatch.engine.verdict import REASONS
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, NetworkLook, SocketFacts
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.engine.test_ports import LOOKS, idle_ring
from unit.synthetic import WORLD, Rank, frozen_ring, looks, silent_link


def path(rank: int, peer: int, comm_hash: int = WORLD) -> DeadPath:
    return DeadPath(comm_hash, rank, peer, f"10.0.0.{rank}", f"10.0.0.{peer}")


def said(*paths: DeadPath, ranks: list[Rank] | None = None) -> Verdict:
    return diagnose(looks(ranks or idle_ring(), LOOKS), Known(dead_paths=paths))


def test_what_several_dead_paths_share_is_named() -> None:
    verdict = said(path(0, 1), path(3, 1))
    assert verdict.verdict_class is VerdictClass.HARDWARE
    assert [c.rank for c in verdict.culprits] == [1] and set(verdict.victims) == {0, 2, 3}
    assert any("end at rank 2, which may itself wait" in line for line in verdict.evidence)
    assert sum("no NCCL counter moved" in line for line in verdict.evidence) == 1
    assert "nic" in verdict.planes and verdict.link is None


def test_of_a_single_path_both_ends_are_named_as_a_link() -> None:
    verdict = said(path(0, 1))
    assert verdict.verdict_class is VerdictClass.HARDWARE
    assert [c.rank for c in verdict.culprits] == [0, 1]
    assert verdict.link is not None and (verdict.link.source, verdict.link.destination) == (0, 1)


def test_two_paths_with_nothing_in_common_are_two_links() -> None:
    assert {c.rank for c in said(path(0, 1), path(2, 3)).culprits} == {0, 1, 2, 3}


def test_paths_that_prove_nothing_here_change_nothing() -> None:
    assert said(path(0, 1, 0xDEAD)) == said(), "of another job"
    assert said(path(0, 9)) == said(), "no such rank"
    assert said(replace(path(0, 1), global_rank=7)) == said(), "another communicator of the same hash"
    assert said(replace(path(0, 1), remote="10.0.0.0")) == said(), "a machine does not lose itself"
    verdict = said(path(0, 1), ranks=frozen_ring(2, 4, run_state="T"))
    assert verdict.verdict_class is VerdictClass.STOPPED, "what the operating system states stands"
    assert said(path(0, 2), ranks=idle_ring()[:2]).verdict_class is VerdictClass.UNKNOWN, "one end was not observed"


def test_of_who_is_cut_off_it_is_said_that_the_network_is_why() -> None:
    ranks = silent_link(2)
    alone, dead = said(ranks=ranks), said(path(2, 3), ranks=ranks)
    assert [c.rank for c in alone.culprits] == [c.rank for c in dead.culprits] == [2]
    assert alone.culprits[0].reason == REASONS[Cause.CUT_OFF] and dead.culprits[0].reason == REASONS[Cause.PATH]
    assert dead.summary.endswith(REASONS[Cause.PATH]) and dead.victims == alone.victims
    assert "ncclwatch probe" in "".join(dead.next_steps) and "nic" in dead.planes
    assert said(path(0, 1), ranks=ranks) == alone, "of other ranks"


def test_which_flows_are_dead_paths() -> None:
    facts = SocketFacts(1, "10.0.0.1:4711", "10.0.0.2:4712", unacknowledged=13, timeouts=6)
    send, state = Direction.SEND, FlowState.STALLED
    flow = FlowRecord(4711, FlowKind.SOCKET, "Socket", "eth0", 0, state, "no answer", 1, WORLD, 1, 0, 2, send, socket=facts)
    memory = NetworkMemory()

    def dead(flow: FlowRecord) -> list[DeadPath]:
        memory.feed("node1", NetworkLook(flows=(flow,)), 1)
        return memory.dead_paths()

    assert dead(flow) == [DeadPath(WORLD, 1, 2, "10.0.0.1", "10.0.0.2", 1)]
    assert dead(replace(flow, socket=replace(facts, timeouts=4))) == [], "TCP tries again"
    lossy = replace(flow, retries=90)
    assert dead(lossy) == [], "what loses much may still come through"
    assert dead(replace(lossy, socket=replace(facts, timeouts=7))) != []
    memory = NetworkMemory()
    assert dead(replace(flow, socket=replace(facts, unacknowledged=0))) == [], "nothing is under way"
    assert dead(replace(flow, state=FlowState.ACTIVE)) == []
    assert dead(replace(flow, comm_hash=None)) == [], "nobody knows whose it is"
