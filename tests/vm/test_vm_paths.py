"""Source ports of RoCE v2, predicted from queue pair numbers, are those that NCCL sends from: every one, by capture."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections import defaultdict

import pytest

from ncclwatch.collect.flows import FlowCollector
from ncclwatch.collect.network import NetworkWatch
from ncclwatch.model.network import FlowRecord
from ncclwatch.model.paths import NodeView, Origin
from ncclwatch.model.state import Direction
from ncclwatch.paths.flow_map import flow_map
from ncclwatch.paths.ports import ROCE_PORT, rule_of
from ncclwatch.target.session import TargetProcess
from testbed.job import available
from vm.fabric import Fabric

pytestmark = pytest.mark.vm

VERSION = "2.27.5"
LEAST_S, MOST_S = 3.0, 90.0


def test_every_predicted_port_is_on_the_wire(soft_roce: Fabric) -> None:
    if not available(VERSION):
        pytest.skip(f"NCCL {VERSION} is not in the cache")
    environment = {"NCCL_IB_QPS_PER_CONNECTION": "2", "NCCL_IB_SPLIT_DATA_ON_QPS": "1"}
    with soft_roce.job(VERSION, 2, count=1 << 16, extra=("--pause-us", "50000"), env=environment) as job:
        records = look(job.pids)
        pairs = remote_pairs(records)
        seen = capture((soft_roce.a.netdev, soft_roce.b.netdev), set(pairs.values()))
    network = NetworkWatch("guest", kernel_log=False)
    try:
        nics, namespaces = network.nics_behind(records)
    finally:
        network.close()
    assert {nic.driver for nic in nics if nic.kind == "rdma"} == {"rxe"}
    rule = rule_of("rxe", os.uname().release)
    assert not isinstance(rule, str), rule
    mapped = flow_map([NodeView("guest", records, nics, namespaces)])
    assert len(mapped) == len(pairs) >= 4 and {one.flow.rank for one in mapped} == {0, 1}
    for one in mapped:
        five, pair = one.flow.tuple, one.flow.queue_pair
        assert five is not None and pair is not None, one
        assert (one.flow.origin, one.rule, five.destination_port) == (Origin.PREDICTED, rule.name, ROCE_PORT)
        assert seen[five.source, pairs[five.source, pair]] == {five.source_port}, (one, dict(seen))


def look(pids: list[int]) -> list[FlowRecord]:
    targets = [TargetProcess.open(pid) for pid in pids]
    collector = FlowCollector(targets)
    try:
        deadline = time.monotonic() + MOST_S
        while True:
            collector.step()
            found = collector.flows()
            if found and all(one.ends is not None and one.ends.remote for one in found):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
    finally:
        collector.close()
        for target in targets:
            target.close()


def remote_pairs(records: list[FlowRecord]) -> dict[tuple[str, int], int]:
    """(address, queue pair) of each sender → the queue pair its packets go to, as the other end's memory says."""
    ends = {
        (one.channel, one.rank, one.peer, one.connection_index, one.direction, one.ends.index): one.ends
        for one in records
        if one.ends
    }
    found = {}
    for (channel, rank, peer, connection, way, index), here in ends.items():
        if way is Direction.SEND:
            there = ends[channel, peer, rank, connection, Direction.RECV, index]
            found[there.remote, here.queue_pair] = there.queue_pair
    return found


def capture(netdevs: tuple[str, ...], wanted: set[int]) -> defaultdict[tuple[str, int], set[int]]:
    """(source address, destination queue pair) → UDP source ports of RoCE v2 packets, until each wanted pair was sent to.

    The queue pair is bytes 5 to 7 of the base transport header behind UDP (InfiniBand specification, 9.2).
    """
    found: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    ends = [socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800)) for _ in netdevs]
    try:
        for end, name in zip(ends, netdevs, strict=True):
            end.bind((name, 0x0800))
        began = time.monotonic()
        while time.monotonic() < began + MOST_S:
            for end in select.select(ends, [], [], 0.5)[0]:
                data = end.recv(2048)
                start = (data[0] & 15) * 4
                source_port, port = struct.unpack_from("!HH", data, start)
                if data[9] == socket.IPPROTO_UDP and port == ROCE_PORT and len(data) >= start + 20:
                    pair = int.from_bytes(data[start + 13 : start + 16], "big")
                    found[socket.inet_ntoa(data[12:16]), pair].add(source_port)
            if time.monotonic() > began + LEAST_S and wanted <= {pair for _, pair in found}:
                break
        return found
    finally:
        for end in ends:
            end.close()
