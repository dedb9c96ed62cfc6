"""Looks at a network with one NIC that goes down, the verdict that it concerns, and what is told beside it."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.collect.network_memory import NetworkMemory
from ncclwatch.engine.beside import add_network
from ncclwatch.model.network import LinkChange, NetworkLook, NicRecord
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from unit.engine.evidence.said import of_network

SECOND = 1_000_000_000
NIC = NicRecord("node1", "eth0", "netdev", up=True, state="up", used_by=(0, 1))
DOWN = replace(NIC, up=False, state="down")
CHANGE = LinkChange("node1", "eth0", False, "no carrier", 5 * SECOND, 1_700_000_000 * SECOND)
CULPRIT = Culprit(1, 1, "node1", 4711, 0)
HUNG = Verdict(VerdictClass.HARDWARE, "the link stands still", (CULPRIT,), (0,), evidence=("steps",), next_steps=("look",))


def remembering(*looks: NetworkLook, host: str = "node1") -> NetworkMemory:
    memory = NetworkMemory()
    for number, look in enumerate(looks):
        memory.feed(host, look, number * SECOND)
    return memory


def explained(memory: NetworkMemory, verdict: Verdict) -> Verdict:
    return add_network(of_network(memory), verdict)
