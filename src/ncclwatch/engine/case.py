"""One job as it is judged: its records, what is known besides them, and what was concluded so far, by which rules.

A hypothesis is typed: causes, ranks, facts. Verdicts are made of it last (:mod:`ncclwatch.engine.verdict`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Any, TypeVar

from ncclwatch.engine.call_patterns import Orders
from ncclwatch.engine.conflicts import ConflictWatch, StageOf
from ncclwatch.engine.edges import StallMark, Wait, wait_facts
from ncclwatch.engine.evidence.base import Fact, FactKind, Facts, Node, Source
from ncclwatch.engine.evidence.calls import Called, CallsFinding
from ncclwatch.engine.evidence.registry import SOURCES
from ncclwatch.engine.graph import Sink, Waits
from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.ledger import Ledger, Place
from ncclwatch.engine.network import NetworkMemory
from ncclwatch.engine.patience import CREATION_S, Patience
from ncclwatch.engine.sends_and_receives import Messages
from ncclwatch.engine.transfers import Transfers
from ncclwatch.model.verdict import Culprit, VerdictClass

T = TypeVar("T")


# --- hypotheses ---------------------------------------------------------------------------------------------------------


class Cause(StrEnum):
    """Why somebody holds the job up, as the clause that follows a rank's name, or why nobody is named; a closed list.

    Verdicts fill in ``{detail}``: what was called, the name of a port; and of who names nobody ``{still}`` and ``{seconds}``,
    the ends of the waits (``{unseen}``, ``{ranks}``) and the communicator.
    """

    # Nobody is named.
    ALL_ENDED = "all have ended"
    ONE_SAMPLE = "only one sample of a process, so progress cannot be told from standstill"
    PROGRESS = "NCCL makes progress"
    PAUSE = "no NCCL counter has moved for {still:.1f} s; a pause of up to {seconds:.0f} s is not yet a hang"
    TCP_TRIES = f"{PAUSE}; what was lost is sent again by TCP"
    NOTHING_OPEN = "no NCCL operation is open"
    NOTHING_SEEN = "NCCL has not moved for {still:.0f} s; what joins the ranks hides whether an operation is open"
    CREATING = "{come} ranks wait in the creation of communicator {communicator}"
    UNSEEN = "nothing moves; the waits lead to {unseen}, which was not observed"
    HIDDEN = "nothing moves; the waits lead to {unseen}, which is joined by a transport the host cannot see into"
    BESIDE_ABSENT = "the waits lead to {ranks}, which has nothing open and may wait for {unseen}, not observed"
    CYCLE_IN_OPERATION = "ranks wait for each other inside one operation; what was read does not single one out"
    CYCLE_OF_CALLS = "ranks wait for each other in a cycle of calls; what was read does not single one out"
    # The operating system or NCCL says so.
    ENDED = "its process has ended"
    ENDED_UNSEEN = "has ended: it is not among the processes of its host, or its peers lost it"
    STOPPED = "its process is stopped by a signal"
    STOPPED_BY_DEBUGGER = "its process is stopped by a debugger"
    NCCL_ERROR = "reports {detail}"
    NOT_JOINED = "has not come to the creation of the communicator"
    # Calls: not made, or others.
    NOT_ENTERED = "has not entered the operation the others wait in"
    NOT_TAKING_PART = "does not take part: data for it lies unread and it waits for nobody"
    NOT_CALLED = "has not called the operation the others have called"
    LEFT_OUT = "has left out an operation that its calls always had here"
    LACKS_CALL = "has not called an operation that the others have called, and waits elsewhere"
    LACKS_OTHER_CALL = "has made as many calls as its peers, but not the one they wait in"
    ALONE_IN_CALL = "is in an operation that its peers are not in: they have ended what they called instead, and gone on"
    WROTE_MORE = "has called as often as its peers, and written more than their calls amount to: it called something else"
    CALLED_OTHER = "has called {detail}, unlike its peers"
    CALLED_OTHER_AS = "called {detail}, unlike its peers"
    RUNS_ON = "called {detail}"
    COUNTED_OTHER = "has called {detail} where its peers called something else"
    ORDER = "waits in a cycle"
    # GPU and proxy.
    GPU_NOT_BEGUN = "has called the operation, but its GPU has not begun it"
    GPU_STOPPED = "its GPU has stopped in the middle of the operation"
    GPU_RUNNING = "its GPU is in the operation and does not go on, although nothing it needs is missing"
    FLUSH = "data arrived, but the flush to its GPU's memory does not complete"
    PROXY_STALLED = "its proxy thread does not move transfers that could go on"
    PROXY_NOT_BEGUN = "its proxy thread has not begun an operation that is queued"
    # The network.
    LINK = "one end of the link on which data does not arrive"
    CUT_OFF = "data arrives neither at it nor from it: its proxy thread or its network port stands still"
    PORT_RETRIES = "its network port, or the path to it, is slow: no transfer with it ends, though TCP still tries"
    PORT = "its network port {detail}"
    PATH = "nothing that is sent to or from its address is acknowledged: its network port, or the path to it, is dead"
    PATH_END = "one end of a path over which nothing is acknowledged"

    @property
    def label(self) -> str:
        """``gpu-not-begun``."""
        return self.name.lower().replace("_", "-")


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
    """One explanation of a job's state. ``confidence`` is between 0 and 1."""

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
    rule: str = ""
    """Whose it is: written on it when it is weighed."""
    follows: tuple[str, ...] = ()
    """Rules whose hypotheses it was made from."""

    def amended(self, *planes: str, **changes: Any) -> Hypothesis:
        """The same as another rule sees it, by more planes: with other suspects, another class, more evidence."""
        return replace(self.seen_by(*planes), rule="", follows=(*self.follows, self.rule), **changes)

    def seen_by(self, *planes: str) -> Hypothesis:
        """The same by more planes."""
        return replace(self, planes=tuple(dict.fromkeys((*self.planes, *planes))))

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


