import pytest

from ncclwatch.errors import UsageError
from ncclwatch.model.paths import ElephantFlow, NicPort
from ncclwatch.paths.fabric import regular
from ncclwatch.paths.traffic import Ring, of_flows, rings
from unit.paths.fabrics import fabric


def test_paths_between_blocks_go_over_each_pair_of_ports_and_each_spine() -> None:
    built = fabric()
    assert len(built.alternatives(0, 4)) == 2 * 4 * 2
    assert built.is_path(built.alternatives(0, 4)).all()
    spine_up = built.uplink_spine[built.alternatives(0, 4)[:, 1] - built.first_up]
    assert (spine_up == built.uplink_spine[built.alternatives(0, 4)[:, 2] - built.first_down]).all()


def test_ports_on_one_leaf_need_no_spine() -> None:
    assert [row[1:3].tolist() for row in fabric().alternatives(0, 1) if row[1] < 0] == [[-1, -1], [-1, -1]]


def test_a_dead_uplink_and_a_dead_port_are_no_path() -> None:
    built = fabric()
    dead = built.with_uplinks(built.uplinks_between(0, 0))
    assert len(dead.alternatives(0, 4)) == 16 - 2
    assert len(built.with_ports([0]).alternatives(0, 4)) == 8
    assert len(built.with_ports([0, 1]).alternatives(0, 4)) == 0
    # A spine that no longer reaches the destination is no choice of the leaf of the source.
    cut = built.with_uplinks([*built.uplinks_between(2, 1), *built.uplinks_between(3, 1)])
    assert built.uplinks_between(0, 1)[0] in built.up_choices(0, 4)
    assert built.uplinks_between(0, 1)[0] not in cut.up_choices(0, 4)


def test_a_degraded_link_stays_a_path() -> None:
    built = fabric()
    slow = built.with_uplinks([0], 50.0)
    assert slow.capacity[[slow.first_up, slow.first_down]].tolist() == [50, 50]
    assert len(slow.alternatives(0, 4)) == 16


def test_rails_keep_a_ring_on_its_leaves() -> None:
    built = fabric(rails=True)
    assert (built.alternatives(0, 4)[:, 1] == -1).any()


def test_links_have_names() -> None:
    built = fabric()
    assert built.link_name(1) == "host0 nic0.1 → leaf1"
    assert built.link_name(built.ports + 1) == "leaf1 → host0 nic0.1"
    assert built.link_name(built.first_up + 5) == "leaf1 → spine1 #5"
    assert built.link_name(built.first_down + 5) == "spine1 → leaf1 #5"


@pytest.mark.parametrize("wrong", [{"hosts": 0}, {"leaves": 3}, {"ports": 3}, {"hosts": 1 << 22}, {"port_gbps": -1.0}])
def test_numbers_that_make_no_fabric(wrong: dict[str, float]) -> None:
    numbers = {"hosts": 4, "nics": 1, "ports": 2, "port_gbps": 1.0, "leaves": 4, "spines": 1, "links": 1, "uplink_gbps": 1.0}
    with pytest.raises(UsageError):
        regular(**(numbers | wrong), rails=False)  # type: ignore[arg-type]


def test_whole_messages_in_turns_weigh_the_last() -> None:
    flows = rings(fabric(), [Ring("a", [0, 2], queue_pairs=4, split=False, messages=6)], 2, 0)
    assert flows.weight[:4].tolist() == [4 / 3, 4 / 3, 2 / 3, 2 / 3]


def test_flows_seen_on_hosts_find_their_nics() -> None:
    seen = ElephantFlow("a", 0, 1, 0, NicPort("host0", "nic1"), NicPort("host2", "nic1"), rate=1e9)
    flows = of_flows(fabric(), [seen, seen])
    assert (flows.source.tolist(), flows.destination.tolist(), flows.weight.tolist()) == ([1, 1], [5, 5], [1, 1])
    with pytest.raises(UsageError, match="no NIC"):
        of_flows(fabric(), [ElephantFlow("a", 0, 1, 0, NicPort("elsewhere", "nic1"), NicPort("host2", "nic1"))])
