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

SURE, DIVIDED, HALVED = 0.95, 0.85, 0.5


@dataclass(slots=True)
class Call:
    """One operation as this module needs it. ``towards``: +1, −1 for Send and Recv between stages, else 0. ``inside``: belongs to
    the passes (not to the update of parameters). ``marks``: −1 says backward, +1 forward. ``call`` numbers group calls.
    """

    call: int
    send: bool = False
    towards: int = 0
    inside: bool = False
    marks: int = 0
    thread: int = 0


@dataclass(slots=True)
class Place:
    """What was found for one operation."""

    phase: Phase = Phase.EITHER
    micro_batch: int = -1
    chunk: int = -1
    confidence: float = 0.0


@dataclass(slots=True)
class Passes:
    """Places of all operations, and the numbers they imply; 0 where unknown."""

    places: list[Place]
    micro_batches: int = 0
    chunks: int = 1
    forward_length: int = -1
    backward_length: int = -1
    consistent: bool = True
    balanced: bool = False
    """As many backward passes as forward ones are exchanged between stages."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What other stages showed: operations in a forward and a backward pass, micro-batches and chunks; −1 or 0 where unknown."""

    forward_length: int = -1
    backward_length: int = -1
    micro_batches: int = 0
    chunks: int = 0


@dataclass(slots=True)
class _Block:
    """Operations inside passes between two exchanges, and the passes (forward?, ordinal) that lie there, in order."""

    operations: list[int] = field(default_factory=list)
    passes: list[tuple[bool, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Ends:
    """For each direction the exchanges (by number) that bring an input and that take a result, in order, and the operations."""

    inputs: list[int] = field(default_factory=list)
    input_operations: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    result_operations: list[int] = field(default_factory=list)

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


# --- with a pipeline -----------------------------------------------------------------------------------------------------


def _by_exchanges(calls: Sequence[Call], stages: int, stage: int, hints: Hints, result: Passes) -> None:
    blocks, forward, backward, ambiguous = _read(calls, stages)
    result.balanced = forward.number == backward.number > 0
    if ambiguous or not forward.number or (backward.number and not result.balanced):
        result.consistent = False
        return
    m, v = _numbers(forward, stages, stage, hints)
    result.micro_batches, result.chunks = m, max(v, 1)
    order = _order(forward.number, stages, m, v)
    _mark_exchanges(forward, Phase.FORWARD, order, stages, stage, v, result)
    reverse = [(micro_batch, v - 1 - chunk if chunk >= 0 else -1) for micro_batch, chunk in order]
    _mark_exchanges(backward, Phase.BACKWARD, reverse, stages, stage, v, result)
    _place_passes(blocks, forward, forward=True, interleaved=v != 1)
    _place_passes(blocks, backward, forward=False, interleaved=v != 1)
    _divide(blocks, order, reverse, hints, result)


def _read(calls: Sequence[Call], stages: int) -> tuple[list[_Block], _Ends, _Ends, bool]:
    blocks, forward, backward = [_Block()], _Ends(), _Ends()
    current, ambiguous = -1, False
    sends = receives = 0
    for at, call in enumerate(calls):
        if call.towards == 0:
            if call.inside:
                blocks[-1].operations.append(at)
            continue
        if call.call != current:
            current, sends, receives = call.call, 0, 0
            blocks.append(_Block())
        number = len(blocks) - 2  # exchange i lies between blocks i and i + 1
        sends, receives = sends + call.send, receives + (not call.send)
        # Of two stages each is the other's next and previous: with chunks, what goes where cannot be told.
        ambiguous = ambiguous or (stages == 2 and (sends > 1 or receives > 1))
        ends = forward if call.send == (call.towards > 0) else backward
        (ends.results if call.send else ends.inputs).append(number)
        (ends.result_operations if call.send else ends.input_operations).append(at)
    return blocks, forward, backward, ambiguous


def _numbers(forward: _Ends, stages: int, stage: int, hints: Hints) -> tuple[int, int]:
    """Micro-batches and chunks. On the first stage passes of the first chunk lack an input, on the last the last's a result."""
    total = forward.number
    ends = len(forward.inputs), len(forward.results)
    if 0 in ends:
        return total, 1
    missing = total - min(ends)
    if missing and total % missing == 0 and stage in (0, stages - 1):
        return missing, total // missing
    if hints.micro_batches and hints.chunks > 1 and total == hints.micro_batches * hints.chunks:
        return hints.micro_batches, hints.chunks
    # An inner stage has an input and a result for each chunk: only the ends of the pipeline tell chunks from micro-batches.
    return (total, 1) if not missing and hints.chunks == 1 else (0, 0)


def _order(total: int, stages: int, m: int, v: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of each forward pass: Megatron-LM takes ``stages`` micro-batches through a chunk, then the next."""
    if v == 1:
        return [(k, -1) for k in range(total)]
    if v == 0 or m % stages:
        return [(-1, -1)] * total
    return [(b, c) for g in range(0, m, stages) for c in range(v) for b in range(g, g + stages)]


def _mark_exchanges(
    ends: _Ends, phase: Phase, order: list[tuple[int, int]], stages: int, stage: int, v: int, result: Passes
) -> None:
    """A Recv brings the input of its pass, a Send takes the result. Passes at the ends of the model have only one of the two."""
    first_chunk, last_chunk = (0, v - 1) if phase is Phase.FORWARD else (v - 1, 0)
    entry, leave = (0, stages - 1) if phase is Phase.FORWARD else (stages - 1, 0)
    with_input = [p for p in order if stage != entry or (v > 1 and p[1] != first_chunk)]
    with_result = [p for p in order if stage != leave or (v > 1 and p[1] != last_chunk)]
    for operations, passes in ((ends.input_operations, with_input), (ends.result_operations, with_result)):
        known = len(operations) == len(passes)
        for i, at in enumerate(operations):
            micro_batch, chunk = passes[i] if known else (-1, -1)
            result.places[at] = Place(phase, micro_batch, chunk, SURE)


def _place_passes(blocks: list[_Block], ends: _Ends, *, forward: bool, interleaved: bool) -> None:
    """Put each pass where its computation lies: right before its result leaves, or right after its input came."""
    if len(ends.results) >= len(ends.inputs):
        for ordinal, exchange in enumerate(ends.results):
            blocks[exchange].passes.append((forward, ordinal))
    else:
        # What begins with its input comes before what ends with its result in the same stretch; but with interleaved chunks
        # inputs come a pass early, and the forward pass is first (Megatron-LM's order).
        for ordinal, exchange in enumerate(ends.inputs):
            after = blocks[exchange + 1].passes
            after.insert(sum(1 for f, _ in after if f) if forward or interleaved else 0, (forward, ordinal))


def _divide(
    blocks: Sequence[_Block], forward: list[tuple[int, int]], backward: list[tuple[int, int]], hints: Hints, result: Passes
) -> None:
    lengths = {
        kind: {len(b.operations) for b in blocks if len(b.passes) == 1 and b.passes[0][0] is kind} for kind in (True, False)
    }
    f = lengths[True].pop() if len(lengths[True]) == 1 else -1
    b = lengths[False].pop() if len(lengths[False]) == 1 else -1
    result.forward_length, result.backward_length = f, b
    for block in blocks:
        _divide_block(block, f, b, hints, forward, backward, result)


def _divide_block(
    block: _Block,
    f: int,
    b: int,
    hints: Hints,
    forward: list[tuple[int, int]],
    backward: list[tuple[int, int]],
    result: Passes,
) -> None:
    passes, total = block.passes, len(block.operations)
    if not total:
        return
    if not passes:
        result.consistent = False
        return
    if len(passes) == 1:
        parts, confidence = [total], SURE
    else:
        parts, confidence = _parts(passes, total, f, b, hints)
    at = 0
    for (kind, ordinal), length in zip(passes, parts, strict=True):
        micro_batch, chunk = (forward if kind else backward)[ordinal]
        phase = Phase.FORWARD if kind else Phase.BACKWARD
        for operation in block.operations[at : at + length]:
            result.places[operation] = Place(phase, micro_batch, chunk, confidence)
        at += length
    if at == total:
        return
    # The passes cannot be divided; where both are of one micro-batch (the last stage), that much is known.
    both = {(forward if kind else backward)[ordinal][0] for kind, ordinal in passes}
    for operation in block.operations:
        result.places[operation] = Place(Phase.EITHER, both.pop() if len(both) == 1 else -1, -1, HALVED)
        both = {(forward if kind else backward)[ordinal][0] for kind, ordinal in passes}


def _parts(passes: Sequence[tuple[bool, int]], total: int, f: int, b: int, hints: Hints) -> tuple[list[int], float]:
    """Lengths of several passes in one stretch; zeros where they cannot be divided."""
    known = [f if kind else b for kind, _ in passes]
    if -1 not in known and sum(known) == total:
        return known, DIVIDED
    if len(passes) == 2 and known.count(-1) == 1 and 0 <= max(known) <= total:
        return [total - max(known) if one == -1 else one for one in known], DIVIDED
    others = [hints.forward_length if kind else hints.backward_length for kind, _ in passes]
    if -1 not in others and sum(others) == total:
        return others, DIVIDED
    if len(passes) == 2 and passes[0][0] is not passes[1][0] and total % 2 == 0 and hints.forward_length == hints.backward_length:
        return [total // 2, total // 2], HALVED
    return [0] * len(passes), 0.0


# --- without a pipeline --------------------------------------------------------------------------------------------------


def _by_marks(calls: Sequence[Call], result: Passes) -> None:
    inside = [at for at, call in enumerate(calls) if call.inside]
    marks = [calls[at].marks for at in inside]
    if not (1 in marks and -1 in marks):
        threads = list(dict.fromkeys(calls[at].thread for at in inside))
        if len(threads) != 2:
            result.consistent = False
            return
        # The first pass of an iteration is a forward pass.
        marks = [1 if calls[at].thread == threads[0] else -1 for at in inside]
    switches = [mark for mark in marks if mark]
    turns = [switches[0]] + [b for a, b in itertools.pairwise(switches) if a != b]
    if turns[0] < 0 or turns[-1] > 0:
        result.consistent = False
    number = len(turns)
    equal = len(inside) % number == 0
    if equal:
        length = len(inside) // number
        parts = [marks[i * length : (i + 1) * length] for i in range(number)]
        equal = all(set(part) - {0} == {turn} for part, turn in zip(parts, turns, strict=True))
    result.micro_batches = number // 2 if result.consistent else 0
    turn = 0
    for i, at in enumerate(inside):
        if equal:
            turn = i // (len(inside) // number)
        elif marks[i] and marks[i] != turns[turn]:
            turn += 1
        phase = Phase.FORWARD if turns[turn] > 0 else Phase.BACKWARD
        sure = equal or marks[i] != 0
        micro_batch = turn // 2 if result.consistent else -1
        result.places[at] = Place(phase, micro_batch, -1, DIVIDED) if sure else Place(Phase.EITHER, micro_batch, -1, HALVED)
