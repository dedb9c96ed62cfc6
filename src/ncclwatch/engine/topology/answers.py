"""What is said of a call: the step of the pattern it is at as a stage, or what its communicator's role alone tells."""

from __future__ import annotations

from ncclwatch.engine.topology.model import Phase, Role, Stage, Step, Topology
from ncclwatch.model.events import Function


def _where(topology: Topology, rank: int) -> tuple[int, int]:
    if not 0 <= rank < topology.world:
        return -1, -1
    stages, width = int(topology.stage.max(initial=-1)) + 1, int(topology.tensor_index.max(initial=-1)) + 1
    return (int(topology.stage[rank]) if stages > 1 else -1), (int(topology.tensor_index[rank]) if width > 1 else -1)


def by_role(role: Role, topology: Topology, rank: int) -> Stage:
    """What the role of its communicator alone says of a call."""
    stage, tensor = _where(topology, rank)
    phase = Phase.OPTIMIZER if role in (Role.DATA, Role.MODEL, Role.EXPERT_DATA, Role.EMBEDDING) else Phase.EITHER
    return Stage(phase=phase, pipeline_stage=stage, tensor_index=tensor, role=role, confidence=0.4)


def as_stage(step: Step, topology: Topology, rank: int, confidence: float, *, certain: bool) -> Stage:
    """A step of the pattern as the stage of one rank; what may be some calls off is left out where it is not certain."""
    stage, tensor = _where(topology, rank)
    known = step.function in Function._value2member_map_
    name = Function(step.function).name.title().replace("_", "") if known else ""
    return Stage(
        # After a gap the place may be some calls off: then only what the operation itself shows is said.
        phase=step.phase if certain or step.phase is Phase.OPTIMIZER or step.towards else Phase.EITHER,
        micro_batch=step.micro_batch if certain else -1,
        chunk=step.chunk if certain else -1,
        pipeline_stage=stage,
        tensor_index=tensor,
        role=step.role,
        function="AllToAll" if step.function == Function.ALL_TO_ALL else name,
        layer=step.layer if certain else -1,
        towards=step.towards,
        confidence=confidence,
    )
