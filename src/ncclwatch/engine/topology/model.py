"""What is learned of a job: roles of groups, layout, the pattern of an iteration, and a place in it. Plain data, no judgement of
health.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    OTHER = "between iterations"


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
    evidence: tuple[str, ...] = ()
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

    def equals(self, rank: int) -> NDArray[np.int64]:
        """Ranks that do the same work as this one (same stage, same tensor index), itself among them; alone where unknown."""
        if not 0 <= rank < self.world or self.stage[rank] < 0 or self.tensor_index[rank] < 0:
            return np.array([rank], np.int64)
        same = (self.stage == self.stage[rank]) & (self.tensor_index == self.tensor_index[rank])
        return np.flatnonzero(same).astype(np.int64)

    @cached_property
    def equal_work(self) -> NDArray[np.int32]:
        """For each rank the number of its set of equals (see ``equals``); −1 where unknown. Shape (world,)."""
        known = (self.stage >= 0) & (self.tensor_index >= 0)
        width = int(self.tensor_index.max(initial=0)) + 1
        result: NDArray[np.int32] = np.where(known, self.stage * width + self.tensor_index, -1).astype(np.int32)
        return result


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of an iteration's pattern and where it stands in the work.

    ``function`` is ``model.events.Function``. ``towards`` is, for Send and Recv between stages, +1 for the next stage, −1 for the
    one before (cyclic), 0 otherwise. ``phase``, ``micro_batch`` and ``chunk`` are those of the pass it belongs to: a Recv brings
    the input of its pass, a Send takes the result away. ``layer`` counts the pass's calls on that group from 0; −1 where unknown.
    ``confidence`` is that of the phase.
    """

    role: Role
    function: int
    count: int
    datatype: int
    towards: int = 0
    slot: int = 0
    """Tells several communicators of one role in one process apart."""
    phase: Phase = Phase.EITHER
    micro_batch: int = -1
    chunk: int = -1
    layer: int = -1
    call: int = 0
    """Number of the NCCL group call or single call within the iteration: operations of one grouped call have the same."""
    confidence: float = 0.0


@dataclass(frozen=True)
class Pattern:
    """The operations of one iteration as all ranks of a pipeline stage call them, in program order.

    ``tokens`` are the steps as 64-bit fingerprints, shape (steps,). ``seen`` counts the iterations it was learned from.
    """

    id: int
    stage: int
    steps: tuple[Step, ...]
    tokens: NDArray[np.uint64]
    micro_batches: int = 0
    chunks: int = 1
    seen: int = 0
    complete: bool = False
    """It holds passes in both directions and a reduction of gradients: no part of an iteration looks so."""
    confidence: float = 0.0

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where in the training a rank stands, as a verdict says it; parts that are not known are −1 or empty."""

    phase: Phase
    micro_batch: int = -1
    chunk: int = -1
    pipeline_stage: int = -1
    tensor_index: int = -1
    role: Role = Role.UNSURE
    function: str = ""
    layer: int = -1
    towards: int = 0
    confidence: float = 0.0
    detail: str = ""

    def at_home_of(self, own: Stage) -> Stage:
        """The same place in the iteration, read off a peer, with the pipeline stage and tensor rank of ``own``."""
        return replace(self, pipeline_stage=own.pipeline_stage, tensor_index=own.tensor_index)

    def text(self) -> str:
        """``backward of micro-batch 5, pipeline stage 2, TP rank 1: tensor AllReduce (layer call 3)``."""
        from ncclwatch.engine.topology.words import stage_text

        return stage_text(self)


@dataclass(frozen=True, slots=True)
class Placed:
    """A batch of calls with their places, as columns of equal length; only calls that are operations of ranks with a pattern.

    ``event`` indexes the batch that was observed; ``rank`` is global; ``pattern`` is ``Pattern.id``; ``position`` indexes its
    ``steps``, −1 for a call that does not belong to the pattern (a barrier, an evaluation phase); ``iteration`` counts iterations
    and is comparable between ranks; ``exact`` is false from a gap (lost records) until the next operation that is unique in the
    iteration.
    """

    event: NDArray[np.int64]
    rank: NDArray[np.int32]
    pattern: NDArray[np.int32]
    position: NDArray[np.int32]
    iteration: NDArray[np.int64]
    exact: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.event)


@dataclass(slots=True)
class Learned:
    """What a ``StageNamer`` knows at a moment; replaced, never changed, when it learns more."""

    topology: Topology
    patterns: dict[int, Pattern] = field(default_factory=dict)
    pattern_of: dict[int, int] = field(default_factory=dict)
    """global rank → ``Pattern.id``"""
    confirmed: bool = False
    """Whether it held when more was seen (or cannot be a mere part of an iteration); before, nothing is placed."""
