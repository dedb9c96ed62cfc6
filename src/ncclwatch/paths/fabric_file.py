"""A fabric as a TOML file says it: what is known, regular or NIC by NIC, and what is dead or slow.

[regular]                     # either numbers ...
hosts = 16
nics = 8                      # of each host
ports = 2                     # of each NIC, bonded
port_gbps = 200
leaves = 8
spines = 8
links = 1                     # parallel ones, from each leaf to each spine
uplink_gbps = 800
rails = false

[[uplink]]                    # ... or every uplink and NIC
leaf = "leaf0"
spine = "spine0"
gbps = 400
links = 2
[[nic]]
host = "node1"
name = "mlx5_0"
address = "10.0.0.1"
leaves = ["leaf0", "leaf1"]   # of its ports, in order
gbps = 200                    # of each port

[[changed]]                   # both directions; gbps = 0 is dead
leaf = "leaf0"
spine = "spine3"              # all parallel links between them, or the one of this number from 0
number = 0
gbps = 0
[[changed]]
host = "host3"
nic = "nic1"
port = 0
gbps = 100
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ncclwatch.errors import UsageError
from ncclwatch.paths.fabric import BOND, MAX_PORTS, Fabric, regular
from ncclwatch.paths.probed import read_bytes
from ncclwatch.text import clean

MAX_BYTES = 16 << 20
"""Bound: a file; a line for each of 100,000 NICs is shorter."""
MAX_NAME = 64
"""Bound: characters of a name."""
MAX_GBPS = 1e6
"""Bound: capacity of a link."""

Table = Mapping[str, Any]
_KINDS: dict[str, Any] = {
    "a whole number": (int,),
    "a number": (int, float),
    "a text": (str,),
    "true or false": (bool,),
}
_REGULAR = {
    **dict.fromkeys(("hosts", "nics", "ports", "leaves", "spines", "links"), "a whole number"),
    **dict.fromkeys(("port_gbps", "uplink_gbps"), "a number"),
    "rails": "true or false",
}


def read(path: Path) -> Fabric:
    """The fabric that a file describes. Raises :class:`UsageError` for one that cannot be read or makes no sense."""
    return parse(read_text(path))


def read_text(path: Path) -> str:
    """The text of a file. Raises :class:`UsageError` for one that cannot be read."""
    hint = "give a TOML file of the fabric"
    try:
        return read_bytes(path, MAX_BYTES, hint).decode()
    except UnicodeDecodeError:
        raise UsageError(f"{clean(str(path))} is not UTF-8", hint) from None


def parse(text: str) -> Fabric:
    """The fabric that a text describes. Raises :class:`UsageError`."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise _wrong(f"it is no TOML: {clean(str(error))}") from None
    # What :mod:`ncclwatch.paths.known` compares beside the fabric is none of the model.
    if unknown := set(data) - {"regular", "uplink", "nic", "changed", "hash", "router"}:
        raise _wrong(f"there is no section {clean(min(unknown), MAX_NAME)}")
    if ("regular" in data) == ("nic" in data or "uplink" in data):
        raise _wrong("it needs either [regular], or [[nic]] and [[uplink]]")
    if "regular" in data:
        table = data["regular"]
        if not isinstance(table, dict):
            raise _wrong("regular is no table")
        _only(table, set(_REGULAR), "[regular]")
        built = regular(**{key: _get(table, key, kind, "[regular]") for key, kind in _REGULAR.items()})
    else:
        built = _listed(_tables(data, "uplink"), _tables(data, "nic"))
    for table in _tables(data, "changed"):
        built = _changed(built, table)
    return built


def _wrong(what: str) -> UsageError:
    return UsageError(f"the file of the fabric is wrong: {what}", "docs/paths.md shows one")


def _tables(data: Table, name: str) -> list[Table]:
    found = data.get(name, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise _wrong(f"{name} is to be written [[{name}]]")
    if len(found) > MAX_PORTS:
        raise _wrong(f"it has more than {MAX_PORTS} [[{name}]]")
    return found


def _only(table: Table, known: set[str], where: str) -> None:
    if unknown := set(table) - known:
        raise _wrong(f"{where} has no {clean(min(unknown), MAX_NAME)}")


def _get(table: Table, key: str, kind: str, where: str, default: Any = None) -> Any:
    value: Any = table.get(key, default)
    if value is None:
        raise _wrong(f"{where} lacks {key}")
    if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "true or false"):
        raise _wrong(f"{key} of {where} is not {kind}")
    if kind == "a text" and not (0 < len(value) <= MAX_NAME and value.isprintable()):
        raise _wrong(f"{key} of {where} is not 1 to {MAX_NAME} printable characters")
    if kind == "a number" and not 0 <= value < MAX_GBPS:
        raise _wrong(f"{key} of {where} is not 0 to {MAX_GBPS:.0f}")
    return value


