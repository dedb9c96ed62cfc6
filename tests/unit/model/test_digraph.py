"""Directed graphs against networkx, which is the reference."""

from __future__ import annotations

import random
from functools import partial

import networkx as nx
import numpy as np
import pytest

from ncclwatch.model.digraph import adjacency, components, final_components, reaching


@pytest.mark.parametrize("seed", range(20))
def test_components_and_ancestors_agree_with_networkx(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randrange(2, 60)
    reference = nx.gnp_random_graph(size, chance.choice([0.01, 0.05, 0.2]), seed=seed, directed=True)
    following = {node: list(reference.successors(node)) for node in reference}
    parts = {frozenset(part) for part in nx.strongly_connected_components(reference)}
    assert {frozenset(part) for part in components(following)} == parts
    edges = np.array(list(reference.edges), np.int64).reshape(-1, 2)
    sources, targets = edges[:, 0], edges[:, 1]
    node = chance.randrange(size)
    preceding = adjacency(size, targets, sources)
    assert set(np.flatnonzero(reaching(preceding, [node])).tolist()) == nx.ancestors(reference, node) | {node}
    final = {part for part in parts if all(target in part for member in part for target in following[member])}
    assert {frozenset(part) for part in final_components(size, sources, targets, partial(reaching, preceding))} == final


def test_a_chain_of_100_000_ranks_needs_no_recursion() -> None:
    size = 100_000
    assert len(components({node: [node + 1] for node in range(size - 1)})) == size
    nodes = np.arange(size)
    following = (nodes + 1) % size
    assert len(final_components(size, nodes, following, partial(reaching, adjacency(size, following, nodes)))) == 1
