"""A plan on measured paths: who crowds, what is moved where, what it gains, and what is not known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.model.paths import Load, Probe, Protocol, SeenPath
from ncclwatch.paths.assignment import next_demands
from ncclwatch.paths.measured import MeasuredFlow, capacities_of, crowds, links_of, where_now
from ncclwatch.paths.measured_plan import plan
from ncclwatch.paths.ports import ROCE_PORT

A, B = "10.0.0.1", "10.0.1.1"
LEAF, OTHER = "10.0.0.254", "10.9.9.9"


def seen(source_port: int, spine: int, port: int = 26000, **more: object) -> SeenPath:
    return SeenPath(port, source_port, (LEAF, f"10.8.{spine}.2", f"10.7.{spine}.1"), arrived=True, **more)  # type: ignore[arg-type]


def flow(channel: int, source_port: int, **more: object) -> MeasuredFlow:
    made = MeasuredFlow("job", 0, 1, channel, A, source_port, B, 40000 + channel)
    return replace(made, **more)  # type: ignore[arg-type]


FLOWS = [flow(0, 500), flow(1, 501)]
LIVE = (replace(seen(500, 0, 40000), live=True), replace(seen(501, 0, 40001), live=True))
OWN = tuple(seen(700 + number, number % 2, 26000 + number // 2 % 2) for number in range(8))


def probe(*paths: SeenPath, wrong: float = 0.0, **more: object) -> Probe:
    protocol = Protocol.UDP if any(one.port == ROCE_PORT for one in paths) else Protocol.TCP
    return Probe("a", A, B, protocol, 1.0, wrong, paths, **more)  # type: ignore[arg-type]


def test_two_flows_on_one_spine_are_found_and_moved_apart() -> None:
    found = plan(FLOWS, [probe(*OWN, *LIVE)], floor=0.05)
    (one,) = found.crowded
    assert one.link == (LEAF, "10.8.0.2") and one.flows == tuple(FLOWS) and one.empty == ((LEAF, "10.8.1.2"),)
    (gain,) = found.gains
    assert (gain.before, gain.before_known, gain.after, gain.gain, gain.confidence) == (2.0, True, 1.0, 1.0, 1.0)
    assert {choice.hops[1] for choice in found.chosen if choice} == {"10.8.0.2", "10.8.1.2"} and not found.refused
    assert found.loads[LEAF, "10.8.0.2"] == found.loads[LEAF, "10.8.1.2"] == 1.0


def test_flows_that_are_apart_are_no_crowd_and_no_plan_is_worth_it() -> None:
    apart = (LIVE[0], replace(seen(501, 1, 40001), live=True))
    found = plan(FLOWS, [probe(*OWN, *apart)], floor=0.05)
    assert not found.crowded and found.gains[0].gain == 0.0 and "below the floor of 5%" in found.refused


def test_where_all_paths_share_a_link_two_flows_on_it_are_no_crowd() -> None:
    """The link of the host to its leaf carries all there is; so does the only spine."""
    found = plan(FLOWS, [probe(*(replace(one, hops=OWN[0].hops) for one in (*OWN, *LIVE)))], floor=0.05)
    assert not found.crowded and found.refused


def test_unknown_paths_of_running_flows_are_drawn_and_said() -> None:
    found = plan(FLOWS, [probe(*OWN)], floor=0.05)
    (gain,) = found.gains
    assert (
        not gain.before_known
        and gain.gain_low == 0.0
        and gain.gain_high == 1.0
        and gain.confidence == pytest.approx(0.5, abs=0.1)
    )


def test_wrong_paths_cost_confidence() -> None:
    sure, unsure = (plan(FLOWS, [probe(*OWN, *LIVE, wrong=wrong)], floor=0.05).gains[0] for wrong in (0.0, 0.4))
    assert sure.confidence == 1.0 and 0.5 < unsure.confidence < 0.95


def test_dead_unsteady_and_silent_paths_are_not_used() -> None:
    bad = [replace(one, arrived=False) for one in OWN[:3]] + [replace(OWN[3], steady=False), replace(OWN[4], hops=())]
    found = plan(FLOWS, [probe(*bad, *OWN[5:], *LIVE)], floor=0.05)
    assert {choice.source_port for choice in found.chosen if choice} <= {705, 706, 707}


def test_a_path_that_may_be_any_of_the_others_is_not_used() -> None:
    """Its links are fewer, as the silent router's are missing: it is no emptier path for that."""
    late = [replace(one, hops=(LEAF, None, None)) for one in OWN[:4]]
    assert {one.source_port for one in plan(FLOWS, [probe(*late, *OWN[4:], *LIVE)], floor=0.05).chosen if one} <= {
        704,
        705,
        706,
        707,
    }
    silent = [replace(one, hops=(LEAF, None, "10.7.9.1")) for one in OWN[:4]]
    third = plan([*FLOWS, flow(2, 502)], [probe(*silent, *OWN[4:], *LIVE)], floor=0.0)
    assert {one.source_port for one in third.chosen if one} & {700, 701, 702, 703}, (
        "a spine of its own, whose router never answers"
    )
    every = [replace(one, hops=(None, None, one.hops[2])) for one in OWN]
    assert all(plan(FLOWS, [probe(*every, *LIVE)], floor=0.0).chosen)


