"""Queue pairs of a job in the guest, as its memory and the guest's NICs show them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ncclwatch.collect.flows import FlowCollector
from ncclwatch.collect.network import NetworkWatch
from ncclwatch.model.network import FlowRecord
from ncclwatch.model.paths import NodeView
from ncclwatch.model.state import Direction
from ncclwatch.target.session import TargetProcess

MOST_S = 90.0

Pairs = dict[tuple[str, int], int]
"""(address, queue pair) of each sender → the queue pair its packets go to."""


def view_of(records: Sequence[FlowRecord]) -> NodeView:
    """The guest as a node of a flow map."""
    network = NetworkWatch("guest", kernel_log=False)
    try:
        nics, namespaces = network.nics_behind(records)
    finally:
        network.close()
    return NodeView("guest", records, nics, namespaces)


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


def remote_pairs(records: list[FlowRecord]) -> Pairs:
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
