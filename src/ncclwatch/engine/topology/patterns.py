"""The pattern of an iteration for every pipeline stage, learned from specimens, with each operation's place in the work."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.topology.infer import Inference
from ncclwatch.engine.topology.iteration import canonical_start
from ncclwatch.engine.topology.jobmap import Facts, JobMap
from ncclwatch.engine.topology.model import Pattern, Phase, Role, Step, Topology
from ncclwatch.engine.topology.passes import Call, Hints, Passes, find_passes
from ncclwatch.engine.topology.specimen import POINT_TO_POINT, VARIABLE, Specimen, mix
from ncclwatch.model.events import Function

INSIDE = (Role.TENSOR, Role.CONTEXT, Role.EXPERT)
"""Roles whose operations belong to the passes."""

ONCE = (Role.DATA, Role.MODEL, Role.EMBEDDING, Role.EXPERT_DATA, Role.WORLD)

ROLE_CODE = {role: number for number, role in enumerate(Role)}
REDUCING = (int(Function.ALL_REDUCE), int(Function.REDUCE_SCATTER), int(Function.REDUCE))
GATHER, SCATTER = int(Function.ALL_GATHER), int(Function.REDUCE_SCATTER)


@dataclass(slots=True)
class Encoding:
    """How calls of any process become tokens that are equal on all ranks of a stage. Arrays are indexed by row of the map."""

    role: NDArray[np.int64]
    nranks: NDArray[np.int64]
    variable: set[tuple[int, int]] = field(default_factory=set)
    """(role code, function) whose sizes depend on the data"""
    towards_of: dict[tuple[int, int], int] = field(default_factory=dict)
    """(row, peer) → −1, 0, +1; filled as they occur"""

    def all_to_all(self) -> NDArray[np.bool_]:
        """Rows whose grouped sends and receives are one operation."""
        result: NDArray[np.bool_] = self.role == ROLE_CODE[Role.EXPERT]
        return result


def encode(jobmap: JobMap, inference: Inference) -> Encoding:
    """The encoding that follows from a topology."""
    by_id = {g.id: g.role for g in inference.topology.groups if not g.inferred}
    rows = len(jobmap.row_process)
    result = Encoding(np.full(rows, ROLE_CODE[Role.UNSURE], np.int64), np.zeros(rows, np.int64))
    for row, group in enumerate(jobmap.row_group):
        result.role[row] = ROLE_CODE[by_id.get(group.id, Role.UNSURE)]
        result.nranks[row] = group.nranks
    calls: Counter[tuple[int, int]] = Counter()
    sizes: dict[tuple[int, int], set[int]] = defaultdict(set)
    for specimen in inference.specimens[:16]:
        for row, function, count in specimen.operations[["row", "function", "count"]].tolist():
            key = (int(result.role[row]), function)
            calls[key] += 1
            sizes[key].add(count)
    result.variable = {key for key, number in calls.items() if len(sizes[key]) > max(8, VARIABLE * number)}
    return result


def towards(encoding: Encoding, jobmap: JobMap, topology: Topology, row: int, peer: int) -> int:
    """Whether a peer is on the next stage (+1), the previous (−1), or neither (0); stages are cyclic."""
    if not 0 <= peer < jobmap.row_group[row].nranks:
        return 0
    known = encoding.towards_of.get((row, peer))
    if known is None:
        known = _towards(jobmap.row_group[row], jobmap.row_rank[row], topology, peer)
        encoding.towards_of[row, peer] = known
    return known


def _towards(group: Facts, own: int, topology: Topology, peer: int) -> int:
    if not (0 <= peer < group.nranks and 0 <= own < group.nranks):
        return 0
    a, b = int(group.ranks[own]), int(group.ranks[peer])
    if a < 0 or b < 0 or max(a, b) >= topology.world:
        return 0
    stages = int(topology.stage.max(initial=-1)) + 1
    one, other = int(topology.stage[a]), int(topology.stage[b])
    if one < 0 or other < 0 or one == other or stages < 2:
        return 0
    if abs(other - one) == 1 or stages == 2:
        return 1 if other > one else -1
    return {1: 1, stages - 1: -1}.get((other - one) % stages, 0)


def tokens_of(
    encoding: Encoding,
    jobmap: JobMap,
    topology: Topology,
    row: NDArray[np.int64],
    function: NDArray[Any],
    count: NDArray[Any],
    datatype: NDArray[Any],
    peer: NDArray[Any],
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Fingerprints of operations and the direction of those between stages; O(n) plus a little Python per distinct peer."""
    role = encoding.role[row]
    point = np.isin(function, POINT_TO_POINT)
    direction = np.zeros(len(row), np.int64)
    if point.any():
        pairs = (row[point].astype(np.int64) << 32) | (peer[point].astype(np.int64) & 0xFFFFFFFF)
        values, inverse = np.unique(pairs, return_inverse=True)
        each = [towards(encoding, jobmap, topology, v >> 32, v & 0xFFFFFFFF) for v in values.tolist()]
        direction[point] = np.array(each, np.int64)[inverse]
    loose = point | (function == Function.ALL_TO_ALL)
    for code, one in encoding.variable:
        loose |= (role == code) & (function == one)
    tokens = mix(
        role.astype(np.uint64),
        np.asarray(function).astype(np.uint64),
        np.where(loose, 0, count).astype(np.uint64),
        np.asarray(datatype).astype(np.int64).astype(np.uint64),
        (direction + 1).astype(np.uint64),
        encoding.nranks[row].astype(np.uint64),
    )
    return tokens, direction