def _numbers() -> tuple[dict[str, int], Callable[[str], int]]:
    names: dict[str, int] = {}
    return names, lambda name: names.setdefault(name, len(names))


def _listed(uplinks: list[Table], nics: list[Table]) -> Fabric:
    leaves, leaf_number = _numbers()
    spines, spine_number = _numbers()
    ends: list[tuple[int, int]] = []
    capacity: list[float] = []
    for table in uplinks:
        _only(table, {"leaf", "spine", "gbps", "links"}, "[[uplink]]")
        links = _get(table, "links", "a whole number", "[[uplink]]", 1)
        if links < 1 or len(ends) + links > MAX_PORTS:
            raise _wrong(f"links of [[uplink]] are not 1 or more, {MAX_PORTS} in all at most")
        leaf, spine = (_get(table, key, "a text", "[[uplink]]") for key in ("leaf", "spine"))
        ends += [(leaf_number(leaf), spine_number(spine))] * links
        capacity += [float(_get(table, "gbps", "a number", "[[uplink]]"))] * links
    names: dict[tuple[str, str], int] = {}
    addresses: dict[str, int] = {}
    nic_ports = np.full((len(nics), BOND), -1, np.int64)
    port_leaf: list[int] = []
    port_gbps: list[float] = []
    for number, table in enumerate(nics):
        _only(table, {"host", "name", "address", "leaves", "gbps"}, "[[nic]]")
        name = (_get(table, "host", "a text", "[[nic]]"), _get(table, "name", "a text", "[[nic]]"))
        where = f"[[nic]] {' '.join(name)}"
        at = table.get("leaves")
        if (
            not isinstance(at, list)
            or not 1 <= len(at) <= BOND
            or not all(leaf in leaves for leaf in at if isinstance(leaf, str))
        ):
            raise _wrong(f"leaves of {where} are not one or two that have an [[uplink]]")
        if not all(isinstance(leaf, str) for leaf in at):
            raise _wrong(f"leaves of {where} are not texts")
        if names.setdefault(name, number) != number or addresses.setdefault(_address(table, where), number) != number:
            raise _wrong(f"{where} or its address is there twice")
        for port, leaf in enumerate(at):
            nic_ports[number, port] = len(port_leaf)
            port_leaf.append(leaves[leaf])
            port_gbps.append(float(_get(table, "gbps", "a number", where)))
    if not names or not ends:
        raise _wrong("it has no [[nic]] or no [[uplink]]")
    pairs = np.array(ends, np.int64)
    return Fabric(
        tuple(names),
        tuple(addresses),
        tuple(leaves),
        tuple(spines),
        nic_ports,
        np.array(port_leaf, np.int64),
        pairs[:, 0],
        pairs[:, 1],
        np.array(port_gbps * 2 + capacity * 2, np.float64),
    )


def _address(table: Table, where: str) -> str:
    try:
        return str(ipaddress.ip_address(_get(table, "address", "a text", where)))
    except ValueError:
        raise _wrong(f"address of {where} is no IP address") from None


def _changed(fabric: Fabric, table: Table) -> Fabric:
    where = "[[changed]]"
    gbps = float(_get(table, "gbps", "a number", where))
    if "leaf" in table:
        _only(table, {"leaf", "spine", "number", "gbps"}, where)
        leaf, spine = (_get(table, key, "a text", where) for key in ("leaf", "spine"))
        if leaf not in fabric.leaves or spine not in fabric.spines:
            raise _wrong(f"{where} names a leaf or spine that is not there")
        uplinks = fabric.uplinks_between(fabric.leaves.index(leaf), fabric.spines.index(spine))
        number = _get(table, "number", "a whole number", where, -1)
        chosen = uplinks if number == -1 else uplinks[number : number + 1] if number >= 0 else []
        if not chosen:
            raise _wrong(f"{where}: there is no such link between {leaf} and {spine}")
        return fabric.with_uplinks(chosen, gbps)
    _only(table, {"host", "nic", "port", "gbps"}, where)
    nic = fabric.number.get((_get(table, "host", "a text", where), _get(table, "nic", "a text", where)))
    number = _get(table, "port", "a whole number", where, 0)
    if nic is None or not 0 <= number < BOND or fabric.nic_ports[nic, number] < 0:
        raise _wrong(f"{where} names a port of a NIC that is not there")
    return fabric.with_ports([int(fabric.nic_ports[nic, number])], gbps)
