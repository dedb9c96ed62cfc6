"""What the hosts say of their NICs: ports that are or were down, and ports that count errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from ncclwatch.engine.evidence.base import Fact, FactKind, Source
from ncclwatch.engine.network import LOSSY_SEGMENTS
from ncclwatch.model.network import LinkChange, NicRecord

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "ports"


@dataclass(frozen=True, slots=True, kw_only=True)
class PortDown(Fact):
    """A NIC that is or was down, from ``since`` to ``until`` in seconds since the epoch; ``None`` where nobody saw it go down,
    and for one that still is. ``change`` is what its link did last, where that took it down. ``subject`` is the NIC's key.
    ``namesakes``: where nobody was seen to use it, NICs of the host that ranks do use and that go by the same name.
    """

    nic: NicRecord
    since: float | None = None
    until: float | None = None
    change: LinkChange | None = None
    namesakes: tuple[NicRecord, ...] = ()

    def is_used_by(self, host: str, rank: int | None) -> bool:
        """Whether a rank of the job uses it."""
        return host == self.nic.host and rank in self.nic.used_by

    @property
    def state(self) -> str:
        """``is down``, or ``was down``."""
        return "is down" if self.until is None else "was down"


@dataclass(frozen=True, slots=True, kw_only=True)
class PortErrors(Fact):
    """A port that has counted errors or signs of loss; ``value`` is how many. ``subject`` is the NIC's key; ``namesakes`` as of
    :class:`PortDown`.
    """

    nic: NicRecord
    namesakes: tuple[NicRecord, ...] = ()


def port_down(
    nic: NicRecord,
    since: float | None = None,
    until: float | None = None,
    change: LinkChange | None = None,
    namesakes: tuple[NicRecord, ...] = (),
) -> PortDown:
    """The fact that a NIC is or was down."""
    interval = (since, until if until is not None else float("inf")) if since is not None else None
    return PortDown(
        kind=FactKind.PORT_DOWN, subject=nic.key, source=NAME, interval=interval, nic=nic, since=since, until=until,
        change=change, namesakes=namesakes, describe=partial(_down_text, nic, change, until),
    )  # fmt: skip


class Ports(Source):
    """The NICs of the hosts."""

    name = NAME
    plane = "nic"
    kinds = frozenset({FactKind.PORT_DOWN, FactKind.PORT_ERRORS})

    def facts(self, case: Case) -> Iterator[Fact]:
        """Ports that are down, or that ranks use and that were, and ports with errors. O(NICs + changes of their links)."""
        for _, known in sorted(case.known.network.hosts.items()):
            for nic in known.nics.values():
                last = known.last_change(nic) if not nic.up else None
                change = last if last is not None and not last.up else None
                outage = known.last_outage(nic) if nic.used_by else None
                total = sum(nic.errors.values())
                if nic.up and outage is None and total < LOSSY_SEGMENTS:
                    continue
                namesakes = _namesakes(nic, known.nics.values()) if not nic.used_by else ()
                if outage is not None and (outage[1] is None) is not nic.up:
                    yield port_down(nic, *outage, change, namesakes)
                elif not nic.up:
                    yield port_down(nic, change=change, namesakes=namesakes)
                if total >= LOSSY_SEGMENTS:
                    yield PortErrors(
                        kind=FactKind.PORT_ERRORS, subject=nic.key, source=NAME, value=total, nic=nic, namesakes=namesakes,
                        describe=partial(_errors_text, nic),
                    )  # fmt: skip

    def coverage(self, case: Case) -> Iterator[str]:
        """Hosts that say nothing of their network, where others do."""
        told = {host for host, known in case.known.network.hosts.items() if known.nics}
        silent = {member.info.host for member in case.job.members} - told if told else ()
        if silent:
            yield f"{len(silent)} hosts say nothing of their NICs, connections and kernel logs"


def names_of(nic: NicRecord) -> set[str]:
    """What a NIC is called: ``mlx5_0:1``, ``mlx5_0``, ``eth0``."""
    return {nic.name, nic.name.partition(":")[0], nic.netdev} - {""}


def _namesakes(nic: NicRecord, others: Iterable[NicRecord]) -> tuple[NicRecord, ...]:
    """Every host has an eth0, and so may each of its containers: the name alone says little where users are known."""
    return tuple(other for other in others if other.used_by and names_of(other) & names_of(nic))


def _down_text(nic: NicRecord, change: LinkChange | None, until: float | None) -> str:
    if until is not None:
        return f"{nic.label} on {nic.host} was down until {datetime.fromtimestamp(until):%H:%M:%S}"
    what = change.detail if change is not None and change.detail else nic.state
    when = f", since {datetime.fromtimestamp(change.wall_ns / 1e9):%H:%M:%S}" if change is not None else ""
    return f"{nic.label} on {nic.host} is down ({what}{when})"


def _errors_text(nic: NicRecord) -> str:
    worst = sorted(nic.errors.items(), key=lambda item: -item[1])[:3]
    counted = ", ".join(f"{name} {number}" for name, number in worst)
    return f"{nic.label} on {nic.host} counted errors since watching began: {counted}"
