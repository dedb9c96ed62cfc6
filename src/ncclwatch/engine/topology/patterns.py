"""The pattern of an iteration for every pipeline stage, learned from specimens, with each operation's place in the work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.model import Pattern, Phase, Role, Step, Topology
from ncclwatch.engine.topology.passes import Call, Hints, Passes, find_passes
from ncclwatch.engine.topology.record import GATHER, POINT_TO_POINT, SCATTER, SUM, JobMap, mix
from ncclwatch.engine.topology.specimen import Specimen, canonical_start, varies
from ncclwatch.model.events import Function

ROLES = tuple(Role)
ROLE_CODE = {role: number for number, role in enumerate(ROLES)}
INSIDE = (Role.TENSOR, Role.CONTEXT, Role.EXPERT)
"""Roles whose operations belong to the passes."""
ONCE = (Role.DATA, Role.MODEL, Role.EMBEDDING, Role.EXPERT_DATA, Role.WORLD)
"""Roles whose operations belong to the update of parameters."""
REDUCING = (SUM, SCATTER, int(Function.REDUCE))


def _is(role: NDArray[np.int64], roles: Collection[Role]) -> NDArray[np.bool_]:
    return np.isin(role, [ROLE_CODE[one] for one in roles])


# --- tokens --------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Encoding:
    """How calls of any process become tokens that are equal on all ranks of a stage. Arrays are indexed by row of the map."""

    jobmap: JobMap
    topology: Topology
    role: NDArray[np.int64]
    """``ROLE_CODE`` of each row; one more, of no row."""
    nranks: NDArray[np.int64]
    variable: set[tuple[int, int]] = field(default_factory=set)
    """(role code, function) whose sizes depend on the data"""
    towards_of: dict[tuple[int, int], int] = field(default_factory=dict)
    """(row, peer) → −1, 0, +1; filled as they occur"""
    all_to_all: NDArray[np.bool_] = field(init=False)
    """Rows whose grouped sends and receives are one operation."""

    def __post_init__(self) -> None:
        self.all_to_all = _is(self.role, (Role.EXPERT,))

    def tokens(self, operations: NDArray[Any], row: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Fingerprints of operations and the direction of those between stages; O(n) plus a little Python per distinct peer."""
        role, function = self.role[row], operations["function"]
        point = np.isin(function, POINT_TO_POINT)
        direction = np.zeros(len(row), np.int64)
        if point.any():
            pairs = (row[point].astype(np.int64) << 32) | (operations["peer"][point].astype(np.int64) & 0xFFFFFFFF)
            values, inverse = np.unique(pairs, return_inverse=True)
            each = [self._towards(value >> 32, value & 0xFFFFFFFF) for value in values.tolist()]
            direction[point] = np.array(each, np.int64)[inverse]
        loose = point | (function == Function.ALL_TO_ALL)
        for code, one in self.variable:
            loose |= (role == code) & (function == one)
        tokens = mix(
            role.astype(np.uint64),
            function.astype(np.uint64),
            np.where(loose, 0, operations["count"]).astype(np.uint64),
            operations["datatype"].astype(np.int64).astype(np.uint64),
            (direction + 1).astype(np.uint64),
            self.nranks[row].astype(np.uint64),
        )
        return tokens, direction

    def _towards(self, row: int, peer: int) -> int:
        """Whether a peer is on the next stage (+1), the previous (−1), or neither (0); stages are cyclic."""
        known = self.towards_of.get((row, peer))
        if known is None:
            known = self.towards_of[row, peer] = self._find_direction(row, peer)
        return known

    def _find_direction(self, row: int, peer: int) -> int:
        group, own = self.jobmap.row_group[row], self.jobmap.row_rank[row]
        if not (0 <= peer < group.nranks and 0 <= own < group.nranks):
            return 0
        ranks = group.ranks[[own, peer]]
        if ranks.min() < 0 or ranks.max() >= self.topology.world:
            return 0
        stages = int(self.topology.stage.max(initial=-1)) + 1
        one, other = self.topology.stage[ranks].tolist()
        if one < 0 or other < 0 or one == other or stages < 2:
            return 0
        if abs(other - one) == 1 or stages == 2:
            return 1 if other > one else -1
        return {1: 1, stages - 1: -1}.get((other - one) % stages, 0)


