"""Roles of groups from how they are used, the sizes of the layout, and which end of a pipeline is the first stage."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.specimens import OPERATION, Recorder
from ncclwatch.engine.topology.iteration import Specimen, examine
from ncclwatch.engine.topology.job_map import GATHER, SCATTER, SUM, JobMap, KnownGroup, KnownJob
from ncclwatch.engine.topology.roles import assemble, read
from ncclwatch.engine.topology.uses import Use, uses_of_calls
from ncclwatch.model.events import Function
from ncclwatch.model.topology import Layout, Role, Topology

Call = tuple[int, int, int, int]
"""Row, function, elements, peer."""
WORLD = 8
TENSOR: list[tuple[int, ...]] = [(0, 1), (2, 3), (4, 5), (6, 7)]
DATA: list[tuple[int, ...]] = [(0, 2, 4, 6), (1, 3, 5, 7)]


def operations(calls: list[Call]) -> NDArray[Any]:
    result = np.zeros(len(calls), OPERATION)
    for at, (row, function, count, peer) in enumerate(calls):
        result[at] = (at * 1_000_000, count, row, peer, at, function, 7, 0, 0)
    return result


def group(number: int, *ranks: int, hosts: int = 1) -> KnownGroup:
    return KnownGroup(number, number, len(ranks), np.array(ranks, np.int32), hosts=hosts)


def topology_of(world: int, called: dict[int, list[Call]], groups: list[KnownGroup]) -> tuple[Topology, list[Specimen]]:
    """What the calls of some ranks show; their rows are the groups they are in, numbered as these."""
    jobmap = JobMap(row_group=groups)
    job = KnownJob(world, list(called), groups)
    recorder = Recorder(list(called), len(groups))
    specimens = []
    for rank, calls in called.items():
        rows = {row: (one.ranks.tolist().index(rank), one.nranks) for row, one in enumerate(groups) if rank in one.ranks}
        specimens.append(examine(rank, rank, operations(calls), rows))
        for row, function, _, _ in calls:
            recorder.calls[row, function] += 1
        for row in rows:
            groups[row].rows = [row]
    repeats = max((one.repeats for one in specimens if one.iteration is not None), default=0)
    reading = read(job, uses_of_calls(job, recorder, specimens), set(called), repeats=repeats)
    return assemble(jobmap, job, reading, specimens), specimens


def counted(kinds: dict[tuple[int, ...], tuple[float, set[int]]]) -> Topology:
    """What follows where NCCL has counted calls (how often, which) on groups of ranks."""
    groups = [group(number, *ranks) for number, ranks in enumerate(kinds)]
    uses = [
        Use(group=one, times=times, total=times, functions=frozenset(functions), exchanges=not functions)
        for one, (times, functions) in zip(groups, kinds.values(), strict=True)
    ]
    job = KnownJob(WORLD, list(range(WORLD)), groups)
    return assemble(JobMap(row_group=groups), job, read(job, uses, set(range(WORLD)), repeats=None), [])


def test_sizes_that_depend_on_the_data_do_not_hide_the_iteration() -> None:
    sizes = iter(range(4096, 8192))
    calls: list[Call] = []
    for _ in range(12):
        calls += [(0, Function.ALL_REDUCE, next(sizes), -1) for _ in range(4)] + [(1, Function.ALL_REDUCE, 1 << 20, -1)]
    _, (found,) = topology_of(4, {0: calls}, [group(1, 0, 1), group(2, 0, 2)])
    assert (found.length, found.repeats) == (5, 12)


def test_a_single_group_is_data_parallel_where_no_domain_of_tensor_parallelism_is_so_wide() -> None:
    calls: list[Call] = [(0, Function.ALL_REDUCE, 1 << 20, -1)] * 40

    def role(ranks: int, hosts: int) -> Role:
        return topology_of(ranks, dict.fromkeys(range(ranks), calls), [group(1, *range(ranks), hosts=hosts)])[0].groups[0].role

    assert role(16, 2) is Role.DATA
    assert role(16, 1) is Role.UNSURE
    assert role(8, 2) is Role.UNSURE


def test_a_pipeline_that_runs_against_the_ranks_of_its_communicator_is_turned() -> None:
    """Four micro-batches, all forward and then all backward; gradients are reduced once."""

    def calls(row: int, first: bool, peer: int, data: int) -> list[Call]:
        there, back = (Function.SEND, Function.RECV) if first else (Function.RECV, Function.SEND)
        return ([(row, there, 64, peer)] * 4 + [(row, back, 64, peer)] * 4 + [(data, SUM, 1 << 20, -1)]) * 6

    groups = [group(1, 0, 1), group(2, 2, 3), group(3, 0, 2), group(4, 1, 3)]
    called = {rank: calls(rank // 2, rank % 2 == 1, 1 - rank % 2, 2 + rank % 2) for rank in range(4)}
    found, _ = topology_of(4, called, groups)
    assert found.layout == Layout(1, 2, 2, 1, 1)
    assert found.stage.tolist() == [1, 0, 1, 0]


def test_stages_that_differ_in_what_they_call_on_their_tensor_groups_have_one_layout() -> None:
    """The last stage also sums its loss over the vocabulary, as Megatron-LM does."""
    groups = [group(1, 0, 1), group(2, 2, 3), group(3, 0, 2), group(4, 1, 3)]

    def calls(rank: int) -> list[Call]:
        first, tensor, pipe = rank < 2, rank // 2, 2 + rank % 2
        there, back = (Function.SEND, Function.RECV) if first else (Function.RECV, Function.SEND)
        layer = [(tensor, GATHER, 1 << 16, -1), (tensor, SCATTER, 1 << 16, -1)] * 2
        loss = [] if first else [(tensor, SUM, 1 << 14, -1)]
        forward = [*layer, (pipe, there, 64, tensor ^ 1)] if first else [(pipe, there, 64, tensor ^ 1), *layer, *loss]
        backward = [(pipe, back, 64, tensor ^ 1), *layer] if first else [*layer, (pipe, back, 64, tensor ^ 1)]
        return (forward * 4 + backward * 4) * 6

    found, _ = topology_of(4, {rank: calls(rank) for rank in range(4)}, groups)
    assert found.layout == Layout(2, 2, 1, 1, 1)
    assert {one.ranks for one in found.by_role[Role.TENSOR]} == {(0, 1), (2, 3)}


def test_replicas_of_sharded_data_are_not_taken_for_tensor_groups() -> None:
    """HSDP: parameters are gathered and gradients scattered inside a host, and what is scattered is summed over hosts."""
    groups = [group(1, 0, 1), group(2, 2, 3), group(3, 0, 2), group(4, 1, 3)]

    def calls(rank: int) -> list[Call]:
        shard, replica = rank // 2, 2 + rank % 2
        backward = [(shard, GATHER, 1 << 16, -1), (shard, SCATTER, 1 << 16, -1), (replica, SUM, 1 << 15, -1)]
        return ([(shard, GATHER, 1 << 16, -1)] * 4 + backward * 4) * 6

    found, _ = topology_of(4, {rank: calls(rank) for rank in range(4)}, groups)
    assert Role.TENSOR not in found.by_role


def test_a_group_that_lies_where_one_of_a_role_must_be_leaves_no_doubt_about_the_layout() -> None:
    known = dict.fromkeys(TENSOR, (96.0, {SUM})) | dict.fromkeys(DATA, (6.0, {SUM}))
    assert counted(known).layout == Layout(2, 1, 4, 1, 1)
    found = counted(known | {(4, 5): (300.0, {SUM})})
    assert found.layout == Layout(2, 1, 4, 1, 1)
    assert (4, 5) in {one.ranks for one in found.by_role[Role.TENSOR]}


def test_a_group_anywhere_else_may_be_of_context_or_experts() -> None:
    known = dict.fromkeys(TENSOR, (96.0, {SUM})) | dict.fromkeys(DATA, (6.0, {SUM}))
    layout = counted(known | {(0, 2): (6.0, {SCATTER})}).layout
    assert (layout.tp, layout.pp) == (2, 1) and layout.ep is None and layout.cp is None


def test_a_job_of_which_one_rank_is_known_has_no_roles() -> None:
    """As read from a real job whose processes were taken up one after the other: its group has two ranks, the job one."""
    calls: list[Call] = [(0, SUM, 4096, -1)] * 30
    one = KnownGroup(0, 0, 2, np.array([-1, 0], np.int32), hosts=1, rows=[0])
    job, recorder = KnownJob(1, [0], [one]), Recorder([0], 1)
    recorder.calls[0, SUM] += len(calls)
    specimen = examine(0, 0, operations(calls), {0: (1, 2)})
    reading = read(job, uses_of_calls(job, recorder, [specimen]), {0}, repeats=specimen.repeats)
    assert [found.role for found in assemble(JobMap(row_group=[one]), job, reading, [specimen]).groups] == [Role.UNSURE]
