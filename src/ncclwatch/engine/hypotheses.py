"""What may be wrong with a job: hypotheses, each by one rule, what a rule is, and the trail of how they were weighed.

A hypothesis is typed: causes, ranks, facts. Words for people are made of it last (:mod:`ncclwatch.engine.verdict`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, Union

from ncclwatch.engine.evidence.base import Fact
from ncclwatch.engine.nodes import Node
from ncclwatch.model.verdict import Culprit, VerdictClass

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case
    from ncclwatch.engine.edges import StallMark, Wait


class Cause(StrEnum):
    """Why somebody holds the job up, or why nobody is named; a closed list. ``verdict.py`` has the words for each."""

    # Nobody is named.
    ALL_ENDED = "all-ended"
    ONE_SAMPLE = "one-sample"
    PROGRESS = "progress"
    PAUSE = "pause"
    TCP_TRIES = "tcp-tries"
    NOTHING_OPEN = "nothing-open"
    NOTHING_SEEN = "nothing-seen"
    CREATING = "creating"
    UNSEEN = "unseen"
    HIDDEN = "hidden"
    BESIDE_ABSENT = "beside-absent"
    CYCLE_IN_OPERATION = "cycle-in-operation"
    CYCLE_OF_CALLS = "cycle-of-calls"
    # The operating system or NCCL says so.
    ENDED = "ended"
    ENDED_UNSEEN = "ended-unseen"
    STOPPED = "stopped"
    STOPPED_BY_DEBUGGER = "stopped-by-debugger"
    NCCL_ERROR = "nccl-error"
    NOT_JOINED = "not-joined"
    # Calls: not made, or others.
    NOT_ENTERED = "not-entered"
    NOT_TAKING_PART = "not-taking-part"
    NOT_CALLED = "not-called"
    LEFT_OUT = "left-out"
    LACKS_CALL = "lacks-call"
    LACKS_OTHER_CALL = "lacks-other-call"
    ALONE_IN_CALL = "alone-in-call"
    CALLED_OTHER = "called-other"
    CALLED_OTHER_AS = "called-other-as"
    RUNS_ON = "runs-on"
    COUNTED_OTHER = "counted-other"
    ORDER = "order"
    # GPU and proxy.
    GPU_NOT_BEGUN = "gpu-not-begun"
    GPU_STOPPED = "gpu-stopped"
    GPU_RUNNING = "gpu-running"
    FLUSH = "flush"
    PROXY_STALLED = "proxy-stalled"
    PROXY_NOT_BEGUN = "proxy-not-begun"
    # The network.
    LINK = "link"
    CUT_OFF = "cut-off"
    PORT_RETRIES = "port-retries"
    PORT = "port"
    PATH = "path"
    PATH_END = "path-end"


@dataclass(frozen=True, slots=True)
class Suspect:
    """Whom a hypothesis names, and why that one. ``place`` is a culprit without words; ``detail`` completes the words of the
    cause (what was called, the name of a port).
    """

    place: Culprit
    cause: Cause
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One explanation of a job's state by one rule. ``confidence`` is between 0 and 1."""

    rule: str
    verdict_class: VerdictClass
    cause: Cause
    suspects: tuple[Suspect, ...] = ()
    victims: frozenset[int] = frozenset()
    """Indices of the processes that wait for the suspects."""
    confidence: float = 0.0
    supports: tuple[Fact, ...] = ()
    """What it follows from; of many the first few are shown."""
    beside: tuple[Fact, ...] = ()
    """What other planes say of those it names: shown after that, whole."""
    because: tuple[Fact, ...] = ()
    """Ports, paths and limits of which its words speak."""
    missing: tuple[Fact, ...] = ()
    """What was not observed and might have told otherwise."""
    tie: bool = False
    """Whether all sides of a disagreement are named, since nothing tells who is wrong."""
    ends: tuple[Node, ...] = ()
    """Where the waits end, of a hypothesis that names nobody."""
    group: int | None = None
    """The communicator it is about, where that is not the suspects' own."""
    seconds: float = 0.0
    """For how long a pause may last, or a link has carried nothing, where the cause speaks of that."""
    planes: tuple[str, ...] = ("state",)
    follows: tuple[str, ...] = ()
    """Rules whose hypotheses it was made from."""

    def amended(self, rule: str, **changes: Any) -> Hypothesis:
        """The same as another rule sees it: with other suspects, another class, more evidence."""
        return replace(self, rule=rule, follows=(*self.follows, self.rule), **changes)

    def beside_it(self, rule: str, facts: Iterable[Fact], **changes: Any) -> Hypothesis:
        """The same with what a rule found beside it."""
        return replace(self, beside=(*self.beside, *facts), follows=(*self.follows, rule), **changes)

    @property
    def accuses(self) -> bool:
        """Whether it says that something is wrong."""
        return self.verdict_class.accuses

    @property
    def open_to_doubt(self) -> bool:
        """Whether it says where waits end; what the operating system states, and calls that disagree, stand by themselves."""
        return self.verdict_class in (VerdictClass.NOT_ENTERED, VerdictClass.DEADLOCK, VerdictClass.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Retraction:
    """A wait that counts no longer, by its number in the graph, and the rule that says so."""

    wait: int
    rule: str
    fact: Fact


@dataclass(frozen=True, slots=True)
class Lost:
    """A hypothesis that was weighed and lost, and the rule of the one that it lost against."""

    hypothesis: Hypothesis
    against: str


@dataclass(slots=True)
class Trail:
    """How a verdict came about: what ``ncclwatch diagnose --why`` prints."""

    drawn: list[tuple[str, Fact]] = field(default_factory=list)
    """(rule, wait that it drew)"""
    retracted: list[Retraction] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    fired: dict[str, int] = field(default_factory=dict)
    """Rule → how many facts, retractions or hypotheses it concluded, in the order in which they first did."""


# --- rules --------------------------------------------------------------------------------------------------------------


class Stratum(IntEnum):
    """When a rule runs."""

    STATED = 1
    """What the operating system or NCCL states outright: it needs no patience, and ends the inference."""
    DRAW = 2
    """Waits that follow from calls and counts, of every rank."""
    PATIENCE = 3
    """Whether nothing has moved for long enough to accuse anybody of waiting; if not, that ends the inference."""
    RETRACT = 4
    """Waits that count no longer: those that are not begun."""
    FOLLOW = 5
    """Weaker waits, of ranks at which the waits end: whom such a rank may wait for itself, unseen."""
    EXPLAIN = 6
    """Hypotheses from where the waits end, and from what was called."""
    QUALIFY = 7
    """What other evidence says of the hypothesis that stands: a pattern of calls, a port that is down, a CPU limit."""
    BESIDE = 8
    """What is told beside whatever stands, those of the first strata included."""


Conclusion = Union["Wait", "StallMark", Retraction, Hypothesis]


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. ``defeats`` names earlier rules only, so that the relation is acyclic (tested).

    ``derivation``: why it is true (NCCL source with tag, paper section). ``recording``: the archived job, scenario or test it is
    needed for. ``near_miss``: one that looks alike and that it must leave alone.
    """

    id: str
    stratum: Stratum
    apply: Callable[[Case], Iterable[Conclusion]]
    derivation: str
    recording: str
    near_miss: str
    defeats: frozenset[str] = field(default_factory=frozenset)
    breaks_ties: bool = False
    """Whether it defeats, too, what names all sides of a disagreement for want of anything better."""