def encode(jobmap: JobMap, topology: Topology, specimens: Sequence[Specimen]) -> Encoding:
    """The encoding that follows from a topology."""
    role_of = {group.id: group.role for group in topology.groups if not group.inferred}
    role = np.array([ROLE_CODE[role_of.get(g.id, Role.UNSURE)] for g in jobmap.row_group] + [ROLE_CODE[Role.UNSURE]], np.int64)
    result = Encoding(jobmap, topology, role, np.array([group.nranks for group in jobmap.row_group] + [0], np.int64))
    sizes: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for specimen in specimens:
        calls, numbers = np.unique(specimen.operations[["row", "function", "count"]], return_counts=True)
        for (row, function, count), number in zip(calls.tolist(), numbers.tolist(), strict=True):
            sizes[int(role[row]), function][count] += number
    result.variable = {key for key, found in sizes.items() if varies(len(found), found.total())}
    return result


# --- patterns ------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Draft:
    """The iteration of a stage, before its passes are told apart; columns of equal length."""

    word: NDArray[Any]
    tokens: NDArray[np.uint64]
    direction: NDArray[np.int64]
    role: NDArray[np.int64]
    calls: list[Call]
    seen: int
    share: float
    """Of the specimens of the stage those that show it."""


def learn_patterns(specimens: Sequence[Specimen], encoding: Encoding) -> dict[int, Pattern]:
    """One pattern for each stage whose specimens showed a repeating iteration, by stage."""
    topology = encoding.topology
    stages = int(topology.stage.max(initial=-1)) + 1
    by_stage: dict[int, list[Specimen]] = defaultdict(list)
    for specimen in specimens:
        if specimen.word is not None and 0 <= specimen.rank < topology.world and topology.stage[specimen.rank] >= 0:
            by_stage[int(topology.stage[specimen.rank])].append(specimen)
    drafts = {stage: _draft(encoding, members, first=not stage) for stage, members in by_stage.items()}
    hints = Hints()
    # Inner stages show how long a pass is, the first and the last how many chunks there are: twice round, then all know.
    found: dict[int, Passes] = {}
    for _ in range(2):
        found = {stage: find_passes(draft.calls, stages, stage, hints) for stage, draft in drafts.items()}
        hints = _hints(list(found.values()))
    # Without a pipeline and a reduction of gradients nothing shows how many micro-batches make an iteration.
    unknown = stages == 1 and not any(_reduces(draft) for draft in drafts.values())
    most = max((passes.micro_batches for passes in found.values()), default=0)
    for passes in found.values():
        # A stage on which the pattern seems shorter than on the others repeats within the iteration. And with one micro-batch a
        # pipeline would mostly idle: what looks so is the steady part of an iteration.
        if unknown or passes.micro_batches != most or (stages > 1 and most == 1):
            passes.forget_micro_batches()
    return {stage: _pattern(stage, drafts[stage], passes) for stage, passes in found.items()}


def _reduces(draft: _Draft) -> bool:
    return bool(np.any(_is(draft.role, (Role.DATA,)) & np.isin(draft.word["function"], REDUCING)))


def _hints(passes: Sequence[Passes]) -> Hints:
    def common(values: list[int], none: int) -> int:
        known = Counter(v for v in values if v > none)
        return known.most_common(1)[0][0] if known else none

    return Hints(
        common([p.forward_length for p in passes], -1),
        common([p.backward_length for p in passes], -1),
        common([p.micro_batches for p in passes if p.chunks > 1 or len(passes) == 1], 0),
        common([p.chunks for p in passes if p.micro_batches], 0),
    )


def _draft(encoding: Encoding, specimens: Sequence[Specimen], *, first: bool) -> _Draft:
    """The word most specimens of a stage show, turned so that it begins where an iteration begins."""
    versions: dict[bytes, list[tuple[Specimen, NDArray[Any]]]] = defaultdict(list)
    for specimen in specimens:
        if specimen.word is not None:
            tokens, _ = encoding.tokens(specimen.word, specimen.word["row"])
            start = canonical_start(tokens)
            versions[np.roll(tokens, -start).tobytes()].append((specimen, np.roll(specimen.word, -start)))

    def seen(version: list[tuple[Specimen, NDArray[Any]]]) -> int:
        return sum(specimen.period.repeats for specimen, _ in version if specimen.period)

    best = max(versions.values(), key=seen)
    word = best[0][1]
    tokens, direction = encoding.tokens(word, word["row"])
    role = encoding.role[word["row"]]
    begin = _beginning(word, role, direction, first=first)
    word, tokens, direction, role = (np.roll(column, -begin) for column in (word, tokens, direction, role))
    return _Draft(word, tokens, direction, role, _calls(word, direction, role), seen(best), len(best) / len(specimens))


