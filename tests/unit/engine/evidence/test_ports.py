"""What hosts say of their NICs: when a port was down, and errors that it counts."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.collect.network_memory import NetworkMemory
from ncclwatch.engine.evidence.base import FactKind
from ncclwatch.engine.evidence.nics import PortDown
from ncclwatch.model.network import (
    LinkChange,
    NetworkLook,
    NicRecord,
)
from unit.engine.evidence.said import of_network

SECOND = 1_000_000_000


NIC = NicRecord("node1", "eth0", "netdev", up=True, state="up", used_by=(0, 1))


DOWN = replace(NIC, up=False, state="down")


CHANGE = LinkChange("node1", "eth0", False, "no carrier", 5 * SECOND, 1_700_000_000 * SECOND)


def remembering(*looks: NetworkLook, host: str = "node1") -> NetworkMemory:
    memory = NetworkMemory()
    for number, look in enumerate(looks):
        memory.feed(host, look, number * SECOND)
    return memory


def ports(*looks: NetworkLook) -> list[PortDown]:
    return [port for port in of_network(remembering(*looks)).facts.of(FactKind.PORT_DOWN, PortDown) if port.nic.used_by]


def test_when_a_port_was_down_is_remembered() -> None:
    def change(second: int, *, up: bool) -> LinkChange:
        return replace(CHANGE, up=up, wall_ns=CHANGE.wall_ns + second * SECOND)

    wall = CHANGE.wall_ns / 1e9
    # Up for a moment while the carrier is found; a minute of work before.
    seen = (change(-90, up=False), change(-60, up=True), change(0, up=False), change(20, up=True), change(21, up=False))
    [port] = ports(NetworkLook((DOWN,), seen))
    assert (port.since, port.until) == (wall, None)
    [port] = ports(NetworkLook((NIC,), (*seen, change(22, up=True), change(23, up=True))))
    assert (port.since, port.until) == (wall, wall + 22)
    assert ports(NetworkLook((replace(NIC, used_by=()),), seen)) == []
    assert ports(NetworkLook((NIC,))) == []
