"""What the hosts say of their network: ports that are or were down or count errors; paths without an answer, losses that TCP
repairs, trouble of sockets and queue pairs. Who has only stopped reading still acknowledges what is sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from ncclwatch.collect.network_memory import LOSSY_SEGMENTS, HostNetwork, Way, way_of
from ncclwatch.engine.evidence.base import Fact, FactKind, Source, Strength
from ncclwatch.model.network import FlowRecord, FlowState, LinkChange, NicRecord
from ncclwatch.model.state import Direction

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

# --- ports --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PortErrors(Fact):
    """A port that has counted errors or signs of loss; ``value`` is how many, ``subject`` the NIC's key. ``namesakes``: where
    nobody was seen to use it, NICs of the host that ranks do use and that go by the same name.
    """

    kind: FactKind = FactKind.PORT_ERRORS
    nic: NicRecord
    namesakes: tuple[NicRecord, ...] = ()

    @property
    def text(self) -> str:
        """Which NIC, and what it counts most of."""
        worst = sorted(self.nic.errors.items(), key=lambda item: -item[1])[:3]
        counted = ", ".join(f"{name} {number}" for name, number in worst)
        return f"{self.nic.label} on {self.nic.host} counted errors since watching began: {counted}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PortDown(Fact):
    """A NIC that is or was down, from ``since`` to ``until`` in seconds since the epoch; ``None`` where nobody saw it go down,
    and for one that still is. ``change``: what its link did last, if that took it down. The rest as :class:`PortErrors`.
    """

    kind: FactKind = FactKind.PORT_DOWN
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

    @property
    def text(self) -> str:
        """Which NIC, and since when or until when."""
        what = f"{self.nic.label} on {self.nic.host} {self.state}"
        if self.until is not None:
            return f"{what} until {datetime.fromtimestamp(self.until):%H:%M:%S}"
        change = self.change
        why = change.detail if change is not None and change.detail else self.nic.state
        when = f", since {datetime.fromtimestamp(change.wall_ns / 1e9):%H:%M:%S}" if change is not None else ""
        return f"{what} ({why}{when})"


class Ports(Source):
    """The NICs of the hosts."""

    kinds = frozenset({FactKind.PORT_DOWN, FactKind.PORT_ERRORS})

    def facts(self, case: Case) -> Iterator[Fact]:
        """Ports that are down, or that ranks use and that were, and ports with errors. O(NICs x changes of their links)."""
        for _, known in sorted(case.known.network.hosts.items()):
            used = [nic for nic in known.nics.values() if nic.used_by]
            for nic in known.nics.values():
                keys = {nic.key, (nic.host, nic.namespace, nic.netdev)}
                changes = [change for change in reversed(known.changes) if change.key in keys]
                since, until = _last_outage(changes) if nic.used_by else (None, None)
                if (until is None) is nic.up:
                    since = until = None
                # Every host has an eth0, and so may each of its containers: the name alone says little where users are known.
                alike = tuple(other for other in used if names_of(other) & names_of(nic)) if not nic.used_by else ()
                if since is not None or not nic.up:
                    change = changes[0] if changes and not nic.up and not changes[0].up else None
                    yield PortDown(subject=nic.key, nic=nic, since=since, until=until, change=change, namesakes=alike)
                if (total := sum(nic.errors.values())) >= LOSSY_SEGMENTS:
                    yield PortErrors(subject=nic.key, value=total, nic=nic, namesakes=alike)

    def coverage(self, case: Case) -> Iterator[str]:
        """Hosts that say nothing of their network, where others do."""
        told = {host for host, known in case.known.network.hosts.items() if known.nics}
        silent = {member.info.host for member in case.job.members} - told if told else ()
        if silent:
            yield f"{len(silent)} hosts say nothing of their NICs, connections and kernel logs"


SETTLED_NS = 3_000_000_000
"""Fact: a NIC that is switched on goes up, down (no carrier) and up within milliseconds; up for less than this it was not up."""


def _last_outage(changes: Iterable[LinkChange]) -> tuple[float | None, float | None]:
    """From when to when a NIC was down last (changes newest first), s since the epoch; ``None``: not seen, or still down."""
    began, ended = None, None
    for change in changes:
        if not change.up:
            began = change.wall_ns
        elif began is None:
            ended = change.wall_ns
        elif began - change.wall_ns > SETTLED_NS:
            break
    return (began / 1e9, ended / 1e9 if ended is not None else None) if began is not None else (None, None)


def names_of(nic: NicRecord) -> set[str]:
    """What a NIC is called: ``mlx5_0:1``, ``mlx5_0``, ``eth0``."""
    return {nic.name, nic.name.partition(":")[0], nic.netdev} - {""}


# --- connections --------------------------------------------------------------------------------------------------------

RETRY_S = 7.0
"""Fact: TCP sends again 0.2, 0.6, 1.4, 3.0, 6.2 and 12.6 s after what was lost (Linux, ``TCP_RTO_MIN``, doubled each time)."""
RETRY_ALIVE_S = 30.0
"""Fact: so long where something came through meanwhile: the round trip then holds the wait, and the next timeout comes late."""
RETRY_LOSSY_S = 60.0
"""Fact: so long where much was lost: after an answer at 6.2 s the next tries come 7, 21 and 49 s after the loss."""
LAST_TIMEOUT = 5
"""Fact: after so many timeouts in a row TCP's next try is not waited for: 6.2 s where the first comes after 0.2 s."""
LAST_LOSSY_TIMEOUT = 7
"""Fact: after so many where much was lost, 25 s: of a tenth lost both ways one row of seven in a hundred thousand is chance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadPath(Fact):
    """A connection on which sockets have sent the same again and again without an answer, for longer than TCP is given; or a path
    on which a probe of ours had none. ``local`` and ``remote`` are IP addresses; ``global_rank`` of who sends tells communicators
    of one hash apart, where it is known.
    """

    kind: FactKind = FactKind.PATH_DEAD
    subject: Way
    local: str
    remote: str
    global_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowFact(Fact):
    """What was seen of a connection, and the ranks that may be at its far end (``by_address``: that socket was found)."""

    kind: FactKind = FactKind.FLOW_TROUBLE
    flow: FlowRecord
    far: frozenset[int] = frozenset()
    by_address: bool = False

    @property
    def text(self) -> str:
        """What the host says of it."""
        return self.flow.reason


class Sockets(Source):
    """Connections over the network, as their hosts list them."""

    kinds = frozenset({FactKind.PATH_DEAD, FactKind.RETRYING, FactKind.FLOW_TROUBLE, FactKind.LOST})

    def facts(self, case: Case) -> Iterator[Fact]:
        """Dead paths, connections that TCP tries to repair, trouble of each connection, and what it lost. O(connections)."""
        hosts = [known for _, known in sorted(case.known.network.hosts.items()) if known.flows]
        for known in hosts:
            yield from _unanswered(known)
        for host, flow, answer in case.known.network.probes(case.job, case.still):
            way, address = way_of(flow), _address(flow.socket.local) if flow.socket is not None else f"{flow.device} of {host}"
            if way is not None and not answer.alive:
                text = f"a probe of ours from {address} to {answer.address} got no answer ({answer.answer}: {answer.detail})"
                yield DeadPath(
                    subject=way, strength=Strength.LIKELY, local=address, remote=answer.address, global_rank=flow.global_rank,
                    describe=partial(str, text),
                )  # fmt: skip
        yield from _flow_facts([flow for known in hosts for flow in known.flows])


def _flow_facts(flows: Sequence[FlowRecord]) -> Iterator[FlowFact]:
    """Trouble and losses of each connection, with the ranks at its far end: by address, else by rank and hash."""
    ranks: dict[Hashable, set[int]] = defaultdict(set)
    for flow in flows:
        if flow.global_rank is not None:
            if flow.socket is not None:
                ranks[flow.socket.local, flow.socket.remote].add(flow.global_rank)
            ranks[flow.comm_hash, flow.rank].add(flow.global_rank)
    for flow in flows:
        troubled = bool(flow.reason) and (flow.state is FlowState.BLOCKED or flow.state.is_trouble)
        sends = flow.socket is not None and flow.retries is not None and flow.direction is Direction.SEND
        if troubled or sends:
            by_address = ranks.get((flow.socket.remote, flow.socket.local)) if flow.socket is not None else None
            by_rank = ranks.get((flow.comm_hash, flow.peer)) if None not in (flow.comm_hash, flow.peer) else None
            far = frozenset(by_address or by_rank or ())
            fact = FlowFact(subject=way_of(flow), flow=flow, far=far, by_address=bool(by_address))
            if troubled:
                yield fact
            if sends:
                yield replace(fact, kind=FactKind.LOST, value=flow.retries)


def _unanswered(known: HostNetwork) -> Iterator[Fact]:
    """Dead paths, and connections that send again and may come through, with the standstill (s) that is worth waiting."""
    retrying: dict[Way, float] = {}
    for way, flow in known.known_ways():
        facts = flow.socket
        if facts is None or not facts.unacknowledged:
            continue
        lossy, tried = way in known.lossy, facts.timeouts or 0
        left = tried < (LAST_LOSSY_TIMEOUT if lossy else LAST_TIMEOUT)
        if flow.state is FlowState.STALLED and not left:
            yield dead_path(way, _address(facts.local), _address(facts.remote), global_rank=flow.global_rank, timeouts=tried)
        elif facts.timeouts is not None and left:
            worth = RETRY_LOSSY_S if lossy else RETRY_S if tried else RETRY_ALIVE_S
            retrying[way] = max(retrying.get(way, 0.0), worth)
    for way, worth in retrying.items():
        where = f"rank {way.rank} to rank {way.peer} of communicator {way.comm_hash:016x}"
        text = f"{where}: what was lost is sent again by TCP, which may come through within {worth:.0f} s"
        yield Fact(FactKind.RETRYING, way, value=worth, describe=partial(str, text))


def _address(end: str) -> str:
    """``10.0.0.1`` of ``10.0.0.1:4711``."""
    return end.rpartition(":")[0]


def dead_path(way: Way, local: str, remote: str, *, global_rank: int | None = None, timeouts: int = LAST_TIMEOUT) -> DeadPath:
    """The fact that nothing sent on a connection is acknowledged, after so many timeouts in a row."""
    text = partial(str, f"nothing that {local} sends to {remote} is acknowledged, after {timeouts} timeouts in a row")
    return DeadPath(subject=way, local=local, remote=remote, global_rank=global_rank, value=timeouts, describe=text)
