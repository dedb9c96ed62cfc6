"""How long what is sent on each link takes to be acknowledged, by the wire's own word: graded evidence for slow links.

TCP measures the round trip of each connection, a NIC the completion of each work request; neither is asked what the job does
with the data.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ncclwatch.engine.evidence.base import Coverage, FactKind, Measure, Quantity, Source
from ncclwatch.engine.job import Group

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "round trips"


class Link(NamedTuple):
    """From one process to another, by their indices in the job."""

    sender: int
    receiver: int


class RoundTrips(Source):
    """TCP round trips and completion times of RDMA work requests."""

    name = NAME
    plane = "nic"
    kinds = frozenset({FactKind.SLOWED})

    def facts(self, case: Case) -> Iterator[Measure]:
        """The newest measurement of each link of the job: the longest of its connections. O(connections)."""
        for link, (at, seconds) in round_trips(case).items():
            yield Measure(
                kind=FactKind.SLOWED, subject=link, source=NAME, quantity=Quantity.ROUND_TRIP, value=seconds, interval=(at, at),
                describe=partial(_text, case, link, seconds),
            )  # fmt: skip

    def coverage(self, case: Case) -> Coverage:
        """Hosts with NCCL processes whose connections could be measured."""
        wanted = {member.info.host for member in case.job.members}
        return Coverage(NAME, len(wanted & case.known.network.delays().keys()), len(wanted))


def round_trips(case: Case) -> dict[Link, tuple[float, float]]:
    """Link → when it was measured (seconds since the epoch) and at what (seconds). O(connections)."""
    measured = case.known.network.delays()
    groups: dict[int, list[Group]] = defaultdict(list)
    for group in case.job.groups.values() if measured else ():
        groups[group.hash].append(group)
    found: dict[Link, tuple[float, float]] = {}
    for host, (time_ns, delays) in measured.items():
        for (pid, comm_hash, rank, peer), delay_us in delays.items():
            for group in groups.get(comm_hash, ()):
                sender, receiver = group.holder(rank), group.holder(peer)
                if sender is None or receiver is None or (sender.info.host, sender.info.pid) != (host, pid):
                    continue
                link, seconds = Link(sender.index, receiver.index), delay_us / 1e6
                found[link] = time_ns / 1e9, max(found.get(link, (0.0, 0.0))[1], seconds)
    return found


def _text(case: Case, link: Link, seconds: float) -> str:
    sender, receiver = case.job.member(link.sender), case.job.member(link.receiver)
    return f"from {sender.label} to {receiver.label}: what is sent is acknowledged after {seconds * 1e3:.1f} ms"
