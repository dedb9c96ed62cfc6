"""The wait-for graph of one job, and where it ends: strongly connected components that nothing leaves.

Its edges are facts; a graph with more of them, or with some retracted, is another graph. Who waits in a wait that was retracted
does not follow it, and still counts among those behind.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np

from ncclwatch.engine.edges import NOBODY, StallMark, Wait
from ncclwatch.engine.evidence import base
from ncclwatch.engine.evidence.base import Fact, FactColumns, FactKind, Node, Nodes, RankNode
from ncclwatch.model.columns import Flags, is_among
from ncclwatch.model.digraph import adjacency, final_components, reaching
from ncclwatch.model.job import Job, Member
from ncclwatch.model.joined import beside_unobserved, neighbours, veiled
from ncclwatch.model.rows import distinct

EdgeT = TypeVar("EdgeT", Wait, StallMark)


class Waits:
    """A wait-for graph: who waits for whom, who stands still, and which of the waits are retracted, by their numbers."""

    def __init__(
        self, job: Job, nodes: Nodes, waits: Sequence[Fact | FactColumns[Any]], stalls: Sequence[Fact | FactColumns[Any]],
        retracted: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """Among ``waits`` and ``stalls`` others are passed over."""
        self.job, self.nodes, self.retracted = job, nodes, retracted
        self.waits, self.stalls = _in_columns(Wait, waits, nodes), _in_columns(StallMark, stalls, nodes)

    def plus(self, facts: Sequence[Wait | StallMark], retracted: Iterable[int] = ()) -> Waits:
        """This graph and more waits and stalls, with more of its waits retracted."""
        waits, stalls = [self.waits, *facts], [self.stalls, *facts]
        return Waits(self.job, self.nodes, waits, stalls, self.retracted.union(retracted))

    @property
    def open(self) -> bool:
        """Whether any transfer is unfinished."""
        return len(self.waits) + len(self.stalls) > 0

    def wait(self, number: int) -> Wait:
        """One wait, which knows its number."""
        return replace(self.waits.make(number), number=number)

    def of(self, indices: Iterable[int]) -> dict[int, list[Wait]]:
        """For each of these processes its waits and those for it."""
        found: dict[int, list[Wait]] = {index: [] for index in indices}
        wanted = np.array(list(found), np.int64)
        for place in np.flatnonzero(np.isin(self.waits.subject, wanted) | np.isin(self.waits.object, wanted)).tolist():
            wait = self.wait(place)
            for number in {int(self.waits.subject[place]), int(self.waits.object[place])} & found.keys():
                found[number].append(wait)
        return found

    def stalls_of(self, index: int) -> list[StallMark]:
        """What shows that a process stands still though it could go on."""
        return [self.stalls.make(number) for number in np.flatnonzero(self.stalls.subject == index).tolist()]

    def first(self, waiters: int) -> list[Wait]:
        """All waits of the first so many nodes that wait."""
        _, place = np.unique(self.waits.subject, return_index=True)
        chosen = self.waits.subject[np.sort(place)[:waiters]]
        return [self.wait(number) for number in np.flatnonzero(np.isin(self.waits.subject, chosen)).tolist()]

    @cached_property
    def waiting(self) -> set[int]:
        """Indices of the processes that wait."""
        return set(distinct(self.waits.subject[self.waits.subject >= 0]).tolist())

    @cached_property
    def busy(self) -> set[int]:
        """Indices of the processes that wait or stand still in something that shows."""
        return self.waiting | set(distinct(self.stalls.subject).tolist())

    def collectives(self) -> set[int]:
        """Ids of the communicators in which a collective stands still."""
        return {*self.waits.collectives, *self.stalls.collectives}

    @cached_property
    def sinks(self) -> list[Sink]:
        """Where the waits end, most waits first. O(edges + nodes)."""
        places, sinks = self.places, list[Sink]()
        sink_of = np.full(len(places.nodes), -1, np.int64)
        for part in final_components(len(places.nodes), places.waiters, places.targets, places.reaching):
            sink_of[part] = len(sinks)
            nodes = (self.nodes.node(number) for number in places.nodes[part].tolist())
            sinks.append(Sink(tuple(sorted(nodes, key=repr)), self.job))
        into = sink_of[places.targets]
        for place in np.flatnonzero(into >= 0).tolist():
            sink, wait = sinks[into[place]], self.wait(int(places.edges[place]))
            (sink.inside if sink_of[places.waiters[place]] == into[place] else sink.waits).append(wait)
        of_stall = sink_of[places.standing]
        for number in np.flatnonzero(of_stall >= 0).tolist():
            sinks[of_stall[number]].stalls.append(self.stalls.make(number))
        return sorted(sinks, key=lambda sink: (-len(sink.waits), repr(sink.nodes)))

    @cached_property
    def ends(self) -> Ends:
        """Where the waits end, by kind."""
        ends, retracted = Ends(), set(self.waits.object[list(self.retracted)].tolist())
        for sink in self.sinks:
            node = sink.nodes[0]
            if sink.is_cycle:
                ends.cycles.append(sink)
            elif isinstance(node, base.LinkNode):
                ends.links.append(sink)
            elif isinstance(node, base.AbsentNode | base.HiddenNode):
                ends.unseen.append(sink)
            elif sink.waits or (sink.stalls and self.nodes.number(node) not in retracted):
                # One that has ended is an end even where nobody waits for it: its work was done. And one for which nobody has
                # begun to wait holds nobody up.
                (ends.beside_absent if sink.may_wait_for_absent else ends.ranks).append(sink)
        return ends

    @cached_property
    def places(self) -> Places:
        """Its nodes and what joins them as numbers from 0 on."""
        return Places(self)

    def victims(self, sinks: Iterable[Sink]) -> set[int]:
        """Indices of the processes that wait for one of these ends, directly or through others. O(edges)."""
        return self.behind(node for sink in sinks for node in sink.nodes)

    def veiled(self, sink: Sink) -> set[int]:
        """Where waits end at a rank that NVLink hides: that process, who may wait for it, and those further in that wait for
        nobody. One of them holds the others up; which does not show. Empty for other ends, and where that rank was not observed.
        """
        node = sink.nodes[0]
        if not isinstance(node, base.HiddenNode) or (hidden := self.job.groups[node.group_id].holder(node.comm_rank)) is None:
            return set()
        doors = {wait.subject.index for wait in sink.waits if isinstance(wait.subject, RankNode)}
        return doors | {hidden.index} | (veiled(self.job.groups[node.group_id], node.comm_rank) - self.waiting)

    def behind(self, nodes: Iterable[Node]) -> set[int]:
        """Indices of those that wait for nodes, also through others and in retracted waits (they come later). O(edges)."""
        places = self.places
        ends = is_among(places.nodes, [self.nodes.number(node) for node in nodes])
        behind = places.nodes[places.reaching(np.flatnonzero(ends).tolist(), retracted=True) & ~ends]
        return set(behind[behind >= 0].tolist())


def _in_columns(form: type[EdgeT], facts: Sequence[Fact | FactColumns[Any]], nodes: Nodes) -> FactColumns[EdgeT]:
    """All waits, or all stalls, of some facts: those in columns, and behind them those that are objects already."""
    kind = FactKind.WAITS_FOR if form is Wait else FactKind.STANDS
    objects = [fact for fact in facts if isinstance(fact, form)]
    parts: list[FactColumns[EdgeT]] = [fact for fact in facts if isinstance(fact, FactColumns)]
    parts.append(FactColumns(
        kind, np.array([nodes.number(fact.subject) for fact in objects], np.int64),
        np.array([nodes.number(fact.object) if isinstance(fact, Wait) else NOBODY for fact in objects], np.int64),
        np.array([fact.strength is base.Strength.POSSIBLE for fact in objects], np.bool_), objects.__getitem__,
        frozenset(fact.key.group for fact in objects if not fact.key.point_to_point),
    ))  # fmt: skip
    first = list(accumulate(map(len, parts), initial=0))

    def make(number: int) -> EdgeT:
        part = bisect_right(first, number) - 1
        return parts[part].make(number - first[part])

    subject, about, possible = (
        np.concatenate([getattr(one, name) for one in parts]) for name in ("subject", "object", "possible")
    )
    return FactColumns(kind, subject, about, possible, make, frozenset().union(*(part.collectives for part in parts)))


@dataclass(slots=True)
class Sink:
    """Where waits end: one node, or a cycle of several. ``waits`` lead into it, those ``inside`` are between its nodes."""

    nodes: tuple[Node, ...]
    job: Job
    waits: list[Wait] = field(default_factory=list)
    inside: list[Wait] = field(default_factory=list)
    stalls: list[StallMark] = field(default_factory=list)

    @property
    def is_cycle(self) -> bool:
        """Whether ranks wait for each other in a cycle."""
        return len(self.nodes) > 1

    @property
    def member(self) -> Member | None:
        """The observed process this sink is, if it is one."""
        node = self.nodes[0]
        return self.job.member(node.index) if isinstance(node, RankNode) and not self.is_cycle else None

    @property
    def may_wait_for_absent(self) -> bool:
        """Whether a rank with nothing open has a neighbour nobody observed: their transfer may be dropped, or hidden."""
        member = self.member
        if member is None or self.stalls:
            return False
        waited = {wait.key.group for wait in self.waits if not wait.key.point_to_point}
        rings = ((group, own) for group, own in self.job.held_by(member) if group.id in waited)
        return beside_unobserved(self.job, member) or any(neighbours(own) - group.members.keys() for group, own in rings)


@dataclass(slots=True)
class Ends:
    """The ends of the waits by their kind."""

    cycles: list[Sink] = field(default_factory=list)
    ranks: list[Sink] = field(default_factory=list)
    beside_absent: list[Sink] = field(default_factory=list)
    """Ranks with nothing open that may wait for a neighbour nobody observed."""
    links: list[Sink] = field(default_factory=list)
    unseen: list[Sink] = field(default_factory=list)


class Places:
    """Nodes as numbers from 0 on; ``edges``: waits that are followed, ``waiters`` to ``targets``; ``standing``: of stalls."""

    def __init__(self, graph: Waits) -> None:
        subject, halted = graph.waits.subject, np.array([one.index for one in graph.job.halted], np.int64)
        # A stopped or ended process waits for nobody.
        edges = np.flatnonzero((subject != graph.waits.object) & ~is_among(subject, halted))
        every = subject[edges], graph.waits.object[edges], graph.stalls.subject, halted
        self.nodes, places = np.unique(np.concatenate(every), return_inverse=True)
        self._waiters, self._targets, self.standing, _ = np.split(places.reshape(-1), np.cumsum([*map(len, every[:3])]))
        # A wait that is merely possible counts only where nothing else leaves the node. Proven and likely ones are followed
        # alike: of two operations that a rank has open, the one of which more is proven need not come first.
        followed, possible = ~is_among(edges, [*graph.retracted]), graph.waits.possible[edges]
        if possible.any():
            followed &= ~possible | ~np.isin(self._waiters, self._waiters[followed & ~possible])
        self.edges, self.waiters, self.targets = edges[followed], self._waiters[followed], self._targets[followed]
        self._reached: tuple[list[int], Flags] = [], np.zeros(len(self.nodes), np.bool_)

    def reaching(self, ends: list[int], *, retracted: bool = False) -> Flags:
        """As of :func:`reaching`, by the waits that are followed (kept: who is behind is asked soon) or by all."""
        if retracted and len(self.edges) < len(self._waiters):
            return reaching(adjacency(len(self.nodes), self._targets, self._waiters), ends)
        if self._reached[0] != ends:
            self._reached = ends, reaching(self._preceding, ends)
        return self._reached[1]

    @cached_property
    def _preceding(self) -> tuple[list[int], list[int]]:
        return adjacency(len(self.nodes), self.targets, self.waiters)
