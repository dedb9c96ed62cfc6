"""What a file says of the fabric, checked against what probes and flows show: a line for each contradiction.

The file is that of :mod:`ncclwatch.paths.fabric_file`, and may also say what only a real fabric has:

[hash]
fields = "five-tuple"         # what switches hash: or "addresses"
[[router]]
name = "spine0"               # of a leaf or spine of the file
addresses = ["10.80.0.2", "10.80.16.2"]       # that it answers with where packets die

Without addresses of routers numbers are compared: routers on the way, and ways between two NICs.
"""

from __future__ import annotations

import ipaddress
import math
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from ncclwatch.errors import UsageError
from ncclwatch.model.paths import Hops, Probe
from ncclwatch.paths.bottlenecks import is_queued
from ncclwatch.paths.fabric import Fabric
from ncclwatch.paths.fabric_file import parse, read_text
from ncclwatch.paths.learned import Edge
from ncclwatch.paths.measured import SLOWER, Link
from ncclwatch.paths.suspects import Told
from ncclwatch.text import clean

SURE = 0.95
"""What is less sure than this is no contradiction: too few source ports were asked."""
ROUTERS_BETWEEN = {True: 1, False: 3}
"""Fact: of two tiers: a leaf, or leaf, spine, leaf."""

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Fields(StrEnum):
    """What switches hash."""

    ADDRESSES = "addresses"
    FIVE_TUPLE = "five-tuple"


class _Hash(msgspec.Struct, forbid_unknown_fields=True):
    fields: Fields


class _Router(msgspec.Struct, forbid_unknown_fields=True):
    name: _Name
    addresses: Annotated[list[_Name], msgspec.Meta(min_length=1, max_length=4096)]


class _Extras(msgspec.Struct):
    regular: dict[str, object] | None = None
    hash: _Hash | None = None
    router: Annotated[list[_Router], msgspec.Meta(max_length=1 << 16)] = msgspec.field(default_factory=list)


@dataclass(frozen=True)
class Known:
    """A fabric, the names of routers by the addresses that they answer with, and what is hashed (None: not said)."""

    fabric: Fabric
    routers: Mapping[str, str]
    fields: Fields | None
    listed: bool
    """Whether NICs have their own names and addresses: those of a regular fabric are made up."""


@dataclass(frozen=True, slots=True)
class Contradiction:
    """What is seen is not what the file says; ``confidence`` is 0 to 1."""

    text: str
    confidence: float


def read(path: Path) -> Known:
    """What a file says. Raises :class:`UsageError` for one that cannot be read or makes no sense."""
    return known_of(read_text(path))


def known_of(text: str) -> Known:
    """What a text says. Raises :class:`UsageError`."""
    fabric = parse(text)
    try:
        extras = msgspec.convert(tomllib.loads(text), _Extras)
    except msgspec.ValidationError as error:
        raise UsageError(f"the file of the fabric is wrong: {clean(str(error), 200)}", "docs/flow-map.md shows one") from None
    routers: dict[str, str] = {}
    for router in extras.router:
        if router.name not in (*fabric.leaves, *fabric.spines):
            raise UsageError(f"{clean(router.name)} is no leaf and no spine of the file", "name one that an [[uplink]] has")
        for address in router.addresses:
            routers[_address(address)] = router.name
    return Known(fabric, routers, extras.hash.fields if extras.hash is not None else None, extras.regular is None)


def _address(text: str) -> str:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        raise UsageError(f"'{clean(text)}' of a [[router]] is no IP address", "give what 'paths probe' shows") from None


def told_by_file(known: Known, links: Iterable[Link]) -> list[Told]:
    """What the file says of links between named routers, for a plan: dead ones, and those that carry less than the largest."""
    speeds = {link: gbps for link in links if (gbps := _gbps(known, link)) is not None}
    most = max(speeds.values(), default=0.0)
    return [Told(gbps / most, 1.0, "the file says so", link) for link, gbps in sorted(speeds.items()) if gbps < most]


