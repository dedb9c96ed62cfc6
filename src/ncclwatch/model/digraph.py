"""Directed graphs of many nodes, which are numbers from 0 on: who reaches whom, and where all ways end."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

import numpy as np

from ncclwatch.model.columns import Column, Flags

NodeT = TypeVar("NodeT", bound=Hashable)


def final_components(size: int, sources: Column, targets: Column, reach: Callable[[list[int]], Flags]) -> list[list[int]]:
    """Strongly connected components no edge leaves; ``reach``: as :func:`reaching`. O(nodes + edges)."""
    ends: list[int] = np.flatnonzero(np.bincount(sources, minlength=size) == 0).tolist()
    # Whatever reaches a node without edges is in no such component; few nodes are left to be searched for cycles.
    done = reach(ends)
    found = [[node] for node in ends]
    if done.all():
        return found
    first, following = adjacency(size, sources, targets)
    after = {node: following[first[node] : first[node + 1]] for node in np.flatnonzero(~done).tolist()}
    return found + [list(part) for part in components(after) if all(other in part for node in part for other in after[node])]


def reaching(preceding: tuple[list[int], list[int]], targets: Iterable[int]) -> Flags:
    """Marks all nodes from which one of ``targets`` can be reached, themselves included. O(nodes + edges)."""
    first, others = preceding
    todo, seen = list(targets), bytearray(len(first) - 1)
    for node in todo:
        seen[node] = 1
    while todo:
        node = todo.pop()
        for other in others[first[node] : first[node + 1]]:
            if not seen[other]:
                seen[other] = 1
                todo.append(other)
    return np.frombuffer(seen, np.bool_)


def adjacency(size: int, nodes: Column, others: Column) -> tuple[list[int], list[int]]:
    """(where the neighbours of each node begin, all neighbours)"""
    first = np.cumsum(np.bincount(nodes, minlength=size))
    return [0, *first.tolist()], others[np.argsort(nodes, kind="stable")].tolist()


def components(following: Mapping[NodeT, Iterable[NodeT]]) -> list[set[NodeT]]:
    """Strongly connected components, in no particular order. O(nodes + edges)."""
    import networkx as nx  # It takes a tenth of a second to load, and most jobs have no cycle.

    return list(nx.strongly_connected_components(nx.DiGraph(following)))
