"""What the two ends of every network transfer say: who needs whom, and who could go on and does not.

All transfers are compared at once, in columns (:class:`ncclwatch.engine.transfers.Compared`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ncclwatch.engine.edges import NOBODY, OF_THE_LINK, PROXY_STALLS, Stall, StallMark, Wait, Why, stalls_at, wait_text
from ncclwatch.engine.evidence.base import AbsentNode, F, Fact, FactColumns, FactKind, LinkNode, RankNode, Source
from ncclwatch.engine.transfers import SHOWN, Column
from ncclwatch.model.state import Transport

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "proxies"

HIDDEN = {
    Transport.COLLNET: "CollNet: the switch adds up inside the network; its own counters are not compared between ranks",
    Transport.UNKNOWN: "connections of a transport that was not recognised",
}


class Proxies(Source):
    """Transfers over the network, as the proxies at both ends hold them."""

    name = NAME
    plane = "state"
    kinds = frozenset({FactKind.WAITS_FOR, FactKind.STANDS})

    def facts(self, case: Case) -> Iterator[FactColumns[Fact]]:
        """Waits and stalls, in columns. O(transfers)."""
        found = _Found(case)
        yield found.columns(FactKind.WAITS_FOR, found.waits, found.make_wait)
        yield found.columns(FactKind.STANDS, found.stalls, found.make_stall)

    def coverage(self, case: Case) -> Iterator[str]:
        """Operations that no proxy shows, or that it shows alone."""
        yield from (text for transport, text in HIDDEN.items() if transport in case.job.joined.transports)
        if case.job.joined.captured:
            yield "operations captured in CUDA graphs: their replays make no calls; only proxy steps are seen"
        if case.job.joined.by_device:
            yield "operations that kernels start themselves (device API, GIN): neither calls nor proxy steps show them"


class _Found:
    """What the transfers of a job show, as facts: ``waits`` and ``stalls`` are rows of the comparison."""

    def __init__(self, case: Case) -> None:
        self.job, self.nodes, self.transfers, self.compared = case.job, case.facts.nodes, case.transfers, case.transfers.compared
        stands = self.compared.showing(*Stall)
        self.waits, self.stalls = np.flatnonzero(~stands), np.flatnonzero(stands)
        self.target = self._targets()

    def _targets(self) -> Column:
        """Whom each waits for: the peer, the link to it, or a peer that was not observed; numbers of nodes.

        Data that does not arrive says nothing about a link when the proxy at one of its ends stands still anyway: a request
        counts as handed to the network before the proxy has pushed all of it into the socket.
        """
        t, rows = self.transfers, self.compared.rows
        of_links = self.compared.showing(*OF_THE_LINK)
        target = np.where(of_links, NOBODY, t.peer_index[rows])
        target[self.stalls] = 0
        idle = {member.index for member in self.job.members if member.halted}
        idle |= set(t.owner[rows[self.compared.showing(*PROXY_STALLS)]].tolist())
        for place in np.flatnonzero(target < 0).tolist():
            key, row = t.key(int(rows[place])), int(rows[place])
            holders = [self.job.groups[key.group].holder(rank) for rank in (key.source, key.destination)]
            blamed = next((one.index for one in holders if one is not None and one.index in idle), None)
            link, absent = LinkNode(key.group, key.source, key.destination), AbsentNode(key.group, int(t.peer[row]))
            node = absent if not of_links[place] else link if blamed is None else RankNode(blamed)
            target[place] = self.nodes.number(node)
        target[self.stalls] = NOBODY
        return target

    def columns(self, kind: FactKind, found: Column, make: Callable[[int], F]) -> FactColumns[F]:
        """What was found, as facts."""
        t, rows = self.transfers, self.compared.rows[found]
        places = np.unique(t.group[rows[~t.point_to_point[rows]]]).tolist()
        collectives = frozenset(t.members.groups[place].id for place in places)
        return FactColumns(kind, t.owner[rows], self.target[found], np.zeros(len(rows), np.bool_), make, collectives)

    def make_wait(self, number: int) -> Wait:
        """One of the waits."""
        place = int(self.waits[number])
        end, far, why = *self.compared.ends(place), Why(SHOWN[self.compared.shows[place]])
        target = self.nodes.node(int(self.target[place]))
        return Wait(
            subject=RankNode(end.member.index), source=NAME, object=target, why=why, key=end.key,
            end=end, other=far, describe=partial(wait_text, self.job, end, far, why),
        )  # fmt: skip

    def make_stall(self, number: int) -> StallMark:
        """One of the stalls."""
        place = int(self.stalls[number])
        return stalls_at(*self.compared.ends(place), Stall(SHOWN[self.compared.shows[place]]), NAME)
