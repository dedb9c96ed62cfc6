"""A port or a path that is down below a standstill is the cause, not the rank where visible waits end; and where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.collect.network_memory import Way
from ncclwatch.engine.case import Known
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.engine.evidence.nics import DeadPath, PortDown, dead_path
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.patience import Patience
from ncclwatch.model.cause import Cause
from ncclwatch.model.network import NicRecord
from ncclwatch.model.state import Direction, NetStep, Transport
from ncclwatch.model.verdict import Verdict, VerdictClass
from unit.engine.evidence.said import with_facts
from unit.engine.evidence.test_work_requests import RECV, judged, window
from unit.engine.test_calls import calls
from unit.engine.test_net_steps import BEGIN, STEPS, tail_of_a_ring
from unit.synthetic import WORLD, Rank, communicator, frozen_ring, looks, recv, silent_link

CAME_TO_STAND = 1_700_000_000.0


LOOKS = 12


DOWN = NicRecord("node1", "eth0", "netdev", up=False, state="down", used_by=(1,))


def port_down(nic: NicRecord, since: float | None = None, until: float | None = None) -> PortDown:
    return PortDown(subject=nic.key, nic=nic, since=since, until=until)


def idle_ring() -> list[Rank]:
    """Rank 2 has nothing open and all others wait for it in the end: it has not entered, or its transfers were dropped."""
    ranks = frozen_ring(2, 4, run_state="S")
    ranks[2].operations = ()
    return ranks


def said(*ports: PortDown, ranks: list[Rank] | None = None) -> Verdict:
    return diagnose(looks(ranks or idle_ring(), LOOKS), Known(sources=with_facts(*ports)))


def test_without_a_port_that_is_down_the_rank_is_named() -> None:
    verdict = said()
    assert verdict.verdict_class is VerdictClass.NOT_ENTERED and [c.rank for c in verdict.culprits] == [2]


@pytest.mark.parametrize("since", [None, CAME_TO_STAND - 20, CAME_TO_STAND + 1])
def test_a_port_that_went_down_when_the_job_came_to_stand_is_the_cause(since: float | None) -> None:
    verdict = said(port_down(DOWN, since))
    assert verdict.verdict_class is VerdictClass.HARDWARE, verdict.summary
    assert [c.rank for c in verdict.culprits] == [1] and set(verdict.victims) == {0, 2, 3}
    assert verdict.summary.startswith("eth0 on node1 is down, and rank 1 uses it: the job stands still in AllReduce")
    assert verdict.link is not None and verdict.link.device == "eth0" and 1 in (verdict.link.source, verdict.link.destination)
    assert any("end at rank 2, which may itself wait" in line for line in verdict.evidence)
    assert "nic" in verdict.planes


@pytest.mark.parametrize(
    "port",
    [
        port_down(DOWN, CAME_TO_STAND + 8),
        port_down(DOWN, CAME_TO_STAND - 1000),
        port_down(DOWN, CAME_TO_STAND - 60, CAME_TO_STAND - 30),
        port_down(replace(DOWN, used_by=(3,))),
        port_down(replace(DOWN, host="node9")),
    ],
    ids=["later", "the job ran for long without it", "up again before", "nobody of this host uses it", "another host"],
)
def test_a_port_that_has_nothing_to_do_with_it_changes_nothing(port: PortDown) -> None:
    assert said(port) == said()


def test_a_port_that_is_up_again_is_still_why_the_job_came_to_stand() -> None:
    """The verdict keeps its culprits, and with them its id, until the job goes on."""
    down, again = said(port_down(DOWN, CAME_TO_STAND)), said(port_down(replace(DOWN, up=True), CAME_TO_STAND, CAME_TO_STAND + 9))
    assert again.id == down.id
    assert again.summary.startswith("eth0 on node1 was down, and rank 1 uses it")


def test_what_the_operating_system_states_stands() -> None:
    verdict = said(port_down(DOWN), ranks=frozen_ring(2, 4, run_state="T"))
    assert verdict.verdict_class is VerdictClass.STOPPED and [c.rank for c in verdict.culprits] == [2]


def test_a_pause_is_still_a_pause_while_a_port_is_down() -> None:
    live = LiveDiagnosis(Known(Patience(), sources=with_facts(port_down(DOWN))))
    for number in range(4):
        verdict = live.update([rank.looks(4)[number] for rank in idle_ring()])
        assert not verdict.verdict_class.accuses
    verdict = live.update([rank.looks(LOOKS)[LOOKS - 1] for rank in idle_ring()])
    assert verdict.verdict_class is VerdictClass.HARDWARE


def test_a_rank_that_has_not_called_the_next_operation_may_stand_in_the_one_before() -> None:
    """Rank 0 has sent all of an operation and called the next; what it sent does not reach 1, and 2 and 3 stand unseen."""
    inside = [communicator(rank, 4, transport=Transport.SHM) for rank in range(4)]
    sent = replace(communicator(0, 4), net_steps=(NetStep(0, 1, Direction.SEND, 0, 960 + 96),))
    ranks = [
        Rank(0, 4, (sent,)),
        Rank(1, 4, (communicator(1, 4),), (recv(0, posted=96, received=90, delivered=90, consumed=90),)),
        Rank(2, 4, (inside[2],)),
        Rank(3, 4, (inside[3],)),
    ]
    live = LiveDiagnosis()
    for rank in range(4):
        live.add_calls(calls(rank, [64, 64, 64] if rank == 0 else [64, 64]))
    for number in range(LOOKS):
        verdict = live.update([rank.looks(LOOKS)[number] for rank in ranks])
        assert not {2, 3} & {culprit.rank for culprit in verdict.culprits}, verdict.summary
    assert verdict.verdict_class is VerdictClass.HARDWARE and verdict.link is not None


def test_of_a_link_that_carries_nothing_the_end_whose_port_is_down_is_kept() -> None:
    ranks = tail_of_a_ring(BEGIN + STEPS)
    both = said(ranks=ranks)
    assert both.verdict_class is VerdictClass.HARDWARE and both.link is not None
    assert {c.rank for c in both.culprits} == {0, 1}
    verdict = said(port_down(DOWN), ranks=ranks)
    assert [c.rank for c in verdict.culprits] == [1] and 0 in verdict.victims
    assert verdict.link == both.link
    assert "eth0 on node1 is down, and rank 1 uses it" in verdict.summary
    assert said(port_down(replace(DOWN, host="node2", used_by=(2,))), ranks=ranks) == both, "another rank's port"


def path(rank: int, peer: int, comm_hash: int = WORLD) -> DeadPath:
    return dead_path(Way(comm_hash, rank, peer), f"10.0.0.{rank}", f"10.0.0.{peer}")


def said_of_paths(*paths: DeadPath, ranks: list[Rank] | None = None) -> Verdict:
    return diagnose(looks(ranks or idle_ring(), LOOKS), Known(sources=with_facts(*paths)))


def test_what_several_dead_paths_share_is_named() -> None:
    verdict = said_of_paths(path(0, 1), path(3, 1))
    assert verdict.verdict_class is VerdictClass.HARDWARE
    assert [c.rank for c in verdict.culprits] == [1] and set(verdict.victims) == {0, 2, 3}
    assert any("end at rank 2, which may itself wait" in line for line in verdict.evidence)
    assert sum("no NCCL counter moved" in line for line in verdict.evidence) == 1
    assert "nic" in verdict.planes and verdict.link is None


def test_of_a_single_path_both_ends_are_named_as_a_link() -> None:
    verdict = said_of_paths(path(0, 1))
    assert verdict.verdict_class is VerdictClass.HARDWARE
    assert [c.rank for c in verdict.culprits] == [0, 1]
    assert verdict.link is not None and (verdict.link.source, verdict.link.destination) == (0, 1)


def test_two_paths_with_nothing_in_common_are_two_links() -> None:
    assert {c.rank for c in said_of_paths(path(0, 1), path(2, 3)).culprits} == {0, 1, 2, 3}


def test_paths_that_prove_nothing_here_change_nothing() -> None:
    assert said_of_paths(path(0, 1, 0xDEAD)) == said_of_paths(), "of another job"
    assert said_of_paths(path(0, 9)) == said_of_paths(), "no such rank"
    assert said_of_paths(replace(path(0, 1), global_rank=7)) == said_of_paths(), "another communicator of the same hash"
    assert said_of_paths(replace(path(0, 1), remote="10.0.0.0")) == said_of_paths(), "a machine does not lose itself"
    verdict = said_of_paths(path(0, 1), ranks=frozen_ring(2, 4, run_state="T"))
    assert verdict.verdict_class is VerdictClass.STOPPED, "what the operating system states stands"
    assert said_of_paths(path(0, 2), ranks=idle_ring()[:2]).verdict_class is VerdictClass.UNKNOWN, "one end was not observed"


def test_of_who_is_cut_off_it_is_said_that_the_network_is_why() -> None:
    ranks = silent_link(2)
    alone, dead = said_of_paths(ranks=ranks), said_of_paths(path(2, 3), ranks=ranks)
    assert [c.rank for c in alone.culprits] == [c.rank for c in dead.culprits] == [2]
    assert alone.culprits[0].reason == Cause.CUT_OFF and dead.culprits[0].reason == Cause.PATH
    assert dead.summary.endswith(Cause.PATH) and dead.victims == alone.victims
    assert "ncclwatch probe" in "".join(dead.next_steps) and "nic" in dead.planes
    assert said_of_paths(path(0, 1), ranks=ranks) == alone, "of other ranks"


def test_work_requests_tell_a_proxy_from_the_network() -> None:
    ranks = silent_link(2)
    assert judged(ranks).culprits[0].reason == Cause.CUT_OFF
    asleep = judged(ranks, window(2, 3, polls=0))
    assert [(c.rank, c.reason) for c in asleep.culprits] == [(2, Cause.PROXY_STALLED)]
    assert "network-end" in asleep.rules and "wire" in asleep.planes
    dead = judged(ranks, window(2, 3))
    assert [(c.rank, c.reason) for c in dead.culprits] == [(2, Cause.PATH)]
    link = judged(silent_link(), window(1, 2, polls=0))
    assert [(c.rank, c.reason, c.link) for c in link.culprits] == [(1, Cause.PROXY_STALLED, None)]
    assert 2 in link.victims
    both = judged(silent_link(), window(1, 2), window(2, 1, RECV, polls=0))
    assert [c.rank for c in both.culprits] == [1, 2], "the sender waits in vain for what the other adapter acknowledges"


def test_work_requests_that_were_not_seen_since_tell_nothing() -> None:
    ranks = silent_link(2)
    assert judged(ranks, window(2, 3, polls=0, end_ns=0)) == judged(ranks)
    assert judged(ranks, window(0, 1, polls=0)).culprits == judged(ranks).culprits, "of other ranks"
