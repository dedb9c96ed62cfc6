"""From opinions on single processes to the topology of the job: every group's role, the layout, and checks that they fit.

What does not fit is ``UNSURE``, not made to fit. Ranks nobody observes are filled in only where every observed group of a role
follows one rule (equal distance and size), as in every rank order in use; for Megatron-LM's, tp-cp-ep-dp-pp, see
``RankGenerator`` in its ``megatron/core/parallel_state.py``. The rule is checked, never assumed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.counted import roles_by_counts
from ncclwatch.engine.topology.jobmap import Facts, JobFacts, JobMap
from ncclwatch.engine.topology.model import Group, Layout, Role, Topology
from ncclwatch.engine.topology.record import Recorder
from ncclwatch.engine.topology.roles import Opinion, judge
from ncclwatch.engine.topology.specimen import Specimen, examine
from ncclwatch.engine.topology.stages import StageOrder, order_stages

AGREEMENT = 0.8
"""Share of the specimens of a kind of group that must say the same."""

PARTITIONING = (Role.TENSOR, Role.PIPELINE, Role.DATA, Role.CONTEXT, Role.EXPERT)
"""Roles of which every rank has exactly one group, all of one size."""


@dataclass(slots=True)
class Judged:
    """A group with the role it was given."""

    facts: Facts
    role: Role
    confidence: float
    why: tuple[str, ...]


@dataclass(slots=True)
class Inference:
    """A topology with what it was inferred from."""

    topology: Topology
    specimens: list[Specimen] = field(default_factory=list)
    judged: dict[int, Judged] = field(default_factory=dict)
    """group id → role"""


def infer(jobmap: JobMap, job: JobFacts, recorder: Recorder, *, by_counts: bool = False) -> Inference:
    """Infer one job's topology from what was recorded so far, or (``by_counts``, and where no call was) from NCCL's own counts.

    O(specimens x operations + communicators).
    """
    rows_of = _rows_by_process(jobmap, job)
    specimens: list[Specimen] = []
    periods: set[int] = set()
    for process in recorder.specimens if not by_counts else ():
        if process in rows_of:
            history = recorder.history(process)
            if len(history):
                specimens.append(examine(process, jobmap.rank[process], history, rows_of[process], periods))
                if (period := specimens[-1].period) is not None:
                    periods.add(period.length)
    opinions = {specimen.process: judge(specimen, job.world) for specimen in specimens}
    judged = _give_roles(jobmap, job, recorder, specimens, opinions) if specimens else _by_counts(jobmap, job)
    order = order_stages(job.world, [j.facts for j in judged.values() if j.role is Role.PIPELINE], specimens, opinions)
    return Inference(_assemble(job, judged, order, specimens), specimens, judged)


def _rows_by_process(jobmap: JobMap, job: JobFacts) -> dict[int, dict[int, tuple[Facts, int]]]:
    result: dict[int, dict[int, tuple[Facts, int]]] = {process: {} for process in job.processes}
    for group in job.groups:
        for row in group.rows:
            result[jobmap.row_process[row]][row] = (group, jobmap.row_rank[row])
    return result


def _by_counts(jobmap: JobMap, job: JobFacts) -> dict[int, Judged]:
    """Without calls: what NCCL's own counts tell."""
    opinions = roles_by_counts(jobmap, job, jobmap.communicators)
    groups = {group.id: group for group in job.groups}
    return {number: Judged(groups[number], one.role, one.confidence, (one.why,)) for number, one in opinions.items()}


# --- roles of groups -----------------------------------------------------------------------------------------------------


def _give_roles(
    jobmap: JobMap,
    job: JobFacts,
    recorder: Recorder,
    specimens: Sequence[Specimen],
    opinions: Mapping[int, Mapping[int, Opinion]],
) -> dict[int, Judged]:
    votes: dict[int, list[Opinion]] = defaultdict(list)
    for specimen in specimens:
        for row, opinion in opinions[specimen.process].items():
            votes[specimen.usages[row].group.id].append(opinion)
    judged: dict[int, Judged] = {}
    for group in job.groups:
        if group.id in votes:
            judged[group.id] = _majority(group, votes[group.id])
    families = _families(jobmap, job, recorder)
    for members in families.values():
        _agree(members, judged)
    _by_likeness(recorder, job, judged)
    return judged


