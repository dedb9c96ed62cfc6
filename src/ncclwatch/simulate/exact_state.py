"""What the executor of single ranks keeps: a rank's program and place in it, its calls, and communicators run slice by slice."""

from __future__ import annotations

from dataclasses import dataclass, field

from ncclwatch.simulate.program import Action, Collective, PointToPoint
from ncclwatch.simulate.scenario import Fault
from ncclwatch.simulate.steps import Connection, End, StepNetwork
from ncclwatch.simulate.timeline import Block


@dataclass(slots=True)
class Call:
    """One call of one rank: its place in a block, and what it asked for."""

    block: Block
    place: int
    action: Collective | PointToPoint
    index: int
    finished: float | None = None
    started: bool = False
    messages: list[float | None] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)


@dataclass(slots=True)
class RankRun:
    """One rank as two sequential processes: ``host`` and ``gpu`` are the times (s) each has come to."""

    rank: int
    stage: int
    host: float
    gpu: float
    iteration: int
    actions: list[Action] = field(default_factory=list)
    marks: dict[int, Fault] = field(default_factory=dict)
    strikes: dict[int, list[Fault]] = field(default_factory=dict)
    jitter: list[float] = field(default_factory=list)
    iteration_of: list[int] = field(default_factory=list)
    host_cursor: int = 0
    gpu_cursor: int = 0
    computed: int = 0
    calls: list[Call] = field(default_factory=list)
    by_action: dict[int, Call] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    exchanges: dict[tuple[bool, int, bool], int] = field(default_factory=dict)


@dataclass(slots=True)
class Stream:
    """A communicator run slice by slice: ring connections by member, and slices each member has been promised so far."""

    network: StepNetwork
    members: list[int]
    links: list[Connection]
    sent: list[int]
    received: list[int]
