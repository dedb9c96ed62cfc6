"""Lines of the kernels' logs as facts."""

from __future__ import annotations

from ncclwatch.collect.network_memory import NetworkMemory
from ncclwatch.engine.evidence.base import FactKind
from ncclwatch.engine.evidence.kernel import Logged
from ncclwatch.model.network import KernelLogLine, NetworkLook
from unit.engine.evidence.said import case_of
from unit.synthetic import SECOND, frozen_ring, looks

XID = KernelLogLine("node1", "xid", "0000:3b:00", "NVRM: Xid (PCI:0000:3b:00): 79", 5, 3, 79, 4711)


def test_a_line_is_a_fact_about_its_host_and_process() -> None:
    memory = NetworkMemory()
    memory.feed("node1", NetworkLook(kernel=(XID,)), 9 * SECOND)
    memory.feed("node0", NetworkLook(kernel=(XID,)), 8 * SECOND)
    case = case_of(looks(frozen_ring()), network=memory)
    first, second = case.facts.of(FactKind.LOGGED, Logged)
    assert (first.host, second.host) == ("node0", "node1"), "by host"
    assert second.subject == ("node1", 4711) and second.line is XID
    assert second.text == f"kernel log of node1: {XID.text}"