def learn_patterns(jobmap: JobMap, inference: Inference, encoding: Encoding) -> dict[int, Pattern]:
    """One pattern for each stage whose specimens showed a repeating iteration, by stage."""
    topology = inference.topology
    stages = int(topology.stage.max(initial=-1)) + 1
    by_stage: dict[int, list[Specimen]] = defaultdict(list)
    for specimen in inference.specimens:
        if specimen.word is not None and 0 <= specimen.rank < topology.world and topology.stage[specimen.rank] >= 0:
            by_stage[int(topology.stage[specimen.rank])].append(specimen)
    drafts: dict[int, _Draft] = {}
    for stage, specimens in by_stage.items():
        draft = _draft(jobmap, topology, encoding, specimens)
        if draft is not None:
            drafts[stage] = draft
    hints = Hints()
    # Inner stages show how long a pass is, the first and the last how many chunks there are: twice round, then all know.
    found: dict[int, Passes] = {}
    for _ in range(2):
        for stage, draft in drafts.items():
            found[stage] = find_passes(draft.calls, stages, stage, hints)
        hints = _hints(found.values())
    if stages == 1 and not any(_reduces(draft) for draft in drafts.values()):
        # Without a reduction of gradients nothing shows how many micro-batches make an iteration.
        for passes in found.values():
            _forget_micro_batches(passes)
    most = max((passes.micro_batches for passes in found.values()), default=0)
    for passes in found.values():
        # With one micro-batch a pipeline would mostly idle: what looks so is the steady part of an iteration.
        if passes.micro_batches != most or (stages > 1 and most == 1):
            _forget_micro_batches(passes)
    return {stage: _pattern(stage, drafts[stage], passes) for stage, passes in found.items()}


def _reduces(draft: _Draft) -> bool:
    return bool(np.any((draft.role == ROLE_CODE[Role.DATA]) & np.isin(draft.word["function"], REDUCING)))


def _forget_micro_batches(passes: Passes) -> None:
    """A stage on which the pattern seems shorter than on the others repeats within the iteration: its count means nothing."""
    passes.micro_batches = 0
    for place in passes.places:
        place.micro_batch = place.chunk = -1


@dataclass(slots=True)
class _Draft:
    word: NDArray[Any]
    tokens: NDArray[np.uint64]
    direction: NDArray[np.int64]
    role: NDArray[np.int64]
    calls: list[Call]
    seen: int
    share: float


