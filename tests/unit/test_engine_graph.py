"""Graph helpers against networkx, which is the reference."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from ncclwatch.engine.graph import components, reaching


@pytest.mark.parametrize("seed", range(20))
def test_components_and_ancestors_agree_with_networkx(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randrange(2, 60)
    graph = nx.gnp_random_graph(size, chance.choice([0.01, 0.05, 0.2]), seed=seed, directed=True)
    following = {node: list(graph.successors(node)) for node in graph}
    preceding = {node: list(graph.predecessors(node)) for node in graph}
    expected = {frozenset(part) for part in nx.strongly_connected_components(graph)}
    assert {frozenset(part) for part in components(list(graph), following)} == expected
    node = chance.randrange(size)
    assert reaching([node], preceding) == nx.ancestors(graph, node) | {node}


def test_a_chain_of_100_000_ranks_needs_no_recursion() -> None:
    size = 100_000
    assert len(components(range(size), {node: [node + 1] for node in range(size - 1)})) == size
