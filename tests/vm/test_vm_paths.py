"""Source ports of RoCE v2, predicted from queue pair numbers, are those that NCCL sends from: every one, by capture."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ncclwatch.model.paths import NodeView, Origin
from ncclwatch.pathprobe.capture import capture
from ncclwatch.paths.flow_map import flow_map, to_capture
from ncclwatch.paths.pins import Roce, plan_text
from ncclwatch.paths.ports import ROCE_PORT, rule_of
from testbed.job import available, build_folder
from vm.fabric import Fabric
from vm.pairs import Pairs, look, remote_pairs, view_of

pytestmark = pytest.mark.vm

VERSION = "2.27.5"
MOST_S = 90.0
"""Of one look at packets."""
PORTS = {0: (50001, 50002), 1: (50011, 49152)}
"""The last is the one port whose label must not be its own low bits: those are 0, which would be none."""


def test_every_predicted_port_is_on_the_wire(soft_roce: Fabric) -> None:
    view, pairs, seen = watched(soft_roce)
    assert {nic.driver for nic in view.nics if nic.kind == "rdma"} == {"rxe"}
    rule = rule_of("rxe", os.uname().release)
    assert not isinstance(rule, str), rule
    mapped = flow_map([view])
    assert len(mapped) == len(pairs) >= 4 and {one.flow.rank for one in mapped} == {0, 1}
    for one in mapped:
        five, pair = one.flow.tuple, one.flow.queue_pair
        assert five is not None and pair is not None, one
        assert (one.flow.origin, one.rule, five.destination_port) == (Origin.PREDICTED, rule.name, ROCE_PORT)
        assert seen[five.source, pairs[five.source, pair]] == {five.source_port}, (one, seen)


def test_a_plan_of_ports_is_on_the_wire_and_in_the_map(soft_roce: Fabric, tmp_path: Path) -> None:
    """Flow labels by the preloaded library: queue pairs that send data leave by the plan's ports, all others as ever."""
    plan, ends = tmp_path / "plan.pins", (soft_roce.a.address, soft_roce.b.address)
    plan.write_text(plan_text([], [], [Roce(rank, ends[1 - rank], PORTS[rank]) for rank in (0, 1)]))
    library = str(build_folder() / "libncclwatch_pins.so")
    view, pairs, seen = watched(soft_roce, LD_PRELOAD=library, NCCLWATCH_PATH_PINS=str(plan))
    wanted, netdevs = to_capture([view])
    assert netdevs == {soft_roce.a.netdev, soft_roce.b.netdev} and wanted == {
        (source, there) for (source, _), there in pairs.items()
    }
    mapped = flow_map([view], seen)
    assert {one.flow.origin for one in mapped} == {Origin.SEEN}
    by_rank = {
        rank: sorted(one.flow.tuple.source_port for one in mapped if one.flow.tuple and one.flow.rank == rank) for rank in (0, 1)
    }
    assert all(len(ports) >= 2 and len(ports) % 2 == 0 for ports in by_rank.values()), by_rank
    assert by_rank == {rank: sorted(PORTS[rank] * (len(by_rank[rank]) // 2)) for rank in (0, 1)}
    assert all("the rule both-queue-pairs has port" in one.missing[-1] for one in mapped if one.missing), mapped


Ports = dict[tuple[str, int], set[int]]
"""(address of the sender, queue pair its packets go to) → source ports in packets."""


def watched(fabric: Fabric, **environment: str) -> tuple[NodeView, Pairs, Ports]:
    """A job with two queue pairs a connection: what its memory and the guest's NICs say, and the ports that it sends from."""
    if not available(VERSION):
        pytest.skip(f"NCCL {VERSION} is not in the cache")
    environment |= {"NCCL_IB_QPS_PER_CONNECTION": "2", "NCCL_IB_SPLIT_DATA_ON_QPS": "1"}
    with fabric.job(VERSION, 2, count=1 << 16, extra=("--pause-us", "50000"), env=environment) as job:
        records = look(job.pids)
        pairs = remote_pairs(records)
        seen = caught(fabric, pairs)
    return view_of(records), pairs, seen


def caught(fabric: Fabric, pairs: Pairs) -> Ports:
    """Source ports in packets to each of these queue pairs; looked at for long enough that each has several."""
    wanted = {(source, there) for (source, _), there in pairs.items()}
    netdevs = (fabric.a.netdev, fabric.b.netdev)
    found: Ports = {}
    for _ in range(3):
        for place, ports in capture(netdevs, wanted, MOST_S).items():
            found.setdefault(place, set()).update(ports)
    assert wanted <= found.keys()
    return found
