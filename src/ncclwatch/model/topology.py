"""What is learned of a job: roles of groups, layout, and the pattern of an iteration; and where in it a rank is, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ncclwatch.model.events import Function

FUNCTION_NAMES = {int(function): function.name.title().replace("_", "") for function in Function}
"""Names of functions as NCCL spells them."""


class Role(StrEnum):
    """What a group is for. ``DATA`` is the group over which gradients are reduced: data times context parallel ranks."""

    TENSOR = "tensor"
    PIPELINE = "pipeline"
    DATA = "data"
    CONTEXT = "context"
    EXPERT = "expert"
    EXPERT_DATA = "expert-data"
    EMBEDDING = "embedding"
    MODEL = "model"
    """Sums of a few bytes over the ranks that hold one copy of the model: the norm of gradients."""
    WORLD = "world"
    UNUSED = "unused"
    """No operation was seen on it."""
    UNSURE = "unsure"


class Phase(StrEnum):
    """The part of an iteration; ``EITHER`` where forward and backward could not be told apart."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EITHER = "forward or backward"
    OPTIMIZER = "optimizer"


DATA_WORDS = {"ReduceScatter": "gradients", "AllReduce": "gradients", "Reduce": "gradients", "AllGather": "parameters"}
"""What an operation of a data-parallel group moves."""

_ONCE = (Role.DATA, Role.MODEL, Role.EXPERT_DATA, Role.EMBEDDING)
PARALLEL = (Role.TENSOR, Role.DATA, Role.CONTEXT, Role.EXPERT)
"""Roles of groups over which work is divided."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Where in the training an operation is, and the rank that calls it; parts that are not known are −1 or empty.

    ``towards`` is, for Send and Recv between stages, +1 for the next stage, −1 for the one before (cyclic), 0 otherwise.
    ``layer`` counts the pass's calls on that group from 0. ``call`` numbers calls within the iteration: operations of one grouped
    call have the same.
    """

    phase: Phase = Phase.EITHER
    micro_batch: int = -1
    chunk: int = -1
    pipeline_stage: int = -1
    tensor_index: int = -1
    role: Role = Role.UNSURE
    function: str = ""
    layer: int = -1
    towards: int = 0
    call: int = field(default=0, compare=False)

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
        text = f"{self.function or 'collective'} "
        if self.role is Role.MODEL:
            text += "over one copy of the model (gradient norm)"
        else:
            text += f"of the {self.role}{'-parallel' if self.role in PARALLEL else ''} group"
        if self.role is Role.DATA and self.function in DATA_WORDS:
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


@dataclass(frozen=True, slots=True)
class Group:
    """One communicator and what it is for; ``ranks`` are global, in its order (−1: unknown); ``inferred``: nobody observed."""

    id: int
    hash: int
    role: Role
    ranks: tuple[int, ...]
    confidence: float = 0.0
    evidence: tuple[str, ...] = ()
    inferred: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the dimensions, ``None`` where unsure. ``world = tp × cp × dp × pp``; ``ep`` divides ``cp × dp``."""

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None
    ep: int | None = None

    @property
    def known(self) -> bool:
        """Whether every dimension is."""
        return None not in (self.tp, self.pp, self.dp, self.cp, self.ep)

    def text(self) -> str:
        """``TP 2 x PP 2 x DP 4 x EP 1 x CP 1``."""
        parts = {"TP": self.tp, "PP": self.pp, "DP": self.dp, "EP": self.ep, "CP": self.cp}
        return " x ".join(f"{name} {size if size is not None else '?'}" for name, size in parts.items())


@dataclass(frozen=True)
class Topology:
    """Everything inferred of one job; arrays (world,) by global rank, −1: unknown."""

    world: int
    groups: tuple[Group, ...]
    layout: Layout
    stage: NDArray[np.int32]
    tensor_index: NDArray[np.int32]
    confidence: float = 0.0
    unsure: tuple[str, ...] = ()
    """Why something is not known, in words."""

    @cached_property
    def by_role(self) -> Mapping[Role, tuple[Group, ...]]:
        """Groups of each role that occurs."""
        found: dict[Role, list[Group]] = {}
        for group in self.groups:
            found.setdefault(group.role, []).append(group)
        return {role: tuple(groups) for role, groups in found.items()}

    @cached_property
    def by_id(self) -> Mapping[int, Group]:
        """Groups by the numbers that the engine gives them."""
        return {group.id: group for group in self.groups}

    def placed(self, stage: Stage, rank: int) -> Stage:
        """A step of the pattern as one rank's. Of one pipeline stage or tensor rank alone nothing is said."""
        known = 0 <= rank < self.world
        pipeline, tensor = (int(of[rank]) if known and of.max() > 0 else -1 for of in (self.stage, self.tensor_index))
        return replace(stage, pipeline_stage=pipeline, tensor_index=tensor)

    def placed_by_role(self, role: Role, rank: int) -> Stage:
        """What the role of its communicator alone says of a call."""
        return self.placed(Stage(Phase.OPTIMIZER if role in _ONCE else Phase.EITHER, role=role), rank)


@dataclass(frozen=True)
class Pattern:
    """One iteration as all ranks of a stage call it, in order; ``tokens``: fingerprints (steps,), ``seen``: iterations."""

    stage: int
    steps: tuple[Stage, ...]
    tokens: NDArray[np.uint64]
    micro_batches: int = 0
    chunks: int = 1
    seen: int = 0
    balanced: bool = True
    """As many backward passes as forward ones are exchanged between stages, where there are stages."""
    complete: bool = False
    """It holds passes in both directions and a reduction of gradients: no part of an iteration looks so."""
    confidence: float = 0.0

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def word(self) -> list[int]:
        """The tokens."""
        word: list[int] = self.tokens.tolist()
        return word

    @cached_property
    def positions(self) -> Mapping[int, int]:
        """Tokens with their positions; −1 of those that occur more than once."""
        numbers = Counter(self.word)
        return {token: at if numbers[token] == 1 else -1 for at, token in enumerate(self.word)}


@dataclass(slots=True)
class Learned:
    """What a ``StageNamer`` knows at a moment; replaced, never changed, when it learns more."""

    topology: Topology
    patterns: dict[int, Pattern] = field(default_factory=dict)
    """By stage."""
    confirmed: bool = False
    """Whether it held when more was seen, or cannot be a mere part of an iteration; before, nothing is placed."""

    @property
    def pattern_of(self) -> dict[int, int]:
        """Global rank → stage, of the stages with a pattern."""
        return {rank: stage for rank, stage in enumerate(self.topology.stage.tolist()) if stage in self.patterns}
