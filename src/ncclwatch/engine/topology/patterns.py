"""The pattern of an iteration for every pipeline stage, learned from specimens, and the pass every operation of it belongs to.

With a pipeline, Send and Recv tell: what comes from the previous stage begins a forward pass, what goes to the next ends one;
backward the other way round. Without one only context parallel operations or a thread of its own for backward passes tell.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.ledger import POINT_TO_POINT, mix
from ncclwatch.collect.specimens import FUNCTIONS
from ncclwatch.engine.topology.iteration import Specimen, after_update, varies
from ncclwatch.engine.topology.job_map import GATHER, SCATTER, SUM, JobMap
from ncclwatch.engine.topology.roles import ONCE
from ncclwatch.engine.topology.uses import common
from ncclwatch.model.events import Function
from ncclwatch.model.topology import FUNCTION_NAMES, Pattern, Phase, Role, Stage, Topology

ROLES = tuple(Role)
INSIDE = (Role.TENSOR, Role.CONTEXT, Role.EXPERT)
"""Roles whose operations belong to the passes."""
REDUCING = (SUM, SCATTER, Function.REDUCE)


def _is(role: NDArray[np.int64], *roles: Role) -> NDArray[np.bool_]:
    return np.isin(role, [ROLES.index(one) for one in roles])


@dataclass(slots=True)
class Encoding:
    """How calls become tokens that are equal on all ranks of a stage. Arrays are by row of the map, and one entry for no row."""

    topology: Topology
    stages: int
    role: NDArray[np.int64]
    """Index in ``ROLES``."""
    nranks: NDArray[np.int64]
    stage: NDArray[np.int64]
    """Of the row's process; −1 where unknown."""
    offset: NDArray[np.int64]
    peer_stage: NDArray[np.int64]
    """Stages of the members of every group; those of a row's group begin at its ``offset``."""
    all_to_all: NDArray[np.bool_]
    """Whether grouped sends and receives are one operation."""
    variable: NDArray[np.bool_]
    """Whether sizes depend on the data. Shape (roles, functions)."""

    def tokens(self, operations: NDArray[Any], row: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        """Fingerprints, and direction: to the next stage (+1), the previous (−1; cyclic), or neither. O(n)."""
        role, function, peer = self.role[row], operations["function"], operations["peer"].astype(np.int64)
        known = np.isin(function, POINT_TO_POINT) & (peer >= 0) & (peer < self.nranks[row])
        own, other = self.stage[row], self.peer_stage[np.where(known, self.offset[row] + peer, -1)]
        turn = (other - own) % max(1, self.stages)
        cyclic = (turn == 1).astype(np.int64) - (turn == self.stages - 1)
        direction = np.where((own >= 0) & (other >= 0) & (own != other), np.sign(other - own) if self.stages == 2 else cyclic, 0)
        loose = np.isin(function, (*POINT_TO_POINT, Function.ALL_TO_ALL)) | self.variable[role, function]
        count = np.where(loose, 0, operations["count"])
        return mix(role, function, count, operations["datatype"], direction + 1, self.nranks[row]), direction


def encode(jobmap: JobMap, topology: Topology, specimens: Sequence[Specimen]) -> Encoding:
    """The encoding that follows from a topology."""
    role_of = {group.id: ROLES.index(group.role) for group in topology.groups}
    unsure = ROLES.index(Role.UNSURE)
    groups = {group.id: group for group in jobmap.row_group}
    begins = dict(zip(groups, itertools.accumulate((group.nranks for group in groups.values()), initial=0), strict=False))
    rows = [(role_of.get(g.id, unsure), g.nranks, begins[g.id]) for g in jobmap.row_group]
    role, nranks, offset = np.array([*rows, (unsure, 0, 0)], np.int64).T
    stage_of = np.append(topology.stage, -1).astype(np.int64)
    ranks = np.concatenate([*(group.ranks for group in groups.values()), [-1]]).astype(np.int64)
    peer_stage = stage_of[np.where(ranks < topology.world, ranks, -1)]
    own = np.array([*jobmap.row_rank, -1], np.int64)
    stage = peer_stage[np.where((own >= 0) & (own < nranks), offset + own, -1)]
    sizes: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for specimen in specimens:
        calls = specimen.operations[["row", "function", "count"]]
        _, first, numbers = np.unique(mix(calls["row"], calls["function"], calls["count"]), return_index=True, return_counts=True)
        for (row, function, count), number in zip(calls[first].tolist(), numbers.tolist(), strict=True):
            sizes[int(role[row]), function][count] += number
    variable = np.zeros((len(ROLES), FUNCTIONS), np.bool_)
    for key, found in sizes.items():
        variable[key] = varies(len(found), found.total())
    stages = int(topology.stage.max(initial=-1)) + 1
    return Encoding(topology, stages, role, nranks, stage, offset, peer_stage, _is(role, Role.EXPERT), variable)


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

    @property
    def reduces(self) -> bool:
        """Whether gradients are reduced in it."""
        return bool(np.any(_is(self.role, Role.DATA) & np.isin(self.iteration["function"], REDUCING)))


def learn_patterns(specimens: Sequence[Specimen], encoding: Encoding) -> dict[int, Pattern]:
    """One pattern for each stage whose specimens showed a repeating iteration, by stage."""
    topology, stages = encoding.topology, encoding.stages
    by_stage: dict[int, list[Specimen]] = defaultdict(list)
    for specimen in specimens:
        if specimen.iteration is not None and 0 <= specimen.rank < topology.world and topology.stage[specimen.rank] >= 0:
            by_stage[int(topology.stage[specimen.rank])].append(specimen)
    drafts = {stage: _draft(encoding, members, first=not stage) for stage, members in by_stage.items()}
    calls = {stage: _calls(draft) for stage, draft in drafts.items()}
    hints = Hints()
    # Inner stages show how long a pass is, the first and the last how many chunks there are: twice round, then all know.
    found: dict[int, Passes] = {}
    for _ in range(2):
        found = {stage: find_passes(calls[stage], stages, stage, hints) for stage in drafts}
        lengths = {phase: common([one.lengths.get(phase) for one in found.values()]) for phase in (Phase.FORWARD, Phase.BACKWARD)}
        micro_batches = common([p.micro_batches or None for p in found.values() if p.chunks > 1 or len(found) == 1])
        chunks = common([p.chunks for p in found.values() if p.micro_batches])
        hints = Hints({phase: one for phase, one in lengths.items() if one is not None}, micro_batches or 0, chunks or 0)
    # Without a pipeline and a reduction of gradients nothing shows how many micro-batches make an iteration.
    unknown = stages == 1 and not any(draft.reduces for draft in drafts.values())
    most = max((passes.micro_batches for passes in found.values()), default=0)
    for passes in found.values():
        # A stage on which the pattern seems shorter than on the others repeats within the iteration. And with one micro-batch a
        # pipeline would mostly idle: what seems so is the steady part of an iteration.
        if unknown or passes.micro_batches != most or (stages > 1 and most == 1):
            passes.micro_batches, passes.places = 0, [Stage(place.phase) for place in passes.places]
    return {stage: _pattern(stage, drafts[stage], calls[stage], passes) for stage, passes in found.items()}


def _draft(encoding: Encoding, specimens: Sequence[Specimen], *, first: bool) -> _Draft:
    """The iteration most specimens of a stage show, from its beginning."""
    versions: dict[bytes, list[_Draft]] = defaultdict(list)
    for specimen in specimens:
        word = specimen.pattern
        tokens, direction = encoding.tokens(word, word["row"])
        role = encoding.role[word["row"]]
        turned = np.roll(np.arange(len(word)), -_beginning(word, role, direction, first=first))
        draft = _Draft(word[turned], tokens[turned], direction[turned], role[turned], specimen.repeats)
        versions[draft.tokens.tobytes()].append(draft)
    best = max(versions.values(), key=lambda drafts: sum(draft.seen for draft in drafts))
    best[0].seen, best[0].share = sum(draft.seen for draft in best), len(best) / len(specimens)
    return best[0]


def _beginning(word: NDArray[Any], role: NDArray[np.int64], direction: NDArray[np.int64], *, first: bool) -> int:
    """Where an iteration begins: after its update (gradients, norm, parameters), else where nothing is under way."""
    once, passing = _is(role, *ONCE), (direction != 0) | _is(role, *INSIDE)
    if once.any() and passing.any():
        return after_update(once, passing)
    if (direction != 0).any():
        return _at_rest(word, direction, first=first)
    gaps = np.diff(word["time_ns"].astype(np.int64))
    return (int(gaps.argmax()) + 1) % len(word) if len(gaps) else 0


def _at_rest(word: NDArray[Any], direction: NDArray[np.int64], *, first: bool) -> int:
    """Where the fewest micro-batches are under way: received and not returned, on the first stage sent and not back."""
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


def _calls(draft: _Draft) -> list[Call]:
    word, direction, role = draft.iteration, draft.direction, draft.role
    inside = _is(role, *INSIDE, Role.UNSURE) & (direction == 0)
    sharded, context = _is(role, Role.DATA), _is(role, Role.CONTEXT)
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
    steps: list[Stage] = []
    number = 0
    columns = draft.iteration["function"].tolist(), draft.role.tolist()
    for i, (function, role_index, call, place) in enumerate(zip(*columns, calls, passes.places, strict=True)):
        role, layer = ROLES[role_index], -1
        phase = Phase.OPTIMIZER if role in ONCE and not call.inside else place.phase
        where = phase, place.micro_batch, place.chunk
        if call.inside and place.micro_batch >= 0 and phase is not Phase.EITHER:
            layer = layers[where, role]
            layers[where, role] += 1
        number += i > 0 and call.call != calls[i - 1].call
        name = FUNCTION_NAMES.get(function, "")
        steps.append(Stage(*where, role=role, function=name, layer=layer, towards=call.towards, call=number))
    return Pattern(
        stage=stage,
        steps=tuple(steps),
        tokens=draft.tokens,
        micro_batches=passes.micro_batches,
        chunks=passes.chunks,
        seen=draft.seen,
        balanced=passes.balanced or not draft.direction.any(),
        complete=passes.balanced and draft.reduces,
        confidence=round(min(1.0, 0.5 + 0.1 * draft.seen) * draft.share, 3),
    )


# --- passes -------------------------------------------------------------------------------------------------------------------

Exchanges = list[tuple[int, int]]
"""(number of the block of operations before, operation) of exchanges."""


@dataclass(slots=True)
class Call:
    """One operation: ``inside`` the passes or of the update; ``marks``: −1 backward, +1 forward; else as of ``Stage``."""

    call: int
    send: bool = False
    towards: int = 0
    inside: bool = False
    marks: int = 0
    thread: int = 0


@dataclass(slots=True)
class Hints:
    """What stages show: micro-batches and chunks (0: unknown), and operations in a pass where all have as many."""

    lengths: dict[Phase, int] = field(default_factory=dict)
    micro_batches: int = 0
    chunks: int = 0


@dataclass(slots=True, kw_only=True)
class Passes(Hints):
    """Places of all operations, and the numbers they imply; ``balanced`` as of ``Pattern``."""

    places: list[Stage]
    balanced: bool = False


def find_passes(calls: Sequence[Call], stages: int, stage: int, hints: Hints) -> Passes:
    """Assign every operation of one iteration (which begins at its first) to its pass."""
    result = Passes(chunks=1, places=[Stage() for _ in calls])
    if stages > 1:
        _by_exchanges(calls, stages, stage, hints, result)
    else:
        _by_marks(calls, result)
    return result


def _by_exchanges(calls: Sequence[Call], stages: int, stage: int, hints: Hints, result: Passes) -> None:
    """A Recv brings the input of its pass, a Send takes its result away; both end a block of operations inside passes."""
    blocks: list[list[int]] = [[]]
    inputs: dict[Phase, Exchanges] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    results: dict[Phase, Exchanges] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    ways: set[tuple[int, bool]] = set()
    current, ambiguous = -1, False
    for at, call in enumerate(calls):
        if not call.towards:
            blocks[-1] += [at] if call.inside else []
            continue
        if call.call != current:
            current = call.call
            blocks.append([])
        # Of two stages each is the other's next and previous: with chunks, what goes where cannot be told.
        ambiguous = ambiguous or (stages == 2 and (current, call.send) in ways)
        ways.add((current, call.send))
        phase = Phase.FORWARD if call.send == (call.towards > 0) else Phase.BACKWARD
        (results if call.send else inputs)[phase].append((len(blocks) - 2, at))
    forward, backward = (max(len(inputs[phase]), len(results[phase])) for phase in inputs)
    result.balanced = forward == backward > 0
    if ambiguous or not forward or (backward and not result.balanced):
        return
    m, v = _numbers(len(inputs[Phase.FORWARD]), len(results[Phase.FORWARD]), stage in (0, stages - 1), hints)
    result.micro_batches, result.chunks = m, max(v, 1)
    passes: list[list[Stage]] = [[] for _ in blocks]
    first, last = (0, 0), (stages - 1, v - 1)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        order = _order(phase, forward, stages, m, v)
        # Passes at the ends of the model have no input, or no result.
        begin, end = (first, last) if phase is Phase.FORWARD else (last, first)
        for exchanges, (lacking, chunk) in ((inputs[phase], begin), (results[phase], end)):
            own = [one for one in order if stage != lacking or (v > 1 and one.chunk != chunk)]
            for i, (_, at) in enumerate(exchanges):
                result.places[at] = own[i] if len(own) == len(exchanges) else Stage(phase)
        _place_passes(passes, order, inputs[phase], results[phase], interleaved=v != 1)
    _divide(blocks, passes, hints, result)


def _numbers(inputs: int, results: int, end: bool, hints: Hints) -> tuple[int, int]:
    """Micro-batches and chunks. On the first stage passes of the first chunk lack an input, on the last the last's a result."""
    total, missing = max(inputs, results), abs(inputs - results)
    if missing == total:
        return total, 1
    if missing and total % missing == 0 and end:
        return missing, total // missing
    if hints.micro_batches and hints.chunks > 1 and total == hints.micro_batches * hints.chunks:
        return hints.micro_batches, hints.chunks
    # An inner stage has an input and a result for each chunk: only the ends of the pipeline tell chunks from micro-batches.
    return (total, 1) if not missing and hints.chunks == 1 else (0, 0)


def _order(phase: Phase, total: int, stages: int, m: int, v: int) -> list[Stage]:
    """The passes of one direction: Megatron-LM takes ``stages`` micro-batches through a chunk, then the next."""
    if v == 1:
        return [Stage(phase, k) for k in range(total)]
    if v == 0 or m % stages:
        return [Stage(phase)] * total
    chunks = range(v) if phase is Phase.FORWARD else range(v)[::-1]
    return [Stage(phase, b, c) for g in range(0, m, stages) for c in chunks for b in range(g, g + stages)]


def _place_passes(
    passes: list[list[Stage]], order: Sequence[Stage], inputs: Exchanges, results: Exchanges, *, interleaved: bool
) -> None:
    """Put each pass into the block where its computation lies: right before its result leaves, or right after its input came."""
    if len(results) >= len(inputs):
        for one, (block, _) in zip(order, results, strict=False):
            passes[block].append(one)
        return
    # What begins with its input comes before what ends with its result in the same stretch; but with interleaved chunks inputs
    # come a pass early, and the forward pass is first (Megatron-LM's order).
    for one, (block, _) in zip(order, inputs, strict=False):
        after = passes[block + 1]
        behind = one.phase is Phase.FORWARD or interleaved
        after.insert(sum(other.phase is Phase.FORWARD for other in after) if behind else 0, one)


def _divide(blocks: Sequence[Sequence[int]], passes: Sequence[Sequence[Stage]], hints: Hints, result: Passes) -> None:
    """Give the operations of each block to the passes that lie there."""
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        alone = {len(block) for block, here in zip(blocks, passes, strict=True) if [one.phase for one in here] == [phase]}
        if len(alone) == 1:
            result.lengths[phase] = alone.pop()
    for block, here in zip(blocks, passes, strict=True):
        if not block or not here:
            continue
        places, parts = here, _parts([one.phase for one in here], len(block), (result.lengths, hints.lengths))
        if not parts:
            # The passes cannot be divided; where both are of one micro-batch (the last stage), that much is known.
            micro_batches = {place.micro_batch for place in places}
            places, parts = [Stage(micro_batch=micro_batches.pop() if len(micro_batches) == 1 else -1)], [len(block)]
        operations = iter(block)
        for place, length in zip(places, parts, strict=True):
            for at in itertools.islice(operations, length):
                result.places[at] = place


def _parts(phases: Sequence[Phase], total: int, said: Sequence[Mapping[Phase, int]]) -> list[int]:
    """Lengths of several passes in one stretch, by what this stage shows, else the others; none where they cannot be divided."""
    if len(phases) == 1:
        return [total]
    for lengths in said:
        known = [lengths.get(phase, -1) for phase in phases]
        if len(phases) == 2 and known.count(-1) == 1 and max(known) <= total:
            known = [total - max(known) if one == -1 else one for one in known]
        if -1 not in known and sum(known) == total:
            return known
    alike = said[-1].get(Phase.FORWARD) == said[-1].get(Phase.BACKWARD)
    return [total // 2] * 2 if alike and len(set(phases)) == len(phases) == 2 and not total % 2 else []


def _by_marks(calls: Sequence[Call], result: Passes) -> None:
    inside = [at for at, call in enumerate(calls) if call.inside]
    marks = [calls[at].marks for at in inside]
    if not {1, -1} <= set(marks):
        threads = list(dict.fromkeys(calls[at].thread for at in inside))
        if len(threads) != 2:
            return
        # The first pass of an iteration is a forward pass.
        marks = [1 if calls[at].thread == threads[0] else -1 for at in inside]
    turns = [mark for mark, _ in itertools.groupby(mark for mark in marks if mark)]
    whole = turns[0] > 0 > turns[-1]
    result.micro_batches = len(turns) // 2 if whole else 0
    # Passes of equal length: then also what lies between two marks has its place.
    length = len(inside) // len(turns)
    parts = [set(marks[i * length : (i + 1) * length]) - {0} for i in range(len(turns))]
    equal = length * len(turns) == len(inside) and parts == [{mark} for mark in turns]
    turn = 0
    for i, at in enumerate(inside):
        if equal:
            turn = i // length
        elif marks[i] and marks[i] != turns[turn]:
            turn += 1
        phase = Phase.FORWARD if turns[turn] > 0 else Phase.BACKWARD
        micro_batch = turn // 2 if whole else -1
        result.places[at] = Stage(phase if equal or marks[i] else Phase.EITHER, micro_batch)
