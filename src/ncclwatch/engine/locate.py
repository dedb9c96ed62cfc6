"""Follow the waits to where they end: the ranks, links or unseen places that hold everybody else up."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import networkx as nx

from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.waits import Node, RankNode, StallMark, Wait, Waits


@dataclass(slots=True)
class Sink:
    """Where a chain of waits ends: one node, or several that wait for each other in a circle.

    ``waits`` are the edges that lead into it, ``inside`` the edges between its own nodes, ``stalls`` what its ranks could do and
    do not do, ``victims`` the indices of all processes that wait for it, directly or through others.
    """

    nodes: tuple[Node, ...]
    waits: list[Wait] = field(default_factory=list)
    inside: list[Wait] = field(default_factory=list)
    stalls: list[StallMark] = field(default_factory=list)
    victims: set[int] = field(default_factory=set)

    @property
    def is_cycle(self) -> bool:
        """Whether ranks wait for each other in a circle."""
        return len(self.nodes) > 1

    def member(self, job: Job) -> Member | None:
        """The observed process this sink is, if it is one."""
        node = self.nodes[0]
        if self.is_cycle or not isinstance(node, RankNode):
            return None
        return next(member for member in job.members if member.index == node.index)


def find_sinks(job: Job, waits: Waits) -> list[Sink]:
    """The ends of the wait-for graph, most victims first. A stopped or ended process waits for nobody: it is where a chain ends.

    O(edges + nodes).
    """
    halted = {RankNode(member.index) for member in job.members if member.stopped or member.gone}
    graph = nx.DiGraph()
    graph.add_nodes_from(halted)
    graph.add_nodes_from(RankNode(mark.member.index) for mark in waits.stalls)
    edges = [wait for wait in waits.edges if wait.waiter not in halted and wait.waiter != wait.target]
    graph.add_edges_from((wait.waiter, wait.target) for wait in edges)
    component_of: dict[Node, int] = {}
    components: list[tuple[Node, ...]] = []
    for nodes in nx.strongly_connected_components(graph):
        for node in nodes:
            component_of[node] = len(components)
        components.append(tuple(sorted(nodes, key=repr)))
    leaving = {component_of[w.waiter] for w in edges if component_of[w.waiter] != component_of[w.target]}
    sinks = {number: Sink(nodes) for number, nodes in enumerate(components) if number not in leaving}
    _attach_evidence(sinks, component_of, edges, waits.stalls)
    for number, sink in sinks.items():
        sink.victims = {
            node.index
            for node in nx.ancestors(graph, components[number][0])
            if isinstance(node, RankNode) and component_of[node] != number
        }
    return sorted(sinks.values(), key=lambda sink: (-len(sink.victims), repr(sink.nodes)))


def _attach_evidence(sinks: dict[int, Sink], component_of: dict[Node, int], edges: list[Wait], stalls: list[StallMark]) -> None:
    for wait in edges:
        sink = sinks.get(component_of[wait.target])
        if sink is not None:
            (sink.inside if component_of[wait.waiter] == component_of[wait.target] else sink.waits).append(wait)
    for mark in stalls:
        sink = sinks.get(component_of[RankNode(mark.member.index)])
        if sink is not None:
            sink.stalls.append(mark)


def spread(waits: list[Wait]) -> dict[int, list[Wait]]:
    """Waits by communicator, in the order in which they were found."""
    by_communicator: dict[int, list[Wait]] = defaultdict(list)
    for wait in waits:
        by_communicator[wait.key.comm_hash].append(wait)
    return dict(by_communicator)
