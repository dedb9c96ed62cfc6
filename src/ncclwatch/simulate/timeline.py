"""The result of a simulation: for every operation and rank when it was called, started and finished (true time, seconds;
``inf``: never).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.simulate.disturbance import Disturbance
from ncclwatch.simulate.scenario import Scenario
from ncclwatch.simulate.schedule import Transfer
from ncclwatch.simulate.steps import End, Trace

Times = NDArray[np.float64]
Indices = NDArray[np.int64]

LinkKey = tuple[int, int, bool]
"""(source stage, destination stage, forward): messages on it are matched in order."""


class Calling(NamedTuple):
    """What one rank asked for, where it differs from its peers."""

    function: str
    nbytes: int
    element_bytes: int


@dataclass(slots=True)
class Block:
    """One operation of many ranks: a collective of one or more groups of a role, or an exchange of a whole stage.

    Arrays have shape (ranks,). ``sequence`` counts the collectives (or exchanges) of the communicator before this one, equal for
    all ranks in the block. ``base`` is the absolute step of the ring or tree connections at which it begins.
    """

    iteration: int
    role: str
    function: str
    nbytes: int
    element_bytes: int
    label: str
    ranks: Indices
    groups: Indices
    sequence: int
    called: Times
    launched: Times
    started: Times
    finished: Times
    base: int = 0
    stage: int = -1
    transfers: tuple[Transfer, ...] = ()
    message: tuple[int, ...] = ()
    """For each transfer: how many messages of its link came before."""
    transfer_finished: tuple[Times, ...] = ()
    traces: dict[int, Trace] = field(default_factory=dict)
    streams: dict[int, list[End]] = field(default_factory=dict)
    """Ends of connections of ranks (by global rank) whose connections outlive the operation; steps are absolute there."""
    callings: dict[int, Calling] = field(default_factory=dict)

    def calling(self, rank: int) -> Calling:
        """What a global rank asked for."""
        return self.callings.get(rank) or Calling(self.function, self.nbytes, self.element_bytes)


@dataclass(slots=True)
class Timeline:
    """A simulated run. ``iterations`` holds for each rank the end of each iteration, shape (iterations, world)."""

    scenario: Scenario
    disturbance: Disturbance
    blocks: list[Block] = field(default_factory=list)
    sends: dict[LinkKey, list[Block]] = field(default_factory=lambda: defaultdict(list))
    receives: dict[LinkKey, list[Block]] = field(default_factory=lambda: defaultdict(list))
    iteration_ends: list[Times] = field(default_factory=list)
    host_free: Times = field(default_factory=lambda: np.zeros(0))
    never_initialised: tuple[int, ...] = ()

    @property
    def first_iteration_s(self) -> float:
        """True time at which the first iteration begins: after the communicators were made."""
        return self.scenario.network.init_s

    @property
    def hung(self) -> bool:
        """Whether some operation that began or was due never ended."""
        return bool(self.never_initialised) or any(not np.isfinite(b.finished).all() for b in self.blocks)

    @property
    def end(self) -> float:
        """The last moment at which anything happened."""
        times = np.array([self.first_iteration_s])
        times = np.concatenate([times, *(times for block in self.blocks for times in (block.called, block.finished))])
        return float(times[np.isfinite(times)].max())

    def open_at(self, time: float) -> Iterator[Block]:
        """Blocks in which some rank has called and not finished by ``time``, in program order."""
        for block in self.blocks:
            if ((block.called <= time) & ~(block.finished <= time)).any():
                yield block

    def durations(self) -> Times:
        """Seconds of each iteration, from the last rank's end of the one before to its own last end; ``inf`` once hung."""
        ends = np.array([self.first_iteration_s, *(float(e.max()) for e in self.iteration_ends)])
        finite = ends[np.isfinite(ends)]
        return np.concatenate([np.diff(finite), np.full(len(ends) - len(finite), math.inf)])
