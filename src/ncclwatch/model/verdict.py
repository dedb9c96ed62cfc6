"""The verdict: what ncclwatch says about a job, in the shape ``ncclwatch.verdict/1`` (schema beside this module)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ncclwatch.model.failure import Failure

SCHEMA_NAME = "ncclwatch.verdict/1"


class VerdictClass(StrEnum):
    """What kind of trouble a verdict names.

    A rank that others wait for is ``NOT_ENTERED`` where it has not started the operation they wait in: its host has not called
    it, or its GPU has not started it; the cause tells which. It is ``HARDWARE`` where it is in the operation and does not go on.
    The same rule holds for GPUs that stall between two operations: they have not started the next.

    ``RUNNING`` and ``IDLE`` accuse nobody: progress was seen, or nothing is open. ``UNKNOWN`` accuses nobody either: something
    stands still and the evidence does not single anyone out. The classes of CCL-D (section 2.2) are ``NOT_ENTERED`` (H1),
    ``INCONSISTENT`` (H2), ``HARDWARE`` (H3: link, proxy or GPU; the link and the evidence say which) and the three slow ones
    (S1, S2, S3). ``STOPPED`` and ``DEAD`` are causes that the operating system states outright.
    """

    RUNNING = "running"
    IDLE = "idle"
    UNKNOWN = "unknown"
    STOPPED = "stopped"
    DEAD = "dead"
    NOT_ENTERED = "not-entered"
    INCONSISTENT = "inconsistent"
    HARDWARE = "hardware"
    DEADLOCK = "deadlock"
    INIT_HANG = "init-hang"
    ERROR = "error"
    SLOW_COMPUTATION = "slow-computation"
    SLOW_COMMUNICATION = "slow-communication"
    SLOW_MIXED = "slow-mixed"

    @property
    def accuses(self) -> bool:
        """Whether a verdict of this class says that something is wrong."""
        return self not in (VerdictClass.RUNNING, VerdictClass.IDLE, VerdictClass.UNKNOWN)

    @property
    def slow(self) -> bool:
        """Whether the job goes on, and slower than it should."""
        return self in (VerdictClass.SLOW_COMPUTATION, VerdictClass.SLOW_COMMUNICATION, VerdictClass.SLOW_MIXED)


@dataclass(frozen=True, slots=True)
class CommunicatorRef:
    """A communicator as a verdict names it: ``hash`` in hexadecimal, its size, and its role where one is known."""

    hash: str
    nranks: int
    role: str = ""


@dataclass(frozen=True, slots=True)
class OperationRef:
    """The operation in which the job stands; ``sequence`` is ``None`` where ranks could not be aligned."""

    name: str
    sequence: int | None = None
    protocol: str = ""
    algorithm: str = ""


@dataclass(frozen=True, slots=True)
class LinkRef:
    """A connection between two ranks as a verdict names it: ranks are of the communicator named beside it."""

    source: int
    destination: int
    transport: str
    channels: tuple[int, ...] = ()
    device: str = ""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What somebody who is to repair a node has to know of a culprit, as far as it was found; texts are empty where not.

    ``node`` is the name by which the scheduler knows it; ``job`` that of Slurm, ``pod`` with ``namespace`` of Kubernetes.
    """

    node: str = ""
    job: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    gpu_uuid: str = ""
    nics: tuple[str, ...] = ()
    gpu_bus: str = ""
    """``0000:07:00.0``, as the kernel has it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """A row of the tables of knowledge that fits a verdict (docs/knowledge.md): what was seen, the likely cause, what to do.

    ``confidence`` is between 0 and 1: how likely it is the cause where this is seen, as judged from the sources. ``defect``: a
    known defect of NCCL, with how to tell (``check``) and the release that has the fix, empty where none has.
    """

    row: str
    seen: str
    cause: str
    confidence: float
    do: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    defect: bool = False
    check: str = ""
    fixed_in: str = ""


@dataclass(frozen=True, slots=True)
class Culprit:
    """One rank a verdict names. ``rank`` is the global rank, or ``None`` when only the communicator's rank is known.

    ``observed`` is false when no process of that rank was read (its node has no agent, or it is gone).
    """

    rank: int | None
    comm_rank: int | None
    host: str
    pid: int | None
    gpu: int | None
    communicator: CommunicatorRef | None = None
    operation: OperationRef | None = None
    stage: str = ""
    link: LinkRef | None = None
    reason: str = ""
    observed: bool = True
    doing: tuple[str, ...] = ()
    """What its process was doing (:class:`~ncclwatch.model.doing.Doing`), most telling first; empty where nobody looked."""
    ticket: Ticket | None = None
    gpu_trouble: tuple[str, ...] = ()
    """What is wrong with its GPU (:class:`~ncclwatch.model.gpu.Trouble`), the worst first; empty where nobody looked."""

    def is_at(self, host: str, pid: int, rank: int | None) -> bool:
        """Whether this is that rank: pids of two hosts may be equal, and a process that drives several GPUs is several ranks."""
        return self.pid == pid and self.host == host and (self.rank == rank or self.rank is None)


Place = tuple[str, int | None, int | None]
"""(host, pid, rank in the job)"""


def places(culprits: Iterable[Culprit]) -> frozenset[Place]:
    """Where culprits are, for looking up many ranks."""
    return frozenset((culprit.host, culprit.pid, culprit.rank) for culprit in culprits if culprit.pid is not None)


def stands_in(found: Collection[Place], host: str, pid: int, rank: int | None) -> bool:
    """Whether a rank is among the places of culprits."""
    return (host, pid, rank) in found or (host, pid, None) in found


class SlowKind(StrEnum):
    """What holds a slow job up, as it is said: rows of knowledge are matched on it."""

    COMPUTE = "computation"
    HOST = "host"
    KERNEL = "communication kernel"
    PROXY = "proxy"
    NIC = "network interface"
    LINK = "link"

    @property
    def computes(self) -> bool:
        """Whether it counts as slow computation (S1); the rest is communication (S2)."""
        return self in (SlowKind.COMPUTE, SlowKind.HOST)


class SlowCause(StrEnum):
    """Why a culprit is slow, where something singles it out: rows of knowledge are matched on it."""

    THROTTLED = "CPU throttling"
    CONTENDED = "CPU contention"
    PAUSES = "pauses"
    LATE = "begins iterations late"


class StepKind(StrEnum):
    """What a step of a trail is."""

    FACT = "fact"
    """Something seen that the verdict follows from."""
    DRAWN = "drawn"
    """A wait that a rule concluded: no transfer shows it."""
    RETRACTED = "retracted"
    """A wait that a rule took back: it is not begun."""
    LOST = "lost"
    """An explanation that was weighed and lost, against that of another rule."""
    STANDS = "stands"
    """The explanation that is told."""
    MISSING = "missing"
    """What was not seen and might have told otherwise."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step on the way to a verdict. ``rule`` is empty for what was seen; ``against`` the rule that something lost against."""

    kind: StepKind
    rule: str
    text: str
    against: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong, who holds the job up, and how it is known.

    ``since`` is seconds since the epoch, or ``None`` when unknown. ``confidence`` is between 0 and 1. ``evidence`` are readable
    lines with numbers; ``unobserved`` what the planes and transports in play hide; ``next_steps`` what to do now. ``victims`` are
    the global ranks (or communicator ranks) that wait for the culprits.
    """

    verdict_class: VerdictClass
    summary: str
    culprits: tuple[Culprit, ...] = ()
    victims: tuple[int, ...] = ()
    communicator: CommunicatorRef | None = None
    operation: OperationRef | None = None
    stage: str = ""
    link: LinkRef | None = None
    since: float | None = None
    time: float | None = None
    confidence: float = 0.0
    evidence: tuple[str, ...] = ()
    unobserved: tuple[str, ...] = ()
    next_steps: tuple[str, ...] = ()
    planes: tuple[str, ...] = field(default=("state",))
    rules: tuple[str, ...] = ()
    """Ids of the rules that led to it, in their order (docs/engine.md has the table)."""
    trail: tuple[Step, ...] = ()
    """How it came about: facts, what rules changed, what was weighed and lost, what was missing."""
    knowledge: tuple[Advice, ...] = ()
    """What is known of what was seen: rows of the tables that fit, most telling first."""
    differences: tuple[str, ...] = ()
    """In which settings, releases, CPUs, GPUs and NICs culprits differ from most of their peers: a line each."""
    failures: tuple[Failure, ...] = ()
    """What failed in the job, in the order of time, over all its hosts; empty while nothing has."""

    @property
    def id(self) -> str:
        """Stable over repeated looks at the same trouble: class, culprits, communicator and operation, not time or numbers."""
        named = sorted((c.rank if c.rank is not None else -1, c.host, c.pid or 0) for c in self.culprits)
        communicator = self.communicator.hash if self.communicator else ""
        operation = (self.operation.name, self.operation.sequence) if self.operation else ("", None)
        text = json.dumps([self.verdict_class, named, communicator, operation])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def to_json(self) -> dict[str, Any]:
        """The verdict as plain JSON data that validates against the committed schema."""
        return {
            "schema": SCHEMA_NAME,
            "id": self.id,
            "class": str(self.verdict_class),
            "summary": self.summary,
            "culprits": [_plain(c) for c in self.culprits],
            "victims": list(self.victims),
            "communicator": _plain(self.communicator),
            "operation": _plain(self.operation),
            "stage": self.stage,
            "link": _plain(self.link),
            "since": self.since,
            "time": self.time,
            "confidence": round(self.confidence, 3),
            "evidence": list(self.evidence),
            "unobserved": list(self.unobserved),
            "next_steps": list(self.next_steps),
            "planes": list(self.planes),
            "rules": list(self.rules),
            "trail": [_plain(step) for step in self.trail],
            "knowledge": [_plain(advice) for advice in self.knowledge],
            "differences": list(self.differences),
            "failures": [_plain(failure) for failure in self.failures],
        }


def _plain(value: Any) -> Any:
    """Turn the small reference records into JSON data; tuples become lists, ``None`` stays."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def schema() -> dict[str, Any]:
    """The JSON schema of ``ncclwatch.verdict/1``."""
    from importlib import resources  # With it come archives and temporary files, which no verdict needs.

    text = resources.files("ncclwatch.model").joinpath("verdict-1.schema.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded
