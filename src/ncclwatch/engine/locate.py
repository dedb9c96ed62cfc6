"""Follow the waits to where they end: the ranks, links or unseen places that hold everybody else up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ncclwatch.engine.edges import Node, RankNode, StallMark, Wait, Waits
from ncclwatch.engine.graph import components, reaching
from ncclwatch.engine.job import Job, Member


@dataclass(slots=True)
class Sink:
    """Where a chain of waits ends: one node, or several that wait for each other in a circle.

    ``waits`` are the edges that lead into it, ``inside`` the edges between its own nodes, ``stalls`` what its ranks could do and
    do not do, ``preceding`` the graph backward (one for all sinks).
    """

    nodes: tuple[Node, ...]
    waits: list[Wait] = field(default_factory=list)
    inside: list[Wait] = field(default_factory=list)
    stalls: list[StallMark] = field(default_factory=list)
    preceding: Mapping[Node, Sequence[Node]] = field(default_factory=dict)

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


def find_sinks(job: Job, waits: Waits) -> list[Sink]:
    """The ends of the wait-for graph, most waits first. A stopped or ended process waits for nobody: it is where a chain ends.

    O(edges + nodes).
    """
    halted = {RankNode(member.index) for member in job.members if member.stopped or member.gone}
    edges = [wait for wait in waits.edges if wait.waiter not in halted and wait.waiter != wait.target]
    nodes: dict[Node, None] = dict.fromkeys(halted)
    nodes.update(dict.fromkeys(RankNode(mark.member.index) for mark in waits.stalls))
    following: dict[Node, list[Node]] = defaultdict(list)
    preceding: dict[Node, list[Node]] = defaultdict(list)
    for waiter, target in dict.fromkeys((wait.waiter, wait.target) for wait in edges):
        nodes.update({waiter: None, target: None})
        following[waiter].append(target)
        preceding[target].append(waiter)
    parts = [tuple(sorted(part, key=repr)) for part in components(nodes, following)]
    component_of = {node: number for number, part in enumerate(parts) for node in part}
    leaving = {component_of[w.waiter] for w in edges if component_of[w.waiter] != component_of[w.target]}
    sinks = {number: Sink(part) for number, part in enumerate(parts) if number not in leaving}
    _attach_evidence(sinks, component_of, edges, waits.stalls)
    for sink in sinks.values():
        sink.preceding = preceding
    return sorted(sinks.values(), key=lambda sink: (-len(sink.waits), repr(sink.nodes)))


def victims_of(sinks: Iterable[Sink]) -> set[int]:
    """Indices of the processes that wait for one of the sinks, directly or through others. O(edges)."""
    found = list(sinks)
    if not found:
        return set()
    ends = {node for sink in found for node in sink.nodes}
    return {node.index for node in reaching(ends, found[0].preceding) - ends if isinstance(node, RankNode)}


def _attach_evidence(sinks: dict[int, Sink], component_of: dict[Node, int], edges: list[Wait], stalls: list[StallMark]) -> None:
    for wait in edges:
        sink = sinks.get(component_of[wait.target])
        if sink is not None:
            (sink.inside if component_of[wait.waiter] == component_of[wait.target] else sink.waits).append(wait)
    for mark in stalls:
        sink = sinks.get(component_of[RankNode(mark.member.index)])
        if sink is not None:
            sink.stalls.append(mark)
