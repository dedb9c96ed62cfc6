"""Follow the waits to where they end: the ranks, links or unseen places that hold everybody else up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ncclwatch.engine.columns import Column
from ncclwatch.engine.edges import Node, RankNode, StallMark, Wait, Waits
from ncclwatch.engine.graph import Graph
from ncclwatch.engine.job import Job, Member


@dataclass(slots=True)
class Sink:
    """Where a chain of waits ends: one node, or several that wait for each other in a circle.

    ``waits`` are the edges that lead into it, ``inside`` the edges between its own nodes, ``stalls`` what its ranks could do and
    do not do, ``graph`` the whole of it (one for all sinks).
    """

    nodes: tuple[Node, ...]
    graph: WaitGraph
    waits: list[Wait] = field(default_factory=list)
    inside: list[Wait] = field(default_factory=list)
    stalls: list[StallMark] = field(default_factory=list)

    @property
    def is_cycle(self) -> bool:
        """Whether ranks wait for each other in a circle."""
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


class WaitGraph:
    """The waits of a job as a graph over places: numbers from 0 on, of the nodes in their order."""

    def __init__(self, job: Job, waits: Waits) -> None:
        self._names = waits.nodes
        halted = np.array([member.index for member in job.members if member.halted], np.int64)
        waiters, targets = waits.ends()
        self.edges: Column = np.flatnonzero(~np.isin(waiters, halted) & (waiters != targets))
        """Numbers of the waits that are followed: a stopped or ended process waits for nobody."""
        waiters, targets = waiters[self.edges], targets[self.edges]
        standing = waits.standing()
        self._nodes: Column
        self._nodes, places = np.unique(np.r_[waiters, targets, standing, halted], return_inverse=True)
        places = places.reshape(-1)
        self.waiters, self.targets = places[: len(waiters)], places[len(waiters) : 2 * len(waiters)]
        self.standing = places[2 * len(waiters) : 2 * len(waiters) + len(standing)]
        self.graph = Graph(len(self._nodes), self.waiters, self.targets)

    def node(self, place: int) -> Node:
        """The node at a place."""
        return self._names.node(int(self._nodes[place]))

    def behind(self, nodes: Iterable[Node]) -> set[int]:
        """Indices of the processes that wait for nodes, directly or through others. O(edges)."""
        ends = np.searchsorted(self._nodes, [self._names.number(node) for node in nodes]).tolist()
        found = self._nodes[sorted(self.graph.reaching(ends) - set(ends))]
        return set(found[found >= 0].tolist())


def find_sinks(job: Job, waits: Waits) -> list[Sink]:
    """The ends of the wait-for graph, most waits first. A stopped or ended process waits for nobody: it is where a chain ends.

    O(edges + nodes).
    """
    graph = WaitGraph(job, waits)
    sinks: list[Sink] = []
    sink_of = np.full(graph.graph.size, -1, np.int64)
    for part in graph.graph.final_components():
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
