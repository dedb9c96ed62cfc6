"""The sizes of a layout where what some groups are for is not known."""

from __future__ import annotations

import numpy as np

from ncclwatch.engine.topology.layout import assemble_topology, order_stages
from ncclwatch.engine.topology.model import Layout, Role, Topology
from ncclwatch.engine.topology.record import KnownGroup, KnownJob
from ncclwatch.engine.topology.roles import Opinion

WORLD = 8
TENSOR: list[tuple[int, ...]] = [(0, 1), (2, 3), (4, 5), (6, 7)]
DATA: list[tuple[int, ...]] = [(0, 2, 4, 6), (1, 3, 5, 7)]


def topology(roles: dict[tuple[int, ...], Role], again: tuple[int, ...] = ()) -> Topology:
    """A job whose groups are judged so; ``again``: one more group of which nobody knows anything."""
    known = [*roles.items(), *([(again, Role.UNSURE)] if again else [])]
    groups = [KnownGroup(number, number, len(ranks), np.array(ranks, np.int32)) for number, (ranks, _) in enumerate(known)]
    roles_of = {one.id: Opinion(role, 0.9, "seen") for one, (_, role) in zip(groups, known, strict=True)}
    job = KnownJob(processes=list(range(WORLD)), groups=groups, world=WORLD)
    return assemble_topology(job, roles_of, order_stages(WORLD, [], [], {}), calls=False)


def test_a_group_that_lies_where_one_of_a_role_must_be_leaves_no_doubt_about_the_layout() -> None:
    known = dict.fromkeys(TENSOR, Role.TENSOR) | dict.fromkeys(DATA, Role.DATA)
    assert topology(known).layout == Layout(2, 1, 4, 1, 1)
    found = topology(known | {(4, 5): Role.UNSURE})
    assert found.layout == Layout(2, 1, 4, 1, 1)
    assert (4, 5) in {group.ranks for group in found.by_role[Role.TENSOR]}


def test_a_group_anywhere_else_may_be_of_context_or_experts() -> None:
    known = dict.fromkeys(TENSOR, Role.TENSOR) | dict.fromkeys(DATA, Role.DATA)
    for ranks in ((0, 2), (4, 5)):
        layout = topology(known, again=ranks).layout
        assert (layout.tp, layout.pp) == (2, 1) and layout.ep is None and layout.cp is None, ranks
