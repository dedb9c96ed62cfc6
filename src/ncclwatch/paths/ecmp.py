"""How hashing spreads flows: the port of a bond, the uplink of a leaf, the way down from a spine.

Vendors do not publish their hashes. :func:`switch_hash` is a STAND-IN: CRC-32 over the five-tuple, mixed with a seed of the
switch, so that two switches decide independently of one another unless they have one seed. What it shares with real ones: the
same five-tuple always takes the same path, and nearby source ports take unlike ones. Which source port takes which path in a
real fabric is learned by probing, not from here. The kernel's own multipath hash is keyed with a secret drawn at boot
(``fib_multipath_hash_policy=1``, siphash): it cannot be predicted from outside and is no part of this.
"""

from __future__ import annotations

import ipaddress
import zlib
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ncclwatch.paths.fabric import Fabric, Floats, Ints
from ncclwatch.paths.ports import LOWEST
from ncclwatch.paths.traffic import Traffic

Words = NDArray[np.uint32]
UDP = 17
"""Fact: number of UDP (IANA)."""


class Bond(StrEnum):
    """Who chooses the port that a NIC sends from."""

    HASH = "hash"
    """Layer 3+4 (kernel ``Documentation/networking/bonding.rst``)."""
    TURNS = "turns"
    """Queue pairs in turns, as mlx5's queue affinity does (``mlx5dv_modify_qp_lag_port`` changes it)."""


@dataclass(frozen=True, slots=True)
class Hashing:
    """The hashes of a fabric, as far as they are assumed."""

    seed: int
    bond: Bond = Bond.HASH
    alike: bool = False
    """All switches have one seed: then spines repeat the leaves' choices (polarisation)."""
    addresses_alone: bool = False
    """Switches hash no ports: then all flows between two NICs go one way."""


def _words(fabric: Fabric) -> Words:
    """One word for each NIC's address; an IPv6 address is folded."""
    values = [int(ipaddress.ip_address(each)) for each in fabric.addresses]
    return np.array([(v ^ v >> 32 ^ v >> 64 ^ v >> 96) & 0xFFFFFFFF for v in values], np.uint32)


def _table() -> Words:
    return np.array([zlib.crc32(bytes([b])) ^ zlib.crc32(b"\0") for b in range(256)], np.uint32)


_BYTE: Words = _table()


def crc32(columns: list[Words]) -> Words:
    """CRC-32 (IEEE 802.3, as zlib's) of the columns' bytes, big-endian, row by row."""
    value = np.full(np.broadcast_shapes(*(c.shape for c in columns)), 0xFFFFFFFF, np.uint32)
    for column in columns:
        for shift in (24, 16, 8, 0):
            value = _BYTE[(value ^ column >> np.uint32(shift)) & np.uint32(255)] ^ value >> np.uint32(8)
    return np.asarray(value ^ np.uint32(0xFFFFFFFF))


def switch_hash(crc: Words, seed: Words | int) -> Words:
    """STAND-IN for a switch's hash: the CRC of the five-tuple mixed with the seed (finaliser of MurmurHash3)."""
    value = np.asarray(crc ^ np.asarray(seed, np.uint32))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        value = (value ^ value >> np.uint32(shift)) * np.uint32(factor)
    return np.asarray(value ^ value >> np.uint32(16))


def bond_hash(source: Words, destination: Words, source_port: Ints, destination_port: Ints) -> Words:
    """Linux's layer 3+4 hash of a bond. It is taken modulo the number of ports.

    Ports and addresses are XORed as they lie in the packet and folded; the lowest bit is left out, as dynamic ports are often
    even (kernel ``drivers/net/bonding/bond_main.c``, ``bond_ip_hash``).
    """
    ports = (source_port.astype(np.uint32) << np.uint32(16) | destination_port.astype(np.uint32)).byteswap()
    value = ports ^ source.byteswap() ^ destination.byteswap()
    value ^= value >> np.uint32(16)
    value ^= value >> np.uint32(8)
    return np.asarray(value >> np.uint32(1))


def _crcs(fabric: Fabric, traffic: Traffic, source_port: Ints, hashing: Hashing) -> Words:
    words = _words(fabric)
    ports = source_port.astype(np.uint32) << np.uint32(16) | traffic.destination_port.astype(np.uint32)
    ports = np.zeros_like(ports) if hashing.addresses_alone else ports
    # The protocol is the same for all flows of a fabric and adds nothing; it is hashed in a word of its own as switches do.
    return crc32([words[traffic.source], words[traffic.destination], ports, np.full(len(ports), UDP, np.uint32)])


def _seeds(hashing: Hashing, switches: int) -> list[int]:
    drawn = np.random.default_rng(hashing.seed).integers(0, 1 << 32, switches, dtype=np.uint64)
    return [int(drawn[0 if hashing.alike else i]) for i in range(switches)]


