"""Which role each communicator plays: from how single processes use it, and by a vote of its members.

* Stages exchange activations and gradients by Send and Recv with neighbours; experts by all-to-all.
* Tensor and context parallelism communicate inside every pass, over and over with the same size; gradients are reduced once an
  iteration (MegaTrace, Key Insight 2).
* Tensor parallelism sums, or gathers and scatters in turns; context parallelism gathers forward and scatters backward.
* Data sharded by FSDP is gathered layer by layer as well, but then no other group reduces gradients.

Where two readings fit, the role is ``UNSURE``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.model import Role
from ncclwatch.engine.topology.record import GATHER, POINT_TO_POINT, SCATTER, SUM, KnownGroup, KnownJob, Recorder
from ncclwatch.engine.topology.specimen import Shape, Specimen, Usage
from ncclwatch.model.events import Function

LARGE_GROUP = 8
"""Unit: ranks. From: GPUs of one host joined by NVLink, as tensor groups are (Megatron-LM's advice, and every job of
``score.topology``). A single group of more, over several hosts, is data parallel.
"""
DATA_PERIOD_S = 0.2
"""Unit: seconds. From: a layer takes milliseconds, so that what is called this seldom is called once an iteration. It names the
only group of a job of ``score.topology`` that reduces gradients and nothing else; at 0.4 s that is unsure.
"""
MANY = 40
"""Unit: periods. From: micro-batches in an iteration, of which there are fewer. A group that was unused in so many periods is not
used for gradients.
"""
OFTEN = 2.0
"""Unit: ratio of calls. From: a layer has a pass forward and one backward, and gradients are reduced once for both; each pass
calls a tensor group twice for each time it exchanges (Megatron-LM).
"""
RARE = 0.05
"""Unit: share of the calls on a communicator. From: barriers and checkpoints of the simulated jobs are less; a layer has no 20
calls for each of one kind.
"""

ONCE = (Role.DATA, Role.MODEL, Role.EMBEDDING, Role.EXPERT_DATA, Role.WORLD)
"""Roles whose operations belong to the update of parameters, once an iteration."""


@dataclass(frozen=True, slots=True)
class Opinion:
    """A role with its confidence and the observation it rests on."""

    role: Role
    confidence: float
    why: str


def _unsure(why: str) -> Opinion:
    return Opinion(Role.UNSURE, 0.0, why)


TOO_EARLY = _unsure("gradients may yet be reduced on another communicator over the same ranks")

BY_SHAPE = {
    Shape.CHAIN: Opinion(Role.PIPELINE, 0.95, "Send and Recv with neighbours, both ways"),
    Shape.RING: Opinion(Role.CONTEXT, 0.85, "Send and Recv round a ring, one way"),
    Shape.PAIRS: _unsure("two ranks that always exchange both ways: experts or context"),
}


def judge(specimen: Specimen, world: int) -> dict[int, Opinion]:
    """Roles of the communicators of one process, by row."""
    opinions: dict[int, Opinion] = {}
    left = []
    for usage in specimen.usages.values():
        simple = _simple(usage, world)
        if simple is not None:
            opinions[usage.row] = simple
        else:
            left.append(usage)
    if not left:
        return opinions
    # Tensor, context and data are told apart by how often and in which order they are used within an iteration.
    levels = _levels(specimen, left, opinions)
    if levels is None:
        unclear = _unsure("used as often as the other groups: no iteration shows in the calls seen")
        return opinions | {usage.row: _single(specimen, usage) if len(left) == 1 else unclear for usage in left}
    often, seldom = levels
    found = {usage.row: _in_passes(specimen, usage, seldom) for usage in often}
    found |= {usage.row: _once(specimen, usage, seldom, opinions) for usage in seldom}
    return opinions | found


def _simple(usage: Usage, world: int) -> Opinion | None:
    """Roles that need no comparison with other communicators."""
    if usage.total == 0:
        return Opinion(Role.UNUSED, 0.9, "no operation was seen on it")
    if usage.group.nranks == 1:
        return Opinion(Role.UNUSED, 1.0, "a group of one rank")
    everybody = usage.group.nranks == world
    if not usage.functions:
        return Opinion(Role.WORLD if everybody else Role.UNUSED, 0.6, "used now and then, not in every iteration")
    if usage.collective:
        return None if usage.shape is Shape.NONE else _unsure("collectives and point-to-point calls together")
    if usage.shape in BY_SHAPE:
        return BY_SHAPE[usage.shape]
    if Function.ALL_TO_ALL in usage.functions:
        return Opinion(Role.EXPERT, 0.85, "all-to-all exchanges")
    if usage.tiny:
        return Opinion(Role.WORLD if everybody else Role.MODEL, 0.8, "collectives of a few bytes only")
    return _unsure(str(usage.shape))


def _levels(specimen: Specimen, left: list[Usage], known: Mapping[int, Opinion]) -> tuple[list[Usage], list[Usage]] | None:
    """Communicators used inside the passes, and those used once an iteration; ``None`` where nothing tells them apart."""
    if specimen.iteration is None:
        return None
    least = min(usage.multiplicity for usage in left)
    if any(opinion.role is Role.PIPELINE for opinion in known.values()):
        # What is used between most exchanges of the stages belongs to the passes.
        blocks = exchange_blocks(specimen.iteration)
        number = int(blocks.max(initial=0)) + 1
        spread = {usage.row: len(np.unique(blocks[specimen.iteration["row"] == usage.row])) for usage in left}
        if number >= 3 and max(spread.values()) >= 2:
            often = [usage for usage in left if spread[usage.row] * 2 >= number]
        else:
            often = [usage for usage in left if usage.multiplicity >= 2 * OFTEN * least]
            if not often and number < 3 and any(usage.multiplicity > 1 for usage in left):
                return None
    else:
        inside = {row for row, opinion in known.items() if opinion.role in (Role.EXPERT, Role.CONTEXT)}
        most = max(usage.multiplicity for usage in specimen.usages.values() if usage in left or usage.row in inside)
        if most < OFTEN * least:
            return (left, []) if len(left) > 1 and _all_sharded(specimen, left) else None
        often = [usage for usage in left if usage.multiplicity >= OFTEN * least and usage.multiplicity * 8 >= most]
    return often, [usage for usage in left if usage not in often]


def exchange_blocks(word: NDArray[Any]) -> NDArray[np.int64]:
    """For each operation of a (cyclic) pattern the number of the stretch between two exchanges of stages it lies in."""
    starts = np.isin(word["function"], POINT_TO_POINT)
    starts[1:] &= ~(starts[:-1] & (word["call"][1:] == word["call"][:-1]))
    result: NDArray[np.int64] = np.cumsum(starts) % max(1, int(starts.sum()))
    return result


def _ranks(usage: Usage) -> set[int]:
    return set(usage.group.ranks.tolist()) - {-1}


def _premature(specimen: Specimen, usage: Usage) -> bool:
    """Whether what was seen may be a part of an iteration: another communicator over these ranks exists and is not in it."""
    if specimen.period is not None and specimen.period.repeats >= MANY:
        return False
    others = [other for other in specimen.usages.values() if other is not usage]
    waiting = [
        other.group.nranks
        for other in others
        if not other.functions and other.group.nranks > 1 and _ranks(usage) <= set(other.group.ranks.tolist())
    ]
    # The communicator over all ranks that frameworks make first is mostly never used.
    return len(waiting) > (max(other.group.nranks for other in specimen.usages.values()) in waiting)


def _longest_run(order: NDArray[np.int64], function: int) -> int:
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
        return _unsure("collectives of unusual kinds inside the passes")
    if not functions >= {GATHER, SCATTER}:
        return _unsure("only gathers or only scatters inside the passes")
    one_way = _longest_run(usage.order, SCATTER) >= 2 or _one_kind_between_exchanges(specimen, usage)
    reduced = any(
        _ranks(usage) <= set(other.group.ranks.tolist()) and other.group.nranks >= usage.group.nranks for other in seldom
    )
    if one_way and reduced:
        why = "gathers in one pass and scatters in the other; gradients are reduced on another group"
        return Opinion(Role.CONTEXT, 0.85, why)
    if one_way or _longest_run(usage.order, GATHER) > 2:
        if reduced:
            return _unsure("gathers and scatters in no known order")
        if _premature(specimen, usage):
            return TOO_EARLY
        why = "parameters gathered and gradients scattered layer by layer; no other group reduces them"
        return Opinion(Role.DATA, 0.75, why)
    gathers, scatters = usage.functions[GATHER], usage.functions[SCATTER]
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
    return gathering != scattering


def _follows_scatter(specimen: Specimen, usage: Usage) -> bool:
    """Whether each of its operations comes right after a ReduceScatter on another communicator."""
    word = specimen.pattern
    before = word[np.flatnonzero(word["row"] == usage.row) - 1]
    return bool(np.all((before["function"] == SCATTER) & (before["row"] != usage.row)))


def _all_sharded(specimen: Specimen, left: list[Usage]) -> bool:
    """Sharded data with replicas (HSDP): one group gathers and scatters, the other sums what was scattered."""
    sums = [usage for usage in left if set(usage.functions) == {SUM}]
    return bool(sums) and all(_follows_scatter(specimen, usage) for usage in sums)


def _once(specimen: Specimen, usage: Usage, seldom: list[Usage], known: Mapping[int, Opinion]) -> Opinion:
    """Used once an iteration: gradients, mostly; Megatron-LM's tied embeddings are summed over first and last stage."""
    functions, own = set(usage.functions), _ranks(usage)
    if not functions <= {GATHER, SCATTER, SUM, Function.REDUCE, Function.BROADCAST}:
        return _unsure("collectives of unusual kinds once an iteration")
    pipelines, experts = (
        [specimen.usages[row] for row, one in known.items() if one.role is role] for role in (Role.PIPELINE, Role.EXPERT)
    )
    if functions == {SUM} and own and any(own <= _ranks(pipeline) for pipeline in pipelines):
        return Opinion(Role.EMBEDDING, 0.8, "AllReduce between stages of one pipeline, once an iteration")
    largest = max(other.group.nranks for other in seldom)
    if usage.group.nranks < largest:
        if any(expert.group.nranks * usage.group.nranks == largest for expert in experts):
            return Opinion(Role.EXPERT_DATA, 0.7, "once an iteration, over the ranks that hold the same experts")
        if not any(own <= set(other.group.ranks.tolist()) for other in seldom if other is not usage):
            return _unsure("two different groups are reduced over once an iteration")
        return _unsure("reduced over once an iteration, within a larger group that is as well")
    if usage.multiplicity > 1 and {GATHER, SCATTER} <= functions and _premature(specimen, usage):
        return TOO_EARLY
    what = " and ".join(sorted(Function(f).name.title().replace("_", "") for f in functions))
    return Opinion(Role.DATA, 0.9, f"{what} once an iteration")


