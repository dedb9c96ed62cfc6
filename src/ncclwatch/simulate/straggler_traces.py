"""SIMULATED traces as ByteDance's StragglerAnalysis takes them: ``trace-NAME.parquet``, a row an operation of a worker.

Columns and kinds as in the README of github.com/ByteDance-Seed/StragglerAnalysis; a worker is the first rank of a replica's
stage. What a host takes before it launches something is no part of an operation, as in their traces. The simulated job has no
garbage collection, and no layer norms or embeddings of its own to reduce; where it computes no norm of its gradients their
clipping takes no time. Steps that do something else than train are left out. Shares no code with what reads such files.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ncclwatch.simulate.layout import coordinates
from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.program import Compute, PointToPoint, events_of, iteration_program
from ncclwatch.simulate.scenario import Layout, LookalikeKind, Scenario
from ncclwatch.simulate.schedule import Pass, passes
from ncclwatch.simulate.timeline import Block, Timeline

COMPUTED = {"forward": "forward-compute", "backward": "backward-compute", "optimizer": "optimizer"}
GATHER, SCATTER, CLIP = "params-all-gather", "grads-reduce-scatter", "optimizer-clip-main-grad"
_OF_CHUNK = (GATHER, SCATTER)
_LABELS = {"data, gradients": SCATTER, "gradient norm": CLIP, "data, parameters": GATHER}
_COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc")


class Span(NamedTuple):
    """One operation, true times in seconds. ``of``: the pass that it computes."""

    kind: str
    begin: float
    end: float
    of: Pass | None = None


@dataclass(slots=True)
class _Stream:
    """Operations of one rank in one iteration, as its GPU runs them one after the other."""

    spans: list[Span]
    free: float
    """When what came before has ended."""
    waiting: list[tuple[str, float, Pass | None]]
    """Computation since: kind, usual seconds, pass."""

    def until(self, called: float, started: float) -> None:
        """What was computed before the next operation, which the host called and the GPU began then: each its part of it."""
        begin, total = min(max(self.free, called), started), sum(seconds for _, seconds, _ in self.waiting)
        length = (started - begin) / total if total else 0.0
        for kind, seconds, of in self.waiting:
            self.add(Span(kind, begin, begin + seconds * length, of))
            begin += seconds * length
        self.waiting, self.free = [], max(self.free, started)

    def add(self, span: Span) -> None:
        """An operation; computation of one pass is one."""
        last = self.spans[-1] if self.spans else None
        if span.of is not None and last is not None and last.of == span.of:
            self.spans[-1] = last._replace(end=span.end)
        else:
            self.spans.append(span)
        self.free = max(self.free, span.end)


def write_straggler(timeline: Timeline, folder: Path, name: str = "simulated") -> list[Path]:
    """Write ``trace-NAME.parquet`` and ``meta-NAME.yaml``; their paths, or none where no step is whole. Needs pyarrow."""
    import pyarrow
    from pyarrow import parquet

    layout = timeline.scenario.layout
    rows = list(_rows(timeline))
    if not rows:
        return []
    columns = dict(zip(_COLUMNS, zip(*rows, strict=True), strict=True))
    trace, meta = folder / f"trace-{name}.parquet", folder / f"meta-{name}.yaml"
    parquet.write_table(pyarrow.table({key: list(values) for key, values in columns.items()}), trace)
    meta.write_text(f"trial_name: {name}\ndsp_size: {layout.cp}\npp_size: {layout.pp}\ntp_size: {layout.tp}\n", "ascii")
    return [trace, meta]


def worker_of(layout: Layout, rank: int) -> int:
    """The rank that a trace has for a rank's worker: the first of its tensor and context groups."""
    place = coordinates(layout, rank)
    return rank - place.tp - place.cp * layout.tp


def _rows(timeline: Timeline) -> Iterator[tuple[Any, ...]]:
    cast, layout = Cast(timeline.scenario), timeline.scenario.layout
    workers = sorted({worker_of(layout, rank) for rank in range(layout.world)})
    if not all(cast.observed(rank) for rank in workers):
        workers = []
    blocks = _blocks_of(timeline, workers)
    former: dict[int, Span] = {}
    for iteration in range(timeline.scenario.workload.iterations):
        step = {rank: _spans(timeline.scenario, rank, iteration, blocks[rank, iteration]) for rank in workers}
        if any(spans is None for spans in step.values()):
            former = {}
            continue
        made = {rank: [*([former[rank]] if rank in former else []), *(spans or [])] for rank, spans in step.items()}
        # A step begins with the parameters that the one before has updated.
        former = {rank: spans.pop() for rank, spans in made.items() if spans and spans[-1].kind == GATHER}
        if iteration and any(made.values()) and (len(former) == len(workers) or not former):
            yield from _step(timeline.scenario, iteration, made)


