"""The pattern of an iteration for every pipeline stage, learned from specimens, and where in it a rank is.

A rank has a pointer into the pattern. A call that is what the pattern has next moves it. Another one is a gap (records were lost)
or does not belong to the iteration (a barrier, an evaluation phase): then the pointer waits for an operation that occurs once in
the pattern, or for a run of calls that fits in one place only.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
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

AHEAD = 64
"""Calls: after a gap the pattern is searched so far ahead. A buffer that overflows loses more, and then the place is open."""
RUN = 4
"""Calls in a row that must fit before a place ahead is believed: a layer makes no more of them in one pass."""
CONTEXT = 24
"""Without an operation that is unique, so many of the latest calls must fit in one place of the pattern only."""
EVERY = 8
"""That search is made once in so many calls: it compares with the whole pattern."""


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
    for i, function in enumerate(draft.word["function"].tolist()):
        role, place, inside = ROLES[int(draft.role[i])], passes.places[i], draft.calls[i].inside
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
        complete=passes.balanced and _reduces(draft),
        confidence=round(min(1.0, 0.5 + 0.1 * draft.seen) * draft.share, 3),
    )


# --- where a rank is ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Track:
    """The pointer of one process: ``position`` is the step its latest call was, −1 when lost."""

    pattern: Pattern
    position: int = -1
    exact: bool = False
    """Whether it has passed an operation that is unique since it was lost."""
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=CONTEXT))
    """The latest calls, while the pointer is lost."""
    astray: int = 0
    """Calls without a place, in all."""

    def follow(self, tokens: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Take calls in order; returns their positions, −1 where they have none."""
        positions = np.full(len(tokens), -1, np.int32)
        at = 0
        while at < len(tokens):
            if self.position >= 0:
                at = self._advance(tokens, positions, at)
            if at < len(tokens):
                positions[at] = self._search(tokens, at)
                at += 1
        return positions

    def _advance(self, tokens: NDArray[np.uint64], positions: NDArray[np.int32], at: int) -> int:
        """Follow the pattern as far as it fits; returns the index of the first call that does not."""
        word = self.pattern.tokens
        while at < len(tokens):
            begin = (self.position + 1) % len(word)
            piece = min(len(word) - begin, len(tokens) - at)
            same = tokens[at : at + piece] == word[begin : begin + piece]
            fits = piece if same.all() else int(same.argmin())
            if fits:
                self.exact = self.exact or any(begin <= position < begin + fits for position in self.pattern.unique.values())
                positions[at : at + fits] = np.arange(begin, begin + fits)
                self.position = begin + fits - 1
                at += fits
            if fits < piece:
                break
        return at

    def _search(self, tokens: NDArray[np.uint64], at: int) -> int:
        """The place of a call that does not fit; where there is none it is passed over, or the pointer is lost."""
        token, unique = int(tokens[at]), self.pattern.unique
        found, certain = unique.get(token, -1), True
        if found < 0 and self.position >= 0:
            found, certain = self._ahead(tokens, at), False
        if found < 0:
            self.recent.append(token)
            self.astray += 1
            if self.position < 0 and len(self.recent) == CONTEXT and self.astray % EVERY == 0:
                # Passes of an evaluation look like those of an iteration: certain is what is unique, where anything is.
                found, certain = self._by_context(), not unique
        if found >= 0:
            self.position, self.exact = found, certain
            self.recent.clear()
        elif not self._is_stranger(tokens, at):
            self.position, self.exact = -1, False
        return found

    def _is_stranger(self, tokens: NDArray[np.uint64], at: int) -> bool:
        """Whether the pattern goes on right after this call: then it was put in between (a barrier), and nothing is lost.

        What goes from stage to stage is never put in between: there another pass begins than the pattern has next.
        """
        if self.position < 0 or int(tokens[at]) in self.pattern.exchanges:
            return False
        if at + 1 >= len(tokens):
            return bool((self.pattern.tokens != tokens[at]).all())
        return bool(tokens[at + 1] == self.pattern.tokens[(self.position + 1) % len(self.pattern)])

    def _ahead(self, tokens: NDArray[np.uint64], at: int) -> int:
        """The next place, not far ahead, where this call and those after it fit; −1 if there is none."""
        word, following = self.pattern.tokens, tokens[at : at + RUN]
        for skip in range(2, min(AHEAD, len(word)) + 1) if len(following) == RUN else ():
            begin = self.position + skip
            if np.array_equal(following, np.take(word, range(begin, begin + RUN), mode="wrap")):
                return begin % len(word)
        return -1

    def _by_context(self) -> int:
        """The only place where the latest calls end; −1 where there is none or several."""
        word = self.pattern.tokens
        windows = np.lib.stride_tricks.sliding_window_view(np.resize(word, len(word) + CONTEXT - 1), CONTEXT)
        found = np.flatnonzero((windows == np.array(self.recent, np.uint64)).all(axis=1))
        return int(found[0] + CONTEXT - 1) % len(word) if len(found) == 1 else -1
