"""What is learned of a job: roles of groups, layout, and the pattern of an iteration. Plain data, no judgement of health."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


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


@dataclass(frozen=True, slots=True)
class Group:
    """One communicator with what it is for. ``ranks`` are global ranks in the order of the communicator's; −1 where unknown.

    ``id`` is the number of ``engine.job.Group``; ``inferred`` says that nobody of it was observed: it follows from the others.
    """

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
        parts = (("TP", self.tp), ("PP", self.pp), ("DP", self.dp), ("EP", self.ep), ("CP", self.cp))
        return " x ".join(f"{name} {size if size is not None else '?'}" for name, size in parts)


@dataclass(frozen=True)
class Topology:
    """Everything inferred of one job. Arrays of shape (world,) are indexed by global rank; −1 means unknown.

    ``stage`` is the pipeline stage, ``tensor_index`` the place in the tensor group, ``replica`` the place in the data group:
    ranks of equal stage and tensor index do the same work on other data.
    """

    world: int
    groups: tuple[Group, ...]
    layout: Layout
    stage: NDArray[np.int32]
    tensor_index: NDArray[np.int32]
    replica: NDArray[np.int32]
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
        """Groups by the number ``engine.job`` gives them."""
        return {group.id: group for group in self.groups}


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of an iteration's pattern, and the pass it belongs to: a Recv brings its input, a Send takes its result away.

    ``function`` is ``model.events.Function``. ``towards`` is, for Send and Recv between stages, +1 for the next stage, −1 for the
    one before (cyclic), 0 otherwise. ``layer`` counts the pass's calls on that group from 0. −1 means unknown.
    """

    role: Role
    function: int
    towards: int = 0
    phase: Phase = Phase.EITHER
    micro_batch: int = -1
    chunk: int = -1
    layer: int = -1
    call: int = 0
    """Number of the NCCL group call or single call within the iteration: operations of one grouped call have the same."""


@dataclass(frozen=True)
class Pattern:
    """The operations of one iteration as all ranks of a pipeline stage call them, in program order.

    ``tokens`` are the steps as 64-bit fingerprints, shape (steps,). ``seen`` counts the iterations it was learned from.
    """

    stage: int
    steps: tuple[Step, ...]
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
    def unique(self) -> Mapping[int, int]:
        """Tokens that occur once, with their positions."""
        tokens, first, numbers = np.unique(self.tokens, return_index=True, return_counts=True)
        return dict(zip(tokens[numbers == 1].tolist(), first[numbers == 1].tolist(), strict=True))


@dataclass(slots=True)
class Learned:
    """What a ``StageNamer`` knows at a moment; replaced, never changed, when it learns more."""

    topology: Topology
    patterns: dict[int, Pattern] = field(default_factory=dict)
    """By stage."""
    confirmed: bool = False
    """Whether it held when more was seen (or cannot be a mere part of an iteration); before, nothing is placed."""

    @property
    def pattern_of(self) -> dict[int, int]:
        """Global rank → stage, of the stages with a pattern."""
        return {rank: stage for rank, stage in enumerate(self.topology.stage.tolist()) if stage in self.patterns}
