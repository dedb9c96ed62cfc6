"""One job as it is judged: its records, what is known besides them, and what was concluded so far, by which rules.

A hypothesis is typed: causes, ranks, facts. Words for people are made of it last (:mod:`ncclwatch.engine.verdict`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from typing import Any, TypeVar

from ncclwatch.engine.call_patterns import Orders
from ncclwatch.engine.conflicts import ConflictWatch, StageOf
from ncclwatch.engine.edges import StallMark, Wait
from ncclwatch.engine.evidence.base import Fact, FactKind, Facts, Source
from ncclwatch.engine.evidence.calls import Called, CallsFinding
from ncclwatch.engine.evidence.registry import SOURCES
from ncclwatch.engine.graph import Sink, Waits
from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.ledger import Ledger, Place
from ncclwatch.engine.network import NetworkMemory
from ncclwatch.engine.nodes import Node
from ncclwatch.engine.patience import CREATION_S, Patience
from ncclwatch.engine.sends_and_receives import Messages
from ncclwatch.engine.transfers import Transfers
from ncclwatch.engine.waits import find_waits
from ncclwatch.model.verdict import Culprit, VerdictClass

T = TypeVar("T")


# --- hypotheses ---------------------------------------------------------------------------------------------------------


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
    index: int | None = None
    """Of the process; ``None`` where it was not observed."""
    group: int = -1
    """Id of the communicator that it is named in."""


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
    def named(self) -> frozenset[int]:
        """Indices of the processes that it names."""
        return frozenset(suspect.index for suspect in self.suspects if suspect.index is not None)

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


# --- a job -------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Known:
    """What is known about the jobs besides their samples.

    ``patience``: how long nothing must have moved before a rank is accused on the evidence of waits alone (``None``: no time at
    all); a stopped or ended process needs no patience. ``creation_patience_s``: the same for the creation of a communicator.
    ``complete_hosts``: hosts on which every NCCL process was looked at, so that a rank that should be there and is not has ended.
    """

    patience: Patience | None = None
    creation_patience_s: float = CREATION_S
    complete_hosts: Collection[str] = field(default_factory=frozenset)
    silent: Collection[tuple[int, int]] = field(default_factory=frozenset)
    """(communicator's hash, rank in it) of ranks whose node has fallen silent: they are not seen, which says nothing of them."""
    ledger: Ledger | None = None
    """What the calls plane recorded."""
    orders: Orders | None = None
    """In which order each process called what."""
    conflicts: ConflictWatch | None = None
    """Compares what the ranks of running jobs call."""
    stage_of: StageOf | None = None
    """Where in an iteration a call was."""
    network: NetworkMemory = field(default_factory=NetworkMemory)
    """What the nodes say of their network and their kernels."""
    sources: Sequence[Source] = SOURCES
    """Where facts come from."""
    totals: dict[Place, tuple[int, int]] = field(default_factory=dict)
    """Communicator of a process → (NCCL's own count of collectives, calls in the ledger at that moment)"""


@dataclass(slots=True)
class Case:
    """A job with everything a source may read and a rule may conclude from.

    ``still``: seconds without progress; ``time``: the newest sample, seconds since the epoch; ``loners``: observed processes of
    no job, which hold no communicator.
    """

    job: Job
    known: Known
    still: float
    time: float
    loners: Sequence[Member] = ()
    standing: Hypothesis | None = None
    """The hypothesis that stands: the last that defeated the one before."""
    trail: Trail = field(default_factory=Trail)
    patience_s: float = 0.0
    """Seconds for which nothing must have moved before anybody is accused."""
    retries_s: float = 0.0
    """Seconds before a link whose sockets try again to send is dead."""
    blind: bool = False
    """Whether memory shows nothing that is open: counts and calls are all there is."""
    _kept: dict[str, Any] = field(default_factory=dict)
    _concluded: set[Hashable] = field(default_factory=set)
    _facts: Facts | None = None
    _transfers: Transfers | None = None
    _waits: Waits | None = None
    _findings: dict[int, CallsFinding] | None = None
    _messages: Messages | None = None

    @property
    def facts(self) -> Facts:
        """What the sources say: each is asked once, and only for what is wanted."""
        if self._facts is None:
            self._facts = Facts(self, self.known.sources)
        return self._facts

    @property
    def transfers(self) -> Transfers:
        """What the proxies show of transfers over the network, in columns: records that several sources read."""
        if self._transfers is None:
            self._transfers = Transfers(self.job)
        return self._transfers

    @property
    def waits(self) -> Waits:
        """The wait-for graph: drawn from what the sources say when it is first asked for; rules put another in its place."""
        if self._waits is None:
            self._waits = find_waits(self)
        return self._waits

    @waits.setter
    def waits(self, waits: Waits) -> None:
        self._waits = waits
        self._kept.clear()

    @property
    def sinks(self) -> list[Sink]:
        """Where the waits end, of the graph as it is now."""
        return self.waits.sinks

    def remember(self, what: str, make: Callable[[], T]) -> T:
        """What several rules ask for, made once for the graph as it is now."""
        if what not in self._kept:
            self._kept[what] = make()
        found: T = self._kept[what]
        return found

    def is_new(self, concluded: Wait | StallMark | Retraction) -> bool:
        """Whether something is concluded for the first time."""
        if isinstance(concluded, Retraction):
            return concluded.wait not in self.waits.retracted
        what = concluded.target if isinstance(concluded, Wait) else concluded.stall
        who = concluded.waiter if isinstance(concluded, Wait) else concluded.member.index
        fresh = (who, what, concluded.key) not in self._concluded
        self._concluded.add((who, what, concluded.key))
        return fresh

    @property
    def alive(self) -> list[Member]:
        """The processes that have not ended."""
        return [member for member in self.job.members if not member.gone]

    @property
    def newcomers(self) -> set[int]:
        """Indices of the processes that were sampled only once: whether they move is not known."""
        return {member.index for member in self.alive if len(member.samples) < 2}

    @property
    def findings(self) -> dict[int, CallsFinding]:
        """What the calls plane says of each communicator of the job; empty without one."""
        if self._findings is None:
            self._findings = {called.subject: called.finding for called in self.facts.of(FactKind.CALLED, Called)}
        return self._findings

    @property
    def messages(self) -> Messages | None:
        """Who waits for whom in sends and receives; ``None`` without a calls plane."""
        if self._messages is None and self.known.ledger is not None:
            self._messages = Messages(self.job, self.known.ledger, self.known.totals, self.known.orders)
        return self._messages


def of_job(job: Job) -> Case:
    """A case of which nothing is known but the samples."""
    return Case(job, Known(), 0.0, 0.0)


def of_nodes(known: Known) -> Case:
    """A case without a job: of what the nodes say of themselves."""
    return Case(Job([], {}, {}), known, 0.0, 0.0)


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


Conclusion = Wait | StallMark | Retraction | Hypothesis


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
