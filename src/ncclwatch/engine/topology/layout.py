"""From the roles of groups to the topology of the job: sizes, the order of stages, and checks that all of it fits.

What does not fit is ``UNSURE``, not made to fit. Ranks nobody observes are filled in only where every observed group of a role
follows one rule (equal distance and size), as in every rank order in use; for Megatron-LM's, tp-cp-ep-dp-pp, see
``RankGenerator`` in its ``megatron/core/parallel_state.py``. The rule is checked, never assumed.

The order of stages follows from who sends to whom. Which end is the first shows where an iteration begins: there the first stage
sends, and the last one receives. Where no begin of an iteration is seen, the communicator's own order is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.model import Group, Layout, Role, Topology
from ncclwatch.engine.topology.record import POINT_TO_POINT, JobMap, KnownGroup, KnownJob, Recorder
from ncclwatch.engine.topology.roles import ONCE, Opinion, judge, vote
from ncclwatch.engine.topology.sequence_counts import crossing, roles_by_counts
from ncclwatch.engine.topology.specimen import Specimen, Usage, after_update, examine
from ncclwatch.model.events import Function

PARTITIONING = (Role.TENSOR, Role.PIPELINE, Role.DATA, Role.CONTEXT, Role.EXPERT)
"""Roles of which every rank has exactly one group, all of one size."""

Opinions = Mapping[int, Mapping[int, Opinion]]
"""Of each process, by row."""


@dataclass(slots=True)
class Dimension:
    """One way in which groups divide the ranks among them; arrays of shape (world,), −1 where unknown."""

    size: int
    index: NDArray[np.int32]
    """rank → place in its group; of pipelines its stage."""
    group: NDArray[np.int32]
    """rank → number of its group"""
    trouble: str = ""
    """Why it is not known, or not of all ranks."""
    known: bool = True
    groups: list[Group] = field(default_factory=list)
    """Groups of which nobody is observed, and which follow from the others."""


def infer(jobmap: JobMap, job: KnownJob, recorder: Recorder, *, by_counts: bool = False) -> tuple[Topology, list[Specimen]]:
    """Infer one job's topology from what was recorded so far, or (``by_counts``, and where no call was) from NCCL's own counts.

    Also returns the processes it was inferred from. O(specimens x operations + communicators).
    """
    rows_of: dict[int, dict[int, tuple[KnownGroup, int]]] = {process: {} for process in job.processes}
    for group in job.groups:
        for row in group.rows:
            rows_of[jobmap.row_process[row]][row] = (group, jobmap.row_rank[row])
    specimens: list[Specimen] = []
    periods: set[int] = set()
    for process in recorder.specimens if not by_counts else ():
        history = recorder.history(process)
        if process in rows_of and len(history):
            specimen = examine(process, jobmap.rank[process], history, rows_of[process], periods)
            specimens.append(specimen)
            if specimen.period is not None:
                periods.add(specimen.period.length)
    opinions = {specimen.process: judge(specimen, job.world) for specimen in specimens}
    roles = vote(job, recorder, specimens, opinions) if specimens else roles_by_counts(jobmap, job)
    order = order_stages(job.world, _of_role(job, roles, Role.PIPELINE), specimens, opinions)
    return assemble_topology(job, roles, order, calls=bool(specimens)), specimens


def _of_role(job: KnownJob, roles: Mapping[int, Opinion], role: Role) -> list[KnownGroup]:
    """Groups of a role. Frameworks make several communicators over the same ranks: one of each set is enough."""
    found: dict[object, KnownGroup] = {}
    for group in job.groups:
        if group.id in roles and roles[group.id].role is role:
            found.setdefault(group.ranks.tobytes() if (group.ranks >= 0).all() else group.hash, group)
    return list(found.values())


def order_stages(world: int, groups: Sequence[KnownGroup], specimens: Sequence[Specimen], opinions: Opinions) -> Dimension:
    """Put the ranks of all pipeline communicators in order. Without any there is one stage."""
    chains = list(dict.fromkeys(tuple(group.ranks.tolist()) for group in groups))
    known = [rank for chain in chains for rank in chain if rank >= 0]
    if len({len(chain) for chain in chains}) > 1 or len(set(known)) < len(known):
        return _dimension(world, Role.PIPELINE, *_joined(chains))
    used = [
        (specimen, specimen.usages[row])
        for specimen in specimens
        for row, opinion in opinions[specimen.process].items()
        if opinion.role is Role.PIPELINE
    ]
    steps = {((peer - usage.comm_rank) % usage.group.nranks, usage.group.nranks) for _, usage in used for peer in usage.peers}
    if any(step not in (1, stages - 1) for step, stages in steps):
        return _dimension(world, Role.PIPELINE, chains, "stages that are not neighbours in their communicator exchange data")
    ends = [_direction(specimen, usage, opinions[specimen.process]) for specimen, usage in used]
    turned = ends.count(-1) > ends.count(1)
    return _dimension(world, Role.PIPELINE, [chain[::-1] if turned else chain for chain in chains])


def _joined(pairs: Sequence[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], str]:
    """Pipelines made of several communicators, one for each pair of neighbours: paths through shared ranks, lowest end first.

    Or no path, and why.
    """
    if any(len(pair) != 2 or -1 in pair for pair in pairs):
        return [], "pipeline communicators of different sizes over the same ranks"
    import networkx as nx

    graph = nx.Graph(pairs)
    parts = [graph.subgraph(part) for part in nx.connected_components(graph)]
    paths = all(part.size() == len(part) - 1 and max(degree for _, degree in part.degree) <= 2 for part in parts)
    if not paths or len({len(part) for part in parts}) != 1:
        return [], "stages exchange data in no chain of one length"
    lowest = (min(rank for rank, degree in part.degree if degree == 1) for part in parts)
    return sorted(tuple(nx.dfs_preorder_nodes(part, end)) for end, part in zip(lowest, parts, strict=True)), ""


def _direction(specimen: Specimen, usage: Usage, roles: Mapping[int, Opinion]) -> int:
    """+1 where higher ranks are later stages, −1 where lower ones are, 0 where this process (no end of a chain) does not tell."""
    word = specimen.pattern
    once = np.isin(word["row"], [row for row, opinion in roles.items() if opinion.role in ONCE])
    if specimen.iteration is None or len(usage.peers) != 1 or not once.any():
        return 0
    word = np.roll(word, -after_update(once, np.isin(word["function"], POINT_TO_POINT)))
    first = word[np.isin(word["function"], POINT_TO_POINT) & (word["row"] == usage.row)]["function"][0]
    return 1 if (first == Function.SEND) == (min(usage.peers) > usage.comm_rank) else -1


def assemble_topology(job: KnownJob, roles: Mapping[int, Opinion], order: Dimension, *, calls: bool) -> Topology:
    """The topology that roles of groups (by id) and the order of stages make; ``calls``: whether any call was seen."""
    world, none = job.world, np.full(job.world, -1, np.int32)
    groups_of = {role: _of_role(job, roles, role) for role in PARTITIONING}
    dimensions = {
        role: order if role is Role.PIPELINE else _dimension(world, role, [group.ranks.tolist() for group in groups])
        for role, groups in groups_of.items()
    }
    unsure = [one.trouble for one in dimensions.values() if one.trouble]
    unclear = [group for group in job.groups if group.id in roles and roles[group.id].role is Role.UNSURE]
    layout, misfit = _layout(world, dimensions, unclear) if any(groups_of.values()) else (Layout(), "")
    if misfit:
        unsure.append(misfit)
    if not calls and not any(groups_of.values()):
        unsure.append("no calls were seen, and NCCL's counts alone do not tell what the groups are for")
    doubts = Counter(f"{group.nranks} ranks: {roles[group.id].why}" for group in unclear)
    unsure += [f"{number} group{'s' if number > 1 else ''} of {text}" for text, number in doubts.items()]
    unseen = Opinion(Role.UNSURE, 0.0, "no calls were seen")
    groups = [_as_group(group, roles.get(group.id, unseen)) for group in job.groups]
    groups += [group for one in dimensions.values() for group in one.groups]
    if misfit:
        doubtful = {role for role in PARTITIONING if dimensions[role].size > 1}
        groups = [_doubted(group) if group.role in doubtful else group for group in groups]
    stage, tensor, data = (
        dimensions[role].index if dimensions[role].known else none for role in (Role.PIPELINE, Role.TENSOR, Role.DATA)
    )
    return Topology(
        world=world,
        groups=tuple(sorted(groups, key=lambda g: (list(Role).index(g.role), g.ranks))),
        layout=layout,
        # Without calls a group of which nothing is known may be a pipeline.
        stage=stage if calls or layout.pp is not None else none,
        tensor_index=tensor,
        replica=data,
        confidence=min((g.confidence for g in groups if g.role in PARTITIONING), default=0.0) if not misfit else 0.0,
        unsure=tuple(dict.fromkeys(unsure)),
    )


def _as_group(group: KnownGroup, one: Opinion) -> Group:
    return Group(group.id, group.hash, one.role, tuple(group.ranks.tolist()), round(one.confidence, 3), (one.why,))


def _doubted(group: Group) -> Group:
    return Group(group.id, group.hash, Role.UNSURE, group.ranks, 0.0, (f"looks {group.role}, but the sizes do not fit together",))


def _dimension(world: int, role: Role, groups: Sequence[Sequence[int]], trouble: str = "") -> Dimension:
    """How groups of one role, each its ranks in order, divide the ranks; ``trouble`` says why they do not."""
    if not groups and not trouble:
        return Dimension(1, np.zeros(world, np.int32), np.arange(world, dtype=np.int32))
    sizes, seen = {len(ranks) for ranks in groups}, Counter(rank for ranks in groups for rank in ranks if rank >= 0)
    if len(sizes) > 1:
        trouble = f"{role} groups of different sizes: {', '.join(map(str, sorted(sizes)))}"
    elif max(seen.values(), default=1) > 1:
        trouble = f"ranks that are in two {role} groups"
    result = Dimension(max(sizes, default=1), np.full(world, -1, np.int32), np.full(world, -1, np.int32), trouble, not trouble)
    if not trouble:
        for number, ranks in enumerate(groups):
            order = np.array(ranks)
            result.index[order[order >= 0]], result.group[order[order >= 0]] = np.flatnonzero(order >= 0), number
        _fill_in(world, role, groups, result)
    return result


def _fill_in(world: int, role: Role, groups: Sequence[Sequence[int]], result: Dimension) -> None:
    """Groups of ranks that nobody observes follow where all that are known have one distance and size."""
    missing = np.flatnonzero(result.group < 0)
    size = result.size
    whole = [np.array(ranks) for ranks in groups if -1 not in ranks]
    distances = {int(d) for ranks in whole for d in np.unique(np.diff(np.sort(ranks)))}
    if len(missing) and len(distances) == 1 and world % (size * (distance := distances.pop())) == 0:
        everybody = np.arange(world)
        number = everybody // (size * distance) * distance + everybody % distance
        regular = all(len(np.unique(number[ranks])) == 1 for ranks in whole)
        # Of pipelines the last rank of a communicator may be the first stage.
        turned = all(ranks[0] > ranks[-1] for ranks in whole)
        for one in np.unique(number[missing]).tolist() if regular else ():
            ranks = np.flatnonzero(number == one).astype(np.int32)
            if (result.group[ranks] < 0).all():
                result.group[ranks], result.index[ranks] = int(result.group.max()) + 1, np.arange(size)[:: -1 if turned else 1]
                why = ("nobody of it is observed; it follows from the regular distance of the others",)
                result.groups.append(Group(-1, 0, role, tuple(ranks.tolist()), 0.6, why, inferred=True))
    if left := int((result.group < 0).sum()):
        result.trouble = f"{role} groups of {left} ranks are not known: nobody of them is observed"


def _layout(world: int, dimensions: Mapping[Role, Dimension], unclear: Sequence[KnownGroup]) -> tuple[Layout, str]:
    """Sizes that multiply to the number of ranks; where they do not, something was not seen or misread, and nothing is said.

    ``unclear`` are the groups of which it is not known what they are for.
    """
    if not all(one.known for one in dimensions.values()):
        return Layout(), "groups of one role do not divide the ranks among them"
    tp, pp, copies, cp, ep = (dimensions[role].size for role in PARTITIONING)
    if tp * pp * copies != world or copies % cp or (copies % ep and (tp * copies) % ep):
        sizes = f"tensor {tp}, pipeline {pp}, data {copies}, context {cp}, expert {ep}"
        return Layout(), f"the sizes found do not make {world} ranks: {sizes}"
    several = [dimensions[role].group for role in PARTITIONING[:3] if dimensions[role].size > 1]
    if not all(crossing(one, other) for one, other in combinations(several, 2)):
        return Layout(), "groups of different roles share more than one rank"
    # An unclear group is of context or experts, unless it lies where a group of a known role was not observed.
    holes = Counter(group.ranks for dimension in dimensions.values() for group in dimension.groups)
    if Counter(tuple(group.ranks.tolist()) for group in unclear) <= holes:
        return Layout(tp, pp, copies // cp, cp, ep), ""
    return (Layout(tp, pp, copies // cp, cp) if cp > 1 else Layout(tp, pp)), ""
