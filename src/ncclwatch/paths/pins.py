"""The plan file that ``path_pins/plan.h`` describes: which ports NCCL's data connections use, over sockets and over RoCE. Only a
job that preloads that library follows it; nothing here is applied by itself.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from ncclwatch.errors import UsageError
from ncclwatch.paths.ports import LOWEST

HEADING = "ncclwatch-path-pins 1"
MAX_BYTES = 65535
"""The library reads no more."""


@dataclass(frozen=True, slots=True)
class Listen:
    """A rank's listening sockets on an address take these ports, in the order in which they are made."""

    rank: int
    address: str
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Connect:
    """A rank's connection to a port of an address leaves by ``source_port``."""

    rank: int
    destination: str
    port: int
    source_port: int


@dataclass(frozen=True, slots=True)
class Roce:
    """A rank's queue pairs that send data to an address leave by these UDP source ports, in turns.

    ``bond_ports``: the port of a bond (from 1) for each of them; empty where the NIC chooses.
    """

    rank: int
    destination: str
    source_ports: tuple[int, ...]
    bond_ports: tuple[int, ...] = ()


def plan_text(listens: Iterable[Listen], connects: Iterable[Connect], roce: Iterable[Roce] = ()) -> str:
    """The file's text. Raises :class:`UsageError` for what is no address or port, and for a plan longer than is read."""
    lines = [HEADING]
    for one in listens:
        _check(one.address, *one.ports)
        lines.append(f"listen {one.rank} {one.address} {' '.join(map(str, one.ports))}")
    for pin in connects:
        _check(pin.destination, pin.port, pin.source_port)
        lines.append(f"connect {pin.rank} {pin.destination} {pin.port} {pin.source_port}")
    for each in roce:
        _check(each.destination, *each.source_ports)
        if min(each.source_ports, default=0) < LOWEST:
            raise UsageError(f"ports {each.source_ports} are none of RoCE", f"its source ports are {LOWEST} to 65535")
        lines.append(f"roce {each.rank} {each.destination} {' '.join(map(str, each.source_ports))}")
        if each.bond_ports:
            lines.append(f"bond {each.rank} {each.destination} {' '.join(map(str, each.bond_ports))}")
    text = "\n".join(lines) + "\n"
    if len(text) > MAX_BYTES:
        raise UsageError(
            f"a plan of {len(text)} bytes is too long", f"at most {MAX_BYTES} are read: write one file for each host"
        )
    return text


def _check(address: str, *ports: int) -> None:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise UsageError(f"{address!r} is no address", "give an IP address") from None
    if not all(0 < port <= 65535 for port in ports):
        raise UsageError(f"ports {ports} are out of range", "a port is 1 to 65535")