def _single(specimen: Specimen, usage: Usage) -> Opinion:
    """Nothing else to compare with: only what cannot be anything else is named."""
    order, functions = usage.order, set(usage.functions)
    collective = functions <= {GATHER, SCATTER, SUM}
    if _premature(specimen, usage):
        return TOO_EARLY
    if functions == {GATHER, SCATTER} and (_longest_run(order, GATHER) > 2 or _longest_run(order, SCATTER) >= 2):
        return Opinion(Role.DATA, 0.75, "the only group: parameters gathered and gradients scattered layer by layer")
    if functions == {SUM} and len(usage.sizes) >= 3:
        return Opinion(Role.DATA, 0.75, "the only group: AllReduce of several sizes, as buckets of gradients have")
    if collective and usage.group.nranks > LARGE_GROUP and usage.group.hosts > 1:
        return Opinion(Role.DATA, 0.7, f"the only group, of {usage.group.nranks} ranks on {usage.group.hosts} hosts")
    if collective and SCATTER in functions and _seldom(specimen, usage):
        return Opinion(Role.DATA, 0.65, "the only group: scatters far apart in time, as gradients are")
    return _unsure("the only group, used alike all the time: tensor or data parallel")


def _seldom(specimen: Specimen, usage: Usage) -> bool:
    own = specimen.operations[(specimen.operations["row"] == usage.row) & (specimen.operations["function"] == SCATTER)]
    gaps = np.diff(own["time_ns"].astype(np.int64)) / 1e9
    return len(gaps) > 2 and bool(np.quantile(gaps, 0.25) >= DATA_PERIOD_S)


