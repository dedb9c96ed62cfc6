"""What one process alone shows: its iteration, the roles of its communicators, and which end of a pipeline it is."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.layout import order_stages
from ncclwatch.engine.topology.model import Role
from ncclwatch.engine.topology.record import OPERATION, KnownGroup
from ncclwatch.engine.topology.roles import judge
from ncclwatch.engine.topology.specimen import Specimen, examine
from ncclwatch.model.events import Function

Call = tuple[int, Function, int, int]
"""Row, function, elements, peer."""


def operations(calls: list[Call]) -> NDArray[Any]:
    result = np.zeros(len(calls), OPERATION)
    for at, (row, function, count, peer) in enumerate(calls):
        result[at] = (at * 1_000_000, count, row, peer, at, function, 7, 0, 0)
    return result


def group(number: int, *ranks: int, hosts: int = 1) -> KnownGroup:
    return KnownGroup(number, number, len(ranks), np.array(ranks, np.int32), hosts=hosts)


def specimen(rank: int, calls: list[Call], *groups: KnownGroup) -> Specimen:
    rows = {row: (one, one.ranks.tolist().index(rank)) for row, one in enumerate(groups)}
    return examine(rank, rank, operations(calls), rows)


def test_sizes_that_depend_on_the_data_do_not_hide_the_iteration() -> None:
    sizes = iter(range(4096, 8192))
    calls: list[Call] = []
    for _ in range(12):
        calls += [(0, Function.ALL_REDUCE, next(sizes), -1) for _ in range(4)] + [(1, Function.ALL_REDUCE, 1 << 20, -1)]
    found = specimen(0, calls, group(1, 0, 1), group(2, 0, 2))
    assert found.period is not None
    assert (found.period.length, found.period.repeats) == (5, 12)


def test_a_single_group_is_data_parallel_where_no_domain_of_tensor_parallelism_is_so_wide() -> None:
    calls: list[Call] = [(0, Function.ALL_REDUCE, 1 << 20, -1)] * 40
    wide, narrow = range(16), range(8)
    assert judge(specimen(0, calls, group(1, *wide, hosts=2)), 16)[0].role is Role.DATA
    assert judge(specimen(0, calls, group(1, *wide, hosts=1)), 16)[0].role is Role.UNSURE
    assert judge(specimen(0, calls, group(1, *narrow, hosts=2)), 8)[0].role is Role.UNSURE


def test_a_pipeline_that_runs_against_the_ranks_of_its_communicator_is_turned() -> None:
    """Four micro-batches, all forward and then all backward; gradients are reduced once."""
    update: list[Call] = [(1, Function.ALL_REDUCE, 1 << 20, -1)]
    first = [(0, Function.SEND, 64, 0)] * 4 + [(0, Function.RECV, 64, 0)] * 4 + update
    last = [(0, Function.RECV, 64, 1)] * 4 + [(0, Function.SEND, 64, 1)] * 4 + update
    pipelines = [group(1, 0, 1), group(2, 2, 3)]
    seen = [specimen(1, first * 6, pipelines[0], group(4, 1, 3)), specimen(0, last * 6, pipelines[0], group(3, 0, 2))]
    opinions = {one.process: judge(one, 4) for one in seen}
    assert order_stages(4, pipelines, seen, opinions).index.tolist() == [1, 0, 1, 0]
