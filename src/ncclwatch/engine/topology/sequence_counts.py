"""Roles of communicators where no calls were seen: from what NCCL itself has counted, as in a job that already hangs.

Memory keeps how often each communicator was used (``opCount`` and ``collOpCount`` of ``ncclComm``; by function, ``seqNumber``,
from 2.26 on) and how far every connection was used, those of Send and Recv apart from those of collectives (connection index 1
and 0). The order of the calls is not there. So every assignment of roles that the sets of ranks allow is tried: tensor groups are
used much more often than gradients are reduced, pipelines exchange with neighbours, the sizes multiply to the number of ranks,
groups of different roles share one rank at most, and what lies inside a data group is context or experts. Of the assignments
that fit, those count that leave the fewest groups unexplained. What they agree on is said, the rest is ``UNSURE``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.connections import is_hidden
from ncclwatch.engine.topology.model import Role
from ncclwatch.engine.topology.record import JobMap, KnownGroup, KnownJob
from ncclwatch.engine.topology.roles import LARGE_GROUP, OFTEN, RARE, Opinion, kinds
from ncclwatch.model.state import Communicator, Direction

MAX_FAMILIES = 16
"""Bound: a job with more kinds of groups is not understood: there would be more than 17³ = 4,913 assignments to try."""

SUM, GATHER, SCATTER = "AllReduce", "AllGather", "ReduceScatter"
REDUCES = {SUM, GATHER, SCATTER, "Reduce", "Broadcast"}


@dataclass(slots=True)
class Use:
    """How a group was used, by the members that were observed."""

    group: KnownGroup
    collectives: int = 0
    exchanges: int = 0
    """Send and Recv, in launched plans: the most of any member."""
    functions: dict[str, int] = field(default_factory=dict)
    """Collectives by name; empty where this build counts them together."""
    ways: set[tuple[int, int, Direction]] = field(default_factory=set)
    """(rank of the communicator, peer, direction) of every connection that Send or Recv have used, or may have."""
    hidden: bool = False
    """Whether ranks are joined by NVLink and the like, where Send and Recv are not counted."""

    @property
    def times(self) -> int:
        """How often it was used at all."""
        return max(self.collectives, self.exchanges)

    @property
    def usual(self) -> tuple[str, ...]:
        """Collectives that are no single call among many."""
        return tuple(sorted(name for name, count in self.functions.items() if count > RARE * self.collectives))


@dataclass(slots=True)
class Family:
    """Groups that divide the ranks among them and are used alike."""

    uses: list[Use]
    number: NDArray[np.int32]
    """rank → number of its group, −1 where that is not known. Shape (world,)."""
    size: int = field(init=False)
    """Ranks of each of its groups."""
    times: float = field(init=False)
    """How often each of its groups was used."""
    functions: set[str] = field(init=False)
    """Collectives that were called, empty where the build does not tell."""
    exchanges: bool = field(init=False)
    """Whether no collective was called: Send and Recv alone, or nothing."""
    uncounted: bool = field(init=False)
    """Whether nothing was counted, though Send and Recv may have been called."""

    def __post_init__(self) -> None:
        first = self.uses[0]
        self.size, self.functions, self.exchanges = first.group.nranks, set(first.usual), not first.collectives
        self.times = float(np.median([use.times for use in self.uses]))
        self.uncounted = not any(use.times for use in self.uses)


def roles_by_counts(jobmap: JobMap, job: KnownJob) -> dict[int, Opinion]:
    """The role of every group whose ranks are known, by group id, from the communicators as they were last read."""
    uses = _uses(jobmap, job)
    opinions = {use.group.id: opinion for use in uses if (opinion := _idle(use)) is not None}
    families = list(_families(jobmap, job, [use for use in uses if use.group.id not in opinions]))
    fitting = list(_assignments(job.world, families)) if len(families) <= MAX_FAMILIES else []
    unexplained = [sum(r is Role.UNSURE and not f.uncounted for r, f in zip(one, families, strict=True)) for one in fitting]
    fitting = [_claimed(one) for one, number in zip(fitting, unexplained, strict=True) if number == min(unexplained)]
    for at, family in enumerate(families):
        said = {one[at] for one in fitting}
        role = said.pop() if len(said) == 1 else Role.UNSURE
        opinions |= {use.group.id: _opinion(role, use) for use in family.uses}
    for use in uses:
        opinions.setdefault(use.group.id, _opinion(Role.UNSURE, use))
    return opinions


def _opinion(role: Role, use: Use) -> Opinion:
    counted = f"NCCL has counted {use.times} operations on it" if use.times else "NCCL does not count Send and Recv over NVLink"
    if role is Role.UNSURE:
        return Opinion(role, 0.0, f"{counted}, which fits more than one role, or none")
    return Opinion(role, 0.6, f"{counted}; no other role fits the sets of ranks")


def _idle(use: Use) -> Opinion | None:
    if use.group.nranks == 1:
        return Opinion(Role.UNUSED, 1.0, "a group of one rank")
    return Opinion(Role.UNUSED, 0.8, "NCCL has counted no operation on it") if not use.times and not use.hidden else None


def _uses(jobmap: JobMap, job: KnownJob) -> list[Use]:
    """One for each group that has an observed member and whose ranks are all known."""
    found = []
    for group in job.groups:
        if not group.rows or (group.ranks < 0).any() or (group.ranks >= job.world).any():
            continue
        use = Use(group)
        for row in group.rows:
            own = jobmap.communicators.get(row)
            if own is not None:
                _count(use, jobmap.row_rank[row], own)
        found.append(use)
    return found


def _count(use: Use, rank: int, own: Communicator) -> None:
    steps = [(s.peer, s.direction, s.connection_index, s.step) for s in own.net_steps]
    steps += [(h.peer, h.direction, h.connection_index, h.tail or 0) for h in own.host_connections]
    ringed = any(index == 0 and step > 0 for _, _, index, step in steps)
    total = own.op_count or 0
    collectives = sum(own.sequence_numbers.values()) or own.collective_count or (total if ringed else 0)
    use.collectives = max(use.collectives, collectives)
    for name, count in own.sequence_numbers.items():
        use.functions[name] = max(use.functions.get(name, 0), count)
    used = {(rank, peer, way) for peer, way, index, step in steps if index == 1 and step > 0}
    use.hidden |= is_hidden(own)
    if not used and not collectives and (total or use.hidden):  # whom it is joined to is known, and nothing else
        used = {(rank, peer, Direction(way)) for _, peer, way, _ in own.transports if way in ("send", "recv")}
    use.ways |= used
    # Of Send and Recv through shared memory not every release counts the plans.
    exchanged = max((step for _, _, index, step in steps if index == 1), default=0)
    if not collectives or exchanged:
        use.exchanges = max(use.exchanges, exchanged, 0 if collectives else total)


def _families(jobmap: JobMap, job: KnownJob, uses: Sequence[Use]) -> Iterable[Family]:
    """Groups of one kind, where they do not overlap, and every rank that was observed is in one of them."""
    of = {use.group.id: use for use in uses if not (use.collectives and use.exchanges)}  # no role is known for both on one
    observed = {rank for process in job.processes if 0 <= (rank := jobmap.rank[process]) < job.world}
    # Counts of Send and Recv differ between the stages.
    called = [(use.group, (use.collectives > 0, use.usual), float(use.collectives)) for use in of.values()]
    for members in kinds(job.world, called):
        groups = list(dict.fromkeys(tuple(of[number].group.ranks.tolist()) for number in members))
        ranks = {rank for group in groups for rank in group}
        if len(ranks) == sum(map(len, groups)) and observed <= ranks:
            number = np.full(job.world, -1, np.int32)
            for at, group in enumerate(groups):
                number[list(group)] = at
            yield Family([of[one] for one in members], number)


def _assignments(world: int, families: Sequence[Family]) -> Iterable[tuple[Role, ...]]:
    """Every assignment of roles to the families that fits; few families make few combinations."""
    tensor = [at for at, f in enumerate(families) if not f.exchanges and _may_be_tensor(f)]
    pipeline = [at for at, f in enumerate(families) if f.exchanges and _neighbours(f)]
    data = [at for at, f in enumerate(families) if not f.exchanges and f.functions <= REDUCES]
    for t, p, d in product((None, *tensor), (None, *pipeline), (None, *data)):
        chosen = [at for at in (t, p, d) if at is not None]
        if len(set(chosen)) < len(chosen) or int(np.prod([families[at].size for at in chosen])) != world:
            continue
        if (roles := _fits(families, t, p, d)) is not None:
            yield roles


def _claimed(roles: tuple[Role, ...]) -> tuple[Role, ...]:
    """Nothing, where one kind of group is all that a job uses: it may be tensor as well as data parallel."""
    telling = {Role.TENSOR, Role.PIPELINE, Role.CONTEXT, Role.EXPERT} & set(roles)
    return roles if telling else (Role.UNSURE,) * len(roles)


def _fits(families: Sequence[Family], t: int | None, p: int | None, d: int | None) -> tuple[Role, ...] | None:
    tensor, pipeline, data = (families[at] if at is not None else None for at in (t, p, d))
    chosen = [family.number for family in (tensor, pipeline, data) if family is not None]
    if not all(crossing(one, other) for one, other in combinations(chosen, 2)):
        return None
    if tensor is not None and not _often(tensor, pipeline, data):
        return None
    if data is not None and pipeline is not None:
        # With nothing to compare it with, a group may as well be used inside the passes.
        if pipeline.uncounted and not any(family.times >= 2 * OFTEN * data.times for family in families):
            return None
        if not pipeline.uncounted and data.times * OFTEN > pipeline.times:
            return None
    given = {t: Role.TENSOR, p: Role.PIPELINE, d: Role.DATA}
    roles = [given.get(at) or _other(family, tensor, pipeline, data) for at, family in enumerate(families)]
    known = tuple(role for role in roles if role is not None)
    return known if len(known) == len(families) else None


def _often(tensor: Family, pipeline: Family | None, data: Family | None) -> bool:
    """Whether it is used inside the passes."""
    if data is None:
        return pipeline is not None and not pipeline.uncounted and tensor.times >= OFTEN * pipeline.times
    if tensor.functions and tensor.functions != {SUM} and data.functions == {SUM}:
        # Sharded data with replicas sums once for each scatter.
        return 2 * OFTEN * data.times <= max(use.functions.get(SCATTER, 0) for use in tensor.uses)
    known = 2 if tensor.functions else 4
    return tensor.times >= known * OFTEN * data.times


def _other(family: Family, tensor: Family | None, pipeline: Family | None, data: Family | None) -> Role | None:
    """What a family is that is none of the three; ``None`` where it speaks against them."""
    inside = data is not None and _within(family, data)
    if family.uncounted:
        return Role.UNSURE
    if family.exchanges:
        return _exchanges_inside_data(family) if inside else None
    often = data is not None and family.times >= 2 * OFTEN * data.times
    if data is not None and inside:
        if often:
            return _often_inside_data(family, data)
        return Role.DATA if family.size == data.size else Role.UNSURE
    if often:
        return None
    if not family.functions <= {SUM}:
        return Role.UNSURE
    copies = [one for one in (tensor, pipeline) if one is not None]
    if family.size == np.prod([one.size for one in copies]) and all(_within(one, family) for one in copies):
        return Role.MODEL
    if family.size == len(family.number):
        return Role.WORLD
    return Role.EMBEDDING if pipeline is not None and _within(family, pipeline) else Role.UNSURE


def _often_inside_data(family: Family, data: Family) -> Role | None:
    """Context gathers and scatters; sums inside the passes are not among ranks that hold copies of the same weights.

    Data that is sharded layer by layer gathers and scatters as well: where others are but summed, that may be a barrier.
    """
    if not family.functions or data.functions == {SUM}:
        return Role.UNSURE if family.functions != {SUM} else None
    return Role.CONTEXT if family.functions == {GATHER, SCATTER} else None


def _exchanges_inside_data(family: Family) -> Role:
    """Send and Recv inside a data group: round a ring one way is context, with everybody experts; of two ranks it is either."""
    if family.size < 3:
        return Role.UNSURE
    peers: dict[tuple[int, int], set[int]] = defaultdict(set)
    for use in family.uses:
        for rank, peer, way in use.ways:
            if way is Direction.SEND:
                peers[use.group.id, rank].add(peer)
    if any(len(own) > 1 for own in peers.values()):
        return Role.EXPERT if family.size == 3 or not _neighbours(family) else Role.UNSURE
    return Role.CONTEXT if _neighbours(family) else Role.EXPERT


def _may_be_tensor(family: Family) -> bool:
    wide = family.size > LARGE_GROUP and any(use.group.hosts > 1 for use in family.uses)
    return not wide and (not family.functions or family.functions in ({SUM}, {GATHER, SCATTER}, {SUM, GATHER, SCATTER}))


def _neighbours(family: Family) -> bool:
    """Whether ranks exchange with those next to them only (the last may with the first)."""
    ways = [(rank, peer) for use in family.uses for rank, peer, _ in use.ways]
    return bool(ways) and all((peer - rank) % family.size in (1, family.size - 1) for rank, peer in ways)


def _within(inner: Family, outer: Family) -> bool:
    """Whether every group of one lies inside a group of the other, or is the same."""
    known = (inner.number >= 0) & (outer.number >= 0)
    pairs = np.unique(np.stack([inner.number[known], outer.number[known]]), axis=1)
    return inner.size <= outer.size and len(np.unique(pairs[0])) == pairs.shape[1]


def crossing(one: NDArray[np.int32], other: NDArray[np.int32]) -> bool:
    """Whether no two ranks share a group in both; rank → number of its group, −1 where unknown."""
    known = (one >= 0) & (other >= 0)
    pairs = one[known].astype(np.int64) * (int(other.max(initial=0)) + 1) + other[known]
    return len(np.unique(pairs)) == len(pairs)