def _beginning(word: NDArray[Any], role: NDArray[np.int64], direction: NDArray[np.int64], *, first: bool) -> int:
    """Where an iteration begins: after its update (gradients, norm, parameters), else where nothing is under way."""
    once, passing = _is(role, ONCE), (direction != 0) | _is(role, INSIDE)
    if once.any() and passing.any():
        # After the longest (cyclic) run of operations of the update with nothing of a pass between them.
        start = int(np.argmax(passing))
        turned = np.roll(passing, -start)
        run = np.bincount(np.cumsum(turned), np.roll(once & ~passing, -start))
        return (start + int(np.r_[np.flatnonzero(turned), len(word)][run.argmax()])) % len(word)
    if (direction != 0).any():
        return _at_rest(word, direction, first=first)
    gaps = np.diff(word["time_ns"].astype(np.int64))
    return (int(gaps.argmax()) + 1) % len(word) if len(gaps) else 0


def _at_rest(word: NDArray[Any], direction: NDArray[np.int64], *, first: bool) -> int:
    """Where the fewest micro-batches are under way: received from the previous stage and not returned, on the first stage sent to
    the next and not received back.
    """
    send = word["function"] == Function.SEND
    ours = direction > 0 if first else direction < 0
    balance = np.cumsum(np.where(ours, np.where(send == first, 1, -1), 0))
    at = np.flatnonzero(np.r_[word["call"][1:] != word["call"][:-1], True] & ours)
    if not len(at):
        return 0
    low = int(at[balance[at] == balance[at].min()][-1])
    begin = low + 1
    if first:
        # Its last backward pass comes after the last Recv: as long as the one before, where nothing else lies between.
        exchanges = np.flatnonzero(direction != 0)
        before, after = exchanges[exchanges < low], np.r_[exchanges[exchanges > low], exchanges[0] + len(word)]
        span = int(after[0]) - low - 1
        length = low - int(before[-1]) - 1 if len(before) else span
        begin += length if length < span else span // 2
    return begin % len(word)


def _calls(word: NDArray[Any], direction: NDArray[np.int64], role: NDArray[np.int64]) -> list[Call]:
    inside = _is(role, (*INSIDE, Role.UNSURE)) & (direction == 0)
    sharded, context = _is(role, (Role.DATA,)), _is(role, (Role.CONTEXT,))
    alone = not inside.any() and not direction.any()
    if alone:
        inside, context = inside | sharded, context | sharded
    gathers, scatters = context & (word["function"] == GATHER), context & (word["function"] == SCATTER)
    marks = gathers.astype(np.int64) - scatters
    if alone:
        # Sharded data is gathered in both passes: a gather directly before a scatter belongs to the backward pass.
        marks[:-1][gathers[:-1] & scatters[1:]] = -1
    columns = (word["call"], word["function"] == Function.SEND, direction, inside, marks, word["thread"])
    return [Call(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def _pattern(stage: int, draft: _Draft, passes: Passes) -> Pattern:
    layers: Counter[tuple[object, ...]] = Counter()
    steps = []
    numbers = np.cumsum(np.r_[False, draft.word["call"][1:] != draft.word["call"][:-1]]).tolist()
    rows = draft.word[["function", "count", "datatype"]].tolist()
    for i, (function, count, datatype) in enumerate(rows):
        role, place, inside = ROLES[int(draft.role[i])], passes.places[i], draft.calls[i].inside
        phase = Phase.OPTIMIZER if role in ONCE and not inside else place.phase
        layer = -1
        if inside and place.micro_batch >= 0 and phase is not Phase.EITHER:
            key = (phase, place.micro_batch, place.chunk, role)
            layer = layers[key]
            layers[key] += 1
        steps.append(
            Step(
                role=role,
                function=function,
                count=count,
                datatype=datatype,
                towards=int(draft.direction[i]),
                phase=phase,
                micro_batch=place.micro_batch,
                chunk=place.chunk,
                layer=layer,
                call=numbers[i],
                confidence=0.9 if phase is Phase.OPTIMIZER else place.confidence,
            )
        )
    return Pattern(
        stage=stage,
        steps=tuple(steps),
        tokens=draft.tokens,
        micro_batches=passes.micro_batches,
        chunks=passes.chunks,
        seen=draft.seen,
        complete=passes.balanced and _reduces(draft),
        confidence=round(min(1.0, 0.5 + 0.1 * draft.seen) * draft.share, 3),
    )
