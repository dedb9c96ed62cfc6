"""Which role each communicator of a process plays, from how it is used alone.

What tells roles apart (MegaTrace, Key Insight 2, gives the same marks; here they are checked against each other):

* stages exchange activations and gradients by Send and Recv with neighbours; experts by all-to-all;
* tensor and context parallelism communicate inside every forward and backward pass, over and over with the same size; gradients
  are reduced once an iteration;
* tensor parallelism sums (AllReduce), or gathers and scatters in turns (with sequence parallelism) in both passes; context
  parallelism gathers in the forward pass and scatters in the backward pass;
* data sharded by FSDP is gathered layer by layer as well, but then nothing else reduces gradients: there is no context
  parallelism without a group that reduces them.

Where two readings fit, the role is ``UNSURE``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.exchange import Shape
from ncclwatch.engine.topology.model import Role
from ncclwatch.engine.topology.specimen import POINT_TO_POINT, Specimen, Usage
from ncclwatch.model.events import Function

GATHER, SCATTER, SUM = int(Function.ALL_GATHER), int(Function.REDUCE_SCATTER), int(Function.ALL_REDUCE)

LARGE_GROUP = 8
"""A single group of more ranks than that, over more than one host, is not tensor parallel: no such domain is in use."""

DATA_PERIOD_S = 0.2
"""A layer's communication does not come this seldom."""

MANY = 40
"""Periods after which a group over the same ranks that is still unused is believed to stay so."""

