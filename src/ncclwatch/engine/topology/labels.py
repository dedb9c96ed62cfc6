"""Where a rank is in the training, as people read it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ncclwatch.engine.topology.model import Phase, Role, Step, Topology
from ncclwatch.model.events import Function

DATA_WORDS = {"ReduceScatter": "gradients", "AllReduce": "gradients", "Reduce": "gradients", "AllGather": "parameters"}
"""What an operation of a data-parallel group moves."""

_ONCE = (Role.DATA, Role.MODEL, Role.EXPERT_DATA, Role.EMBEDDING)
_PARALLEL = (Role.TENSOR, Role.DATA, Role.CONTEXT, Role.EXPERT)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where in the training a rank is, as a verdict says it; parts that are not known are −1 or empty."""

    phase: Phase
    micro_batch: int = -1
    chunk: int = -1
    pipeline_stage: int = -1
    tensor_index: int = -1
    role: Role = Role.UNSURE
    function: str = ""
    layer: int = -1
    towards: int = 0

    def at_home_of(self, own: Stage) -> Stage:
        """The same place in the iteration, read off a peer, with the pipeline stage and tensor rank of ``own``."""
        return replace(self, pipeline_stage=own.pipeline_stage, tensor_index=own.tensor_index)

    def text(self) -> str:
        """One line for people: what is known and nothing else."""
        where = [pass_text(self)]
        if self.pipeline_stage >= 0:
            where.append(f"pipeline stage {self.pipeline_stage}")
        if self.tensor_index >= 0:
            where.append(f"TP rank {self.tensor_index}")
        return ": ".join(part for part in (", ".join(filter(None, where)), self._operation()) if part)

    def _operation(self) -> str:
        if self.role in (Role.UNSURE, Role.UNUSED):
            return self.function
        if self.role is Role.PIPELINE:
            way = {"Send": "to", "Recv": "from"}.get(self.function)
            side = {1: "the next", -1: "the previous"}.get(self.towards)
            return f"{self.function or 'exchange'} " + (f"{way} {side} stage" if way and side else "between pipeline stages")
        group = f"the {self.role}-parallel group" if self.role in _PARALLEL else f"the {self.role} group"
        text = f"{self.function or 'collective'} of {group}"
        if self.role is Role.MODEL:
            text = f"{self.function or 'collective'} over one copy of the model (gradient norm)"
        elif self.role is Role.DATA and self.function in DATA_WORDS:
            text += f" ({DATA_WORDS[self.function]})"
        return text + (f", call {self.layer + 1} of the pass" if self.layer >= 0 else "")


def pass_text(stage: Stage) -> str:
    """``backward of micro-batch 5``; empty where the pass is not known."""
    if stage.phase is Phase.OPTIMIZER:
        return "optimizer step"
    if stage.phase is Phase.EITHER and stage.micro_batch < 0:
        return ""
    micro_batch = f" of micro-batch {stage.micro_batch}" if stage.micro_batch >= 0 else ""
    return f"{stage.phase}{micro_batch}" + (f", model chunk {stage.chunk}" if stage.chunk >= 0 else "")


def stage_of_role(role: Role, topology: Topology, rank: int) -> Stage:
    """What the role of its communicator alone says of a call."""
    stage, tensor = _place(topology, rank)
    phase = Phase.OPTIMIZER if role in _ONCE else Phase.EITHER
    return Stage(phase=phase, pipeline_stage=stage, tensor_index=tensor, role=role)


def stage_of_step(step: Step, topology: Topology, rank: int) -> Stage:
    """A step of the pattern as the stage of one rank."""
    stage, tensor = _place(topology, rank)
    known = step.function in Function._value2member_map_
    name = Function(step.function).name.title().replace("_", "") if known else ""
    return Stage(step.phase, step.micro_batch, step.chunk, stage, tensor, step.role, name, step.layer, step.towards)


def _place(topology: Topology, rank: int) -> tuple[int, int]:
    if not 0 <= rank < topology.world:
        return -1, -1
    stages, width = int(topology.stage.max(initial=-1)) + 1, int(topology.tensor_index.max(initial=-1)) + 1
    return (int(topology.stage[rank]) if stages > 1 else -1), (int(topology.tensor_index[rank]) if width > 1 else -1)