def _draft(jobmap: JobMap, topology: Topology, encoding: Encoding, specimens: Sequence[Specimen]) -> _Draft | None:
    """The word most specimens of a stage show, turned so that it begins where an iteration begins."""
    versions: dict[bytes, list[tuple[Specimen, int]]] = defaultdict(list)
    for specimen in specimens:
        word = specimen.word
        if word is None:
            continue
        tokens, _ = _encode_word(jobmap, topology, encoding, word)
        start = canonical_start(tokens)
        versions[np.roll(tokens, -start).tobytes()].append((specimen, start))
    if not versions:
        return None
    best = max(versions.values(), key=lambda found: sum(s.period.repeats for s, _ in found if s.period))
    specimen, start = best[0]
    if specimen.word is None:
        return None
    word = np.roll(specimen.word, -start)
    tokens, direction = _encode_word(jobmap, topology, encoding, word)
    role = encoding.role[word["row"]]
    begin = _beginning(word, role, direction, first=not int(topology.stage[specimen.rank]))
    word, role = np.roll(word, -begin), np.roll(role, -begin)
    tokens, direction = np.roll(tokens, -begin), np.roll(direction, -begin)
    calls = _calls(word, direction, role)
    seen = sum(s.period.repeats for s, _ in best if s.period)
    return _Draft(word, tokens, direction, role, calls, seen, len(best) / len(specimens))