OFTEN = 2.0
"""Inside the passes means: at least so many times as often as the group that is used least."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """A role with its confidence and the observation it rests on."""

    role: Role
    confidence: float
    why: str


def judge(specimen: Specimen, world: int) -> dict[int, Opinion]:
    """Roles of the communicators of one process, by row."""
    opinions: dict[int, Opinion] = {}
    for usage in specimen.usages.values():
        simple = _simple(usage, world)
        if simple is not None:
            opinions[usage.row] = simple
    left = [usage for usage in specimen.usages.values() if usage.row not in opinions]
    if left:
        opinions.update(_collectives(specimen, left, opinions))
    return opinions


def _simple(usage: Usage, world: int) -> Opinion | None:
    """Roles that need no comparison with other communicators."""
    if usage.total == 0:
        return Opinion(Role.UNUSED, 0.9, "no operation was seen on it")
    if usage.group.nranks == 1:
        return Opinion(Role.UNUSED, 1.0, "a group of one rank")
    if not usage.functions:
        role = Role.WORLD if usage.group.nranks == world else Role.UNUSED
        return Opinion(role, 0.6, "used now and then, not in every iteration")
    if usage.shape is Shape.CHAIN and not usage.collective:
        return Opinion(Role.PIPELINE, 0.95, "Send and Recv with neighbours, both ways")
    if usage.shape is Shape.RING and not usage.collective:
        return Opinion(Role.CONTEXT, 0.85, "Send and Recv round a ring, one way")
    if usage.shape is Shape.PAIRS and not usage.collective:
        return Opinion(Role.UNSURE, 0.0, "two ranks that always exchange both ways: experts or context")
    if Function.ALL_TO_ALL in usage.functions and not usage.collective:
        return Opinion(Role.EXPERT, 0.85, "all-to-all exchanges")
    if usage.shape is not Shape.NONE and not usage.tiny and not usage.collective:
        return Opinion(Role.UNSURE, 0.0, str(usage.shape))
    if usage.tiny:
        role = Role.WORLD if usage.group.nranks == world else Role.MODEL
        return Opinion(role, 0.8, "collectives of a few bytes only")
    if usage.shape is not Shape.NONE:
        return Opinion(Role.UNSURE, 0.0, "collectives and point-to-point calls together")
    return None


def _collectives(specimen: Specimen, left: list[Usage], known: dict[int, Opinion]) -> dict[int, Opinion]:
    """Tensor, context and data: told apart by how often and in which order they are used within an iteration."""
    often, seldom = _levels(specimen, left, known)
    if often is None:
        return _alone(specimen, left)
    opinions: dict[int, Opinion] = {}
    for usage in often:
        opinions[usage.row] = _in_passes(specimen, usage, seldom)
    for usage in seldom:
        opinions[usage.row] = _once(specimen, usage, seldom, known)
    return opinions


def _levels(
    specimen: Specimen, left: list[Usage], known: dict[int, Opinion]
) -> tuple[list[Usage], list[Usage]] | tuple[None, list[Usage]]:
    """Communicators used inside the passes, and those used once an iteration; ``None`` where nothing tells them apart."""
    if specimen.word is None:
        return None, []
    if any(opinion.role is Role.PIPELINE for opinion in known.values()):
        return _by_blocks(specimen, left)
    inside = [
        u.multiplicity for u in specimen.usages.values() if u.row in known and known[u.row].role in (Role.EXPERT, Role.CONTEXT)
    ]
    least = min(usage.multiplicity for usage in left)
    most = max([usage.multiplicity for usage in left] + inside)
    if most < OFTEN * least:
        return (left, []) if len(left) > 1 and _all_sharded(specimen, left) else (None, [])
    often = [usage for usage in left if usage.multiplicity >= OFTEN * least and usage.multiplicity * 8 >= most]
    return often, [usage for usage in left if usage not in often]


def _by_blocks(specimen: Specimen, left: list[Usage]) -> tuple[list[Usage], list[Usage]] | tuple[None, list[Usage]]:
    """With a pipeline: what is used between most exchanges of the stages belongs to the passes."""
    blocks = exchange_blocks(specimen.pattern)
    number = int(blocks.max(initial=0)) + 1
    rows = specimen.pattern["row"]
    spread = {usage.row: len(np.unique(blocks[rows == usage.row])) for usage in left}
    widest = max(spread.values())
    if number < 3 or widest < 2:
        least = min(usage.multiplicity for usage in left)
        often = [usage for usage in left if usage.multiplicity >= 2 * OFTEN * least]
        if often:
            return often, [usage for usage in left if usage not in often]
        if all(usage.multiplicity == 1 for usage in left) or number >= 3:
            return [], left
        return None, []
    often = [usage for usage in left if spread[usage.row] * 2 >= number]
    return often, [usage for usage in left if usage not in often]


def exchange_blocks(word: NDArray[Any]) -> NDArray[np.int64]:
    """For each operation of a (cyclic) pattern the number of the stretch between two exchanges of stages it lies in."""
    point = np.isin(word["function"], POINT_TO_POINT)
    starts = point.copy()
    starts[1:] &= ~(point[:-1] & (word["call"][1:] == word["call"][:-1]))
    block = np.cumsum(starts)
    number = int(starts.sum())
    result: NDArray[np.int64] = (block % max(1, number)).astype(np.int64)
    return result


TOO_EARLY = Opinion(Role.UNSURE, 0.0, "gradients may yet be reduced on another communicator over the same ranks")


def _premature(specimen: Specimen, usage: Usage) -> bool:
    """Whether what was seen may be a part of an iteration: another communicator over these ranks exists and is not in it."""
    if specimen.period is not None and specimen.period.repeats >= MANY:
        return False
    own = set(usage.group.ranks.tolist()) - {-1}
    largest = max(other.group.nranks for other in specimen.usages.values())
    waiting = [
        other.group.nranks
        for other in specimen.usages.values()
        if other is not usage and not other.functions and other.group.nranks > 1 and own <= set(other.group.ranks.tolist())
    ]
    # The communicator over all ranks that frameworks make first is mostly never used.
    return len(waiting) > (largest in waiting)


def _runs(order: NDArray[np.int64], function: int) -> int:
    """Longest run of one function."""
    hits = np.r_[False, order == function, False].astype(np.int8)
    change = np.flatnonzero(np.diff(hits))
    return int((change[1::2] - change[::2]).max(initial=0))


def _in_passes(specimen: Specimen, usage: Usage, seldom: list[Usage]) -> Opinion:
    functions = set(usage.functions)
    if functions == {SUM}:
        if _follows_scatter(specimen, usage):
            return Opinion(Role.DATA, 0.6, "sums what a ReduceScatter of another group has just left: replicas of shards")
        return Opinion(Role.TENSOR, 0.9, f"{usage.functions[SUM]} AllReduce an iteration, inside the passes")
    if not functions <= {GATHER, SCATTER, SUM}:
        return Opinion(Role.UNSURE, 0.0, "collectives of unusual kinds inside the passes")
    gathers, scatters = usage.functions.get(GATHER, 0), usage.functions.get(SCATTER, 0)
    if not gathers or not scatters:
        return Opinion(Role.UNSURE, 0.0, "only gathers or only scatters inside the passes")
    one_way = _runs(usage.order, SCATTER) >= 2 or _one_kind_between_exchanges(specimen, usage)
    own = set(usage.group.ranks.tolist()) - {-1}
    reduced = [other for other in seldom if own <= set(other.group.ranks.tolist()) and other.group.nranks >= usage.group.nranks]
    if one_way and reduced:
        return Opinion(
            Role.CONTEXT, 0.85, "gathers in one pass and scatters in the other; gradients are reduced on another group"
        )
    if one_way or _runs(usage.order, GATHER) > 2:
        if not reduced and _premature(specimen, usage):
            return TOO_EARLY
        if not reduced:
            return Opinion(
                Role.DATA, 0.75, "parameters gathered and gradients scattered layer by layer; no other group reduces them"
            )
        return Opinion(Role.UNSURE, 0.0, "gathers and scatters in no known order")
    return Opinion(Role.TENSOR, 0.85, f"gathers and scatters in turns inside the passes ({gathers} and {scatters} an iteration)")


def _one_kind_between_exchanges(specimen: Specimen, usage: Usage) -> bool:
    """With a pipeline: whether some stretch between exchanges has gathers only, or scatters only."""
    word = specimen.pattern
    if not np.isin(word["function"], POINT_TO_POINT).any():
        return False
    blocks = exchange_blocks(word)
    own = word["row"] == usage.row
    gathering = set(blocks[own & (word["function"] == GATHER)].tolist())
    scattering = set(blocks[own & (word["function"] == SCATTER)].tolist())
    return bool(gathering ^ scattering)


def _follows_scatter(specimen: Specimen, usage: Usage) -> bool:
    """Whether each of its operations comes right after a ReduceScatter on another communicator."""
    word = specimen.pattern
    at = np.flatnonzero(word["row"] == usage.row)
    before = word[at - 1]
    return bool(np.all((before["function"] == SCATTER) & (before["row"] != usage.row)))


def _all_sharded(specimen: Specimen, left: list[Usage]) -> bool:
    """Sharded data with replicas (HSDP): one group gathers and scatters, the other sums what was scattered."""
    sums = [usage for usage in left if set(usage.functions) == {SUM}]
    return bool(sums) and all(_follows_scatter(specimen, usage) for usage in sums)


def _once(specimen: Specimen, usage: Usage, seldom: list[Usage], known: dict[int, Opinion]) -> Opinion:
    """Used once an iteration: gradients, mostly; Megatron-LM's tied embeddings are summed over first and last stage."""
    if not set(usage.functions) <= {GATHER, SCATTER, SUM, int(Function.REDUCE), int(Function.BROADCAST)}:
        return Opinion(Role.UNSURE, 0.0, "collectives of unusual kinds once an iteration")
    own = set(usage.group.ranks.tolist()) - {-1}
    for row, opinion in known.items():
        chain = set(specimen.usages[row].group.ranks.tolist()) - {-1}
        if opinion.role is Role.PIPELINE and own and own <= chain and set(usage.functions) == {SUM}:
            return Opinion(Role.EMBEDDING, 0.8, "AllReduce between stages of one pipeline, once an iteration")
    largest = max(other.group.nranks for other in seldom)
    experts = [specimen.usages[row].group.nranks for row, opinion in known.items() if opinion.role is Role.EXPERT]
    if usage.group.nranks < largest:
        if any(size * usage.group.nranks == largest for size in experts):
            return Opinion(Role.EXPERT_DATA, 0.7, "once an iteration, over the ranks that hold the same experts")
        if not any(own <= set(other.group.ranks.tolist()) for other in seldom if other is not usage):
            return Opinion(Role.UNSURE, 0.0, "two different groups are reduced over once an iteration")
        return Opinion(Role.UNSURE, 0.0, "reduced over once an iteration, within a larger group that is as well")
    if usage.multiplicity > 1 and {GATHER, SCATTER} <= set(usage.functions) and _premature(specimen, usage):
        return TOO_EARLY
    what = " and ".join(sorted(Function(f).name.title().replace("_", "") for f in usage.functions))
    return Opinion(Role.DATA, 0.9, f"{what} once an iteration")


