from __future__ import annotations

import numpy as np
import pytest

from ncclwatch.simulate.layout import coordinates, groups, membership, node_of, ranks_of_node, ranks_of_stage, stage_of
from ncclwatch.simulate.scenario import Layout


def test_groups_are_megatrons_for_two_by_two_by_two() -> None:
    layout = Layout(tp=2, pp=2, dp=2)
    assert groups(layout, "tp").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert groups(layout, "dp").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(layout, "pp").tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_the_example_of_megatrons_documentation() -> None:
    """16 GPUs, tensor 2, pipeline 4: the groups that parallel_state.py's initialize_model_parallel lists."""
    layout = Layout(tp=2, pp=4, dp=2)
    assert groups(layout, "dp").tolist() == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert groups(layout, "pp").tolist() == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]


def test_context_and_expert_groups() -> None:
    layout = Layout(tp=2, cp=2, dp=4, ep=4)
    assert groups(layout, "cp").tolist()[:2] == [[0, 2], [1, 3]]
    assert groups(layout, "dp").tolist() == [[0, 2, 4, 6, 8, 10, 12, 14], [1, 3, 5, 7, 9, 11, 13, 15]]
    assert groups(layout, "ep").tolist() == [[0, 2, 4, 6], [1, 3, 5, 7], [8, 10, 12, 14], [9, 11, 13, 15]]


@pytest.mark.parametrize("role", ["tp", "cp", "ep", "dp", "pp", "world"])
@pytest.mark.parametrize("layout", [Layout(2, 3, 4, 2, 2), Layout(8, 8, 8), Layout(1, 1, 1), Layout(1, 4, 6, 3, 1)])
def test_groups_of_a_role_partition_the_world(layout: Layout, role: str) -> None:
    table = groups(layout, role)
    assert sorted(table.reshape(-1).tolist()) == list(range(layout.world))
    group, index = membership(layout, role)
    assert (table[group, index] == np.arange(layout.world)).all()
    if role not in ("pp", "world"):
        for row in table:
            assert len({stage_of(layout, int(r)) for r in row}) == 1


def test_coordinates_and_stages_agree() -> None:
    layout = Layout(tp=2, cp=2, dp=2, pp=3, ep=2)
    for rank in range(layout.world):
        c = coordinates(layout, rank)
        assert rank == c.tp + layout.tp * (c.cp + layout.cp * (c.dp + layout.dp * c.pp))
        assert rank in ranks_of_stage(layout, c.pp)
    with pytest.raises(ValueError, match="not in a world"):
        coordinates(layout, layout.world)


def test_nodes_hold_consecutive_ranks() -> None:
    layout = Layout(tp=2, dp=5, ranks_per_node=4)
    assert [node_of(layout, r) for r in range(10)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert list(ranks_of_node(layout, 2)) == [8, 9]
