"""What a change would gain on a made-up fabric, SIMULATED: known answers of small cases, and what is advised."""

from __future__ import annotations

from ncclwatch.paths.fabric import regular
from ncclwatch.paths.traffic import Ring, rings
from ncclwatch.paths.what_if import Change, in_words, more_queue_pairs, settings, what_if

BONDED = regular(hosts=2, nics=1, ports=2, port_gbps=200, leaves=4, spines=4, links=1, uplink_gbps=400, rails=False)
SINGLE = regular(hosts=4, nics=1, ports=1, port_gbps=100, leaves=2, spines=2, links=1, uplink_gbps=100, rails=False)


def test_a_bond_needs_two_queue_pairs_and_a_plan_to_be_full() -> None:
    found = what_if(BONDED, rings(BONDED, [Ring("a", [0, 1])], 1, 0), seeds=5, wrong=0.0, floor=0.05)
    gbps = {one.change: one.gbps[1] for one in found.outcomes}
    assert found.today[0][1] == 200 and gbps[Change(1, True)] == 200 and gbps[Change(2, True)] == 400
    assert found.best == Change(2, True)
    assert settings(Change(2, True), 1) == {"NCCL_IB_QPS_PER_CONNECTION": "2", "NCCL_IB_SPLIT_DATA_ON_QPS": "1"}


def test_two_jobs_on_one_spine_gain_by_a_plan_and_a_plan_that_is_half_wrong_gains_less() -> None:
    traffic = rings(SINGLE, [Ring("a", [0, 2]), Ring("b", [1, 3])], 1, 0)
    sure, unsure = (what_if(SINGLE, traffic, seeds=30, wrong=wrong, floor=0.05) for wrong in (0.0, 0.5))
    planned = {
        name: next(one for one in each.outcomes if one.change == Change(1, True))
        for name, each in (("sure", sure), ("unsure", unsure))
    }
    assert planned["sure"].gbps == (100.0, 100.0, 100.0) and sure.today[0][0] == 50.0
    assert planned["unsure"].gbps[0] == 50.0
    assert all(after == 100.0 for after in planned["sure"].gbps)


def test_where_nothing_collides_nothing_is_advised() -> None:
    lonely = regular(hosts=2, nics=1, ports=1, port_gbps=100, leaves=2, spines=1, links=1, uplink_gbps=100, rails=False)
    found = what_if(lonely, rings(lonely, [Ring("a", [0, 1])], 1, 0), seeds=3, wrong=0.0, floor=0.05)
    assert found.best is None and all(gain == (0.0, 0.0, 0.0) for _, gain in found.totals)


def test_where_addresses_alone_are_hashed_no_source_port_is_planned() -> None:
    traffic = rings(SINGLE, [Ring("a", [0, 2]), Ring("b", [1, 3])], 1, 0)
    found = what_if(SINGLE, traffic, seeds=10, wrong=0.0, floor=0.05, addresses_alone=True)
    assert not any(change.planned for change, _ in found.totals)
    assert found.best is None and all(gain == (0.0, 0.0, 0.0) for _, gain in found.totals), "more queue pairs go the same way"


def test_more_queue_pairs_carry_the_same_bytes() -> None:
    one = rings(SINGLE, [Ring("a", [0, 2])], 1, 0)
    four = more_queue_pairs(one, 4, 1)
    assert len(four) == 4 * len(one) and four.weight.sum() == one.weight.sum() and len(set(four.source_port.tolist())) > len(one)


def test_words() -> None:
    assert (
        in_words(Change(1, False), 1) == "1 queue pair" and in_words(Change(2, True), 2) == "4 queue pairs, planned source ports"
    )
    assert settings(Change(1, True), 4) == {}