def paths_by_hash(fabric: Fabric, traffic: Traffic, hashing: Hashing) -> Ints:
    """(F, 4): where hashing sends each flow by its source port; a row of -1 where no live path is left.

    Routing has converged: no switch hashes onto a link that is dead or leads nowhere.
    """
    crcs = _crcs(fabric, traffic, traffic.source_port, hashing)
    words = _words(fabric)
    bond = bond_hash(words[traffic.source], words[traffic.destination], traffic.source_port, traffic.destination_port).tolist()
    turn = [0] * len(fabric.nics)
    seeds = np.array(_seeds(hashing, len(fabric.leaves) + len(fabric.spines)), np.uint32)
    by_switch = [switch_hash(crcs, int(seed)) for seed in seeds]
    found = np.full((len(traffic), 4), -1, np.int64)
    ends = zip(traffic.source.tolist(), traffic.destination.tolist(), strict=True)
    ups: dict[tuple[int, int], list[int]] = {}
    downs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for flow, (source, destination) in enumerate(ends):
        out = fabric.out_ports(source)
        if not out:
            continue
        port = out[(turn[source] if hashing.bond is Bond.TURNS else bond[flow]) % len(out)]
        turn[source] += 1
        leaf = int(fabric.port_leaf[port])
        near = [other for other in fabric.in_ports(destination) if fabric.port_leaf[other] == leaf]
        if near:
            found[flow] = (port, -1, -1, fabric.ports + near[int(by_switch[leaf][flow]) % len(near)])
            continue
        if (leaf, destination) not in ups:
            ups[leaf, destination] = fabric.up_choices(leaf, destination)
        up = ups[leaf, destination]
        if not up:
            continue
        uplink = up[int(by_switch[leaf][flow]) % len(up)]
        spine = int(fabric.uplink_spine[uplink])
        if (spine, destination) not in downs:
            downs[spine, destination] = fabric.down_choices(spine, destination)
        down = downs[spine, destination]
        lower, other = down[int(by_switch[len(fabric.leaves) + spine][flow]) % len(down)]
        found[flow] = (port, fabric.first_up + uplink, fabric.first_down + lower, fabric.ports + other)
    return found


def source_ports(fabric: Fabric, traffic: Traffic, paths: Ints, hashing: Hashing, tries: int) -> Ints:
    """(F): a source port that the hashes send down each path, the first of ``tries`` from 0xC000; -1 where none does.

    The port of the bond is set apart from the source port. With this STAND-IN it shows that a path can be had; in a real
    fabric a map learned by probing takes its place.
    """
    wanted = np.full(len(traffic), -1, np.int64)
    seeds = _seeds(hashing, len(fabric.leaves) + len(fabric.spines))
    candidates = np.arange(LOWEST, min(LOWEST + tries, 1 << 16))
    for flow, path in enumerate(paths.tolist()):
        if path[0] < 0:
            continue
        crcs = _crcs(fabric, traffic.part(np.full(len(candidates), flow)), candidates, hashing)
        leaf = int(fabric.port_leaf[path[0]])
        destination = int(traffic.destination[flow])
        if path[1] < 0:
            near = [p for p in fabric.in_ports(destination) if fabric.port_leaf[p] == leaf]
            fits = switch_hash(crcs, seeds[leaf]) % np.uint32(len(near)) == near.index(path[3] - fabric.ports)
        else:
            up = fabric.up_choices(leaf, destination)
            spine = int(fabric.uplink_spine[path[1] - fabric.first_up])
            down = fabric.down_choices(spine, destination)
            fits = switch_hash(crcs, seeds[leaf]) % np.uint32(len(up)) == up.index(path[1] - fabric.first_up)
            step = down.index((path[2] - fabric.first_down, path[3] - fabric.ports))
            fits &= switch_hash(crcs, seeds[len(fabric.leaves) + spine]) % np.uint32(len(down)) == step
        if fits.any():
            wanted[flow] = candidates[int(fits.argmax())]
    return wanted


def mispredicted(fabric: Fabric, traffic: Traffic, paths: Ints, wrong: Floats, rng: np.random.Generator) -> Ints:
    """(F, 4): the paths that come true where flow f's is predicted wrong with probability ``wrong[f]``.

    Such a flow keeps the port that it leaves by, which is set and not hashed, and takes any live path from there.
    """
    found = paths.copy()
    for flow in np.flatnonzero(rng.random(len(traffic)) < wrong).tolist():
        choices = fabric.alternatives(int(traffic.source[flow]), int(traffic.destination[flow]))
        choices = choices[choices[:, 0] == paths[flow, 0]]
        if len(choices):
            found[flow] = choices[rng.integers(len(choices))]
    return found
