"""Which pass every operation of an iteration belongs to: forward or backward, of which micro-batch and model chunk.

With a pipeline, Send and Recv tell: what comes from the previous stage begins a forward pass, what goes to the next ends one; for
backward passes the other way round. That holds for every schedule. The first stage has no input to receive and the last no result
to send, so there the other end of the pass is used. Between two exchanges lies one pass, or two that are divided by the lengths
seen where there is one. Without a pipeline only context parallel operations (gathered forward, scattered backward) or a thread
of its own for backward passes (as PyTorch's autograd has) tell; else nothing is said.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from ncclwatch.engine.topology.model import Phase

Order = list[tuple[int, int]]
"""(micro-batch, chunk) of passes in order; −1 where unknown."""


@dataclass(slots=True)
class Call:
    """One operation as this module needs it. ``call`` numbers group calls; ``towards`` is +1 or −1 for Send and Recv between
    stages, else 0; ``inside``: it belongs to the passes, not to the update; ``marks``: −1 says backward, +1 forward.
    """

    call: int
    send: bool = False
    towards: int = 0
    inside: bool = False
    marks: int = 0
    thread: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """What was found for one operation."""

    phase: Phase = Phase.EITHER
    micro_batch: int = -1
    chunk: int = -1


@dataclass(slots=True)
class Passes:
    """Places of all operations, and the numbers they imply; 0 where unknown."""

    places: list[Place]
    micro_batches: int = 0
    chunks: int = 1
    forward_length: int = -1
    backward_length: int = -1
    balanced: bool = False
    """As many backward passes as forward ones are exchanged between stages."""

    def forget_micro_batches(self) -> None:
        """Say nothing of micro-batches and chunks."""
        self.micro_batches = 0
        self.places = [Place(place.phase) for place in self.places]


@dataclass(frozen=True, slots=True)
class Hints:
    """What other stages showed: operations in a forward and a backward pass, micro-batches and chunks; −1 or 0 where unknown."""

    forward_length: int = -1
    backward_length: int = -1
    micro_batches: int = 0
    chunks: int = 0


@dataclass(slots=True)
class _Ends:
    """Exchanges of one direction that begin passes (inputs) or end them (results): (number of the block before, operation)."""

    inputs: list[tuple[int, int]] = field(default_factory=list)
    results: list[tuple[int, int]] = field(default_factory=list)

    @property
    def number(self) -> int:
        return max(len(self.inputs), len(self.results))


def find_passes(calls: Sequence[Call], stages: int, stage: int, hints: Hints) -> Passes:
    """Assign every operation of one iteration (which begins at its first) to its pass."""
    result = Passes([Place() for _ in calls])
    if stages > 1:
        _by_exchanges(calls, stages, stage, hints, result)
    else:
        _by_marks(calls, result)
    return result


def _by_exchanges(calls: Sequence[Call], stages: int, stage: int, hints: Hints, result: Passes) -> None:
    blocks, ends, ambiguous = _read(calls, stages)
    forward, backward = ends[Phase.FORWARD], ends[Phase.BACKWARD]
    result.balanced = forward.number == backward.number > 0
    if ambiguous or not forward.number or (backward.number and not result.balanced):
        return
    m, v = _numbers(forward, stages, stage, hints)
    result.micro_batches, result.chunks = m, max(v, 1)
    order = _order(forward.number, stages, m, v)
    orders = {Phase.FORWARD: order, Phase.BACKWARD: [(b, v - 1 - chunk if chunk >= 0 else -1) for b, chunk in order]}
    passes: list[list[tuple[Phase, int]]] = [[] for _ in blocks]
    for phase, own in ends.items():
        _mark_exchanges(own, phase, orders[phase], (stages, stage, v), result)
        _place_passes(passes, own, phase, interleaved=v != 1)
    _divide(blocks, passes, orders, hints, result)


def _read(calls: Sequence[Call], stages: int) -> tuple[list[list[int]], dict[Phase, _Ends], bool]:
    """Operations inside passes between two exchanges (blocks), the ends of passes, and whether these cannot be told apart."""
    blocks: list[list[int]] = [[]]
    ends = {Phase.FORWARD: _Ends(), Phase.BACKWARD: _Ends()}
    current, ambiguous = -1, False
    seen: set[bool] = set()
    for at, call in enumerate(calls):
        if call.towards == 0:
            if call.inside:
                blocks[-1].append(at)
            continue
        if call.call != current:
            current, seen = call.call, set()
            blocks.append([])
        # Of two stages each is the other's next and previous: with chunks, what goes where cannot be told.
        ambiguous = ambiguous or (stages == 2 and call.send in seen)
        seen.add(call.send)
        own = ends[Phase.FORWARD if call.send == (call.towards > 0) else Phase.BACKWARD]
        (own.results if call.send else own.inputs).append((len(blocks) - 2, at))
    return blocks, ends, ambiguous


def _numbers(forward: _Ends, stages: int, stage: int, hints: Hints) -> tuple[int, int]:
    """Micro-batches and chunks. On the first stage passes of the first chunk lack an input, on the last the last's a result."""
    total, least = forward.number, min(len(forward.inputs), len(forward.results))
    if not least:
        return total, 1
    missing = total - least
    if missing and total % missing == 0 and stage in (0, stages - 1):
        return missing, total // missing
    if hints.micro_batches and hints.chunks > 1 and total == hints.micro_batches * hints.chunks:
        return hints.micro_batches, hints.chunks
    # An inner stage has an input and a result for each chunk: only the ends of the pipeline tell chunks from micro-batches.
    return (total, 1) if not missing and hints.chunks == 1 else (0, 0)


