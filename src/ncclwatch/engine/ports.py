"""A network port that is down below a standstill is its cause, whoever the waits lead to.

A link that is cut while nothing is under way on it leaves no trace in anybody's memory, and newer proxies drop what their
transport reports as failed: then the waits end at a rank that merely waits unseen. That a port which ranks of the job use went
down when the job came to stand says more than where such a chain ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ncclwatch.engine.graph import Waits
from ncclwatch.engine.hypotheses import Cause
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.model.network import NicRecord
from ncclwatch.model.state import Communicator, Direction, Transport
from ncclwatch.model.verdict import Culprit, LinkRef, Verdict, VerdictClass

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

BEFORE_S = 120.0
"""What lies inside the nodes may go on for a while after a port went down: not longer than this."""
AFTER_S = 5.0
"""A port that went down later than this after the job came to stand is not why it stands."""

BETWEEN_LOOKS_S = 2.0
"""When a job came to stand is known no better."""

OPEN_TO_DOUBT = frozenset({VerdictClass.NOT_ENTERED, VerdictClass.DEADLOCK, VerdictClass.UNKNOWN})
"""Verdicts on where waits end; what the operating system states, and calls that disagree, stand by themselves."""


@dataclass(frozen=True, slots=True)
class PortDown:
    """A NIC that ranks use and that is or was down, from ``since`` to ``until`` in seconds since the epoch; ``None`` where nobody
    saw it go down, and for one that still is.
    """

    nic: NicRecord
    since: float | None = None
    until: float | None = None

    def explains(self, began: float) -> bool:
        """Whether a standstill that began then may be its doing, also once it is up again: what was lost comes later."""
        if self.until is not None and self.until < began - BETWEEN_LOOKS_S:
            return False
        return self.since is None or -BEFORE_S <= self.since - began <= AFTER_S

    def is_used_by(self, host: str, rank: int | None) -> bool:
        """Whether a rank of the job uses it."""
        return host == self.nic.host and rank in self.nic.used_by

    @property
    def state(self) -> str:
        """``is down``, or ``was down``."""
        return "is down" if self.until is None else "was down"


def blame_ports(case: Case, verdict: Verdict, ports: Sequence[PortDown]) -> Verdict:
    """The verdict, or one on the ports that are down below the standstill, where that explains it better."""
    from ncclwatch.engine.suspects import accused, observed
    from ncclwatch.engine.verdict import build

    job, waits, still, time = case.job, case.waits, case.still, case.time
    down = [port for port in ports if port.explains(time - still)]
    if verdict.verdict_class is VerdictClass.HARDWARE and verdict.link is not None:
        return _with_ends_that_are_down(job, verdict, down)
    if not ports or not _is_open_to_doubt(job, verdict, ports):
        return verdict
    standing = [job.groups[number] for number in sorted(_standing(job, verdict, waits))]
    found = [(port, users) for port in down if (users := _users(port, standing))]
    if not found:
        return verdict
    culprits = []
    for port, users in found:
        for member, link in users:
            culprit = observed(job, member, (), (), Cause.PORT, link=link).place
            reason, communicator = f"its network port {port.nic.label} {port.state}", verdict.communicator or culprit.communicator
            culprits.append(replace(culprit, communicator=communicator, operation=verdict.operation, reason=reason))
    evidence = list(verdict.evidence)
    if verdict.culprits:
        evidence.insert(0, f"the waits that can be seen end at {named_in(verdict)}, which may itself wait for such a port")
    victims = set().union(*(group.ranks for group in standing)) - accused(job, culprits)
    blamed = build(case, VerdictClass.HARDWARE, culprits, victims, evidence, verdict.unobserved)
    summary = "; ".join(_summary(port, users) for port, users in found[:3])
    where = f" in {blamed.operation.name} #{blamed.operation.sequence}" if blamed.operation and blamed.operation.name else ""
    return replace(blamed, summary=f"{summary}: the job stands still{where}", planes=(*verdict.planes, "nic"))


def _with_ends_that_are_down(job: Job, verdict: Verdict, ports: Sequence[PortDown]) -> Verdict:
    """Of links that carry no data, the ends whose port is down, where both ends were named for want of anything better.

    An end is let go only where the other end of its own link is known to be down: another link may have another trouble.
    """

    def is_down(host: str, rank: int | None) -> bool:
        return any(port.is_used_by(host, rank) for port in ports)

    down = [c for c in verdict.culprits if is_down(c.host, c.rank)]
    others = {id(c): _other_end(job, c) for c in verdict.culprits if c not in down}
    kept = [c for c in verdict.culprits if c in down or (o := others[id(c)]) is None or not is_down(o.info.host, o.rank)]
    if not down or len(kept) == len(verdict.culprits):
        return verdict
    freed = {c.rank for c in verdict.culprits if c not in kept and c.rank is not None}
    names = ", ".join(f"rank {rank}" for rank in sorted(c.rank for c in down if c.rank is not None))
    named = [p for p in ports if any(p.is_used_by(c.host, c.rank) for c in down)]
    labels, state = ", ".join(sorted({p.nic.label for p in named})), named[0].state
    return replace(
        verdict,
        culprits=tuple(kept),
        victims=tuple(sorted({*verdict.victims, *freed})),
        summary=f"{labels}, which {names} {'use' if len(down) > 1 else 'uses'}, {state}: {verdict.summary}",
        planes=(*verdict.planes, "nic"),
    )


def _other_end(job: Job, culprit: Culprit) -> Member | None:
    """The observed process at the other end of a culprit's link."""
    from ncclwatch.engine.suspects import group_of

    link, group = culprit.link, group_of(job, culprit)
    if link is None or group is None or culprit.comm_rank not in (link.source, link.destination):
        return None
    return group.holder(link.destination if culprit.comm_rank == link.source else link.source)


