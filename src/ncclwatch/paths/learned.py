"""The topology as it was learned: every link that something told of, how it is known, and how sure that is.

A link between routers is false only if each path that showed it is another one than was seen. LLDP is the switch's own word.
Queues tell paths apart and no links: what they tell is one link that is full, and one that is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ncclwatch.model.paths import Load, Probe
from ncclwatch.paths.measured import Link, MeasuredFlow, links_of
from ncclwatch.paths.suspects import Suspect


class By(StrEnum):
    """How a link is known."""

    ROUTERS = "routers"
    """Two routers in a row answered where packets died."""
    LLDP = "lldp"
    QUEUES = "queues"


@dataclass(frozen=True, slots=True)
class Edge:
    """A link, in the direction of what was sent. ``confidence`` (0 to 1): that there is such a link.

    ``ports``: (pair of addresses, source port) that took it. ``flows`` are running ones on it. ``state`` is what verdicts say.
    """

    link: Link
    by: By
    confidence: float
    ports: int = 0
    flows: tuple[MeasuredFlow, ...] = ()
    state: Suspect | None = None

    @property
    def rate(self) -> float:
        """Bytes a second of its flows, 0 where none is known."""
        return sum(flow.rate for flow in self.flows)


@dataclass(slots=True)
class _Seen:
    doubt: float = 1.0
    by: By = By.ROUTERS
    ports: set[tuple[str, str, int]] = field(default_factory=set)


def edges(
    probes: Iterable[Probe],
    flows: Sequence[MeasuredFlow] = (),
    now: Sequence[tuple[Link, ...]] = (),
    suspects: Iterable[Suspect] = (),
) -> list[Edge]:
    """Every link that probes told of, or that a verdict names, in order. ``now``: links of each of ``flows``."""
    seen: defaultdict[Link, _Seen] = defaultdict(_Seen)
    for probe in probes:
        if probe.nic and probe.switch:
            seen[f"{probe.source} ({probe.nic})", f"{probe.switch} {probe.switch_port}".strip()] = _Seen(0.0, By.LLDP)
        for path in probe.paths:
            if not path.steady or (path.told and not path.arrived):
                continue
            by_queues = not path.told and path.load is not Load.UNKNOWN
            for link in links_of(probe, path):
                one = seen[link]
                one.ports.add((probe.source, probe.destination, path.source_port))
                one.doubt *= 1 - path.load_confidence if by_queues else probe.wrong
                one.by = By.QUEUES if by_queues else By.ROUTERS
    told = {one.link: one for one in suspects}
    crossing: defaultdict[Link, list[MeasuredFlow]] = defaultdict(list)
    for flow, links in zip(flows, now, strict=True):
        for link in links:
            crossing[link].append(flow)
    found = [
        Edge(link, one.by, 1 - one.doubt, len(one.ports), tuple(crossing[link]), told.get(link)) for link, one in seen.items()
    ]
    # A dead link is taken by no source port any more: that it was there is as sure as the verdict that named it.
    gone = [Edge(link, By.ROUTERS, one.confidence, 0, (), one) for link, one in told.items() if link not in seen]
    return sorted([*found, *gone], key=lambda edge: edge.link)
