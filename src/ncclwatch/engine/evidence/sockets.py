"""What the sockets and queue pairs of a job's connections say: paths without an answer, losses that TCP repairs, trouble.

Segments that are sent again and again without an answer are the network's doing: who has only stopped reading still acknowledges.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from ncclwatch.engine.evidence.base import Fact, FactKind, Source, Strength
from ncclwatch.engine.network import HostNetwork, Way, way_of
from ncclwatch.model.network import FlowRecord, FlowState, SocketFacts
from ncclwatch.model.state import Direction

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "sockets"

RETRY_S = 7.0
"""Fact: TCP sends again 0.2, 0.6, 1.4, 3.0 and 6.2 s after what was lost (Linux, ``TCP_RTO_MIN``, doubled each time), then
12.6 s.
"""
RETRY_ALIVE_S = 30.0
"""Fact: so long where something came through meanwhile: the round trip then holds the wait, and the next timeout comes late."""
RETRY_LOSSY_S = 60.0
"""Fact: so long on connections that have lost much of late: an answer after 6.2 s makes the measured round trip so long that the
next tries come only 7, 21 and 49 s after what was lost.
"""
LAST_TIMEOUT = 5
"""Fact: after so many timeouts in a row TCP's next try is not waited for: 6.2 s where the first comes after 0.2 s."""
LAST_LOSSY_TIMEOUT = 7
"""Fact: after so many on connections that have lost much of late: 25 s where the first comes after 0.2 s. Where a tenth is lost
both ways one try in five goes unanswered, and one row of seven in a hundred thousand.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadPath(Fact):
    """A connection on which sockets have sent the same again and again, and longer than TCP is given, without an answer.

    ``subject`` is its :class:`Way`; ``local`` and ``remote`` are IP addresses. ``global_rank`` of who sends tells communicators
    of one hash apart; ``None`` where it is not known.
    """

    way: Way
    local: str
    remote: str
    global_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowFact(Fact):
    """What was seen of one connection, and which ranks of the job may be at its other end, by what hosts say.

    ``by_address``: a socket with the two addresses changed over was found, which leaves no other choice.
    """

    flow: FlowRecord
    far: frozenset[int] = frozenset()
    by_address: bool = False


class FarEnds:
    """The far ends of connections, by what the hosts at both ends say of them.

    A socket's other end is the socket with the two addresses changed over. Without one (RDMA, or a host that is not watched) it
    is the rank of the communicator, where hashes of communicators that are equal (splits before NCCL 2.24) leave no doubt.
    """

    def __init__(self, flows: Iterable[FlowRecord]) -> None:
        self._by_address: dict[tuple[str, str], set[int]] = {}
        self._by_rank: dict[tuple[int, int], set[int]] = {}
        for flow in flows:
            if flow.global_rank is None:
                continue
            if flow.socket is not None:
                self._by_address.setdefault((flow.socket.local, flow.socket.remote), set()).add(flow.global_rank)
            if flow.comm_hash is not None and flow.rank is not None:
                self._by_rank.setdefault((flow.comm_hash, flow.rank), set()).add(flow.global_rank)

    def of(self, flow: FlowRecord) -> tuple[frozenset[int], bool]:
        """The job's ranks that may be at the other end of a connection, and whether the addresses say so."""
        if flow.socket is not None and (found := self._by_address.get((flow.socket.remote, flow.socket.local))):
            return frozenset(found), True
        if flow.comm_hash is None or flow.peer is None:
            return frozenset(), False
        return frozenset(self._by_rank.get((flow.comm_hash, flow.peer), ())), False


class Sockets(Source):
    """Connections over the network, as their hosts list them."""

    name = NAME
    plane = "nic"
    kinds = frozenset({FactKind.PATH_DEAD, FactKind.RETRYING, FactKind.FLOW_TROUBLE, FactKind.LOST})

    def facts(self, case: Case) -> Iterator[Fact]:
        """Dead paths, connections that TCP tries to repair, trouble of each connection, and what it lost. O(connections)."""
        hosts = [known for _, known in sorted(case.known.network.hosts.items()) if known.flows]
        for known in hosts:
            yield from _dead_paths(known)
        yield from _unanswered(case)
        for way, worth in _retrying(hosts).items():
            yield Fact(FactKind.RETRYING, way, NAME, value=worth, describe=partial(_retrying_text, way, worth))
        flows = [flow for known in hosts for flow in known.flows]
        ends: FarEnds | None = None
        for flow in flows:
            troubled = bool(flow.reason) and (flow.state is FlowState.BLOCKED or flow.state.is_trouble)
            sends = flow.socket is not None and flow.retries is not None and flow.direction is Direction.SEND
            if not troubled and not sends:
                continue
            ends = ends or FarEnds(flows)
            far, by_address = ends.of(flow)
            fact = FlowFact(
                kind=FactKind.FLOW_TROUBLE, subject=way_of(flow), source=NAME, flow=flow, far=far, by_address=by_address,
                describe=partial(str, flow.reason),
            )  # fmt: skip
            if troubled:
                yield fact
            if sends:
                yield replace(fact, kind=FactKind.LOST, value=flow.retries)


