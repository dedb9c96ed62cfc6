"""The wait-for graph of one job, and where it ends: strongly connected components that nothing leaves.

Waits of the network's transfers lie in columns (100,000 ranks have hundreds of thousands of them), all others are objects. A wait
may be retracted: it is not followed any more, and whoever waits so still counts among those behind.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from ncclwatch.engine.edges import Columns, Nodes, StallMark, Wait
from ncclwatch.engine.evidence.base import Strength
from ncclwatch.engine.evidence.disagreements import Mismatch
from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.nodes import Node, RankNode
from ncclwatch.engine.transfers import Column, Flags

T = TypeVar("T")
NodeT = TypeVar("NodeT", bound=Hashable)


class Waits:
    """The wait-for graph of one job: what the network's transfers show in columns, the rest as objects.

    Waits have an order, and a number by it: those of the columns come first.
    """

    def __init__(
        self, edges: Iterable[Wait] = (), stalls: Iterable[StallMark] = (), mismatches: Iterable[Mismatch] = (),
        *, columns: Columns[Wait] | None = None, stall_columns: Columns[StallMark] | None = None, nodes: Nodes | None = None,
    ) -> None:  # fmt: skip
        self.nodes = nodes or Nodes()
        self.mismatches = list(mismatches)
        self.columns, self.stall_columns = columns, stall_columns
        self.added, self.added_stalls = list(edges), list(stalls)
        self.retracted: set[int] = set()
        """Numbers of the waits that are not followed any more."""

    @property
    def open(self) -> bool:
        """Whether any transfer is unfinished."""
        return bool(self.added or self.added_stalls or self.columns or self.stall_columns)

    def with_edges(self, edges: Iterable[Wait]) -> Waits:
        """The same stalls, and these waits."""
        return Waits(edges, self.added_stalls, self.mismatches, stall_columns=self.stall_columns, nodes=self.nodes)

    def ends(self) -> tuple[Column, Column]:
        """Numbers of the waiters and of those waited for, of every wait."""
        waiters = np.array([self.nodes.number(wait.waiter) for wait in self.added], np.int64)
        targets = np.array([self.nodes.number(wait.target) for wait in self.added], np.int64)
        if self.columns is None:
            return waiters, targets
        return np.r_[self.columns.who, waiters], np.r_[self.columns.target, targets]

    def wait(self, number: int) -> Wait:
        """One wait."""
        in_columns = len(self.columns) if self.columns is not None else 0
        columns = self.columns
        found = columns.make(number) if columns is not None and number < in_columns else self.added[number - in_columns]
        found.number = number
        return found

    def possible(self) -> Flags:
        """For each wait whether it is no more than possible. Those in columns are proven.

        Proven and likely ones are followed alike: of two operations that a rank has open, the one of which more is proven need
        not come first.
        """
        in_columns = len(self.columns) if self.columns is not None else 0
        found = np.zeros(in_columns + len(self.added), np.bool_)
        found[in_columns:] = [wait.strength is Strength.POSSIBLE for wait in self.added]
        return found

    def standing(self) -> Column:
        """Indices of the processes that stand still, one for every stall."""
        added = np.array([mark.member.index for mark in self.added_stalls], np.int64)
        return added if self.stall_columns is None else np.r_[self.stall_columns.who, added]

    def stall(self, number: int) -> StallMark:
        """One stall."""
        in_columns = len(self.stall_columns) if self.stall_columns is not None else 0
        if self.stall_columns is not None and number < in_columns:
            return self.stall_columns.make(number)
        return self.added_stalls[number - in_columns]

    def all(self) -> Iterator[Wait]:
        """Every wait as an object."""
        yield from map(self.wait, range(len(self.ends()[0])))

    def of(self, indices: Iterable[int]) -> dict[int, list[Wait]]:
        """For each of these processes its waits and those for it."""
        found: dict[int, list[Wait]] = {index: [] for index in indices}
        wanted = np.array(list(found), np.int64)
        waiters, targets = self.ends()
        for place in np.flatnonzero(np.isin(waiters, wanted) | np.isin(targets, wanted)).tolist():
            wait = self.wait(place)
            for number in {int(waiters[place]), int(targets[place])} & found.keys():
                found[number].append(wait)
        return found

    def first(self, waiters: int) -> list[Wait]:
        """All waits of the first so many nodes that wait."""
        who, _ = self.ends()
        _, place = np.unique(who, return_index=True)
        chosen = who[np.sort(place)[:waiters]]
        return [self.wait(number) for number in np.flatnonzero(np.isin(who, chosen)).tolist()]

    def waiting(self) -> set[int]:
        """Indices of the processes that wait."""
        waiters, _ = self.ends()
        return set(np.unique(waiters[waiters >= 0]).tolist())

    def busy(self) -> set[int]:
        """Indices of the processes that wait or stand still in something that shows."""
        return self.waiting() | set(np.unique(self.standing()).tolist())

    def collectives(self) -> set[int]:
        """Ids of the communicators in which a collective stands still."""
        keys = (*(wait.key for wait in self.added), *(mark.key for mark in self.added_stalls))
        found = {key.group for key in keys if not key.point_to_point}
        for columns in (self.columns, self.stall_columns):
            if columns is not None:
                found |= columns.collectives
        return found


@dataclass(slots=True)
class Sink:
    """Where a chain of waits ends: one node, or several that wait for each other in a cycle.

    ``waits`` are the waits that lead into it, ``inside`` those between its own nodes, ``stalls`` what its ranks could do and do
    not do, ``graph`` the whole of it (one for all sinks).
    """

    nodes: tuple[Node, ...]
    graph: Places
    waits: list[Wait] = field(default_factory=list)
    inside: list[Wait] = field(default_factory=list)
    stalls: list[StallMark] = field(default_factory=list)

    @property
    def is_cycle(self) -> bool:
        """Whether ranks wait for each other in a cycle."""
        return len(self.nodes) > 1

    def member(self, job: Job) -> Member | None:
        """The observed process this sink is, if it is one."""
        node = self.nodes[0]
        if self.is_cycle or not isinstance(node, RankNode):
            return None
        return job.member(node.index)

    def behind(self) -> set[int]:
        """Indices of the processes that wait for it, directly or through others. O(edges)."""
        return self.graph.behind(self.nodes)


class Places:
    """The waits of a job between places: numbers from 0 on, of the nodes in their order."""

    def __init__(self, job: Job, waits: Waits) -> None:
        self._names = waits.nodes
        halted = np.array([member.index for member in job.members if member.halted], np.int64)
        waiters, targets = waits.ends()
        kept = waiters != targets
        if len(halted):
            # A stopped or ended process waits for nobody.
            kept &= ~np.isin(waiters, halted)
        self._edges: Column = np.flatnonzero(kept)
        waiters, targets = waiters[self._edges], targets[self._edges]
        standing = waits.standing()
        self._nodes: Column
        self._nodes, places = np.unique(np.r_[waiters, targets, standing, halted], return_inverse=True)
        places = places.reshape(-1)
        self._waiters, self._targets = places[: len(waiters)], places[len(waiters) : 2 * len(waiters)]
        self.standing = places[2 * len(waiters) : 2 * len(waiters) + len(standing)]
        self.size = len(self._nodes)
        followed = np.full(len(waiters), True)
        if waits.retracted:
            followed = ~np.isin(self._edges, np.array(sorted(waits.retracted), np.int64))
        possible = waits.possible()
        if possible.any():
            # A wait that is merely possible counts only where nothing else leaves the node.
            sure = np.zeros(self.size, np.bool_)
            sure[self._waiters[followed & ~possible[self._edges]]] = True
            followed &= ~(possible[self._edges] & sure[self._waiters])
        self.edges: Column = self._edges[followed]
        """Numbers of the waits that are followed."""
        self.waiters, self.targets = self._waiters[followed], self._targets[followed]

    def node(self, place: int) -> Node:
        """The node at a place."""
        return self._names.node(int(self._nodes[place]))

    @cached_property
    def preceding(self) -> tuple[list[int], list[int]]:
        """Who waits for each node, by the waits that are followed."""
        return neighbours(self.size, self.targets, self.waiters)

    def behind(self, nodes: Iterable[Node]) -> set[int]:
        """Indices of the processes that wait for nodes, directly or through others. O(edges).

        A wait that was retracted is not begun: it comes later, and lasts as long.
        """
        ends = np.searchsorted(self._nodes, [self._names.number(node) for node in nodes]).tolist()
        all_followed = len(self.edges) == len(self._edges)
        preceding = self.preceding if all_followed else neighbours(self.size, self._targets, self._waiters)
        found = self._nodes[sorted(reaching(preceding, ends) - set(ends))]
        return set(found[found >= 0].tolist())


def find_sinks(job: Job, waits: Waits) -> list[Sink]:
    """The ends of the wait-for graph, most waits first. A stopped or ended process waits for nobody: it is where a chain ends.

    O(edges + nodes).
    """
    graph = Places(job, waits)
    sinks: list[Sink] = []
    sink_of = np.full(graph.size, -1, np.int64)
    for part in final_components(graph.size, graph.waiters, graph.targets, graph.preceding):
        sink_of[part] = len(sinks)
        sinks.append(Sink(tuple(sorted((graph.node(place) for place in part), key=repr)), graph))
    into = sink_of[graph.targets]
    for place in np.flatnonzero(into >= 0).tolist():
        sink, wait = sinks[into[place]], waits.wait(int(graph.edges[place]))
        (sink.inside if sink_of[graph.waiters[place]] == into[place] else sink.waits).append(wait)
    of_stall = sink_of[graph.standing]
    for number in np.flatnonzero(of_stall >= 0).tolist():
        sinks[of_stall[number]].stalls.append(waits.stall(number))
    return sorted(sinks, key=lambda sink: (-len(sink.waits), repr(sink.nodes)))


def victims_of(sinks: Sequence[Sink]) -> set[int]:
    """Indices of the processes that wait for one of the sinks, directly or through others. O(edges)."""
    if not sinks:
        return set()
    return sinks[0].graph.behind([node for sink in sinks for node in sink.nodes])


def final_components(size: int, sources: Column, targets: Column, preceding: tuple[list[int], list[int]]) -> list[list[int]]:
    """Strongly connected components of the nodes below ``size`` without an edge that leaves them, where each of ``sources`` has
    an edge to that of ``targets``; ``preceding``: the :func:`neighbours` of each node, against the edges. O(nodes + edges).
    """
    out = np.bincount(sources, minlength=size)
    ends: list[int] = np.flatnonzero(out == 0).tolist()
    # Whatever reaches a node without edges is in no such component; few nodes are left to be searched for cycles.
    done = reaching(preceding, ends)
    found = [[node] for node in ends]
    if len(done) == size:
        return found
    first, following = neighbours(size, sources, targets)
    left = [node for node in range(size) if node not in done]
    after = {node: following[first[node] : first[node + 1]] for node in left}
    for part in components(left, after):
        own = set(part)
        if all(other in own for node in part for other in after[node]):
            found.append(part)
    return found


def reaching(preceding: tuple[list[int], list[int]], targets: Iterable[int]) -> set[int]:
    """All nodes from which one of ``targets`` can be reached, themselves included. O(nodes + edges)."""
    seen = set(targets)
    todo = list(seen)
    first, others = preceding
    while todo:
        node = todo.pop()
        for other in others[first[node] : first[node + 1]]:
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return seen


def neighbours(size: int, nodes: Column, others: Column) -> tuple[list[int], list[int]]:
    """(where the neighbours of each node begin, all neighbours)"""
    order = np.argsort(nodes, kind="stable")
    first = np.cumsum(np.bincount(nodes, minlength=size))
    return [0, *first.tolist()], others[order].tolist()


def components(nodes: Iterable[NodeT], following: Mapping[NodeT, Sequence[NodeT]]) -> list[list[NodeT]]:
    """Strongly connected components (Tarjan, without recursion: 100,000 ranks in one chain must not overflow a stack), each list
    in no particular order. O(nodes + edges).
    """
    number: dict[NodeT, int] = {}
    lowest: dict[NodeT, int] = {}
    open_nodes: list[NodeT] = []
    is_open: set[NodeT] = set()
    found: list[list[NodeT]] = []
    for start in nodes:
        if start in number:
            continue
        path: list[tuple[NodeT, int]] = [(start, 0)]
        while path:
            node, edge = path.pop()
            if edge == 0:
                number[node] = lowest[node] = len(number)
                open_nodes.append(node)
                is_open.add(node)
            targets = following.get(node, ())
            while edge < len(targets):
                target = targets[edge]
                edge += 1
                if target not in number:
                    path += [(node, edge), (target, 0)]
                    break
                if target in is_open:
                    lowest[node] = min(lowest[node], number[target])
            else:
                if lowest[node] == number[node]:
                    found.append(_take(open_nodes, is_open, node))
                if path:
                    parent = path[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[node])
    return found


def _take(open_nodes: list[NodeT], is_open: set[NodeT], root: NodeT) -> list[NodeT]:
    """Close the component whose root is given: it is what was opened since."""
    component: list[NodeT] = []
    while True:
        node = open_nodes.pop()
        is_open.discard(node)
        component.append(node)
        if node == root:
            return component
