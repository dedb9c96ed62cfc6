"""A leaf-spine fabric as arrays: NICs with one or two bonded ports, leaves, spines, and the capacity of each directed link.

All capacities are in Gb/s: 10^9 bits a second, one direction of a full-duplex link. A dead link has capacity 0 and is no path; a
degraded link has what is left of it. With P ports and U uplinks, the directed links are numbered

    p          port p to its leaf            P + p          leaf to port p
    2P + u     uplink u, leaf to spine       2P + U + u     uplink u, spine to leaf

A path is a row of four links: out of the source's port, up, down, into the destination's port. Up and down are -1 where both
ports are on one leaf, as switches take the shortest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ncclwatch.errors import UsageError
from ncclwatch.model.paths import NicPort

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MAX_PORTS = 1 << 20
"""Bound: ports and uplinks of a fabric."""
BOND = 2
"""Fact: ports that a NIC bonds at most (dual-port NICs; C4, evaluation: 2 x 200 Gb/s)."""
NO_PATHS: Ints = np.empty((0, 4), np.int64)


@dataclass(frozen=True)
class Fabric:
    """What connects NICs. Arrays are indexed by the numbers of NICs, ports, leaves, spines and uplinks."""

    nics: tuple[tuple[str, str], ...]
    """(host, name) of each NIC."""
    addresses: tuple[str, ...]
    """IP address of each NIC; a bond has one."""
    leaves: tuple[str, ...]
    spines: tuple[str, ...]
    nic_ports: Ints
    """(NICs, BOND): ports of a NIC, -1 where it has one only."""
    port_leaf: Ints
    """(P): leaf of each port."""
    uplink_leaf: Ints
    """(U): leaf of each uplink; several between one leaf and one spine are parallel links."""
    uplink_spine: Ints
    """(U)"""
    capacity: Floats
    """(2P + 2U): Gb/s of each directed link, 0 where it is dead."""
    _cache: dict[tuple[int, int], Ints] = field(default_factory=dict, repr=False, compare=False)

    @property
    def ports(self) -> int:
        """Number of ports."""
        return len(self.port_leaf)

    @property
    def uplinks(self) -> int:
        """Number of uplinks."""
        return len(self.uplink_leaf)

    @property
    def first_up(self) -> int:
        """The first link from a leaf to a spine."""
        return 2 * self.ports

    @property
    def first_down(self) -> int:
        """The first link from a spine to a leaf."""
        return 2 * self.ports + self.uplinks

    @cached_property
    def port_nic(self) -> Ints:
        """(P): the NIC of each port."""
        owner = np.zeros(self.ports, np.int64)
        nics, _ = np.nonzero(self.nic_ports >= 0)
        owner[self.nic_ports[self.nic_ports >= 0]] = nics
        return owner

    @cached_property
    def nic_gbps(self) -> Floats:
        """(NICs): what the live ports of each NIC carry together, Gb/s."""
        return np.asarray(np.where(self.nic_ports >= 0, self.capacity[self.nic_ports], 0.0).sum(axis=1))

    @cached_property
    def number(self) -> dict[tuple[str, str], int]:
        """Number of a NIC by (host, name)."""
        return {nic: i for i, nic in enumerate(self.nics)}

    @cached_property
    def _live(self) -> list[list[int]]:
        """Live uplinks of each leaf, in order of their numbers."""
        found: list[list[int]] = [[] for _ in self.leaves]
        for uplink in np.flatnonzero(self.capacity[self.first_up : self.first_down] > 0).tolist():
            found[self.uplink_leaf[uplink]].append(uplink)
        return found

    @cached_property
    def _down(self) -> dict[tuple[int, int], list[int]]:
        """Live uplinks, as seen from the spine, by (spine, leaf)."""
        found: dict[tuple[int, int], list[int]] = {}
        for uplink in np.flatnonzero(self.capacity[self.first_down :] > 0).tolist():
            found.setdefault((int(self.uplink_spine[uplink]), int(self.uplink_leaf[uplink])), []).append(uplink)
        return found

    def out_ports(self, nic: int) -> list[int]:
        """Ports of a NIC whose link to the leaf lives."""
        return [port for port in self.nic_ports[nic].tolist() if port >= 0 and self.capacity[port] > 0]

    def in_ports(self, nic: int) -> list[int]:
        """Ports of a NIC whose link from the leaf lives."""
        return [port for port in self.nic_ports[nic].tolist() if port >= 0 and self.capacity[self.ports + port] > 0]

    def up_choices(self, leaf: int, destination: int) -> list[int]:
        """What a leaf hashes among: its live uplinks to spines that reach a live port of the NIC ``destination``."""
        leaves = {int(self.port_leaf[port]) for port in self.in_ports(destination)}
        return [u for u in self._live[leaf] if any((int(self.uplink_spine[u]), other) in self._down for other in leaves)]

    def down_choices(self, spine: int, destination: int) -> list[tuple[int, int]]:
        """What a spine hashes among: (uplink to come down by, port) of the NIC ``destination``, over live links."""
        return [
            (uplink, port)
            for port in self.in_ports(destination)
            for uplink in self._down.get((spine, int(self.port_leaf[port])), ())
        ]

    def alternatives(self, source: int, destination: int) -> Ints:
        """(K, 4): every shortest live path between two NICs, over each pair of their ports; no rows where there is none."""
        key = (source, destination)
        if key not in self._cache:
            rows = [row for port in self.out_ports(source) for row in self._from(port, destination)]
            self._cache[key] = np.array(rows, np.int64).reshape(-1, 4)
        return self._cache[key]

    def _from(self, port: int, destination: int) -> list[tuple[int, int, int, int]]:
        leaf = int(self.port_leaf[port])
        near = [other for other in self.in_ports(destination) if self.port_leaf[other] == leaf]
        if near:
            return [(port, -1, -1, self.ports + other) for other in near]
        return [
            (port, self.first_up + up, self.first_down + down, self.ports + other)
            for up in self._live[leaf]
            for down, other in self.down_choices(int(self.uplink_spine[up]), destination)
        ]

    def is_path(self, paths: Ints) -> NDArray[np.bool_]:
        """(F): whether every link of each path lives; a row of -1 throughout is no path."""
        alive = np.append(self.capacity, 1.0)[paths] > 0
        return np.asarray(alive.all(axis=1) & (paths[:, 0] >= 0))

    def nic_port(self, port: int) -> NicPort:
        """A port as a record."""
        host, name = self.nics[self.port_nic[port]]
        return NicPort(host, name, int(np.flatnonzero(self.nic_ports[self.port_nic[port]] == port)[0]))

    def link_name(self, link: int) -> str:
        """A directed link for people: ``host3 nic0.1 → leaf2``, ``leaf2 → spine5 #7`` (uplink 7)."""
        if link < self.first_up:
            port = link % self.ports
            end = self.nic_port(port)
            ends = (f"{end.host} {end.nic}.{end.link}", self.leaves[self.port_leaf[port]])
            return " → ".join(ends if link < self.ports else ends[::-1])
        uplink = (link - self.first_up) % self.uplinks
        ends = (self.leaves[self.uplink_leaf[uplink]], self.spines[self.uplink_spine[uplink]])
        return " → ".join(ends if link < self.first_down else ends[::-1]) + f" #{uplink}"

    def uplinks_between(self, leaf: int, spine: int) -> list[int]:
        """Uplinks of a leaf to a spine, dead ones too."""
        return np.flatnonzero((self.uplink_leaf == leaf) & (self.uplink_spine == spine)).tolist()

    def with_uplinks(self, uplinks: Sequence[int], gbps: float = 0.0) -> Fabric:
        """The same with other capacity of both directions of these uplinks; 0 makes them dead."""
        return self._with(np.r_[np.array(uplinks, np.int64) + self.first_up, np.array(uplinks, np.int64) + self.first_down], gbps)

    def with_ports(self, ports: Sequence[int], gbps: float = 0.0) -> Fabric:
        """The same with other capacity of both directions of these ports' links; 0 makes them dead."""
        return self._with(np.r_[np.array(ports, np.int64), np.array(ports, np.int64) + self.ports], gbps)

    def _with(self, links: Ints, gbps: float) -> Fabric:
        capacity = self.capacity.copy()
        capacity[links] = gbps
        return replace(self, capacity=capacity, _cache={})