def _is_open_to_doubt(job: Job, verdict: Verdict, ports: Sequence[PortDown]) -> bool:
    if verdict.verdict_class in OPEN_TO_DOUBT:
        return True
    if verdict.verdict_class is not VerdictClass.HARDWARE:
        return False
    # A GPU or proxy that "does not go on" may wait, unseen, for the port; of a rank that uses the port, that is told already.
    return not any(port.is_used_by(c.host, c.rank) for c in verdict.culprits for port in ports)


def _standing(job: Job, verdict: Verdict, waits: Waits) -> set[int]:
    """Communicators in which something stands still."""
    found = {number for number in waits.collectives() if number in job.groups}
    if verdict.communicator is not None:
        found |= {group.id for group in job.groups.values() if f"{group.hash:016x}" == verdict.communicator.hash}
    return found or {wait.key.group for wait in waits.first(64) if wait.key.group in job.groups}


def _users(port: PortDown, standing: Sequence[Group]) -> list[tuple[Member, LinkRef | None]]:
    """Ranks that use a NIC and have a connection over the network in a communicator that stands still, with one such link."""
    found: dict[int, tuple[Member, LinkRef | None]] = {}
    for group in standing:
        for member, own in group.members.values():
            if member.index not in found and port.is_used_by(member.info.host, member.rank):
                link = _link(own, port.nic)
                if link is not None:
                    found[member.index] = (member, link)
    return [found[index] for index in sorted(found)]


def _link(own: Communicator, nic: NicRecord) -> LinkRef | None:
    over = sorted((channel, peer, direction) for channel, peer, direction, kind in own.transports if kind is Transport.NET)
    if not over:
        return None
    _, peer, direction = over[0]
    channels = tuple(sorted({channel for channel, other, way in over if (other, way) == (peer, direction)}))
    source, destination = (own.rank, peer) if direction is Direction.SEND else (peer, own.rank)
    return LinkRef(source, destination, "net", channels, nic.name)


def _summary(port: PortDown, users: Sequence[tuple[Member, LinkRef | None]]) -> str:
    names = sorted(member.rank for member, _ in users if member.rank is not None)
    shown = ", ".join(map(str, names[:8])) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    who, verb = ("rank", "uses") if len(names) == 1 else ("ranks", "use")
    return f"{port.nic.label} on {port.nic.host} {port.state}, and {who} {shown} {verb} it"


def named_in(verdict: Verdict) -> str:
    """The culprits of a verdict, the first few of many."""
    shown = ", ".join(f"rank {c.rank}" if c.rank is not None else f"rank {c.comm_rank}" for c in verdict.culprits[:4])
    return shown + (f" and {len(verdict.culprits) - 4} more" if len(verdict.culprits) > 4 else "")
