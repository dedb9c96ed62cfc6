"""Which role each kind of group plays.

* Stages exchange activations and gradients by Send and Recv with neighbours; experts by all-to-all.
* Tensor and context parallelism communicate inside every pass, over and over with the same size; gradients are reduced once an
  iteration (MegaTrace, Key Insight 2).
* Data sharded by FSDP is gathered layer by layer as well, but then no other group reduces gradients.
* The sizes of tensor, pipeline and data groups multiply to the number of ranks; two of different roles share one rank at most;
  context and experts lie inside a data group (see ``RankGenerator`` in Megatron-LM's ``megatron/core/parallel_state.py``).

So every assignment of roles that the sets of ranks allow is tried, with the order of the calls where that was seen, and without.
Of those that fit, those count that leave the fewest kinds unexplained. What they agree on is said, the rest is ``UNSURE``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.iteration import Order, Shape
from ncclwatch.engine.topology.model import Role
from ncclwatch.engine.topology.record import GATHER, SCATTER, SUM, KnownJob
from ncclwatch.engine.topology.uses import OFTEN, RARE, Family, Use, families
from ncclwatch.model.events import Function

MAX_FAMILIES = 16
"""Bound: a job with more kinds of groups is not understood: there would be more than 17³ = 4,913 assignments to try."""
LARGE_GROUP = 8
"""Unit: ranks. From: GPUs of one host joined by NVLink, as tensor groups are (Megatron-LM's advice, and every job of
``score.topology``). A single group of more, over several hosts, is data parallel.
"""
ONCE = (Role.DATA, Role.MODEL, Role.EMBEDDING, Role.EXPERT_DATA, Role.WORLD)
"""Roles whose operations belong to the update of parameters, once an iteration."""
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


@dataclass(frozen=True, slots=True)
class Opinion:
    """A role with its confidence and the observation it rests on."""

    role: Role
    confidence: float
    why: str


@dataclass(slots=True)
class Reading:
    """What the groups of a job are for."""

    opinions: dict[int, Opinion] = field(default_factory=dict)
    """By group id."""
    families: dict[Role, Family] = field(default_factory=dict)
    """The kind of each role that has one."""


def read(job: KnownJob, uses: Sequence[Use], observed: set[int], *, repeats: int | None) -> Reading:
    """The role of every group: of each kind what all assignments that fit agree on.

    ``repeats``: how often the iteration was seen, 0 without one; ``None`` where no calls were seen, but counts.
    """
    counted = repeats is None
    result = Reading()
    for use in uses:
        if use.group.nranks == 1 or not (use.total or use.hidden):
            why = "a group of one rank" if use.group.nranks == 1 else "no operation was seen or counted on it"
            result.opinions[use.group.id] = Opinion(Role.UNUSED, 0.8, why)
        elif not counted and use.known and not use.times:
            role = Role.WORLD if use.group.nranks == job.world else Role.UNUSED
            result.opinions[use.group.id] = Opinion(role, 0.6, WHY[Role.UNUSED])
    kinds = families(job, [use for use in uses if use.group.id not in result.opinions], observed)
    told = {use.group.id for kind in kinds for use in kind.uses}
    idle = [set(use.group.ranks.tolist()) for use in uses if use.group.id not in told and use.group.nranks > 1]
    fit = _Fit(job.world, kinds, counted, idle, OFTEN * (1 if repeats else 2))
    # Where calls show no iteration, or a group is called that is not in it, only part of one may have been seen.
    beside = [use.total for use in uses if use.group.id not in told and not use.mixed and 1 < use.group.nranks < job.world]
    # One micro-batch in a pipeline is the steady part of an iteration, or its ranks would mostly idle.
    steady = any(kind.shape is Shape.CHAIN and kind.seen.inside is None for kind in kinds)
    clear = repeats is None or (not steady and (max(beside, default=0) <= RARE * repeats if repeats else len(kinds) == 1))
    found = list(fit.assignments()) if clear and len(kinds) <= MAX_FAMILIES else []
    open_ = [sum(role is Role.UNSURE and not kind.uncounted for role, kind in zip(one, kinds, strict=True)) for one in found]
    found = [fit.claimed(one) for one, number in zip(found, open_, strict=True) if number == min(open_)]
    for at, kind in enumerate(kinds):
        said = {one[at] for one in found}
        role = said.pop() if len(said) == 1 else Role.UNSURE
        if role is not Role.UNSURE and (role not in result.families or kind.size > result.families[role].size):
            result.families[role] = kind
        result.opinions |= {use.group.id: _opinion(role, kind, counted) for use in kind.uses}
    for use in uses:
        result.opinions.setdefault(
            use.group.id, Opinion(Role.UNSURE, 0.0, "collectives and Send and Recv together, or parts that overlap")
        )
    return result


def _opinion(role: Role, kind: Family, counted: bool) -> Opinion:
    if not counted:
        if role is not Role.UNSURE:
            return Opinion(role, 0.9, WHY[role])
        why = str(kind.shape) if kind.exchanges else f"{_called(kind)}, which fits more than one role, or none"
        return Opinion(role, 0.0, why)
    times = int(kind.uses[0].total)
    text = f"NCCL has counted {times} operations on it" if times else "NCCL does not count Send and Recv over NVLink"
    if role is Role.UNSURE:
        return Opinion(role, 0.0, f"{text}, which fits more than one role, or none")
    return Opinion(role, 0.6, f"{text}; no other role fits the sets of ranks")


def _called(kind: Family) -> str:
    return " and ".join(sorted(Function(f).name.title().replace("_", "") for f in kind.functions)) or "operations"


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
        wide = kind.size > LARGE_GROUP and kind.hosts > 1
        if kind.exchanges or kind.seen.inside is False or kind.seen.tiny or kind.seen.follows or (wide and self.counted):
            return False
        both = {GATHER, SCATTER} <= kind.functions <= {GATHER, SCATTER, SUM}
        return kind.seen.order in (None, Order.TURNS) and (both or kind.functions <= {SUM})

    def _may_be_data(self, kind: Family) -> bool:
        if kind.exchanges or kind.seen.tiny or not kind.functions <= REDUCES:
            return False
        if kind.seen.order in (Order.RUNS, Order.ONE_WAY):
            return self._sharded(kind)
        return kind.seen.inside is not True and (kind.seen.order is None or kind.times == 1 or not self._premature(kind))

    def _sharded(self, kind: Family) -> bool:
        """Whether parameters are gathered and gradients scattered layer by layer, and no other group reduces them."""
        return not self._premature(kind) and not any(
            other.functions
            and other.functions <= REDUCES
            and not other.seen.tiny
            and self._once(other, kind)
            and within(kind, other)
            for other in self.kinds
            if other is not kind
        )

    def _premature(self, kind: Family) -> bool:
        """Whether another communicator over its ranks exists and was not used yet."""
        waiting = [len(ranks) for line in kind.lines for ranks in self.idle if {*line} - {-1} <= ranks]
        # The communicator over all ranks that frameworks make first is mostly never used.
        return len(waiting) > len(kind.lines) * (self.world in waiting)

    def _once(self, kind: Family, other: Family) -> bool:
        """Whether a kind is used once an iteration, and the other inside the passes."""
        return kind.seen.inside is False if kind.seen.inside is not None else other.times >= self.often * kind.times

    def claimed(self, roles: tuple[Role, ...]) -> tuple[Role, ...]:
        """Nothing, where one kind of group is all that a job uses: it may be tensor as well as data parallel."""
        if {Role.TENSOR, Role.PIPELINE, Role.CONTEXT, Role.EXPERT} & set(roles):
            return roles
        kind = self.kinds[roles.index(Role.DATA)]
        wide = kind.size > LARGE_GROUP and kind.hosts > 1
        clear = not self.counted and not self._premature(kind) and (wide or kind.seen.gradients)
        return roles if clear or (len(set(roles) - {Role.UNSURE}) > 1 and not self.counted) else (Role.UNSURE,) * len(roles)

    def _roles(self, t: int | None, p: int | None, d: int | None) -> tuple[Role, ...] | None:
        tensor, pipeline, data = (self.kinds[at] if at is not None else None for at in (t, p, d))
        chosen = [kind for kind in (tensor, pipeline, data) if kind is not None]
        if not all(crossing(one.number, other.number) for one, other in combinations(chosen, 2)):
            return None
        if tensor is not None and not self._in_passes(tensor, pipeline, data):
            return None
        if data is not None and pipeline is not None and data.seen.inside is None:
            # With nothing to compare it with, a group may as well be used inside the passes.
            if pipeline.uncounted and not any(kind.times >= self.often * data.times for kind in self.kinds):
                return None
            if not pipeline.uncounted and data.times * OFTEN > pipeline.times:
                return None
        given = {t: Role.TENSOR, p: Role.PIPELINE, d: Role.DATA}
        roles = [given.get(at) or self._other(kind, tensor, pipeline, data) for at, kind in enumerate(self.kinds)]
        known = tuple(role for role in roles if role is not None)
        return known if len(known) == len(roles) else None

    def _in_passes(self, tensor: Family, pipeline: Family | None, data: Family | None) -> bool:
        if tensor.seen.inside:
            return True
        if data is None:
            return pipeline is not None and not pipeline.uncounted and tensor.times >= OFTEN * pipeline.times
        if data.seen.order in (Order.RUNS, Order.ONE_WAY):
            return True
        if self.counted and tensor.functions and tensor.functions != {SUM} and data.functions == {SUM}:
            # Sharded data with replicas sums once for each scatter.
            return self.often * data.times <= max(use.scatters for use in tensor.uses)
        return tensor.times >= self.often * data.times * (1 if tensor.functions else 2)

    def _other(self, kind: Family, tensor: Family | None, pipeline: Family | None, data: Family | None) -> Role | None:
        """What a kind is that is none of the three; ``None`` where it speaks against them."""
        inside = data is not None and within(kind, data)
        if kind.uncounted:
            return Role.UNSURE
        if kind.seen.tiny:
            return Role.WORLD if kind.size == self.world else Role.MODEL
        if kind.exchanges:
            return self._exchanging(kind, inside)
        often = kind.seen.inside if kind.seen.inside is not None else data is not None and kind.times >= self.often * data.times
        if data is not None and inside:
            if often:
                return self._often_inside_data(kind, data)
            experts = [one.size for one in self.kinds if one.exchanges and one.shape is Shape.EVERYBODY]
            if kind.size == data.size:
                return Role.DATA
            return Role.EXPERT_DATA if kind.size * max(experts, default=0) == data.size else Role.UNSURE
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
        if kind.seen.order is Order.ONE_WAY:
            return Role.CONTEXT
        if not kind.functions or data.functions == {SUM} or kind.seen.order is Order.RUNS:
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
    return inner.size <= outer.size and len(np.unique(pairs[0])) == pairs.shape[1]


def crossing(one: NDArray[np.int32], other: NDArray[np.int32]) -> bool:
    """Whether no two ranks share a group in both; rank → number of its group, −1 where unknown."""
    known = (one >= 0) & (other >= 0)
    pairs = one[known].astype(np.int64) * (int(other.max(initial=0)) + 1) + other[known]
    return len(np.unique(pairs)) == len(pairs)