def _majority(group: Facts, votes: Sequence[Opinion]) -> Judged:
    """The role most of its members show. Silence of some does not speak against what others do."""
    weight: dict[Role, float] = defaultdict(float)
    for vote in votes:
        weight[vote.role] += max(vote.confidence, 0.05)
    speaking = [v for v in votes if v.role is not Role.UNUSED] or list(votes)
    sure = [v for v in speaking if v.role is not Role.UNSURE] or speaking
    role = max(dict.fromkeys(v.role for v in sure), key=lambda r: weight[r])
    own = [v for v in sure if v.role is role]
    share = len(own) / len(sure)
    why = tuple(dict.fromkeys(v.why for v in own))[:2]
    if share < AGREEMENT:
        return Judged(group, Role.UNSURE, 0.0, (f"its ranks use it differently: {', '.join(sorted({v.role for v in sure}))}",))
    return Judged(group, role, max(v.confidence for v in own) * share, why)


def _families(jobmap: JobMap, job: JobFacts, recorder: Recorder) -> dict[tuple[int, ...], list[Facts]]:
    """Groups of one size that call the same functions: of one role, if one observed process is a member of only one of them."""
    result: dict[tuple[int, ...], list[Facts]] = defaultdict(list)
    for group in job.groups:
        if not group.rows:
            continue
        calls = recorder.calls[group.rows].sum(axis=0)
        used = tuple(np.flatnonzero(calls * 20 > calls.sum()).tolist())
        result[group.nranks, *used].append(group)
    return result


def _agree(members: Sequence[Facts], judged: dict[int, Judged]) -> None:
    """Ranks that could not tell (too few calls, lost records) follow their kind, where their kind has one role only."""
    roles = {judged[m.id].role for m in members if m.id in judged} - {Role.UNSURE, Role.UNUSED}
    if len(roles) != 1:
        return
    (role,) = roles
    sure = [judged[m.id] for m in members if m.id in judged and judged[m.id].role is role]
    seen = [m for m in members if m.id in judged and judged[m.id].role is not Role.UNUSED]
    if len(sure) < AGREEMENT * len(seen) and len(sure) * 2 <= len(seen):
        return
    for member in members:
        own = judged.get(member.id)
        if own is not None and own.role is Role.UNSURE:
            judged[member.id] = Judged(member, role, 0.7 * sure[0].confidence, ("like the other groups of its kind",))


def _by_likeness(recorder: Recorder, job: JobFacts, judged: dict[int, Judged]) -> None:
    """Groups without a member among the specimens get the role of the group that is used most alike."""
    known = [j for j in judged.values() if j.facts.rows and j.role not in (Role.UNUSED,)]
    rest = [group for group in job.groups if group.id not in judged and group.rows]
    if not rest or not recorder.taken:
        return
    vectors = {group.id: _usage_vector(recorder, group) for group in [*(j.facts for j in known), *rest]}
    by_size: dict[int, list[Judged]] = defaultdict(list)
    for one in known:
        by_size[one.facts.nranks].append(one)
    prototypes = {size: _prototypes(group, vectors) for size, group in by_size.items()}
    for group in rest:
        vector = vectors[group.id]
        if not vector.any():
            judged[group.id] = Judged(group, Role.UNUSED, 0.8, ("no operation was seen on it",))
            continue
        near = sorted((float(np.abs(vector - v).sum()), role) for role, v in prototypes.get(group.nranks, {}).items())
        if near and near[0][0] < 0.5 and (len(near) == 1 or near[0][0] * 2 < near[1][0]):
            judged[group.id] = Judged(group, near[0][1], 0.8, ("used like the groups looked at in full",))
        else:
            judged[group.id] = Judged(group, Role.UNSURE, 0.0, ("used unlike any group looked at in full",))


def _prototypes(judged: Sequence[Judged], vectors: Mapping[int, NDArray[np.float64]]) -> dict[Role, NDArray[np.float64]]:
    found: dict[Role, list[NDArray[np.float64]]] = defaultdict(list)
    for one in judged:
        found[one.role].append(vectors[one.facts.id])
    return {role: np.median(np.stack(own), axis=0) for role, own in found.items()}


def _usage_vector(recorder: Recorder, group: Facts) -> NDArray[np.float64]:
    """Shares of functions, and logarithms of mean counts (scaled): near for groups of one role, apart for others."""
    calls = recorder.calls[group.rows].sum(axis=0).astype(np.float64)
    if not calls.sum():
        return np.zeros(2 * len(calls))
    mean = recorder.elements[group.rows].sum(axis=0) / np.maximum(calls, 1)
    size = np.where(calls > 0, np.log2(mean + 1) / 8, 0)
    return np.concatenate([calls / calls.sum(), size * (calls * 20 > calls.sum())])


# --- layout --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Dimension:
    size: int = 1
    index: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """rank → place in its group, −1 unknown"""
    group: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """rank → number of its group, −1 unknown"""
    groups: list[Group] = field(default_factory=list)
    known: bool = True
    trouble: str = ""