def tries_left(known: HostNetwork, way: Way, facts: SocketFacts) -> bool:
    """Whether TCP is to be given another try on a connection whose sockets wait for an answer."""
    return (facts.timeouts or 0) < (LAST_LOSSY_TIMEOUT if way in known.lossy else LAST_TIMEOUT)


def _retrying(hosts: Iterable[HostNetwork]) -> dict[Way, float]:
    """Connections whose sockets wait to send again what was lost, and may come through, each with the seconds of standstill it is
    worth waiting for that: each time they wait twice as long, so a link that only loses much can stand still for many seconds.
    """
    found: dict[Way, float] = {}
    for known in hosts:
        for way, _, facts in known.known_sockets():
            if facts.unacknowledged and facts.timeouts is not None and tries_left(known, way, facts):
                alone = RETRY_S if facts.timeouts else RETRY_ALIVE_S
                found[way] = max(found.get(way, 0.0), RETRY_LOSSY_S if way in known.lossy else alone)
    return found


def dead_path(way: Way, local: str, remote: str, *, global_rank: int | None = None, timeouts: int | None = None) -> DeadPath:
    """The fact that nothing sent on a connection is acknowledged, after so many timeouts in a row."""
    text = f"nothing that {local} sends to {remote} is acknowledged, after {timeouts} timeouts in a row"
    return DeadPath(
        kind=FactKind.PATH_DEAD, subject=way, source=NAME, way=way, local=local, remote=remote, global_rank=global_rank,
        value=timeouts, describe=partial(str, text),
    )  # fmt: skip


def _dead_paths(known: HostNetwork) -> Iterator[DeadPath]:
    for way, flow, facts in known.known_sockets():
        if flow.state is FlowState.STALLED and facts.unacknowledged and not tries_left(known, way, facts):
            ends = _address(facts.local), _address(facts.remote)
            yield dead_path(way, *ends, global_rank=flow.global_rank, timeouts=facts.timeouts)


def _unanswered(case: Case) -> Iterator[DeadPath]:
    """Paths on which probes of ours got no answer since the job stands, and their connections none either: a firewall may keep a
    probe out. Zero-payload writes, between queue pairs that had agreed by another way, need no such witness.
    """
    answers = [
        (host, flow, flow.path)
        for host, known in sorted(case.known.network.hosts.items())
        for flow in known.flows
        if flow.path is not None and not flow.path.alive
    ]
    members = {(member.info.host, member.info.pid): member.last.time_ns for member in case.job.members} if answers else {}
    for host, flow, answer in answers:
        way, looked_ns = way_of(flow), members.get((host, flow.pid))
        waits = answer.kind == "rdma" or (flow.socket is not None and bool(flow.socket.unacknowledged))
        if way is None or looked_ns is None or not waits or answer.time_ns < looked_ns - int(case.still * 1e9):
            continue
        local = _address(flow.socket.local) if flow.socket is not None else f"{flow.device} of {host}"
        text = f"a probe of ours from {local} to {answer.address} got no answer ({answer.answer}: {answer.detail})"
        yield DeadPath(
            kind=FactKind.PATH_DEAD, subject=way, source=NAME, strength=Strength.LIKELY, way=way, local=local,
            remote=answer.address, global_rank=flow.global_rank, describe=partial(str, text),
        )  # fmt: skip


def _retrying_text(way: Way, worth: float) -> str:
    where = f"rank {way.rank} to rank {way.peer} of communicator {way.comm_hash:016x}"
    return f"{where}: what was lost is sent again by TCP, which may come through within {worth:.0f} s"


def _address(end: str) -> str:
    """``10.0.0.1`` of ``10.0.0.1:4711``."""
    return end.rpartition(":")[0]
