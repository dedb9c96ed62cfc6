"""Which role each kind of group plays, and from that the topology (docs/topology.md).

The sizes of tensor, pipeline and data groups multiply to the number of ranks; two of different roles share one rank at most;
context and experts lie inside a data group (``RankGenerator`` in Megatron-LM's ``megatron/core/parallel_state.py``). Every
assignment that the sets of ranks allow is tried; of those that leave the fewest kinds unexplained, what they agree on is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise, product

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.ledger import POINT_TO_POINT
from ncclwatch.collect.specimens import Recorder
from ncclwatch.engine.topology.iteration import ENOUGH, OFTEN, Order, Shape, Specimen, after_update, examine
from ncclwatch.engine.topology.job_map import GATHER, SCATTER, SUM, JobMap, KnownGroup, KnownJob
from ncclwatch.engine.topology.uses import Family, Line, Use, families, uses_of_calls, uses_of_counts
from ncclwatch.model.events import Function
from ncclwatch.model.rows import distinct
from ncclwatch.model.topology import FUNCTION_NAMES, Group, Layout, Role, Topology

MAX_FAMILIES = 16
"""Bound: a job with more kinds of groups is not understood: there would be more than 17³ = 4,913 assignments to try."""
ONCE = (Role.DATA, Role.MODEL, Role.EMBEDDING, Role.EXPERT_DATA, Role.WORLD)
"""Roles whose operations belong to the update of parameters, once an iteration."""
PARTITIONING = (Role.TENSOR, Role.PIPELINE, Role.DATA, Role.CONTEXT, Role.EXPERT)
"""Roles of which every rank has exactly one group, all of one size."""
REDUCES = {SUM, GATHER, SCATTER, int(Function.REDUCE), int(Function.BROADCAST)}

WHY = {
    Role.TENSOR: "used inside the passes, across the groups that reduce gradients or exchange between stages",
    Role.PIPELINE: "Send and Recv with neighbours, both ways",
    Role.DATA: "reduced over once an iteration, or gathered and scattered layer by layer while no other group reduces gradients",
    Role.CONTEXT: "gathers and scatters inside the passes, or Send and Recv round a ring; gradients are reduced over more ranks",
    Role.EXPERT: "all-to-all exchanges",
    Role.EXPERT_DATA: "once an iteration, over the ranks that hold the same experts",
    Role.EMBEDDING: "AllReduce between stages of one pipeline, once an iteration",
    Role.MODEL: "small sums over one copy of the model",
    Role.WORLD: "now and then, or a few bytes, over all ranks",
    Role.UNUSED: "used now and then, not in every iteration",
}


@dataclass(slots=True)
class Reading:
    """What the groups of a job are for."""

    groups: dict[int, Group] = field(default_factory=dict)
    """By id."""
    families: dict[Role, Family] = field(default_factory=dict)
    """The kind of each role that has one."""

    def say(self, group: KnownGroup, role: Role, confidence: float, why: str) -> None:
        """A role with its confidence and the observation it rests on; the first that is said counts."""
        self.groups.setdefault(group.id, Group(group.id, group.hash, role, tuple(group.ranks.tolist()), confidence, (why,)))


def read(job: KnownJob, uses: Sequence[Use], observed: set[int], *, repeats: int | None) -> Reading:
    """The role of every group: of each kind what all assignments that fit agree on.

    ``repeats``: how often the iteration was seen, 0 without one; ``None`` where no calls were seen, but counts.
    """
    counted = repeats is None
    result = Reading()
    for use in uses:
        if use.group.nranks == 1 or not (use.total or use.hidden):
            why = "a group of one rank" if use.group.nranks == 1 else "no operation was seen or counted on it"
            result.say(use.group, Role.UNUSED, 0.8, why)
        elif not counted and use.known and not use.times:
            result.say(use.group, Role.WORLD if use.group.nranks == job.world else Role.UNUSED, 0.6, WHY[Role.UNUSED])
    kinds = families(job, [use for use in uses if use.group.id not in result.groups], observed)
    told = {use.group.id for kind in kinds for use in kind.uses}
    left = [use for use in uses if use.group.id not in told and use.group.nranks > 1]
    fit = _Fit(job.world, kinds, counted, [set(use.group.ranks.tolist()) for use in left], OFTEN * (1 if repeats else 2))
    # Where calls show no iteration, or a group is called that is not in it, only part of one may have been seen.
    beside = max((use.total for use in left if not use.mixed and use.group.nranks < job.world), default=0)
    # One micro-batch in a pipeline is the steady part of an iteration, or its ranks would mostly idle.
    steady = any(kind.shape is Shape.CHAIN and kind.inside is None for kind in kinds)
    clear = repeats is None or (not steady and (ENOUGH * beside <= repeats if repeats else len(kinds) == 1))
    found = list(fit.assignments()) if clear and len(kinds) <= MAX_FAMILIES else []
    open_ = [sum(role is Role.UNSURE and not kind.uncounted for role, kind in zip(one, kinds, strict=True)) for one in found]
    found = [fit.claimed(one) for one, number in zip(found, open_, strict=True) if number == min(open_)]
    for at, kind in enumerate(kinds):
        said = {one[at] for one in found}
        role = said.pop() if len(said) == 1 else Role.UNSURE
        if role is not Role.UNSURE and (role not in result.families or kind.size > result.families[role].size):
            result.families[role] = kind
        for use in kind.uses:
            result.say(use.group, role, *_reason(role, kind, counted))
    for use in uses:
        result.say(use.group, Role.UNSURE, 0.0, "collectives and Send and Recv together, or parts that overlap")
    return result


def _reason(role: Role, kind: Family, counted: bool) -> tuple[float, str]:
    times = int(kind.uses[0].total)
    names = " and ".join(sorted(FUNCTION_NAMES.get(function, "") for function in kind.functions)) or "operations"
    if role is not Role.UNSURE and not counted:
        return 0.9, WHY[role]
    if not counted and kind.exchanges:
        return 0.0, str(kind.shape)
    text = f"NCCL has counted {times} operations on it" if times else "NCCL does not count Send and Recv over NVLink"
    if role is not Role.UNSURE:
        return 0.6, f"{text}; no other role fits the sets of ranks"
    return 0.0, f"{text if counted else names}, which fits more than one role, or none"


@dataclass(slots=True)
class _Fit:
    """The assignments of roles to kinds of groups that what was seen allows."""

    world: int
    kinds: Sequence[Family]
    counted: bool
    idle: Sequence[set[int]]
    """Ranks of groups that were not used yet, or in no iteration."""
    often: float
    """How many times more often a group must be called than another to be used inside the passes."""

    def assignments(self) -> Iterator[tuple[Role, ...]]:
        """Every one that fits; few kinds make few combinations."""
        everything = [(at, kind) for at, kind in enumerate(self.kinds) if kind.whole]
        tensor = [at for at, kind in everything if self._may_be_tensor(kind)]
        pipeline = [at for at, kind in everything if kind.exchanges and kind.shape in (Shape.CHAIN, Shape.EITHER)]
        data = [at for at, kind in everything if self._may_be_data(kind)]
        for chosen in product((None, *tensor), (None, *pipeline), (None, *data)):
            given = [at for at in chosen if at is not None]
            # Of a job of which one rank is known the empty product fits, too; it gives nobody a role.
            if given and len(set(given)) == len(given) and int(np.prod([self.kinds[at].size for at in given])) == self.world:
                roles = self._roles(*chosen)
                if roles is not None:
                    yield roles

    def _may_be_tensor(self, kind: Family) -> bool:
        if kind.exchanges or kind.inside is False or kind.tiny or kind.follows or (kind.wide and self.counted):
            return False
        both = {GATHER, SCATTER} <= kind.functions <= {GATHER, SCATTER, SUM}
        return kind.order in (None, Order.TURNS) and (both or kind.functions <= {SUM})

    def _may_be_data(self, kind: Family) -> bool:
        if kind.exchanges or kind.tiny or not kind.functions <= REDUCES:
            return False
        if kind.order not in (Order.RUNS, Order.ONE_WAY):
            return kind.inside is not True and (kind.order is None or kind.times == 1 or not self._premature(kind))
        # Parameters are gathered and gradients scattered layer by layer: unless another group reduces them, once an iteration.
        reducing = (one for one in self.kinds if one is not kind and one.functions and one.functions <= REDUCES and not one.tiny)
        once = (one for one in reducing if (self._often(kind, one) if one.inside is None else not one.inside))
        return not self._premature(kind) and not any(within(kind, one) for one in once)

    def _premature(self, kind: Family) -> bool:
        """Whether another communicator over its ranks exists and was not used yet."""
        waiting = [len(ranks) for line in kind.lines for ranks in self.idle if {*line} - {-1} <= ranks]
        # The communicator over all ranks that frameworks make first is mostly never used.
        return len(waiting) > len(kind.lines) * (self.world in waiting)

    def _often(self, kind: Family, other: Family) -> bool:
        """Whether a kind is called so much more often than another that it must be used inside the passes."""
        return kind.times >= self.often * other.times

    def claimed(self, roles: tuple[Role, ...]) -> tuple[Role, ...]:
        """Nothing, where one kind of group is all that a job uses: it may be tensor as well as data parallel."""
        if {Role.TENSOR, Role.PIPELINE, Role.CONTEXT, Role.EXPERT} & set(roles):
            return roles
        kind = self.kinds[roles.index(Role.DATA)]
        clear = not self.counted and not self._premature(kind) and (kind.wide or kind.gradients)
        return roles if clear or (len(set(roles) - {Role.UNSURE}) > 1 and not self.counted) else (Role.UNSURE,) * len(roles)

    def _roles(self, t: int | None, p: int | None, d: int | None) -> tuple[Role, ...] | None:
        tensor, pipeline, data = (self.kinds[at] if at is not None else None for at in (t, p, d))
        chosen = [kind for kind in (tensor, pipeline, data) if kind is not None]
        if not all(crossing(one.number, other.number) for one, other in combinations(chosen, 2)):
            return None
        if tensor is not None and not self._in_passes(tensor, pipeline, data):
            return None
        if data is not None and pipeline is not None and data.inside is None:
            # With nothing to compare it with, a group may as well be used inside the passes.
            if pipeline.uncounted and not any(self._often(kind, data) for kind in self.kinds):
                return None
            if not pipeline.uncounted and data.times * OFTEN > pipeline.times:
                return None
        given = {t: Role.TENSOR, p: Role.PIPELINE, d: Role.DATA}
        roles = [given.get(at) or self._other(kind, tensor, pipeline, data) for at, kind in enumerate(self.kinds)]
        known = tuple(role for role in roles if role is not None)
        return known if len(known) == len(roles) else None

    def _in_passes(self, tensor: Family, pipeline: Family | None, data: Family | None) -> bool:
        if tensor.inside:
            return True
        if data is None:
            return pipeline is not None and not pipeline.uncounted and tensor.times >= OFTEN * pipeline.times
        if data.order in (Order.RUNS, Order.ONE_WAY):
            return True
        if self.counted and tensor.functions and tensor.functions != {SUM} and data.functions == {SUM}:
            # Sharded data with replicas sums once for each scatter.
            return self.often * data.times <= max(use.scatters for use in tensor.uses)
        return tensor.times >= self.often * data.times * (1 if tensor.functions else 2)

    def _other(self, kind: Family, tensor: Family | None, pipeline: Family | None, data: Family | None) -> Role | None:
        """What a kind is that is none of the three; ``None`` where it speaks against them."""
        around = data if data is not None and within(kind, data) else None
        if kind.uncounted:
            return Role.UNSURE
        if kind.tiny:
            return Role.WORLD if kind.size == self.world else Role.MODEL
        if kind.exchanges:
            return self._exchanging(kind, around is not None)
        often = kind.inside if kind.inside is not None else data is not None and self._often(kind, data)
        if around is not None and often:
            return self._often_inside_data(kind, around)
        if around is not None:
            experts = [one.size for one in self.kinds if one.exchanges and one.shape is Shape.EVERYBODY]
            if kind.size == around.size:
                return Role.DATA
            return Role.EXPERT_DATA if kind.size * max(experts, default=0) == around.size else Role.UNSURE
        if often:
            return None
        if not kind.functions <= {SUM}:
            return Role.UNSURE
        copies = [one for one in (tensor, pipeline) if one is not None]
        if kind.size == np.prod([one.size for one in copies]) and all(within(one, kind) for one in copies):
            return Role.MODEL
        if kind.size == self.world:
            return Role.WORLD
        return Role.EMBEDDING if pipeline is not None and within(kind, pipeline) else Role.UNSURE

    def _often_inside_data(self, kind: Family, data: Family) -> Role | None:
        """Context gathers and scatters; sums inside the passes are not among ranks that hold copies of the same weights.

        Data that is sharded layer by layer gathers and scatters as well: where others are but summed, that may be a barrier.
        """
        if kind.order is Order.ONE_WAY:
            return Role.CONTEXT
        if not kind.functions or data.functions == {SUM} or kind.order is Order.RUNS:
            return Role.UNSURE if kind.functions != {SUM} else None
        return Role.CONTEXT if kind.functions == {GATHER, SCATTER} else None

    def _exchanging(self, kind: Family, inside: bool) -> Role | None:
        """Round a ring one way is context, with everybody experts; of two ranks it is either. Neither is between stages."""
        if self.counted and not inside:
            return None
        if kind.shape is Shape.RING:
            return Role.CONTEXT
        if kind.shape is Shape.EVERYBODY or (kind.shape is Shape.EITHER and kind.size > 2):
            return Role.EXPERT
        return None if kind.shape is Shape.CHAIN and not inside else Role.UNSURE


def within(inner: Family, outer: Family) -> bool:
    """Whether every group of one lies inside a group of the other, or is the same."""
    known = (inner.number >= 0) & (outer.number >= 0)
    pairs = np.unique(np.stack([inner.number[known], outer.number[known]]), axis=1)
    return inner.size <= outer.size and len(distinct(pairs[0])) == pairs.shape[1]


def crossing(one: NDArray[np.int32], other: NDArray[np.int32]) -> bool:
    """Whether no two ranks share a group in both; rank → number of its group, −1 where unknown."""
    known = (one >= 0) & (other >= 0)
    pairs = one[known].astype(np.int64) * (int(other.max(initial=0)) + 1) + other[known]
    return len(distinct(pairs)) == len(pairs)


# --- from roles to the topology -------------------------------------------------------------------------------------------------


def infer(jobmap: JobMap, job: KnownJob, recorder: Recorder, *, by_counts: bool = False) -> tuple[Topology, list[Specimen]]:
    """A job's topology from calls, or (``by_counts``, or without any) from NCCL's counts; and the processes it is from."""
    rows_of: dict[int, dict[int, tuple[int, int]]] = {process: {} for process in job.processes}
    for group in job.groups:
        for row in group.rows:
            rows_of[jobmap.row_process[row]][row] = (jobmap.row_rank[row], group.nranks)
    specimens: list[Specimen] = []
    for process in recorder.specimens if not by_counts else ():
        if process in rows_of and len(history := recorder.history(process)):
            lengths = {specimen.length for specimen in specimens} - {0}
            specimens.append(examine(process, jobmap.rank[process], history, rows_of[process], lengths))
    observed = {rank for process in job.processes if 0 <= (rank := jobmap.rank[process]) < job.world}
    uses = uses_of_calls(job, recorder, specimens) if specimens else uses_of_counts(jobmap, job)
    repeats = max(specimen.repeats for specimen in specimens) if specimens else None
    return assemble(jobmap, job, read(job, uses, observed, repeats=repeats), specimens), specimens


def assemble(jobmap: JobMap, job: KnownJob, reading: Reading, specimens: Sequence[Specimen]) -> Topology:
    """The topology that roles of groups make."""
    world = job.world
    lines = {role: reading.families[role].lines if role in reading.families else [] for role in PARTITIONING}
    after = {pair for line in lines[Role.PIPELINE] for pair in pairwise(line)}
    ends = Counter(_direction(jobmap, specimen, reading, after) for specimen in specimens)
    if ends[-1] > ends[1]:
        # The iteration begins at the other end.
        lines[Role.PIPELINE] = [line[::-1] for line in lines[Role.PIPELINE]]
    dimensions = {role: _dimension(world, role, own) for role, own in lines.items()}
    inferred = [group for _, found in dimensions.values() for group in found]
    unclear = [reading.groups[g.id] for g in job.groups if g.id in reading.groups and reading.groups[g.id].role is Role.UNSURE]
    left = {role: int(np.count_nonzero(index < 0)) for role, (index, _) in dimensions.items()}
    unsure = [f"{role} groups of {few} ranks are not known: nobody of them is observed" for role, few in left.items() if few]
    if not specimens and not any(lines.values()):
        unsure.append("no calls were seen, and NCCL's counts alone do not tell what the groups are for")
    doubts = Counter(f"{len(group.ranks)} ranks: {group.evidence[0]}" for group in unclear)
    unsure += [f"{number} group{'s' if number > 1 else ''} of {text}" for text, number in doubts.items()]
    for group in job.groups:
        reading.say(group, Role.UNSURE, 0.0, "no calls were seen")
    groups = [*inferred, *(reading.groups[group.id] for group in job.groups)]
    layout = Layout()
    if any(lines.values()):
        tp, pp, copies, cp, ep = (len(lines[role][0]) if lines[role] else 1 for role in PARTITIONING)
        # An unclear group is of context or experts, unless it lies where a group of a known role was not observed.
        if Counter(group.ranks for group in unclear) <= Counter(group.ranks for group in inferred):
            layout = Layout(tp, pp, copies // cp, cp, ep)
        else:
            layout = Layout(tp, pp, copies // cp, cp) if cp > 1 else Layout(tp, pp)
    return Topology(
        world=world,
        groups=tuple(sorted(groups, key=lambda g: (list(Role).index(g.role), g.ranks))),
        layout=layout,
        # Where nothing fits a group of which nothing is known may be a pipeline.
        stage=dimensions[Role.PIPELINE][0] if layout.pp is not None else np.full(world, -1, np.int32),
        tensor_index=dimensions[Role.TENSOR][0],
        confidence=min((g.confidence for g in groups if g.role in PARTITIONING), default=0.0),
        unsure=tuple(dict.fromkeys(unsure)),
    )


def _direction(jobmap: JobMap, specimen: Specimen, reading: Reading, after: set[tuple[int, int]]) -> int:
    """+1 where the lines begin with the first stage, −1 with the last, 0 where this process (no end of a line) does not tell."""
    word = specimen.pattern
    role = {row: reading.groups[jobmap.row_group[row].id].role for row in specimen.usages}
    once = np.isin(word["row"], [row for row, one in role.items() if one in ONCE])
    pipelines = [row for row, one in role.items() if one is Role.PIPELINE]
    passing = np.isin(word["function"], POINT_TO_POINT) & np.isin(word["row"], pipelines)
    if specimen.iteration is None or not once.any():
        return 0
    peers = {int(jobmap.row_group[row].ranks[peer]) for row, peer in np.unique(word[["row", "peer"]][passing]).tolist()}
    if len(peers) != 1:
        return 0
    begin = after_update(once, passing)
    first = np.roll(word, -begin)[np.roll(passing, -begin)][0]
    ahead = (specimen.rank, peers.pop()) in after
    return 1 if (first["function"] == Function.SEND) == ahead else -1


def _dimension(world: int, role: Role, lines: Sequence[Line]) -> tuple[NDArray[np.int32], list[Group]]:
    """How groups of a role divide the ranks: each rank's place (world,), −1 unknown; and unobserved groups that follow."""
    inferred: list[Group] = []
    if not lines:
        return np.zeros(world, np.int32), inferred
    size, index = len(lines[0]), np.full(world, -1, np.int32)
    for line in lines:
        order = np.array(line)
        index[order[order >= 0]] = np.flatnonzero(order >= 0)
    # Groups of ranks that nobody observes follow where all that are known have one distance and size.
    missing = np.flatnonzero(index < 0)
    whole = [np.array(line) for line in lines if -1 not in line]
    distances = {int(d) for ranks in whole for d in distinct(np.diff(np.sort(ranks)))}
    if len(missing) and len(distances) == 1 and world % (size * (distance := distances.pop())) == 0:
        everybody = np.arange(world)
        number = everybody // (size * distance) * distance + everybody % distance
        regular = all(len(distinct(number[ranks])) == 1 for ranks in whole)
        # Of pipelines the last rank of a communicator may be the first stage.
        turned = all(ranks[0] > ranks[-1] for ranks in whole)
        for one in distinct(number[missing]).tolist() if regular else ():
            ranks = np.flatnonzero(number == one).astype(np.int32)
            if (index[ranks] < 0).all():
                index[ranks] = np.arange(size)[:: -1 if turned else 1]
                why = ("nobody of it is observed; it follows from the regular distance of the others",)
                inferred.append(Group(-1, 0, role, tuple(ranks.tolist()), 0.6, why, inferred=True))
    return index, inferred
