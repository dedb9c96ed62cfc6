"""What a source of evidence is, and what it says: typed facts with their strength, interval and origin.

A source reads records (samples, calls, what nodes say of their network) and nothing else: no other source, no graph, no verdict.
Rules and the slowness estimate draw the conclusions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Protocol

from ncclwatch.model.verdict import OperationRef

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case


class Strength(IntEnum):
    """How much a fact proves. Of what one subject may wait for, the strongest facts alone are followed."""

    POSSIBLE = 1
    """Nothing contradicts it."""
    LIKELY = 2
    """It is so more often than not."""
    PROVEN = 3
    """Counters of NCCL, the kernel or the network say so."""


class FactKind(StrEnum):
    """What a fact says of its subject."""

    WAITS_FOR = "waits for"
    """The subject cannot go on before the object does something: an edge of the wait-for graph."""
    STANDS = "stands"
    """The subject could do something and does not."""
    HALTED = "halted"
    """The process is stopped or has ended."""
    CALLED_LESS = "called less"
    """The rank has not called what its peers have."""
    CALLED_OTHER = "called other"
    """Ranks of one communicator called different things."""
    PORT_DOWN = "port down"
    PATH_DEAD = "path dead"
    """Nothing that is sent on it is acknowledged."""
    RETRYING = "retrying"
    """Something was lost on a connection and is sent again."""
    THROTTLED = "throttled"
    """A CPU limit holds the process back; ``value`` is the share of the limit's periods."""
    GPU_STATE = "GPU state"
    """Where the GPU is with an operation, by the device shim."""
    LOGGED = "logged"
    """The kernel's log names it."""
    ERROR = "error"
    """NCCL reports an error."""
    SLOWED = "slowed"
    """The subject takes longer than it did, or than its peers; ``value``: log-likelihood ratio for its being a straggler."""


Subject = Hashable
"""A node of the wait-for graph (:mod:`ncclwatch.engine.edges`), a process key, a link, a NIC."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that a source saw.

    ``interval`` is from when to when it was so (seconds since the epoch); ``value`` a quantity with the unit its kind names;
    ``describe`` makes the line of evidence: of thousands of facts a few are ever shown. ``source`` is the name of its source.
    """

    kind: FactKind
    subject: Subject
    source: str
    strength: Strength = Strength.PROVEN
    object: Subject | None = None
    operation: OperationRef | None = None
    interval: tuple[float, float] | None = None
    value: float | None = None
    describe: Callable[[], str] = field(default=str, compare=False)

    @property
    def text(self) -> str:
        """The fact as a line of evidence."""
        return self.describe()


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a job a source saw: ``seen`` of ``wanted`` subjects, and why the rest was not, as lines for people."""

    source: str
    seen: int
    wanted: int
    missing: tuple[str, ...] = ()


class Source(Protocol):
    """One source of evidence: a module of this package, registered in :data:`ncclwatch.engine.evidence.SOURCES`."""

    name: str
    """As it is shown in the trail of a verdict."""
    plane: str
    """``state``, ``calls``, ``wire``, ``nic`` or ``device``."""

    def facts(self, case: Case) -> Iterable[Fact]:
        """What it saw of a job. A pure function of the case's records. O(records)."""
        ...

    def coverage(self, case: Case) -> Coverage:
        """How much of the job it could see."""
        ...