def address(nic: int) -> str:
    """Address of a NIC in a made-up fabric: 10.0.0.1 and up, one a NIC."""
    value = nic + 1
    return f"10.{value >> 16 & 255}.{value >> 8 & 255}.{value & 255}"


def regular(
    *,
    hosts: int,
    nics: int,
    ports: int,
    port_gbps: float,
    leaves: int,
    spines: int,
    links: int,
    uplink_gbps: float,
    rails: bool,
) -> Fabric:
    """A regular fabric, built from numbers.

    A NIC's ports are on a group of ``ports`` neighbouring leaves, one each. With ``rails``, NIC k of every host is on group k
    modulo the number of groups (rail-optimised); else whole hosts are dealt to the groups in blocks. Every leaf has ``links``
    uplinks of ``uplink_gbps`` to every spine. Raises :class:`UsageError` where the numbers do not fit.
    """
    counts = (hosts, nics, leaves, spines, links)
    if min(counts) < 1 or not 1 <= ports <= BOND:
        raise UsageError(
            "a fabric needs hosts, NICs, leaves, spines and links", f"give numbers from 1, and 1 or {BOND} ports a NIC"
        )
    if leaves % ports:
        raise UsageError(f"{leaves} leaves cannot be in groups of {ports}", "make the leaves a multiple of the ports of a NIC")
    if max(hosts * nics * ports, leaves * spines * links) > MAX_PORTS or hosts * nics >= 1 << 24:
        raise UsageError("the fabric is too large", f"at most {MAX_PORTS} ports and as many uplinks are modelled")
    if not (0 <= port_gbps < 1e6 and 0 <= uplink_gbps < 1e6):
        raise UsageError("a capacity makes no sense", "give Gb/s, below 1,000,000")
    groups = leaves // ports
    of_host, of_nic = np.divmod(np.arange(hosts * nics), nics)
    group = of_nic % groups if rails else of_host * groups // hosts
    port_leaf = (group[:, None] * ports + np.arange(ports)).ravel()
    nic_ports = np.full((hosts * nics, BOND), -1, np.int64)
    nic_ports[:, :ports] = np.arange(hosts * nics * ports).reshape(-1, ports)
    uplink = np.arange(leaves * spines * links)
    return Fabric(
        nics=tuple((f"host{host}", f"nic{nic}") for host in range(hosts) for nic in range(nics)),
        addresses=tuple(map(address, range(hosts * nics))),
        leaves=tuple(f"leaf{leaf}" for leaf in range(leaves)),
        spines=tuple(f"spine{spine}" for spine in range(spines)),
        nic_ports=nic_ports,
        port_leaf=port_leaf,
        uplink_leaf=uplink // (spines * links),
        uplink_spine=uplink // links % spines,
        capacity=np.r_[np.full(2 * len(port_leaf), float(port_gbps)), np.full(2 * len(uplink), float(uplink_gbps))],
    )
