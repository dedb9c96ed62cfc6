"""Small fabrics and jobs for the tests of paths."""

from __future__ import annotations

from ncclwatch.paths.fabric import Fabric, regular
from ncclwatch.paths.traffic import Ring, Traffic, rings


def fabric(hosts: int = 4, nics: int = 2, leaves: int = 4, spines: int = 4, uplink_gbps: float = 200, **more: object) -> Fabric:
    """Two blocks of hosts on two leaves each, 2 x 200 Gb/s a NIC."""
    numbers = {"ports": 2, "port_gbps": 200, "links": 1, "rails": False} | more
    return regular(hosts=hosts, nics=nics, leaves=leaves, spines=spines, uplink_gbps=uplink_gbps, **numbers)  # type: ignore[arg-type]


def pairs(of: Fabric, *, nics: int = 2, queue_pairs: int = 2, seed: int = 1) -> Traffic:
    """A job of two hosts, of which one is in each block, for each pair of hosts."""
    half = len(of.nics) // nics // 2
    return rings(of, [Ring(f"job{k}", [k, k + half], queue_pairs=queue_pairs) for k in range(half)], nics, seed)