def _blocks_of(timeline: Timeline, workers: Sequence[int]) -> dict[tuple[int, int], list[tuple[Block, int]]]:
    """Operations by rank and iteration, in the order in which the rank called them, each with the rank's place in it."""
    found: dict[tuple[int, int], list[tuple[Block, int]]] = defaultdict(list)
    for block in timeline.blocks:
        for place in np.flatnonzero(np.isin(block.ranks, workers)).tolist():
            found[int(block.ranks[place]), block.iteration].append((block, place))
    for own in found.values():
        own.sort(key=lambda one: float(one[0].called[one[1]]))
    return found


def _spans(scenario: Scenario, rank: int, iteration: int, blocks: Sequence[tuple[Block, int]]) -> list[Span] | None:
    """The operations of one iteration; ``None`` where it was not whole, or not of training alone."""
    if events_of(scenario, LookalikeKind.EVALUATION, iteration):
        return None
    stage, work = coordinates(scenario.layout, rank).pp, scenario.workload
    plan = iter(passes(work.schedule, stage, scenario.layout.pp, work.micro_batches, work.virtual_stages))
    left, made = iter(blocks), 0
    current: Pass | None = None
    stream = _Stream([], -np.inf, [])
    for action in iteration_program(scenario, stage, iteration):
        if isinstance(action, Compute):
            if action.what in ("forward", "backward"):
                current = next(plan) if not made % (2 * work.layers) else current
                made += 1
            if action.what in COMPUTED:
                stream.waiting.append((COMPUTED[action.what], action.seconds, current if action.what != "optimizer" else None))
            continue
        block, place = next(left, (None, 0))
        if block is None or block.label != action.label or not np.isfinite(block.finished[place]):
            return None
        _take(stream, block, place, current, is_message=isinstance(action, PointToPoint))
    stream.until(stream.free, stream.free + sum(seconds for _, seconds, _ in stream.waiting))
    spans = _clipped(stream.spans)
    return _with_unlaunched(spans, stage, scenario) if work.virtual_stages > 1 and scenario.layout.pp > 1 else spans


def _take(stream: _Stream, block: Block, place: int, current: Pass | None, *, is_message: bool) -> None:
    """An operation of NCCL: inside a pass it is a part of that, as their profiler sees it."""
    called, begin, end = (float(times[place]) for times in (block.called, block.started, block.finished))
    stream.until(called, begin)
    if is_message:
        for one in block.transfers:
            way = f"{'forward' if one.forward else 'backward'}-{'send' if one.send else 'recv'}"
            stream.spans.append(Span(way, begin, end))
        stream.free = max(stream.free, end)
    elif block.label in _LABELS:
        stream.add(Span(_LABELS[block.label], begin, end))
    elif block.role in ("tp", "cp", "ep") and current is not None:
        stream.add(Span(COMPUTED["forward" if current.forward else "backward"], begin, end, current))


def _clipped(spans: Sequence[Span]) -> list[Span]:
    """With the clipping of gradients before the optimizer."""
    if any(span.kind == CLIP for span in spans):
        return [*spans]
    at = next(at for at, span in enumerate(spans) if span.kind == "optimizer")
    return [*spans[:at], Span(CLIP, spans[at].begin, spans[at].begin), *spans[at:]]


def _with_unlaunched(spans: Sequence[Span], stage: int, scenario: Scenario) -> list[Span]:
    """With the messages at the ends of the model that nobody sends: of stages in chunks their profiler records them, too."""
    made: list[Span] = []
    last = scenario.layout.pp * scenario.workload.virtual_stages - 1
    for span in spans:
        if span.of is None:
            made.append(span)
            continue
        at, way = stage + span.of.chunk * scenario.layout.pp, "forward" if span.of.forward else "backward"
        first, end = (0, last) if span.of.forward else (last, 0)
        made += [Span(f"{way}-recv", span.begin, span.begin)] if at == first else []
        made += [span, *([Span(f"{way}-send", span.end, span.end)] if at == end else [])]
    return made


def _step(scenario: Scenario, iteration: int, made: dict[int, list[Span]]) -> Iterator[tuple[Any, ...]]:
    """Rows of one step: times count from its begin."""
    zero = min(span.begin for spans in made.values() for span in spans)
    for rank, spans in made.items():
        place, numbers = coordinates(scenario.layout, rank), Counter[str]()
        for span in spans:
            chunk, batch, of_model = (0 if span.kind in _OF_CHUNK else -1), -1, -1
            if span.of is not None:
                chunk, batch = span.of.chunk, span.of.micro_batch
                of_model = place.pp + chunk * scenario.layout.pp
            times = span.begin - zero, span.end - span.begin
            yield (place.dp, place.pp, rank, iteration, span.kind, *times, numbers[span.kind], chunk, batch, of_model)
            numbers[span.kind] += 1
