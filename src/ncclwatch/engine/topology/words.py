"""Places and rank sets in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ncclwatch.engine.topology.model import Phase, Role, Stage

_PASSES = (Phase.FORWARD, Phase.BACKWARD, Phase.EITHER)
DATA_WORDS = {"ReduceScatter": "gradients", "AllReduce": "gradients", "Reduce": "gradients", "AllGather": "parameters"}
"""What an operation of a data-parallel group moves."""


def pass_text(stage: Stage) -> str:
    """``backward of micro-batch 5``; empty where the pass is not known."""
    if stage.phase in _PASSES and (stage.phase is not Phase.EITHER or stage.micro_batch >= 0):
        part = f"{stage.phase}"
        if stage.micro_batch >= 0:
            part += f" of micro-batch {stage.micro_batch}"
        if stage.chunk >= 0:
            part += f", model chunk {stage.chunk}"
        return part
    return "optimizer step" if stage.phase is Phase.OPTIMIZER else ""


def stage_text(stage: Stage) -> str:
    """One line for people: what is known and nothing else."""
    known = pass_text(stage)
    where = [known] if known else []
    if stage.pipeline_stage >= 0:
        where.append(f"pipeline stage {stage.pipeline_stage}")
    if stage.tensor_index >= 0:
        where.append(f"TP rank {stage.tensor_index}")
    what = _operation(stage)
    return ": ".join(part for part in (", ".join(where), what) if part)


def _operation(stage: Stage) -> str:
    if stage.detail:
        return stage.detail
    if stage.role in (Role.UNSURE, Role.UNUSED):
        return stage.function
    if stage.role is Role.PIPELINE:
        ways = {1: "the next", -1: "the previous"}
        way = {"Send": "to", "Recv": "from"}.get(stage.function)
        side = f" {way} {ways[stage.towards]} stage" if way and stage.towards in ways else " between pipeline stages"
        return f"{stage.function or 'exchange'}{side}"
    text = f"{stage.function or 'collective'} of the {stage.role}-parallel group" if stage.role in _PARALLEL else ""
    if stage.role is Role.DATA and stage.function in DATA_WORDS:
        text += f" ({DATA_WORDS[stage.function]})"
    if stage.role is Role.MODEL:
        text = f"{stage.function or 'collective'} over one copy of the model (gradient norm)"
    elif not text:
        text = f"{stage.function or 'collective'} of the {stage.role} group"
    return text + (f", call {stage.layer + 1} of the pass" if stage.layer >= 0 else "")


_PARALLEL = (Role.TENSOR, Role.DATA, Role.CONTEXT, Role.EXPERT)


def compressed(ranks: Iterable[int]) -> str:
    """A rank set as ``0-3,8``; a regular one as ``0-28/4`` (from, to, step); ``?`` stands for unknown ranks."""
    wanted = list(ranks)
    known = sorted(rank for rank in wanted if rank >= 0)
    unknown = len(wanted) - len(known)
    parts = [_run(run) for run in _runs(known)]
    if unknown:
        parts.append(f"{unknown} unknown" if parts else "unknown")
    return ",".join(parts)


def _runs(ranks: Sequence[int]) -> list[list[int]]:
    """Greedy runs of equal distance; a step other than 1 only for three ranks and more."""
    runs: list[list[int]] = []
    for rank in ranks:
        last = runs[-1] if runs else None
        if last is None:
            runs.append([rank])
        elif len(last) == 1:
            # Two ranks alone make a run only when they are neighbours or everything else is spaced alike.
            last.append(rank)
        elif rank - last[-1] == last[1] - last[0]:
            last.append(rank)
        elif len(last) == 2 and last[1] - last[0] != 1:
            runs[-1] = [last[0]]
            runs.append([last[1], rank])
        else:
            runs.append([rank])
    return runs


def _run(run: Sequence[int]) -> str:
    if len(run) == 1:
        return str(run[0])
    step = run[1] - run[0]
    if step == 1:
        return f"{run[0]}-{run[-1]}"
    return f"{run[0]},{run[1]}" if len(run) == 2 else f"{run[0]}-{run[-1]}/{step}"
