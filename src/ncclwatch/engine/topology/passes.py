"""Which pass every operation of an iteration belongs to: forward or backward, of which micro-batch and model chunk.

With a pipeline, Send and Recv tell: what comes from the previous stage begins a forward pass, what goes to the next ends one; for
backward passes the other way round. That holds for every schedule. The first stage has no input to receive and the last no result
to send, so there the other end of the pass is used. Between two exchanges lies one pass, or two that are divided by the lengths
seen where there is one. Without a pipeline only context parallel operations (gathered forward, scattered backward) or a thread
of its own for backward passes (as PyTorch's autograd has) tell; else nothing is said.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ncclwatch.engine.topology.model import Phase

Order = list[tuple[int, int]]
"""(micro-batch, chunk) of passes in order; −1 where unknown."""
Exchanges = list[tuple[int, int]]
"""(number of the block of operations before, operation) of exchanges."""


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


@dataclass(frozen=True, slots=True)
class Hints:
    """What other stages showed: operations in a pass by its phase, micro-batches and chunks (0 where unknown)."""

    lengths: Mapping[Phase, int] = field(default_factory=dict)
    micro_batches: int = 0
    chunks: int = 0


@dataclass(slots=True)
class Passes:
    """Places of all operations, and the numbers they imply."""

    places: list[Place]
    micro_batches: int = 0
    """0 where unknown."""
    chunks: int = 1
    lengths: dict[Phase, int] = field(default_factory=dict)
    """Operations in a pass, where all of a phase that stand alone between two exchanges have as many."""
    balanced: bool = False
    """As many backward passes as forward ones are exchanged between stages."""

    def forget_micro_batches(self) -> None:
        """Say nothing of micro-batches and chunks."""
        self.micro_batches = 0
        self.places = [Place(place.phase) for place in self.places]


def find_passes(calls: Sequence[Call], stages: int, stage: int, hints: Hints) -> Passes:
    """Assign every operation of one iteration (which begins at its first) to its pass."""
    result = Passes([Place() for _ in calls])
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
    order = _order(forward, stages, m, v)
    orders = {Phase.FORWARD: order, Phase.BACKWARD: [(b, v - 1 - chunk if chunk >= 0 else -1) for b, chunk in order]}
    passes: list[list[tuple[Phase, int]]] = [[] for _ in blocks]
    first, last = (0, 0), (stages - 1, v - 1)
    for phase, own in orders.items():
        # Passes at the ends of the model have no input, or no result.
        begin, end = (first, last) if phase is Phase.FORWARD else (last, first)
        for exchanges, (lacking, chunk) in ((inputs[phase], begin), (results[phase], end)):
            numbers = [one for one in own if stage != lacking or (v > 1 and one[1] != chunk)]
            known = len(exchanges) == len(numbers)
            for i, (_, at) in enumerate(exchanges):
                result.places[at] = Place(phase, *(numbers[i] if known else (-1, -1)))
        _place_passes(passes, phase, inputs[phase], results[phase], interleaved=v != 1)
    _divide(blocks, passes, orders, hints, result)


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


def _order(total: int, stages: int, m: int, v: int) -> Order:
    """Of each forward pass: Megatron-LM takes ``stages`` micro-batches through a chunk, then the next."""
    if v == 1:
        return [(k, -1) for k in range(total)]
    if v == 0 or m % stages:
        return [(-1, -1)] * total
    return [(b, c) for g in range(0, m, stages) for c in range(v) for b in range(g, g + stages)]


def _place_passes(
    passes: list[list[tuple[Phase, int]]], phase: Phase, inputs: Exchanges, results: Exchanges, *, interleaved: bool
) -> None:
    """Put each pass into the block where its computation lies: right before its result leaves, or right after its input came."""
    if len(results) >= len(inputs):
        for ordinal, (block, _) in enumerate(results):
            passes[block].append((phase, ordinal))
        return
    # What begins with its input comes before what ends with its result in the same stretch; but with interleaved chunks inputs
    # come a pass early, and the forward pass is first (Megatron-LM's order).
    behind = phase is Phase.FORWARD or interleaved
    for ordinal, (block, _) in enumerate(inputs):
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
    for phase in orders:
        alone = {len(block) for block, here in zip(blocks, passes, strict=True) if [one for one, _ in here] == [phase]}
        if len(alone) == 1:
            result.lengths[phase] = alone.pop()
    for block, here in zip(blocks, passes, strict=True):
        if not block or not here:
            continue
        places = [Place(phase, *orders[phase][ordinal]) for phase, ordinal in here]
        parts = _parts([phase for phase, _ in here], len(block), (result.lengths, hints.lengths))
        if not parts:
            # The passes cannot be divided; where both are of one micro-batch (the last stage), that much is known.
            micro_batches = {place.micro_batch for place in places}
            places, parts = [Place(micro_batch=micro_batches.pop() if len(micro_batches) == 1 else -1)], [len(block)]
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
    alike = len({said[-1].get(phase) for phase in Phase if phase in (Phase.FORWARD, Phase.BACKWARD)}) == 1
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
        result.places[at] = Place(phase if equal or marks[i] else Phase.EITHER, micro_batch)
