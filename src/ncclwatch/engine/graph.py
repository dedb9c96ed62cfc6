"""The little graph theory that location needs, without recursion: 100,000 ranks in one chain must not overflow a stack."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

NodeT = TypeVar("NodeT", bound=Hashable)


def components(nodes: Iterable[NodeT], following: Mapping[NodeT, Sequence[NodeT]]) -> list[list[NodeT]]:
    """Strongly connected components (Tarjan, iterative), each list in no particular order. O(nodes + edges)."""
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


class Graph:
    """A directed graph of nodes from 0 on."""

    def __init__(self, size: int, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """An edge from each of ``sources`` to that of ``targets``."""
        self.size = size
        self._following = _neighbours(size, sources, targets)
        self._preceding = _neighbours(size, targets, sources)

    def reaching(self, targets: Iterable[int]) -> set[int]:
        """All nodes from which one of ``targets`` can be reached, themselves included. O(nodes + edges)."""
        seen = set(targets)
        todo = list(seen)
        first, neighbours = self._preceding
        while todo:
            node = todo.pop()
            for other in neighbours[first[node] : first[node + 1]]:
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return seen

    def final_components(self) -> list[list[int]]:
        """Strongly connected components without an edge that leaves them. O(nodes + edges)."""
        first, neighbours = self._following
        ends = [node for node in range(self.size) if first[node] == first[node + 1]]
        # Whatever reaches a node without edges is in no such component; few nodes are left to be searched for circles.
        done = self.reaching(ends)
        left = [node for node in range(self.size) if node not in done] if len(done) < self.size else []
        following = {node: neighbours[first[node] : first[node + 1]] for node in left}
        found = [[node] for node in ends]
        for part in components(left, following):
            own = set(part)
            if all(other in own for node in part for other in following[node]):
                found.append(part)
        return found


def _neighbours(size: int, nodes: NDArray[np.int64], others: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """(where the neighbours of each node begin, all neighbours)"""
    order = np.argsort(nodes, kind="stable")
    first = np.cumsum(np.bincount(nodes, minlength=size))
    return [0, *first.tolist()], others[order].tolist()