def _order(total: int, stages: int, m: int, v: int) -> Order:
    """Of each forward pass: Megatron-LM takes ``stages`` micro-batches through a chunk, then the next."""
    if v == 1:
        return [(k, -1) for k in range(total)]
    if v == 0 or m % stages:
        return [(-1, -1)] * total
    return [(b, c) for g in range(0, m, stages) for c in range(v) for b in range(g, g + stages)]


def _mark_exchanges(ends: _Ends, phase: Phase, order: Order, shape: tuple[int, int, int], result: Passes) -> None:
    """A Recv brings the input of its pass, a Send takes the result. Passes at the ends of the model have only one of the two.

    ``shape``: number of stages, this one, and chunks.
    """
    stages, stage, v = shape
    begin, end = (0, 0), (stages - 1, v - 1)
    if phase is Phase.BACKWARD:
        begin, end = end, begin
    for exchanges, (lacking, chunk) in ((ends.inputs, begin), (ends.results, end)):
        passes = [p for p in order if stage != lacking or (v > 1 and p[1] != chunk)]
        known = len(exchanges) == len(passes)
        for i, (_, at) in enumerate(exchanges):
            result.places[at] = Place(phase, *(passes[i] if known else (-1, -1)))


def _place_passes(passes: list[list[tuple[Phase, int]]], ends: _Ends, phase: Phase, *, interleaved: bool) -> None:
    """Put each pass into the block where its computation lies: right before its result leaves, or right after its input came."""
    if len(ends.results) >= len(ends.inputs):
        for ordinal, (block, _) in enumerate(ends.results):
            passes[block].append((phase, ordinal))
        return
    # What begins with its input comes before what ends with its result in the same stretch; but with interleaved chunks inputs
    # come a pass early, and the forward pass is first (Megatron-LM's order).
    behind = phase is Phase.FORWARD or interleaved
    for ordinal, (block, _) in enumerate(ends.inputs):
        after = passes[block + 1]
        after.insert(sum(other is Phase.FORWARD for other, _ in after) if behind else 0, (phase, ordinal))


def _divide(
    blocks: Sequence[Sequence[int]],
    passes: Sequence[Sequence[tuple[Phase, int]]],
    orders: dict[Phase, Order],
    hints: Hints,
    result: Passes,
) -> None:
    """Give the operations of each block to the passes that lie there."""
    alone: dict[Phase, set[int]] = {phase: set() for phase in orders}
    for block, here in zip(blocks, passes, strict=True):
        if len(here) == 1:
            alone[here[0][0]].add(len(block))
    own = {phase: lengths.pop() if len(lengths) == 1 else -1 for phase, lengths in alone.items()}
    others = {Phase.FORWARD: hints.forward_length, Phase.BACKWARD: hints.backward_length}
    result.forward_length, result.backward_length = own[Phase.FORWARD], own[Phase.BACKWARD]
    for block, here in zip(blocks, passes, strict=True):
        if not block or not here:
            continue
        places = [Place(phase, *orders[phase][ordinal]) for phase, ordinal in here]
        parts = [len(block)] if len(here) == 1 else _parts([phase for phase, _ in here], len(block), own, others)
        if not parts:
            # The passes cannot be divided; where both are of one micro-batch (the last stage), that much is known.
            micro_batches = {place.micro_batch for place in places}
            places, parts = [Place(micro_batch=micro_batches.pop() if len(micro_batches) == 1 else -1)], [len(block)]
        operations = iter(block)
        for place, length in zip(places, parts, strict=True):
            for at in itertools.islice(operations, length):
                result.places[at] = place


def _parts(phases: Sequence[Phase], total: int, own: dict[Phase, int], others: dict[Phase, int]) -> list[int]:
    """Lengths of several passes in one stretch; none where they cannot be divided."""
    known = [own[phase] for phase in phases]
    if -1 not in known and sum(known) == total:
        return known
    if len(phases) == 2 and known.count(-1) == 1 and max(known) <= total:
        return [total - max(known) if one == -1 else one for one in known]
    elsewhere = [others[phase] for phase in phases]
    if -1 not in elsewhere and sum(elsewhere) == total:
        return elsewhere
    if len(set(phases)) == len(phases) == 2 and total % 2 == 0 and len(set(others.values())) == 1:
        return [total // 2, total // 2]
    return []


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
        result.places[at] = Place(phase if equal or marks[i] else Phase.EITHER, micro_batch)