def test_what_is_kept_stays_and_what_died_moves() -> None:
    first = plan(FLOWS, [probe(*OWN, *LIVE)], floor=0.0)
    kept = {
        (d.source, d.rank, d.destination, d.port): c.source_port for d, c in zip(first.demands, first.chosen, strict=True) if c
    }
    three = tuple(replace(one, hops=(LEAF, f"10.8.{n % 3}.2", f"10.7.{n % 3}.1")) for n, one in enumerate(OWN))
    again = plan(FLOWS, [probe(*three)], floor=0.0, kept=kept)
    assert again.loads == plan(FLOWS, [probe(*three)], floor=0.0).loads or max(again.loads.values()) == 2.0
    dead = tuple(replace(one, arrived=one.source_port not in kept.values()) for one in OWN)
    moved = plan(FLOWS, [probe(*dead)], floor=0.0, kept=kept)
    assert not {c.source_port for c in moved.chosen if c} & set(kept.values()) and all(moved.chosen)


def test_a_source_port_is_given_once_for_a_port() -> None:
    only = [seen(700, 0, 26000), seen(701, 0, 26000)]
    many = [flow(number, 500 + number) for number in range(3)]
    roce = [replace(one, port=ROCE_PORT) for one in many]
    found = plan(roce, [probe(*(replace(one, port=ROCE_PORT) for one in only))], floor=0.0)
    given = [choice.source_port for choice in found.chosen if choice]
    assert len(found.demands) == 3 and sorted(given) == [700, 701] and "1 connections stay" in found.notes[0]


def test_flows_of_a_bonded_nic_are_dealt_to_its_ports_by_what_they_carry() -> None:
    weights = (4.0, 1.0, 2.0, 1.0)
    flows = [flow(n, 50001 + n, port=ROCE_PORT, weight=weight, bond=2) for n, weight in enumerate(weights)]
    paths = [seen(51000 + n, n % 2, ROCE_PORT) for n in range(8)]
    found = plan(flows, [probe(*paths)], floor=0.0)
    sent = [sum(one.weight for one, port in zip(found.demands, found.bond_ports, strict=True) if port == at) for at in (1, 2)]
    assert sent == [4.0, 4.0] and any("ports of bonds" in line for line in found.notes)
    alone = plan([replace(one, bond=0) for one in flows], [probe(*paths)], floor=0.0)
    assert alone.bond_ports == [0] * 4 and not any("ports of bonds" in line for line in alone.notes)
    over_sockets = plan([replace(one, bond=2) for one in FLOWS], [probe(*OWN, *LIVE)], floor=0.0)
    assert over_sockets.bond_ports == [0, 0], "the kernel hashes sockets, and nothing of a process chooses"
    few = plan(flows, [probe(*paths[:3])], floor=0.0)
    assert [bool(port) for port in few.bond_ports] == [one is not None for one in few.chosen], "what stays as it is has none"


def test_flows_that_are_routed_adaptively_get_no_port_and_no_promise() -> None:
    loose = [replace(one, adaptive=True) for one in FLOWS]
    found = plan(loose, [probe(*OWN, *LIVE)], floor=0.0)
    assert not found.crowded and not found.gains and not any(found.chosen)
    assert (
        found.refused.startswith("2 flows of job job have NCCL_IB_ADAPTIVE_ROUTING on") and "no gain is promised" in found.refused
    )
    other = [replace(one, job="other", rank=2, source_port=one.source_port + 100, adaptive=True) for one in FLOWS]
    beside = plan([*FLOWS, *other], [probe(*OWN, *LIVE)], floor=0.05)
    assert [gain.job for gain in beside.gains] == ["job"] and {one.job for one in beside.demands} == {"job"}
    assert not beside.refused and any("of job other have NCCL_IB_ADAPTIVE_ROUTING on" in line for line in beside.notes)
    assert where_now(loose, [probe(*OWN, *LIVE)]) == [(), ()]