def kinds(world: int, uses: Iterable[tuple[KnownGroup, object, float]]) -> Iterator[list[int]]:
    """Groups of one kind, by their ids: of one size, one distance of their ranks, called alike, and about as often.

    ``uses``: (group, what is called on it, how often). Counts are far from each other where roles may be told apart by them.
    """
    alike: dict[object, list[tuple[float, int]]] = defaultdict(list)
    for group, what, times in uses:
        distances = tuple(np.diff(np.sort(group.ranks)).tolist()) if group.nranks < world else ()
        alike[group.nranks, distances, what].append((times, group.id))
    for members in alike.values():
        members.sort()
        far = [at for at in range(1, len(members)) if members[at][0] > OFTEN * members[at - 1][0]]
        yield from ([number for _, number in members[start:end]] for start, end in pairwise([0, *far, len(members)]))


def vote(
    job: KnownJob, recorder: Recorder, specimens: Sequence[Specimen], opinions: Mapping[int, Mapping[int, Opinion]]
) -> dict[int, Opinion]:
    """The role of every group, by its id; ``opinions`` are those of the specimens, by process and row."""
    votes: dict[int, list[Opinion]] = defaultdict(list)
    for specimen in specimens:
        for row, opinion in opinions[specimen.process].items():
            votes[specimen.usages[row].group.id].append(opinion)
    found = {number: _majority(said) for number, said in votes.items()}
    uses = []
    for group in job.groups:
        calls = recorder.calls[group.rows].sum(axis=0)
        if group.rows and not calls.any():
            found.setdefault(group.id, Opinion(Role.UNUSED, 0.8, "no operation was seen on it"))
        elif group.rows and (group.id not in found or found[group.id].role is not Role.UNUSED):
            uses.append((group, tuple(np.flatnonzero(calls > RARE * calls.sum()).tolist()), calls.sum() / len(group.rows)))
    for members in kinds(job.world, uses):
        # Ranks that could not tell (too few calls, lost records), or are not among the specimens, follow their kind, where it has
        # one role only.
        judged = [found[number] for number in members if number in found]
        sure = [one for one in judged if one.role is not Role.UNSURE]
        follow = _unsure("used unlike any group kept in full")
        if len({one.role for one in sure}) == 1 and 2 * len(sure) > len(judged):
            follow = Opinion(sure[0].role, 0.7 * sure[0].confidence, "like the other groups of its kind")
            found |= {number: follow for number in members if number in found and found[number].role is Role.UNSURE}
        found |= {number: follow for number in members if number not in found}
    return found


def _majority(votes: Sequence[Opinion]) -> Opinion:
    """The role most members of a group show. Silence of some does not speak against what others do."""
    speaking = [one for one in votes if one.role is not Role.UNUSED] or votes
    sure = [one for one in speaking if one.role is not Role.UNSURE] or speaking
    weight: dict[Role, float] = defaultdict(float)
    for one in sure:
        weight[one.role] += max(one.confidence, 0.05)
    role = max(weight, key=lambda r: weight[r])
    own = [one for one in sure if one.role is role]
    if 2 * len(own) <= len(sure):
        return _unsure(f"its ranks use it differently: {', '.join(sorted(weight))}")
    return Opinion(role, max(one.confidence for one in own) * len(own) / len(sure), own[0].why)
