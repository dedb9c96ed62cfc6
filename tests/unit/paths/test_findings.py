"""What is wrong with paths: each trouble, and a near miss of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.model.network import FlowRecord, NicRecord
from ncclwatch.model.paths import NodeView, Probe
from ncclwatch.paths.findings import Trouble, bonds, one_job_waits, spread
from ncclwatch.paths.memory import PathMemory
from unit.paths.test_flow_map import RECV, SEND
from unit.paths.test_measured import LEAF, flow, probe, seen

A, B = "10.0.0.1", "10.0.1.1"
UP0, UP1 = (LEAF, "10.8.0.2"), (LEAF, "10.8.1.2")


def socket(
    number: int, source_port: int, *, rate: float = 1e6, waits: tuple[int, int] = (100, 90)
) -> tuple[FlowRecord, FlowRecord]:
    """Both ends of a flow over a socket, of one job, on its own channel."""
    assert SEND.socket is not None and RECV.socket is not None
    send = replace(SEND.socket, local=f"{A}:{source_port}", remote=f"{B}:{40000 + number}", rtt_us=waits[0], min_rtt_us=waits[1])
    receive = replace(RECV.socket, local=f"{B}:{40000 + number}", remote=f"{A}:{source_port}")
    return replace(SEND, channel=number, bandwidth=rate, socket=send), replace(RECV, channel=number, socket=receive)


def views(*pairs: tuple[FlowRecord, FlowRecord], nics: tuple[NicRecord, ...] = ()) -> list[NodeView]:
    return [NodeView("a", [one for one, _ in pairs], nics), NodeView("b", [other for _, other in pairs])]


def live(*spines: int) -> Probe:
    """Running flows on these spines, by channel, and 16 source ports that take either."""
    own = [seen(700 + number, number % 2, 26000) for number in range(16)]
    return probe(*own, *(replace(seen(500 + n, spine, 40000 + n), live=True) for n, spine in enumerate(spines)), wrong=0.02)


def found(memory: PathMemory, *pairs: tuple[FlowRecord, FlowRecord], moment: int = 0) -> list[tuple[Trouble, str]]:
    return [(one.trouble, one.where) for one in memory.findings(views(*pairs), moment)]


def test_flows_that_collide_cost_what_a_fair_spread_would_save() -> None:
    memory = PathMemory()
    memory.take([live(0, 0)])
    (one,) = memory.findings(views(socket(0, 500), socket(1, 501)), 0)
    assert (one.trouble, one.where, one.share) == (Trouble.COLLISION, f"{LEAF} → 10.8.0.2", 0.5)
    assert one.confidence == pytest.approx(0.98**2) and one.jobs == {f"{0xABC:016x}"} and "paths plan" in one.step
    apart = PathMemory()
    apart.take([live(0, 1)])
    assert not found(apart, socket(0, 500), socket(1, 501))


def test_without_probes_or_bonds_nothing_is_looked_at() -> None:
    assert PathMemory().findings(views(socket(0, 500), socket(1, 501)), 0) == []


def test_three_flows_on_two_links_cannot_be_spread_better_than_two_and_one() -> None:
    assert spread([1.0, 1.0, 1.0], 2) == 1.5 and spread([3.0, 1.0], 4) == 3.0


def test_a_link_that_no_path_takes_any_more_is_dead() -> None:
    memory = PathMemory()
    memory.take([live(0, 1)])
    assert not found(memory, socket(0, 500), socket(1, 501))
    moved = probe(*(seen(700 + number, 0, 26000) for number in range(16)), wrong=0.02)
    memory.take([replace(moved, wall_s=2.0)])
    (one,) = memory.findings(views(socket(0, 500), socket(1, 501)), 1)
    assert (one.trouble, one.where, one.share) == (Trouble.DEAD, f"{LEAF} → 10.8.1.2", 0.5)
    assert "of 8 that did the network moved 8" in one.text and one.confidence == pytest.approx(0.98)


def test_what_is_swallowed_does_not_arrive() -> None:
    memory = PathMemory()
    memory.take([live(0, 1)])
    lost = [seen(700 + n, n % 2, 26000) for n in range(16)]
    lost = [replace(one, arrived=False, hops=(LEAF, None, None)) if n % 2 else one for n, one in enumerate(lost)]
    memory.take([replace(probe(*lost, wrong=0.02), wall_s=2.0)])
    (one,) = memory.findings(views(socket(0, 500), socket(1, 501)), 1)
    assert one.trouble is Trouble.DEAD and "8 do not arrive" in one.text


def test_few_ports_asked_or_a_silent_router_prove_no_death() -> None:
    few, silent = PathMemory(), PathMemory()
    for memory in (few, silent):
        memory.take([live(0, 1)])
    few.take([replace(probe(seen(700, 0, 26000), wrong=0.02), wall_s=2.0)])
    quiet = [seen(700 + n, n % 2, 26000) for n in range(16)]
    quiet = [replace(one, hops=(LEAF, None, *one.hops[2:])) if n % 2 else one for n, one in enumerate(quiet)]
    silent.take([replace(probe(*quiet, wrong=0.02), wall_s=2.0)])
    assert not found(few, socket(0, 500), socket(1, 501), moment=1)
    assert not found(silent, socket(0, 500), socket(1, 501), moment=1)


def test_an_older_probe_than_the_one_known_is_left() -> None:
    memory = PathMemory()
    memory.take([replace(live(0, 0), wall_s=5.0), replace(live(0, 1), wall_s=4.0)])
    assert [one.trouble for one in memory.findings(views(socket(0, 500), socket(1, 501)), 0)] == [Trouble.COLLISION]


def test_a_link_that_is_full_with_less_than_its_neighbour_is_degraded() -> None:
    memory = PathMemory()
    memory.take([live(0, 1)])
    full = (9000, 100)
    for moment in range(6):
        said = found(memory, socket(0, 500, rate=1e6, waits=full), socket(1, 501, rate=4e6), moment=moment)
    assert said == [(Trouble.DEGRADED, f"{LEAF} → 10.8.0.2")]
    (one,) = memory.findings(views(socket(0, 500, rate=1e6, waits=full), socket(1, 501, rate=4e6)), 6)
    assert one.share == 0.75 and one.confidence > 0.98
    idle = PathMemory()
    idle.take([live(0, 1)])
    for moment in range(6):
        said = found(idle, socket(0, 500, rate=1e6), socket(1, 501, rate=4e6), moment=moment)
    assert said == [], "a link that is not full may have nothing to carry"


BOND = NicRecord("a", "bond0", "netdev", True, "up", bond=("eth0", "eth1"))
ETH0 = NicRecord("a", "eth0", "netdev", True, "up", rate_gbps=0.1, send_rate=9e6)
PORTS = [ETH0, replace(ETH0, name="eth1", send_rate=1e6)]


def test_a_bond_of_which_one_port_sends_most_is_unbalanced() -> None:
    flows = [replace(flow(0, 500), from_name="a bond0"), replace(flow(1, 501), from_name="a bond0")]
    (one,) = bonds([BOND, *PORTS], flows)
    assert (one.trouble, one.where) == (Trouble.BOND, "bond0 on a") and one.share == pytest.approx(1 - 5 / 9)
    assert "eth0 90%, eth1 10%" in one.text
    even = [replace(port, send_rate=5e6) for port in PORTS]
    idle = [replace(port, send_rate=(port.send_rate or 0) / 100) for port in PORTS]
    spare = replace(BOND, bond_active="eth0")
    assert not [*bonds([BOND, *even], flows), *bonds([BOND, *idle], flows), *bonds([spare, *PORTS], flows)]
    assert not list(bonds([BOND, *PORTS], [flow(0, 500)])), "what sends over it is not of a job"


def test_a_path_on_which_one_job_alone_waits() -> None:
    mine = replace(flow(0, 500), job="one", waits=(9000.0, 100.0))
    other = replace(flow(1, 501), job="two", waits=(110.0, 100.0))
    (one,) = one_job_waits([mine, other], [(UP0,), (UP0,)])
    assert (one.trouble, one.where, one.jobs) == (Trouble.ONE_JOB, f"{LEAF} → 10.8.0.2", frozenset({"one"})) and one.share is None
    both = replace(other, waits=(9000.0, 100.0))
    assert not [*one_job_waits([mine, both], [(UP0,), (UP0,)]), *one_job_waits([mine, other], [(UP0,), (UP1,)])]
    assert not list(one_job_waits([mine, replace(other, waits=None)], [(UP0,), (UP0,)]))