def _assemble(job: JobFacts, judged: Mapping[int, Judged], order: StageOrder, specimens: Sequence[Specimen]) -> Topology:
    unsure: list[str] = []
    dimensions: dict[Role, _Dimension] = {}
    for role in PARTITIONING:
        own = [j for j in judged.values() if j.role is role]
        if role is Role.PIPELINE:
            dimensions[role] = _pipeline(job, own, order)
        else:
            dimensions[role] = _dimension(job, role, _one_per_rank_set(own))
        if dimensions[role].trouble:
            unsure.append(dimensions[role].trouble)
    layout, trouble = _layout(job.world, dimensions, judged)
    unsure += trouble
    if not specimens and not any(j.role in PARTITIONING for j in judged.values()):
        unsure.append("no calls were seen, and NCCL's counts alone do not tell what the groups are for")
    groups = [_as_group(j) for j in judged.values()]
    groups += [_as_group(Judged(g, Role.UNSURE, 0.0, ("no calls were seen",))) for g in job.groups if g.id not in judged]
    groups += [group for dimension in dimensions.values() for group in dimension.groups]
    if trouble:
        doubtful = {role for role in PARTITIONING if dimensions[role].size > 1}
        groups = [_doubted(group) if group.role in doubtful else group for group in groups]
    stage = dimensions[Role.PIPELINE].index
    # Without calls a group of which nothing is known may be a pipeline.
    if not dimensions[Role.PIPELINE].known or (not specimens and layout.pp is None):
        stage = np.full(job.world, -1, np.int32)
    confidence = min((g.confidence for g in groups if g.role in PARTITIONING), default=0.0) if not trouble else 0.0
    return Topology(
        world=job.world,
        groups=tuple(sorted(groups, key=lambda g: (list(Role).index(g.role), g.ranks))),
        layout=layout,
        stage=stage,
        tensor_index=_index(dimensions[Role.TENSOR], job.world),
        replica=_index(dimensions[Role.DATA], job.world),
        confidence=confidence,
        evidence=tuple(dict.fromkeys(f"{j.role}: {why}" for j in judged.values() for why in j.why if j.role in PARTITIONING))[
            :12
        ],
        unsure=tuple(dict.fromkeys([*unsure, *_doubts(judged)])),
    )


def _doubts(judged: Mapping[int, Judged]) -> list[str]:
    found: dict[str, int] = defaultdict(int)
    for one in judged.values():
        if one.role is Role.UNSURE:
            found[f"{one.facts.nranks} ranks: {one.why[0] if one.why else 'unknown'}"] += 1
    return [f"{number} group{'s' if number > 1 else ''} of {text}" for text, number in found.items()]


def _doubted(group: Group) -> Group:
    return Group(group.id, group.hash, Role.UNSURE, group.ranks, 0.0, (f"looks {group.role}, but the sizes do not fit together",))


def _as_group(one: Judged) -> Group:
    ranks = tuple(one.facts.ranks.tolist())
    return Group(one.facts.id, one.facts.hash, one.role, ranks, round(one.confidence, 3), one.why)


def _one_per_rank_set(judged: Sequence[Judged]) -> list[Facts]:
    """Frameworks make several communicators over the same ranks; one of each set is enough."""
    found: dict[bytes, Facts] = {}
    for one in judged:
        found.setdefault(
            one.facts.ranks.tobytes() if (one.facts.ranks >= 0).all() else one.facts.hash.to_bytes(8, "little"), one.facts
        )
    return list(found.values())


def _index(dimension: _Dimension, world: int) -> NDArray[np.int32]:
    return dimension.index if dimension.known else np.full(world, -1, np.int32)


def _dimension(job: JobFacts, role: Role, groups: Sequence[Facts]) -> _Dimension:
    """Sizes and places of one role; groups that nobody observed follow where all that are known have one distance and size."""
    result = _Dimension(index=np.zeros(job.world, np.int32), group=np.arange(job.world, dtype=np.int32))
    if not groups:
        return result
    sizes = {group.nranks for group in groups}
    result.size = max(sizes)
    result.index, result.group = np.full(job.world, -1, np.int32), np.full(job.world, -1, np.int32)
    if len(sizes) > 1:
        result.known, result.trouble = False, f"{role} groups of different sizes: {', '.join(map(str, sorted(sizes)))}"
        return result
    for number, group in enumerate(groups):
        known = group.ranks[group.ranks >= 0]
        if (result.group[known] >= 0).any():
            result.known, result.trouble = False, f"ranks that are in two {role} groups"
            return result
        result.group[known] = number
        result.index[known] = np.flatnonzero(group.ranks >= 0)
    if (result.group < 0).any():
        _fill_in(job, role, groups, result)
    return result