def _gbps(known: Known, link: Link) -> float | None:
    """What parallel links between two routers carry together by the file, in this direction; ``None`` where it does not say."""
    fabric, ends = known.fabric, tuple(known.routers.get(end, "") for end in link)
    upwards = ends[0] in fabric.leaves
    below, above = ends if upwards else ends[::-1]
    if below not in fabric.leaves or above not in fabric.spines:
        return None
    joined = fabric.uplinks_between(fabric.leaves.index(below), fabric.spines.index(above))
    first = fabric.first_up if upwards else fabric.first_down
    return float(sum(fabric.capacity[first + uplink] for uplink in joined)) if joined else None


def contradictions(known: Known, probes: Sequence[Probe], edges: Sequence[Edge]) -> tuple[list[Contradiction], list[str]]:
    """What is seen and said otherwise, surest first; and, in words, what could not be compared."""
    numbers = {address: nic for nic, address in enumerate(known.fabric.addresses)}
    found: list[Contradiction] = []
    ends = {address for probe in probes for address in (probe.source, probe.destination)}
    strange = sorted(ends - numbers.keys())
    if not known.listed or (ends and not ends & numbers.keys()):
        return [], ["the file names none of the probed addresses: give each NIC its address ([[nic]], and not [regular])"]
    found += [Contradiction(f"{address} is probed, and no [[nic]] of the file", 1.0) for address in strange]
    for probe in probes:
        if probe.source in numbers:
            found += _leaf(known, probe, numbers[probe.source])
        if probe.source in numbers and probe.destination in numbers:
            found += _ways(known, probe, numbers[probe.source], numbers[probe.destination])
    for edge in edges:
        found += _link(known, edge)
    notes = [] if known.routers else ["the file names no addresses of routers ([[router]]): numbers alone were compared"]
    return sorted((one for one in found if one.confidence >= SURE), key=lambda one: (-one.confidence, one.text)), notes


def _leaf(known: Known, probe: Probe, nic: int) -> Iterator[Contradiction]:
    """The name of the NIC, and the switch that it says it is plugged into."""
    fabric = known.fabric
    host, name = fabric.nics[nic]
    leaves = {fabric.leaves[fabric.port_leaf[port]] for port in fabric.nic_ports[nic].tolist() if port >= 0}
    if probe.nic and probe.nic != name:
        yield Contradiction(f"{probe.source} is {clean(probe.nic)} of {clean(probe.host)}; by the file {name} of {host}", 1.0)
    if probe.switch and probe.switch not in leaves:
        where = " and ".join(sorted(leaves))
        yield Contradiction(f"{probe.source} is plugged into {clean(probe.switch)} (LLDP); by the file into {where}", 1.0)


def _ways(known: Known, probe: Probe, source: int, destination: int) -> Iterator[Contradiction]:
    """How many routers lie between two NICs, how many ways there are, and how source ports spread over them."""
    rows = known.fabric.alternatives(source, destination)
    seen = Counter(path.hops for path in probe.paths if path.told and path.steady and path.arrived and not path.live)
    where, asked = f"{probe.source} → {probe.destination}", sum(seen.values())
    if not asked:
        return
    if not len(rows):
        yield Contradiction(f"{where}: {asked} source ports arrive; by the file there is no living path", 1 - probe.wrong**asked)
        return
    lengths = {ROUTERS_BETWEEN[bool(row[1] < 0)] for row in rows.tolist()}
    for length in sorted({len(hops) for hops in seen} - lengths):
        by = " or ".join(map(str, sorted(lengths)))
        ports = sum(count for hops, count in seen.items() if len(hops) == length)
        text = f"{where} passes {length} routers; by the file {by}"
        yield Contradiction(text, 1 - probe.wrong**ports)
    # Parallel links may answer with one address, and a router with one for all: then fewer ways are told apart.
    most = len({tuple(row[:3]) for row in rows.tolist()})
    least = len({int(known.fabric.uplink_spine[row[1] - known.fabric.first_up]) for row in rows.tolist() if row[1] >= 0}) or 1
    ways = len(seen)
    if ways > most:
        yield Contradiction(f"{where}: {ways} ways were seen; by the file there are {most}", 1 - probe.wrong)
    yield from _spread(known, where, seen, least, ways)
    if known.fields is not Fields.ADDRESSES:
        yield from _spines(known, probe, rows.tolist(), seen)


