"""What of a training step waits for what, as ByteDance's StragglerAnalysis models it.

"Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI 2025), section 3.2; facts from
``analyzer/dependency_model.py`` of github.com/ByteDance-Seed/StragglerAnalysis: which operations of a worker follow each other,
which send belongs to which receive, and which collectives join workers. One step of the first data-parallel replica is the
model of all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

FORWARD, BACKWARD = "forward-compute", "backward-compute"
COMPUTE = (FORWARD, BACKWARD)
MESSAGES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
LAYERNORM, EMBEDDING = "layernorm-grads-all-reduce", "embedding-grads-all-reduce"
CLIP, OPTIMIZER, GARBAGE = "optimizer-clip-main-grad", "optimizer", "gc"
JOINED = (GATHER, SCATTER, SEPARATE, CLIP)
"""Collectives that end for all data-parallel replicas together."""
TYPES = (*COMPUTE, *MESSAGES, GATHER, SCATTER, SEPARATE, LAYERNORM, EMBEDDING, CLIP, OPTIMIZER, GARBAGE)
CLOCK_S = 5e-5
"""Fact: by so much their clocks may be apart where a message is matched with its computation (``EPS``)."""
_AHEAD = {"forward-send": 1, "forward-recv": -1, "backward-send": -1, "backward-recv": 1}
"""Where the other side of a message is, in stages."""
_OTHER = {"send": "recv", "recv": "send"}


class ModelError(ValueError):
    """A step that does not fit the model, and why."""


class Op(NamedTuple):
    """One operation of the step that is the model: what, how many of its kind were before it, and on which stage."""

    kind: str
    number: int
    stage: int


@dataclass(frozen=True, slots=True)
class Seen:
    """When it was, s, and of which chunk of the stage, and of the model."""

    op: Op
    begin: float
    end: float
    chunk: int
    of_model: int


@dataclass(slots=True)
class Model:
    """``needs``: what must have ended before an operation begins; ``groups``: operations that end together; ``joined``: those
    that end for all data-parallel replicas together.
    """

    needs: dict[Op, list[Op]] = field(default_factory=lambda: defaultdict(list))
    groups: list[list[Op]] = field(default_factory=list)
    joined: set[Op] = field(default_factory=set)

    def chain(self, operations: Sequence[Op], after: Sequence[Op] = ()) -> None:
        """Each follows the one before it, the first ``after`` others."""
        last = list(after)
        for one in operations:
            self.needs[one] += last
            last = [one]


def build(step: Sequence[Seen], stages: int, chunks: int, replicas: int) -> Model:
    """The model of a job: ``step`` is one step of one replica, ``replicas`` how many reduce gradients together.

    Raises :class:`ModelError` where the step does not fit.
    """
    model = Model()
    by_stage = [sorted((one for one in step if one.op.stage == at), key=_order) for at in range(stages)]
    present = {one.op for one in step}
    messages = [_match(model, own, stage, stages, chunks) for stage, own in enumerate(by_stage)]
    _pair(model, messages, stages)
    for own in by_stage:
        _inside(model, own)
        if replicas > 1:
            model.chain([one.op for one in own if one.op.kind in (GATHER, SCATTER)])
    overlaps = any(one.op.kind == SEPARATE for one in step)
    for stage, own in enumerate(by_stage):
        if replicas > 1:
            _gathers(model, own)
            if overlaps:
                _scatters(model, own)
        _after_compute(model, own, stage, (stages, replicas > 1, overlaps), present)
    if replicas > 1:
        model.groups += [[one.op] for own in by_stage for one in own if one.op.kind in (GATHER, SCATTER, SEPARATE)]
    for ends in ([Op(EMBEDDING, 0, stage) for stage in sorted({0, stages - 1})], [Op(CLIP, 0, stage) for stage in range(stages)]):
        if kept := [one for one in ends if one in present]:
            model.groups.append(kept)
    model.joined = {one for group in model.groups for one in group if one.kind in JOINED}
    for one in present:
        model.needs[one] = [need for need in model.needs[one] if need in present]
    for one in model.needs.keys() - present:
        del model.needs[one]
    return model


def _order(one: Seen) -> tuple[float, int, str]:
    return one.begin, one.op.number, one.op.kind


def _computed(own: Sequence[Seen]) -> list[Seen]:
    return [one for one in own if one.op.kind in COMPUTE]


def _match(model: Model, own: Sequence[Seen], stage: int, stages: int, chunks: int) -> list[tuple[Op, bool]]:
    """The messages of a stage, each with whether it is one at all; and what of them waits for which computation.

    Their profiler records sends and receives that were not launched: at the ends of a step, and of the model.
    """
    computed = _computed(own)
    place = {one.op: one for one in computed}
    said: list[tuple[Op, bool]] = []
    for kind in MESSAGES:
        direction, way = kind.split("-")
        same = [one for one in computed if one.op.kind == f"{direction}-compute"]
        found = [one for one in own if one.op.kind == kind]
        if not same or not found:
            said += [(one.op, False) for one in found]
            continue
        last_begin, first_end = max(one.begin for one in same), min(one.end for one in same)
        real = [o for o in found if (o.begin <= last_begin + CLOCK_S if way == "recv" else o.end >= first_end - CLOCK_S)]
        number = 0
        if len(real) != len(same):
            if stage not in (0, stages - 1) or len(real) not in (0, len(same) - 1):
                raise ModelError(f"stage {stage} has {len(real)} {kind} for {len(same)} {direction}-compute")
            number = int(way == "recv" and len(real) == len(same) - 1)
        for one in found:
            if one not in real:
                said.append((one.op, False))
                continue
            compute = Op(f"{direction}-compute", number, stage)
            if compute not in place:
                raise ModelError(f"stage {stage} has no {direction}-compute number {number}")
            peer = place[compute].of_model + _AHEAD[kind]
            said.append((one.op, 0 <= peer < chunks * stages))
            _beside(model, way, one.op, compute)
            number += 1
    return said


def _beside(model: Model, way: str, message: Op, compute: Op) -> None:
    if way == "send":
        model.needs[message].append(compute)
        return
    model.needs[compute].append(message)
    if compute.number > 0:
        model.needs[message].append(compute._replace(number=compute.number - 1))


def _pair(model: Model, messages: Sequence[Sequence[tuple[Op, bool]]], stages: int) -> None:
    """Which send and which receive are one message: the n-th of a kind on one side is the n-th on the other."""
    numbered: dict[tuple[str, int, int], Op] = {}
    for stage, own in enumerate(messages):
        counts: dict[str, int] = defaultdict(int)
        for one, real in own:
            if not real:
                model.groups.append([one])
                continue
            numbered[one.kind, counts[one.kind], stage] = one
            counts[one.kind] += 1
    for (kind, number, stage), one in numbered.items():
        direction, way = kind.split("-")
        other = numbered.get((f"{direction}-{_OTHER[way]}", number, (stage + _AHEAD[kind]) % stages))
        if other is None:
            raise ModelError(f"{kind} {number} of stage {stage} has no other side")
        if way == "send":
            model.groups.append([one, other])


def _inside(model: Model, own: Sequence[Seen]) -> None:
    """What follows each other on the streams of a worker."""
    computed = [one.op for one in _computed(own)]
    model.chain(computed)
    for kind in MESSAGES:
        model.chain([one.op for one in own if one.op.kind == kind])
    first = next((at for at, one in enumerate(computed) if one.kind == BACKWARD), 0)
    if first >= 2:
        for kind in ("backward-recv", "backward-send"):
            found = Op(kind, 0, computed[0].stage)
            if any(one.op == found for one in own):
                model.needs[found].append(computed[first - 2])


def _gathers(model: Model, own: Sequence[Seen]) -> None:
    """The first forward pass of a chunk waits for its parameters."""
    done = set()
    for one in sorted((one for one in own if one.op.kind == GATHER), key=lambda one: -one.op.number):
        passes = [other for other in own if other.op.kind == FORWARD and other.chunk == one.chunk]
        if one.chunk not in done and passes:
            model.needs[min(passes, key=lambda other: other.begin).op].append(one.op)
            done.add(one.chunk)


def _scatters(model: Model, own: Sequence[Seen]) -> None:
    """Gradients of a chunk are reduced after its last backward pass."""
    done = set()
    for one in sorted((one for one in own if one.op.kind == SCATTER), key=lambda one: one.op.number):
        passes = [other for other in own if other.op.kind == BACKWARD and other.chunk == one.chunk]
        if one.chunk not in done and passes:
            model.needs[one.op].append(max(passes, key=lambda other: other.end).op)
            done.add(one.chunk)


def _after_compute(model: Model, own: Sequence[Seen], stage: int, job: tuple[int, bool, bool], present: set[Op]) -> None:
    """What follows the last computation of a step."""
    stages, reduces, overlaps = job
    computed = _computed(own)
    if not computed:
        raise ModelError(f"stage {stage} computes nothing")
    last = max(computed, key=lambda one: one.end).op
    garbage = Op(GARBAGE, 0, stage)
    model.needs[garbage].append(last)
    scatters = [Op(SCATTER, number, stage) for number in range(sum(one.op.kind == SCATTER for one in own))]
    embedding = [Op(EMBEDDING, 0, stage)] if stage in (0, stages - 1) else []
    middle = [] if not reduces else [Op(SEPARATE, 0, stage)] if overlaps else scatters
    after = [scatters[-1], garbage] if reduces and overlaps and scatters else [garbage]
    chain = [Op(LAYERNORM, 0, stage), *embedding, *middle, Op(CLIP, 0, stage), Op(OPTIMIZER, 0, stage)]
    # What a trace lacks is passed over.
    model.chain([one for one in chain if one in present], [one if one in present else last for one in after])