def _fill_in(job: JobFacts, role: Role, groups: Sequence[Facts], result: _Dimension) -> None:
    size = result.size
    whole = [group.ranks for group in groups if (group.ranks >= 0).all()]
    distances = {int(d) for ranks in whole for d in np.unique(np.diff(np.sort(ranks)))}
    missing = np.flatnonzero(result.group < 0)
    if len(distances) == 1 and job.world % (size * (distance := distances.pop())) == 0:
        everybody = np.arange(job.world)
        number = everybody // (size * distance) * distance + everybody % distance
        if all(len(np.unique(number[ranks])) == 1 for ranks in whole):
            for one in np.unique(number[missing]).tolist():
                ranks = np.flatnonzero(number == one).astype(np.int32)
                if (result.group[ranks] < 0).all():
                    result.group[ranks], result.index[ranks] = int(result.group.max()) + 1, np.arange(size)
                    why = ("nobody of it is observed; it follows from the regular distance of the others",)
                    result.groups.append(Group(-1, 0, role, tuple(ranks.tolist()), 0.6, why, inferred=True))
    if (result.group < 0).any():
        left = int((result.group < 0).sum())
        result.trouble = f"{role} groups of {left} ranks are not known: nobody of them is observed"


def _pipeline(job: JobFacts, judged: Sequence[Judged], order: StageOrder) -> _Dimension:
    result = _Dimension(size=order.stages, index=order.stage.copy(), group=order.pipeline.copy(), known=order.known)
    result.trouble = order.trouble
    groups = _one_per_rank_set(judged)
    if order.known and order.stages > 1 and (order.stage < 0).any() and all(group.nranks == order.stages for group in groups):
        _fill_in(job, Role.PIPELINE, groups, result)
        # The distance of stages is regular; whether comm order or the reverse is the order of the stages was seen.
        for group in result.groups:
            ranks = np.array(group.ranks)
            result.index[ranks] = np.arange(order.stages)[:: -1 if order.reversed else 1]
    return result


def _layout(world: int, dimensions: Mapping[Role, _Dimension], judged: Mapping[int, Judged]) -> tuple[Layout, list[str]]:
    """Sizes that multiply to the number of ranks; where they do not, something was not seen or misread, and nothing is said."""
    tp, pp = dimensions[Role.TENSOR], dimensions[Role.PIPELINE]
    data, cp, ep = dimensions[Role.DATA], dimensions[Role.CONTEXT], dimensions[Role.EXPERT]
    if not any(j.role in PARTITIONING for j in judged.values()):
        return Layout(), []
    if not all(d.known for d in dimensions.values()):
        return Layout(), ["groups of one role do not divide the ranks among them"]
    product = tp.size * pp.size * data.size
    if product != world or data.size % cp.size or (data.size % ep.size and (tp.size * data.size) % ep.size):
        sizes = f"tensor {tp.size}, pipeline {pp.size}, data {data.size}, context {cp.size}, expert {ep.size}"
        return Layout(), [f"the sizes found do not make {world} ranks: {sizes}"]
    for one, other in ((tp, pp), (tp, data), (pp, data)):
        if not _crossing(one, other):
            return Layout(), ["groups of different roles share more than one rank"]
    if not _in_holes(judged, dimensions):
        # The product is right, so what is not understood lies within the data group: context, experts, or both.
        return Layout(tp.size, pp.size, None if cp.size == 1 else data.size // cp.size, None if cp.size == 1 else cp.size), []
    return Layout(tp.size, pp.size, data.size // cp.size, cp.size, ep.size), []


def _in_holes(judged: Mapping[int, Judged], dimensions: Mapping[Role, _Dimension]) -> bool:
    """Whether every group of which it is not known what it is for lies where a group of a known role was not observed."""
    holes = Counter(group.ranks for dimension in dimensions.values() for group in dimension.groups)
    unsure = Counter(tuple(one.facts.ranks.tolist()) for one in judged.values() if one.role is Role.UNSURE)
    return unsure <= holes


def _crossing(one: _Dimension, other: _Dimension) -> bool:
    """Whether no two ranks share a group in both dimensions."""
    if one.size == 1 or other.size == 1:
        return True
    known = (one.group >= 0) & (other.group >= 0)
    pairs = one.group[known].astype(np.int64) * (int(other.group.max(initial=0)) + 1) + other.group[known]
    return len(np.unique(pairs)) == len(pairs)