def _alone(specimen: Specimen, left: list[Usage]) -> dict[int, Opinion]:
    """Nothing else to compare with: only what cannot be anything else is named."""
    opinions: dict[int, Opinion] = {}
    for usage in left:
        opinions[usage.row] = _single(specimen, usage) if len(left) == 1 else Opinion(
            Role.UNSURE, 0.0, "used as often as the other groups: no iteration shows in the calls seen"
        )  # fmt: skip
    return opinions


def _single(specimen: Specimen, usage: Usage) -> Opinion:
    order, functions = usage.order, set(usage.functions)
    collective = functions <= {GATHER, SCATTER, SUM}
    if _premature(specimen, usage):
        return TOO_EARLY
    if functions == {GATHER, SCATTER} and (_runs(order, GATHER) > 2 or _runs(order, SCATTER) >= 2):
        return Opinion(Role.DATA, 0.75, "the only group: parameters gathered and gradients scattered layer by layer")
    if functions == {SUM} and len(usage.sizes) >= 3:
        return Opinion(Role.DATA, 0.75, "the only group: AllReduce of several sizes, as buckets of gradients have")
    if collective and usage.group.nranks > LARGE_GROUP and usage.group.hosts > 1:
        return Opinion(Role.DATA, 0.7, f"the only group, of {usage.group.nranks} ranks on {usage.group.hosts} hosts")
    if collective and functions >= {SCATTER} and _seldom(specimen, usage):
        return Opinion(Role.DATA, 0.65, "the only group: scatters far apart in time, as gradients are")
    return Opinion(Role.UNSURE, 0.0, "the only group, used alike all the time: tensor or data parallel")


def _seldom(specimen: Specimen, usage: Usage) -> bool:
    own = specimen.operations[(specimen.operations["row"] == usage.row) & (specimen.operations["function"] == SCATTER)]
    if len(own) < 4:
        return False
    gaps = np.diff(own["time_ns"].astype(np.int64)) / 1e9
    return bool(np.quantile(gaps, 0.25) >= DATA_PERIOD_S)