def naming(
    verdict_class: VerdictClass, suspects: Iterable[Suspect], victims: Iterable[int], confidence: float, supports: Iterable[Fact],
    **more: Any,
) -> Hypothesis:  # fmt: skip
    """A hypothesis that names somebody, for the cause of the first; nobody it names is a victim."""
    named = tuple(suspects)
    found = Hypothesis(verdict_class, named[0].cause, named, frozenset(), confidence, tuple(supports), **more)
    return replace(found, victims=frozenset(victims) - found.named)


def nobody(cause: Cause, supports: Iterable[Fact] = (), **more: Any) -> Hypothesis:
    """A hypothesis that names nobody."""
    return Hypothesis(VerdictClass.UNKNOWN, cause, supports=tuple(supports), **more)


@dataclass(frozen=True, slots=True)
class Retraction:
    """A wait that counts no longer, by its number in the graph, and as it is told."""

    wait: int
    fact: Fact


@dataclass(slots=True)
class Trail:
    """How a verdict came about: what ``ncclwatch diagnose --why`` prints."""

    drawn: list[tuple[str, Fact]] = field(default_factory=list)
    """(rule, wait that it drew)"""
    retracted: list[tuple[str, Fact]] = field(default_factory=list)
    """(rule, wait that it took back)"""
    lost: list[tuple[Hypothesis, str]] = field(default_factory=list)
    """(hypothesis that was weighed and lost, rule of the one that it lost against)"""


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


@dataclass
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

    @cached_property
    def facts(self) -> Facts:
        """What the sources say: each is asked once, and only for what is wanted."""
        return Facts(self, self.known.sources)

    @cached_property
    def transfers(self) -> Transfers:
        """What the proxies show of transfers over the network, in columns: records that several sources read."""
        return Transfers(self.job)

    @cached_property
    def waits(self) -> Waits:
        """The wait-for graph: drawn from what the sources say when it is first asked for; rules put another in its place."""
        return Waits.drawn(self.job, self.facts)

    @property
    def sinks(self) -> list[Sink]:
        """Where the waits end, of the graph as it is now."""
        return self.waits.sinks

    @cached_property
    def findings(self) -> dict[int, CallsFinding]:
        """What the calls plane says of each communicator of the job; empty without one."""
        return {called.subject: called.finding for called in self.facts.of(FactKind.CALLED, Called)}

    @cached_property
    def messages(self) -> Messages | None:
        """Who waits for whom in sends and receives; ``None`` without a calls plane."""
        known = self.known
        return Messages(self.job, known.ledger, known.totals, known.orders) if known.ledger is not None else None

    @cached_property
    def alive(self) -> list[Member]:
        """The processes that have not ended."""
        return [member for member in self.job.members if not member.gone]

    @cached_property
    def newcomers(self) -> set[int]:
        """Indices of the processes that were sampled only once: whether they move is not known."""
        return {member.index for member in self.alive if len(member.samples) < 2}

    def change(self, rule: str, concluded: Iterable[Conclusion]) -> bool:
        """Change the graph as a rule says, which solves it again; whether anything is new."""
        new = [one for one in concluded if not isinstance(one, Hypothesis) and self._is_new(one)]
        if new:
            facts = [one for one in new if not isinstance(one, Retraction)]
            retracted = [one for one in new if isinstance(one, Retraction)]
            self.waits = self.waits.plus(facts, (one.wait for one in retracted))
            self._kept.clear()
            self.trail.drawn += [(rule, fact) for fact in wait_facts(fact for fact in facts if isinstance(fact, Wait))]
            self.trail.retracted += [(rule, one.fact) for one in retracted]
        return bool(new)

    def _is_new(self, concluded: Wait | StallMark | Retraction) -> bool:
        if isinstance(concluded, Retraction):
            return concluded.wait not in self.waits.retracted
        what = concluded.target if isinstance(concluded, Wait) else concluded.stall
        who = concluded.waiter if isinstance(concluded, Wait) else concluded.member.index
        fresh = (who, what, concluded.key) not in self._concluded
        self._concluded.add((who, what, concluded.key))
        return fresh

    def remember(self, what: str, make: Callable[[], T]) -> T:
        """What several rules ask for, made once for the graph as it is now."""
        if what not in self._kept:
            self._kept[what] = make()
        found: T = self._kept[what]
        return found


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