def _encode_word(
    jobmap: JobMap, topology: Topology, encoding: Encoding, word: NDArray[Any]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    row = word["row"].astype(np.int64)
    return tokens_of(encoding, jobmap, topology, row, word["function"], word["count"], word["datatype"], word["peer"])


def _beginning(word: NDArray[Any], role: NDArray[np.int64], direction: NDArray[np.int64], *, first: bool) -> int:
    """Where an iteration begins: after its update (gradients, norm, parameters), else where nothing is under way."""
    n = len(word)
    once = np.isin(role, [ROLE_CODE[r] for r in ONCE])
    passing = direction != 0
    passing |= np.isin(role, [ROLE_CODE[r] for r in INSIDE])
    if once.any() and passing.any():
        return _after_longest_run(once, passing)
    if passing.any() and (direction != 0).any():
        return _at_rest(word, direction, first=first)
    gaps = np.diff(word["time_ns"].astype(np.int64))
    return (int(gaps.argmax()) + 1) % n if n > 1 else 0


def _after_longest_run(once: NDArray[np.bool_], passing: NDArray[np.bool_]) -> int:
    """Index after the last of the longest (cyclic) run of operations of the update with nothing of a pass between them."""
    n = len(once)
    first = int(np.flatnonzero(passing)[0])
    best, end, run = 0, 0, 0
    for i in range(first, first + n + 1):
        at = i % n
        if passing[at]:
            if run > best:
                best, end = run, i
            run = 0
        elif once[at]:
            run += 1
    return end % n


def _at_rest(word: NDArray[Any], direction: NDArray[np.int64], *, first: bool) -> int:
    """Where the fewest micro-batches are under way: received from the previous stage and not returned, on the first stage sent to
    the next and not received back.
    """
    send = word["function"] == Function.SEND
    ours = direction > 0 if first else direction < 0
    change = np.where(ours, np.where(send == first, 1, -1), 0)
    balance = np.cumsum(change)
    last = np.r_[word["call"][1:] != word["call"][:-1], True] & ours
    at = np.flatnonzero(last)
    if not len(at):
        return 0
    low = int(at[balance[at] == balance[at].min()][-1])
    begin = (low + 1) % len(word)
    if first:
        # Its last backward pass comes after the last Recv: as long as the one before, where nothing else lies between.
        exchanges = np.flatnonzero(direction != 0)
        before = exchanges[exchanges < low]
        after = int((np.r_[exchanges, exchanges[0] + len(word)] > low).argmax())
        span = int(np.r_[exchanges, exchanges[0] + len(word)][after]) - low - 1
        length = low - int(before[-1]) - 1 if len(before) else span
        begin = (begin + (length if length < span else span // 2)) % len(word)
    return begin


def _calls(word: NDArray[Any], direction: NDArray[np.int64], role: NDArray[np.int64]) -> list[Call]:
    inside = np.isin(role, [ROLE_CODE[r] for r in (*INSIDE, Role.UNSURE)]) & (direction == 0)
    sharded = role == ROLE_CODE[Role.DATA]
    context = role == ROLE_CODE[Role.CONTEXT]
    if not inside.any() and not (direction != 0).any():
        inside, context = inside | sharded, context | sharded
    marks = np.where(context & (word["function"] == GATHER), 1, 0) - np.where(context & (word["function"] == SCATTER), 1, 0)
    if (context & sharded).any():
        # Sharded data is gathered in both passes; between scatters it is the backward pass.
        marks = _between_scatters(word, marks)
    columns = (word["call"], word["function"] == Function.SEND, direction, inside, marks, word["thread"])
    return [
        Call(int(call), bool(send), int(way), bool(within), int(mark), int(thread))
        for call, send, way, within, mark, thread in zip(*(c.tolist() for c in columns), strict=True)
    ]


def _between_scatters(word: NDArray[Any], marks: NDArray[np.int64]) -> NDArray[np.int64]:
    """A gather directly before a scatter belongs to the backward pass."""
    result = marks.copy()
    for at in np.flatnonzero(marks < 0).tolist():
        if at and marks[at - 1] > 0:
            result[at - 1] = -1
    return result


def _hints(found: Any) -> Hints:
    def common(values: list[int], none: int) -> int:
        known = Counter(v for v in values if v > none)
        return known.most_common(1)[0][0] if known else none

    passes = list(found)
    return Hints(
        common([p.forward_length for p in passes], -1),
        common([p.backward_length for p in passes], -1),
        common([p.micro_batches for p in passes if p.chunks > 1 or len(passes) == 1], 0),
        common([p.chunks for p in passes if p.micro_batches], 0),
    )


def _pattern(stage: int, draft: _Draft, passes: Passes) -> Pattern:
    roles = list(Role)
    slots: dict[tuple[Role, int], int] = {}
    taken: Counter[Role] = Counter()
    layers: Counter[tuple[object, ...]] = Counter()
    steps = []
    call, before = -1, -1
    for i, (row, function, count, datatype, number) in enumerate(
        draft.word[["row", "function", "count", "datatype", "call"]].tolist()
    ):
        role = roles[int(draft.role[i])]
        if (role, row) not in slots:
            slots[role, row] = taken[role]
            taken[role] += 1
        call, before = call + (number != before), number
        place = passes.places[i]
        phase = Phase.OPTIMIZER if role in ONCE and not draft.calls[i].inside else place.phase
        layer = -1
        if draft.calls[i].inside and place.micro_batch >= 0 and phase is not Phase.EITHER:
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
                slot=slots[role, row],
                phase=phase,
                micro_batch=place.micro_batch,
                chunk=place.chunk,
                layer=layer,
                call=call,
                confidence=0.9 if phase is Phase.OPTIMIZER else place.confidence,
            )
        )
    return Pattern(
        id=stage,
        stage=stage,
        steps=tuple(steps),
        tokens=draft.tokens,
        micro_batches=passes.micro_batches,
        chunks=passes.chunks,
        seen=draft.seen,
        complete=passes.balanced and any(step.role is Role.DATA and step.function in REDUCING for step in steps),
        confidence=round(min(1.0, 0.5 + 0.1 * draft.seen) * draft.share, 3),
    )


def pattern_of_ranks(topology: Topology, patterns: Mapping[int, Pattern]) -> dict[int, int]:
    """Global rank → pattern, by stage."""
    return {rank: stage for rank, stage in enumerate(topology.stage.tolist()) if stage in patterns}
