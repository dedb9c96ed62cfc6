"""The pattern of an iteration for every pipeline stage, learned from specimens, and where in it a rank is.

A rank has a pointer into the pattern. A call that is what the pattern has next moves it. Another one is a gap (records were lost)
or does not belong to the iteration (a barrier, an evaluation phase): then the pointer waits for an operation that occurs once in
the pattern, or, where none does, for a run of calls that fits in one place only.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.iteration import Specimen, after_update, varies
from ncclwatch.engine.topology.model import Pattern, Phase, Role, Step, Topology
from ncclwatch.engine.topology.passes import Call, Hints, Passes, find_passes
from ncclwatch.engine.topology.record import GATHER, POINT_TO_POINT, SCATTER, SUM, JobMap, mix
from ncclwatch.engine.topology.roles import ONCE
from ncclwatch.engine.topology.uses import common
from ncclwatch.model.events import Function

ROLES = tuple(Role)
ROLE_CODE = {role: number for number, role in enumerate(ROLES)}
INSIDE = (Role.TENSOR, Role.CONTEXT, Role.EXPERT)
"""Roles whose operations belong to the passes."""
REDUCING = (SUM, SCATTER, int(Function.REDUCE))

CONTEXT = 24
"""Unit: calls in a row that must fit in one place of the pattern only, where none is unique. From: more than a layer makes in
both passes; in the jobs of ``score.topology`` half and twice as many place 0.1 % of the calls more or fewer.
"""


def _is(role: NDArray[np.int64], roles: Collection[Role]) -> NDArray[np.bool_]:
    return np.isin(role, [ROLE_CODE[one] for one in roles])


# --- tokens --------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Encoding:
    """How calls of any process become tokens that are equal on all ranks of a stage.

    Arrays are indexed by row of the map, with one entry more, of no row.
    """

    topology: Topology
    role: NDArray[np.int64]
    """``ROLE_CODE``"""
    nranks: NDArray[np.int64]
    stage: NDArray[np.int64]
    """Of the row's process; −1 where unknown."""
    offset: NDArray[np.int64]
    """Where its group begins in ``peer_stage``."""
    peer_stage: NDArray[np.int64]
    """Stage of every member of every group."""
    all_to_all: NDArray[np.bool_]
    """Whether grouped sends and receives are one operation."""
    variable: set[tuple[int, int]]
    """(role code, function) whose sizes depend on the data"""

    def tokens(self, operations: NDArray[Any], row: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Fingerprints of operations, and the direction of those between stages. O(n)."""
        role, function = self.role[row], operations["function"]
        point = np.isin(function, POINT_TO_POINT)
        direction = np.where(point, self._direction(row, operations["peer"].astype(np.int64)), 0)
        loose = point | (function == Function.ALL_TO_ALL)
        for code, one in self.variable:
            loose |= (role == code) & (function == one)
        count = np.where(loose, 0, operations["count"])
        columns = (role, function, count, operations["datatype"].astype(np.int64), direction + 1, self.nranks[row])
        return mix(*(column.astype(np.uint64) for column in columns)), direction

    def _direction(self, row: NDArray[np.int64], peer: NDArray[np.int64]) -> NDArray[np.int64]:
        """Whether a peer is on the next stage (+1), the previous (−1), or neither (0); stages are cyclic."""
        known = (peer >= 0) & (peer < self.nranks[row])
        own, other = self.stage[row], self.peer_stage[np.where(known, self.offset[row] + peer, -1)]
        stages = int(self.topology.stage.max(initial=-1)) + 1
        turn = (other - own) % max(1, stages)
        cyclic = (turn == 1).astype(np.int64) - (turn == stages - 1)
        direction = np.sign(other - own) if stages == 2 else cyclic
        return np.where((own >= 0) & (other >= 0) & (own != other), direction, 0)


def encode(jobmap: JobMap, topology: Topology, specimens: Sequence[Specimen]) -> Encoding:
    """The encoding that follows from a topology."""
    role_of = {group.id: group.role for group in topology.groups if not group.inferred}
    role = np.array([ROLE_CODE[role_of.get(g.id, Role.UNSURE)] for g in jobmap.row_group] + [ROLE_CODE[Role.UNSURE]], np.int64)
    nranks = np.array([group.nranks for group in jobmap.row_group] + [0], np.int64)
    stage_of = np.append(topology.stage, -1).astype(np.int64)
    groups = {group.id: group for group in jobmap.row_group}
    begins = dict(zip(groups, np.cumsum([0, *(group.nranks for group in groups.values())]).tolist(), strict=False))
    offset = np.array([begins[group.id] for group in jobmap.row_group] + [0], np.int64)
    ranks = np.concatenate([*(group.ranks for group in groups.values()), [-1]]).astype(np.int64)
    peer_stage = stage_of[np.where(ranks < topology.world, ranks, -1)]
    own = np.array([*jobmap.row_rank, -1], np.int64)
    stage = peer_stage[np.where((own >= 0) & (own < nranks), offset + own, -1)]
    sizes: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for specimen in specimens:
        calls, numbers = np.unique(specimen.operations[["row", "function", "count"]], return_counts=True)
        for (row, function, count), number in zip(calls.tolist(), numbers.tolist(), strict=True):
            sizes[int(role[row]), function][count] += number
    variable = {key for key, found in sizes.items() if varies(len(found), found.total())}
    return Encoding(topology, role, nranks, stage, offset, peer_stage, _is(role, (Role.EXPERT,)), variable)


# --- patterns ------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Draft:
    """The iteration of a stage, before its passes are told apart; columns of equal length."""

    iteration: NDArray[Any]
    tokens: NDArray[np.uint64]
    direction: NDArray[np.int64]
    role: NDArray[np.int64]
    seen: int
    share: float = 1.0
    """Of the specimens of the stage those that show it."""


def learn_patterns(specimens: Sequence[Specimen], encoding: Encoding) -> dict[int, Pattern]:
    """One pattern for each stage whose specimens showed a repeating iteration, by stage."""
    topology = encoding.topology
    stages = int(topology.stage.max(initial=-1)) + 1
    by_stage: dict[int, list[Specimen]] = defaultdict(list)
    for specimen in specimens:
        if specimen.iteration is not None and 0 <= specimen.rank < topology.world and topology.stage[specimen.rank] >= 0:
            by_stage[int(topology.stage[specimen.rank])].append(specimen)
    drafts = {stage: _draft(encoding, members, first=not stage) for stage, members in by_stage.items()}
    calls = {stage: _calls(draft.iteration, draft.direction, draft.role) for stage, draft in drafts.items()}
    hints = Hints()
    # Inner stages show how long a pass is, the first and the last how many chunks there are: twice round, then all know.
    found: dict[int, Passes] = {}
    for _ in range(2):
        found = {stage: find_passes(calls[stage], stages, stage, hints) for stage in drafts}
        hints = _hints(list(found.values()))
    # Without a pipeline and a reduction of gradients nothing shows how many micro-batches make an iteration.
    unknown = stages == 1 and not any(_reduces(draft) for draft in drafts.values())
    most = max((passes.micro_batches for passes in found.values()), default=0)
    for passes in found.values():
        # A stage on which the pattern seems shorter than on the others repeats within the iteration. And with one micro-batch a
        # pipeline would mostly idle: what seems so is the steady part of an iteration.
        if unknown or passes.micro_batches != most or (stages > 1 and most == 1):
            passes.forget_micro_batches()
    return {stage: _pattern(stage, drafts[stage], calls[stage], passes) for stage, passes in found.items()}


def _reduces(draft: _Draft) -> bool:
    return bool(np.any(_is(draft.role, (Role.DATA,)) & np.isin(draft.iteration["function"], REDUCING)))


def _hints(passes: Sequence[Passes]) -> Hints:
    lengths = {phase: common([one.lengths.get(phase) for one in passes]) for phase in (Phase.FORWARD, Phase.BACKWARD)}
    micro_batches = common([p.micro_batches or None for p in passes if p.chunks > 1 or len(passes) == 1])
    chunks = common([p.chunks for p in passes if p.micro_batches])
    return Hints({phase: length for phase, length in lengths.items() if length is not None}, micro_batches or 0, chunks or 0)


def _draft(encoding: Encoding, specimens: Sequence[Specimen], *, first: bool) -> _Draft:
    """The iteration most specimens of a stage show, from its beginning."""
    versions: dict[bytes, list[_Draft]] = defaultdict(list)
    for specimen in specimens:
        if (word := specimen.iteration) is None:
            continue
        tokens, direction = encoding.tokens(word, word["row"])
        role = encoding.role[word["row"]]
        begin = _beginning(word, role, direction, first=first)
        word, tokens = np.roll(word, -begin), np.roll(tokens, -begin)
        draft = _Draft(word, tokens, np.roll(direction, -begin), np.roll(role, -begin), specimen.repeats)
        versions[tokens.tobytes()].append(draft)
    best = max(versions.values(), key=lambda drafts: sum(draft.seen for draft in drafts))
    best[0].seen, best[0].share = sum(draft.seen for draft in best), len(best) / len(specimens)
    return best[0]


def _beginning(word: NDArray[Any], role: NDArray[np.int64], direction: NDArray[np.int64], *, first: bool) -> int:
    """Where an iteration begins: after its update (gradients, norm, parameters), else where nothing is under way."""
    once, passing = _is(role, ONCE), (direction != 0) | _is(role, INSIDE)
    if once.any() and passing.any():
        return after_update(once, passing)
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


def _pattern(stage: int, draft: _Draft, calls: Sequence[Call], passes: Passes) -> Pattern:
    layers: Counter[tuple[object, ...]] = Counter()
    steps = []
    numbers = np.cumsum(np.r_[False, draft.iteration["call"][1:] != draft.iteration["call"][:-1]]).tolist()
    for i, function in enumerate(draft.iteration["function"].tolist()):
        role, place, inside = ROLES[int(draft.role[i])], passes.places[i], calls[i].inside
        phase = Phase.OPTIMIZER if role in ONCE and not inside else place.phase
        layer = -1
        if inside and place.micro_batch >= 0 and phase is not Phase.EITHER:
            key = (phase, place.micro_batch, place.chunk, role)
            layer = layers[key]
            layers[key] += 1
        towards = int(draft.direction[i])
        steps.append(Step(role, function, towards, phase, place.micro_batch, place.chunk, layer, numbers[i]))
    return Pattern(
        stage=stage,
        steps=tuple(steps),
        tokens=draft.tokens,
        micro_batches=passes.micro_batches,
        chunks=passes.chunks,
        seen=draft.seen,
        balanced=passes.balanced or not draft.direction.any(),
        complete=passes.balanced and _reduces(draft),
        confidence=round(min(1.0, 0.5 + 0.1 * draft.seen) * draft.share, 3),
    )


# --- where a rank is ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Track:
    """The pointer of one process: ``position`` is the step its latest call was, −1 when lost."""

    pattern: Pattern
    position: int = -1
    recent: list[int] = field(default_factory=list)
    """Calls since the pointer was lost."""

    def follow(self, tokens: NDArray[np.uint64]) -> None:
        """Take calls in order."""
        at = 0
        while at < len(tokens):
            if self.position >= 0:
                at += self._advance(tokens[at:])
            if at < len(tokens):
                self._search(int(tokens[at]))
                at += 1

    def _search(self, token: int) -> None:
        """The place of a call that does not fit; what the pattern does not hold is passed over, else the pointer may be lost."""
        unique, known = self.pattern.unique, token in self.pattern.tokens
        if token in unique or (unique and known):
            self.position = unique.get(token, -1)
        elif not unique:
            # Passes of an evaluation equal those of an iteration: a run of calls only counts where nothing is unique.
            self.recent = [*self.recent, token] if self.position < 0 else []
            self.position = -1 if known else self.position
            if len(self.recent) == CONTEXT:
                self.position, self.recent = self._by_context(), []

    def _by_context(self) -> int:
        """The only place where the latest calls end; −1 where there is none or several."""
        word = self.pattern.tokens
        windows = np.lib.stride_tricks.sliding_window_view(np.resize(word, len(word) + CONTEXT - 1), CONTEXT)
        found = np.flatnonzero((windows == np.array(self.recent, np.uint64)).all(axis=1))
        return int(found[0] + CONTEXT - 1) % len(word) if len(found) == 1 else -1

    def _advance(self, tokens: NDArray[np.uint64]) -> int:
        """Follow the pattern as far as it fits; returns how many calls did."""
        word, taken = self.pattern.tokens, 0
        while taken < len(tokens):
            begin = (self.position + 1) % len(word)
            piece = min(len(word) - begin, len(tokens) - taken)
            same = tokens[taken : taken + piece] == word[begin : begin + piece]
            fits = piece if same.all() else int(same.argmin())
            self.position = begin + fits - 1 if fits else self.position
            taken += fits
            if fits < piece:
                break
        return taken