def test_two_senders_share_the_ports_of_a_receiver() -> None:
    other = [replace(one, rank=2, source="10.0.0.3") for one in FLOWS]
    demands = next_demands([*FLOWS, *other], [probe(*OWN), replace(probe(*OWN), source="10.0.0.3")])
    assert sorted((one.rank, one.port, one.weight) for one in demands) == [
        (0, 26000, 1.0), (0, 26001, 1.0), (2, 26000, 1.0), (2, 26001, 1.0)
    ]  # fmt: skip


def test_by_queues_flows_that_wait_crowd() -> None:
    quiet = [
        SeenPath(26000 + n % 2, 700 + n, load=load, load_confidence=0.99, waited=9, probes=20)
        for n, load in enumerate([Load.QUEUED, Load.QUEUED, Load.EMPTY, Load.EMPTY, Load.UNKNOWN])
    ]
    waiting = [replace(one, waits=(60_000.0, 100.0)) for one in FLOWS]
    found = plan(waiting, [probe(*quiet)], floor=0.05)
    assert [one.link[1] for one in found.crowded] == ["queued"] and found.gains[0].gain == pytest.approx(1.0)
    assert sorted(choice.links[0][1] for choice in found.chosen if choice) == ["empty", "queued"]
    idle = [replace(one, waits=(120.0, 100.0)) for one in FLOWS]
    assert not plan(idle, [probe(*quiet)], floor=0.05).crowded


def test_queues_under_the_ports_of_running_flows_of_roce_tell_where_they_are() -> None:
    """Queue pairs of our own leave by the same source ports as the job's: no round trip of the job's is needed."""
    flows = [flow(channel, 50001 + channel, port=ROCE_PORT) for channel in range(2)]
    paths = [
        SeenPath(ROCE_PORT, port, live=port < 50003, load=load, load_confidence=0.99, waited=9, probes=20)
        for port, load in ((50001, Load.QUEUED), (50002, Load.QUEUED), (50003, Load.QUEUED), (50004, Load.EMPTY))
    ]
    found = plan(flows, [probe(*paths)], floor=0.05)
    (crowded,) = found.crowded
    assert crowded.link[1] == "queued" and crowded.flows == tuple(flows)
    assert found.gains[0].before_known and found.gains[0].gain == pytest.approx(1.0)
    assert sorted(choice.source_port for choice in found.chosen if choice) == [50003, 50004]
    apart = [replace(paths[0]), replace(paths[1], load=Load.EMPTY), *paths[2:]]
    assert not plan(flows, [probe(*apart)], floor=0.05).crowded


def test_links_are_between_routers_that_answered() -> None:
    gap = replace(OWN[0], hops=(LEAF, None, "10.7.0.1"))
    assert links_of(probe(), gap) == ((A, LEAF), ("10.7.0.1", B))
    assert links_of(probe(), replace(gap, hops=())) == () and links_of(probe(), replace(gap, hops=(None,))) == ()


def test_flows_that_no_probe_is_for_are_said() -> None:
    found = plan([*FLOWS, flow(2, 503, destination="10.0.9.9")], [probe(*OWN, *LIVE)], floor=0.05)
    assert any("no probe was made from 10.0.0.1 to 10.0.9.9" in line for line in found.notes)


def test_crowds_of_two_hosts_on_one_spine() -> None:
    """Flows of two hosts behind one leaf meet on its uplink."""
    second = replace(probe(*OWN, LIVE[1]), source="10.0.0.3")
    flows = [FLOWS[0], replace(FLOWS[1], source="10.0.0.3", rank=2)]
    probes = [probe(*OWN, LIVE[0]), second]
    (one,) = crowds(flows, where_now(flows, probes), probes)
    assert {each.rank for each in one.flows} == {0, 2}


def test_a_link_that_is_full_with_less_gets_less() -> None:
    """Two flows fill a fast link, one a slow one: the slow one then carries none."""
    full, slow = (9000.0, 100.0), (0.2e6, 1e6)
    flows = [
        flow(0, 500, waits=full, rate=slow[1]),
        flow(1, 501, waits=full, rate=slow[0]),
        flow(2, 502, waits=full, rate=slow[1]),
    ]
    live = (*LIVE[:1], replace(seen(501, 1, 40001), live=True), replace(seen(502, 0, 40002), live=True))
    probes = [probe(*OWN, *live)]
    now = where_now(flows, probes)
    assert capacities_of(flows, now, probes)[LEAF, "10.8.1.2"] == pytest.approx(0.1)
    assert (LEAF, "10.8.0.2") not in capacities_of(flows, now, probes)
    found = plan(flows, probes, floor=0.0)
    spines = [one.hops[1] for one in found.chosen if one]
    assert spines.count("10.8.1.2") == 0 and len(spines) == 2, spines
    idle = [replace(one, waits=(100.0, 100.0)) for one in flows]
    assert capacities_of(idle, now, probes) == {}, "a link that is not full may have nothing to carry"