def _spread(known: Known, where: str, seen: Counter[Hops], least: int, ways: int) -> Iterator[Contradiction]:
    asked = sum(seen.values())
    if known.fields is Fields.ADDRESSES:
        if ways > 1:
            yield Contradiction(f"{where}: the source port changes the way ({ways} were seen); by the file it does not", 1.0)
        return
    if ways < least:
        # That all ports fall on so few of the ways: at most so likely for any choice of these.
        chance = min(1.0, math.comb(least, ways) * (ways / least) ** asked)
        what = "the source port changes nothing" if ways == 1 else f"{asked} source ports take {ways} ways"
        yield Contradiction(f"{where}: {what}; by the file there are {least} ways at least", 1 - chance)
    elif ways > 1 and known.fields is Fields.FIVE_TUPLE:
        fullest = max(seen.values())
        share = 1 / ways
        tail = sum(math.comb(asked, k) * share**k * (1 - share) ** (asked - k) for k in range(fullest, asked + 1))
        yield Contradiction(
            f"{where}: {fullest} of {asked} source ports take one of {ways} ways; an even hash would not", 1 - ways * tail
        )


def _spines(known: Known, probe: Probe, rows: Sequence[Sequence[int]], seen: Counter[Hops]) -> Iterator[Contradiction]:
    """Spines that living links of the file lead over, and that no source port takes."""
    fabric = known.fabric
    meant = {fabric.spines[fabric.uplink_spine[row[1] - fabric.first_up]] for row in rows if row[1] >= 0}
    taken = {known.routers[hop] for hops in seen for hop in hops if hop is not None and hop in known.routers}
    if not taken & meant or any(hop is None or hop not in known.routers for hops in seen for hop in hops):
        return
    for spine in sorted(meant - taken):
        chance = (1 - 1 / len(meant)) ** sum(seen.values())
        where = f"{probe.source} → {probe.destination}"
        yield Contradiction(f"{where}: no source port goes by {spine}; by the file its links live", 1 - chance)


def _link(known: Known, edge: Edge) -> Iterator[Contradiction]:
    """Whether two named routers are joined, whether their links live, and what they carry."""
    ends = tuple(known.routers.get(end, "") for end in edge.link)
    if not all(ends):
        return
    where = f"{edge.link[0]} → {edge.link[1]} ({ends[0]} → {ends[1]})"
    gbps = _gbps(known, edge.link)
    if gbps is None:
        yield Contradiction(f"{where} is a link; by the file these two are not joined", edge.confidence)
        return
    if gbps == 0 and edge.ports:
        yield Contradiction(f"{where} is taken by {edge.ports} source ports; by the file it is dead", edge.confidence)
    carries = edge.rate * 8 / 1e9
    if 0 < gbps < carries:
        yield Contradiction(f"{where} carries {carries:.3g} Gb/s; by the file at most {gbps:.3g}", edge.confidence)
    full = bool(edge.flows) and all(flow.waits is not None and is_queued(*flow.waits) for flow in edge.flows)
    if full and 0 < carries < SLOWER * gbps:
        yield Contradiction(f"{where} is full with {carries:.3g} Gb/s; by the file it has {gbps:.3g}", edge.confidence)
    if edge.state is not None and edge.state.barred and gbps > 0:
        yield Contradiction(f"{edge.state.text}; by the file it lives", edge.state.confidence)
