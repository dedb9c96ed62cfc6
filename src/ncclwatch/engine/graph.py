"""The little graph theory that location needs, without recursion: 100,000 ranks in one chain must not overflow a stack."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

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


def reaching(targets: Iterable[NodeT], preceding: Mapping[NodeT, Sequence[NodeT]]) -> set[NodeT]:
    """All nodes from which one of ``targets`` can be reached, themselves included. O(nodes + edges)."""
    seen = set(targets)
    todo = list(seen)
    while todo:
        for node in preceding.get(todo.pop(), ()):
            if node not in seen:
                seen.add(node)
                todo.append(node)
    return seen
