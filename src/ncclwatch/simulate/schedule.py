"""Pipeline schedules: what a stage computes and which tensors it exchanges in one grouped call, in order.

Facts from Megatron-LM ``megatron/core/pipeline_parallel/schedules.py``: warm-up depth of a stage, the order of (micro-batch,
chunk) in the interleaved schedule, and which sends and receives are batched together (``send_forward_recv_backward`` and so on;
without overlap of point-to-point with compute). GPipe (all forward, then all backward) uses plain sends and receives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ncclwatch.simulate.scenario import Schedule


class Pass(NamedTuple):
    """A forward or backward pass of one micro-batch through one model chunk of the stage."""

    forward: bool
    micro_batch: int
    chunk: int


class Transfer(NamedTuple):
    """One send or receive of a batch. ``forward``: an activation (towards later stages), else a gradient. ``peer`` is a stage."""

    send: bool
    peer: int
    forward: bool


@dataclass(frozen=True, slots=True)
class Exchange:
    """Sends and receives that are one grouped call: it ends when all of them have ended."""

    transfers: tuple[Transfer, ...]


Step = Pass | Exchange


def passes(schedule: Schedule, stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[Pass]:
    """Only the passes of :func:`steps`, in order."""
    return [step for step in steps(schedule, stage, stages, micro_batches, chunks) if isinstance(step, Pass)]


def steps(
    schedule: Schedule, stage: int, stages: int, micro_batches: int, chunks: int = 1, *, forward_only: bool = False
) -> list[Step]:
    """What stage ``stage`` of ``stages`` does in one iteration, in program order.

    ``chunks`` is the number of model chunks (virtual stages) of a stage, 1 but for the interleaved schedule, where
    ``micro_batches`` must be a multiple of ``stages``. ``forward_only`` is an evaluation pass.
    """
    if schedule is Schedule.INTERLEAVED and stages > 1:
        return _drop_empty(_interleaved(stage, stages, micro_batches, chunks, forward_only))
    if schedule is Schedule.GPIPE or forward_only:
        return _drop_empty(_gpipe(stage, stages, micro_batches, forward_only))
    return _drop_empty(_one_f_one_b(stage, stages, micro_batches))


def merged(items: list[Step]) -> list[Step]:
    """The same steps with exchanges that follow each other made into one grouped call."""
    result: list[Step] = []
    for item in items:
        last = result[-1] if result else None
        if isinstance(item, Exchange) and isinstance(last, Exchange):
            result[-1] = Exchange(last.transfers + item.transfers)
        else:
            result.append(item)
    return result


def warmup_depth(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> int:
    """Forward passes before the first backward pass of 1F1B (``get_pp_rank_microbatches``; group size = ``stages``)."""
    depth = stages - stage - 1 if chunks == 1 else 2 * (stages - stage - 1) + (chunks - 1) * stages
    return min(depth, micro_batches * chunks)


def _drop_empty(items: list[Step]) -> list[Step]:
    return [item for item in items if isinstance(item, Pass) or item.transfers]


def _exchange(
    stage: int, stages: int, *, send_f: bool = False, recv_f: bool = False, send_b: bool = False, recv_b: bool = False
) -> Exchange:
    """Neighbours are cyclic: the last stage's output of one chunk is the first stage's input of the next.

    Order as in Megatron-LM's ``p2p_communication.py``: to and from the previous stage, then the next.
    """
    after, before = (stage + 1) % stages, (stage - 1) % stages
    wanted = (
        (send_b, Transfer(True, before, False)),
        (recv_f, Transfer(False, before, True)),
        (send_f, Transfer(True, after, True)),
        (recv_b, Transfer(False, after, False)),
    )
    return Exchange(tuple(transfer for wish, transfer in wanted if wish))


def _gpipe(stage: int, stages: int, micro_batches: int, forward_only: bool) -> list[Step]:
    first, last = stage == 0, stage == stages - 1
    items: list[Step] = []
    for micro_batch in range(micro_batches):
        items.append(_exchange(stage, stages, recv_f=not first))
        items.append(Pass(True, micro_batch, 0))
        items.append(_exchange(stage, stages, send_f=not last))
    for micro_batch in () if forward_only else range(micro_batches):
        items.append(_exchange(stage, stages, recv_b=not last))
        items.append(Pass(False, micro_batch, 0))
        items.append(_exchange(stage, stages, send_b=not first))
    return items


def _one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Step]:
    first, last = stage == 0, stage == stages - 1
    warmup = warmup_depth(stage, stages, micro_batches)
    steady = micro_batches - warmup
    items: list[Step] = []
    for k in range(warmup):
        items += [_exchange(stage, stages, recv_f=not first), Pass(True, k, 0), _exchange(stage, stages, send_f=not last)]
    if steady:
        items.append(_exchange(stage, stages, recv_f=not first))
    for k in range(steady):
        more = k < steady - 1
        items.append(Pass(True, warmup + k, 0))
        items.append(_exchange(stage, stages, send_f=not last, recv_b=not last))
        items.append(Pass(False, k, 0))
        items.append(_exchange(stage, stages, send_b=not first, recv_f=more and not first))
    for k in range(steady, micro_batches):
        items += [_exchange(stage, stages, recv_b=not last), Pass(False, k, 0), _exchange(stage, stages, send_b=not first)]
    return items


def _table(stages: int, micro_batches: int, chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) of each virtual micro-batch: ``stages`` micro-batches a chunk, chunk by chunk, group by group."""
    groups = range(0, micro_batches, stages)
    return [(m, c) for g in groups for c in range(chunks) for m in range(g, min(g + stages, micro_batches))]


