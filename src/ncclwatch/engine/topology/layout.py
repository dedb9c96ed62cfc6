"""From the roles of groups to the topology of the job: sizes, the order of stages, and groups that nobody observes.

Ranks nobody observes are filled in only where every observed group of a role follows one rule (equal distance and size), as in
every rank order in use; for Megatron-LM's, tp-cp-ep-dp-pp, see ``RankGenerator`` in its ``megatron/core/parallel_state.py``. The
rule is checked, never assumed.

The order of stages follows from who sends to whom. Which end is the first shows where an iteration begins: there the first stage
sends, and the last one receives. Where no begin of an iteration is seen, the communicator's own order is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.iteration import Specimen, after_update, examine
from ncclwatch.engine.topology.model import Group, Layout, Role, Topology
from ncclwatch.engine.topology.record import POINT_TO_POINT, JobMap, KnownJob, Recorder
from ncclwatch.engine.topology.roles import ONCE, Opinion, Reading, read
from ncclwatch.engine.topology.uses import Line, uses_of_calls, uses_of_counts
from ncclwatch.model.events import Function

PARTITIONING = (Role.TENSOR, Role.PIPELINE, Role.DATA, Role.CONTEXT, Role.EXPERT)
"""Roles of which every rank has exactly one group, all of one size."""


@dataclass(slots=True)
class Dimension:
    """One way in which groups divide the ranks among them; arrays of shape (world,), −1 where unknown."""

    size: int
    index: NDArray[np.int32]
    """rank → place in its group; of pipelines its stage."""
    groups: list[Group] = field(default_factory=list)
    """Groups of which nobody is observed, and which follow from the others."""
    trouble: str = ""
    """Why it is not known of all ranks."""


def infer(jobmap: JobMap, job: KnownJob, recorder: Recorder, *, by_counts: bool = False) -> tuple[Topology, list[Specimen]]:
    """Infer one job's topology from what was recorded so far, or (``by_counts``, and where no call was) from NCCL's own counts.

    Also returns the processes it was inferred from. O(specimens x operations + communicators).
    """
    rows_of: dict[int, dict[int, tuple[int, int]]] = {process: {} for process in job.processes}
    for group in job.groups:
        for row in group.rows:
            rows_of[jobmap.row_process[row]][row] = (jobmap.row_rank[row], group.nranks)
    specimens: list[Specimen] = []
    for process in recorder.specimens if not by_counts else ():
        history = recorder.history(process)
        if process in rows_of and len(history):
            lengths = {specimen.length for specimen in specimens} - {0}
            specimens.append(examine(process, jobmap.rank[process], history, rows_of[process], lengths))
    observed = {rank for process in job.processes if 0 <= (rank := jobmap.rank[process]) < job.world}
    uses = uses_of_calls(job, recorder, specimens) if specimens else uses_of_counts(jobmap, job)
    repeats = max((specimen.repeats for specimen in specimens if specimen.iteration is not None), default=0)
    reading = read(job, uses, observed, repeats=repeats if specimens else None)
    return assemble(jobmap, job, reading, specimens), specimens


def assemble(jobmap: JobMap, job: KnownJob, reading: Reading, specimens: Sequence[Specimen]) -> Topology:
    """The topology that roles of groups make."""
    world, roles = job.world, reading.opinions
    lines = {role: reading.families[role].lines if role in reading.families else [] for role in PARTITIONING}
    lines[Role.PIPELINE] = _turned(jobmap, lines[Role.PIPELINE], reading, specimens)
    dimensions = {role: _dimension(world, role, own) for role, own in lines.items()}
    unclear = [group for group in job.groups if group.id in roles and roles[group.id].role is Role.UNSURE]
    unsure = [one.trouble for one in dimensions.values() if one.trouble]
    if not specimens and not any(lines.values()):
        unsure.append("no calls were seen, and NCCL's counts alone do not tell what the groups are for")
    doubts = Counter(f"{group.nranks} ranks: {roles[group.id].why}" for group in unclear)
    unsure += [f"{number} group{'s' if number > 1 else ''} of {text}" for text, number in doubts.items()]
    unseen = Opinion(Role.UNSURE, 0.0, "no calls were seen")
    groups = [group for one in dimensions.values() for group in one.groups]
    for group in job.groups:
        one = roles.get(group.id, unseen)
        groups.append(Group(group.id, group.hash, one.role, tuple(group.ranks.tolist()), one.confidence, (one.why,)))
    layout = Layout()
    if any(lines.values()):
        tp, pp, copies, cp, ep = (dimensions[role].size for role in PARTITIONING)
        # An unclear group is of context or experts, unless it lies where a group of a known role was not observed.
        holes = Counter(group.ranks for dimension in dimensions.values() for group in dimension.groups)
        if Counter(tuple(group.ranks.tolist()) for group in unclear) <= holes:
            layout = Layout(tp, pp, copies // cp, cp, ep)
        else:
            layout = Layout(tp, pp, copies // cp, cp) if cp > 1 else Layout(tp, pp)
    return Topology(
        world=world,
        groups=tuple(sorted(groups, key=lambda g: (list(Role).index(g.role), g.ranks))),
        layout=layout,
        # Where nothing fits a group of which nothing is known may be a pipeline.
        stage=dimensions[Role.PIPELINE].index if layout.pp is not None else np.full(world, -1, np.int32),
        tensor_index=dimensions[Role.TENSOR].index,
        replica=dimensions[Role.DATA].index,
        confidence=min((g.confidence for g in groups if g.role in PARTITIONING), default=0.0),
        unsure=tuple(dict.fromkeys(unsure)),
    )


def _turned(jobmap: JobMap, lines: list[Line], reading: Reading, specimens: Sequence[Specimen]) -> list[Line]:
    """The stages of all pipelines in order: turned where the iteration begins at the other end."""
    after = {pair: 1 for line in lines for pair in pairwise(line)}
    ends = Counter(_direction(jobmap, specimen, reading, after) for specimen in specimens)
    return [line[::-1] for line in lines] if ends[-1] > ends[1] else lines


def _direction(jobmap: JobMap, specimen: Specimen, reading: Reading, after: dict[tuple[int, int], int]) -> int:
    """+1 where the lines begin with the first stage, −1 with the last, 0 where this process (no end of a line) does not tell."""
    word = specimen.pattern
    role = {row: reading.opinions[jobmap.row_group[row].id].role for row in specimen.usages}
    once = np.isin(word["row"], [row for row, one in role.items() if one in ONCE])
    passing = np.isin(word["function"], POINT_TO_POINT) & np.isin(
        word["row"], [row for row, one in role.items() if one is Role.PIPELINE]
    )
    if specimen.iteration is None or not once.any() or not passing.any():
        return 0
    first = np.roll(word, -after_update(once, passing))[np.roll(passing, -after_update(once, passing))][0]
    peers = {int(jobmap.row_group[row].ranks[peer]) for row, peer in np.unique(word[["row", "peer"]][passing]).tolist()}
    if len(peers) != 1:
        return 0
    ahead = (specimen.rank, peers.pop()) in after
    return 1 if (first["function"] == Function.SEND) == ahead else -1


def _dimension(world: int, role: Role, lines: Sequence[Line]) -> Dimension:
    """How groups of one role, each its ranks in order, divide the ranks."""
    if not lines:
        return Dimension(1, np.zeros(world, np.int32))
    result = Dimension(len(lines[0]), np.full(world, -1, np.int32))
    for line in lines:
        order = np.array(line)
        result.index[order[order >= 0]] = np.flatnonzero(order >= 0)
    # Groups of ranks that nobody observes follow where all that are known have one distance and size.
    missing, size = np.flatnonzero(result.index < 0), result.size
    whole = [np.array(line) for line in lines if -1 not in line]
    distances = {int(d) for ranks in whole for d in np.unique(np.diff(np.sort(ranks)))}
    if len(missing) and len(distances) == 1 and world % (size * (distance := distances.pop())) == 0:
        everybody = np.arange(world)
        number = everybody // (size * distance) * distance + everybody % distance
        regular = all(len(np.unique(number[ranks])) == 1 for ranks in whole)
        # Of pipelines the last rank of a communicator may be the first stage.
        turned = all(ranks[0] > ranks[-1] for ranks in whole)
        for one in np.unique(number[missing]).tolist() if regular else ():
            ranks = np.flatnonzero(number == one).astype(np.int32)
            if (result.index[ranks] < 0).all():
                result.index[ranks] = np.arange(size)[:: -1 if turned else 1]
                why = ("nobody of it is observed; it follows from the regular distance of the others",)
                result.groups.append(Group(-1, 0, role, tuple(ranks.tolist()), 0.6, why, inferred=True))
    if left := int((result.index < 0).sum()):
        result.trouble = f"{role} groups of {left} ranks are not known: nobody of them is observed"
    return result