def _interleaved(stage: int, stages: int, micro_batches: int, chunks: int, forward_only: bool) -> list[Step]:
    table = _table(stages, micro_batches, chunks)
    total = len(table)
    warmup = total if forward_only else warmup_depth(stage, stages, micro_batches, chunks)
    steady = total - warmup
    first, last = stage == 0, stage == stages - 1

    def chunk(k: int, forward: bool) -> int:
        c = table[k % total][1]
        return c if forward else chunks - 1 - c

    def receives(k: int, forward: bool) -> bool:
        """Whether the input of a pass to come arrives with the exchange after virtual micro-batch ``k``."""
        leading = first if forward else last
        if not leading:
            return True
        if k < stages - 1:
            return False
        return chunk(k - (stages - 1), forward) != (chunks - 1 if forward else 0)

    def do(k: int, forward: bool) -> Pass:
        return Pass(forward, table[k][0], chunk(k, forward))

    sends_f: Callable[[int], bool] = lambda k: not (last and chunk(k, True) == chunks - 1)  # noqa: E731
    sends_b: Callable[[int], bool] = lambda k: not (first and chunk(k, False) == 0)  # noqa: E731
    items: list[Step] = [_exchange(stage, stages, recv_f=not first)]
    for k in range(warmup):
        at_end = k == warmup - 1 and not forward_only and steady > 0
        recv_f = receives(k, True) and k != total - 1
        items += [do(k, True), _exchange(stage, stages, send_f=sends_f(k), recv_f=recv_f, recv_b=at_end and not last)]
    for b in range(steady):
        f = b + warmup
        items += [do(f, True), do(b, False)]
        recv_f = receives(f, True) and b != steady - 1
        items.append(_exchange(stage, stages, send_f=sends_f(f), recv_f=recv_f, send_b=sends_b(b), recv_b=receives(b, False)))
    if forward_only:
        return items
    if steady == 0:
        items.append(_exchange(stage, stages, recv_b=not last))
    for b in range(steady, total):
        items += [do(b, False), _exchange(stage, stages, send_b=sends_b(b), recv_b=receives(b, False) and b != total - 1)]
    return items
