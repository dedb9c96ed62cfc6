"""One job as it is judged: its records, what is known besides them, and what was concluded so far, by which rules.

A hypothesis is typed: causes, facts, and ranks (who, where, in which communicator and operation the others wait). Verdicts are
made of it last (:mod:`ncclwatch.engine.verdict`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ncclwatch.collect.ledger import Ledger
from ncclwatch.collect.network_memory import NetworkMemory
from ncclwatch.engine.call_order import Messages, Orders
from ncclwatch.engine.conflicts import ConflictWatch, StageOf
from ncclwatch.engine.edges import OnConnection, StallMark, Wait, wait_facts
from ncclwatch.engine.evidence.base import AbsentNode, Fact, FactKind, Facts, Node, Source
from ncclwatch.engine.evidence.calls import Called, Calls, CallsFinding, OpenCalls, SequenceCounts
from ncclwatch.engine.evidence.device import DeviceShim
from ncclwatch.engine.evidence.ends import Proxies, SharedMemory
from ncclwatch.engine.evidence.kernel import CpuLimits, Exits, KernelLog
from ncclwatch.engine.evidence.nics import Ports, Sockets
from ncclwatch.engine.evidence.paths import Paths
from ncclwatch.engine.evidence.work_requests import WorkRequests
from ncclwatch.engine.graph import Sink, Waits
from ncclwatch.engine.patience import CREATION_S, Patience
from ncclwatch.engine.transfers import Compared, Transfers
from ncclwatch.model.cause import Cause
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.job import Group, Job, Member
from ncclwatch.model.rings import Ring, rings_inside
from ncclwatch.model.verdict import Culprit, LinkRef, OperationRef, VerdictClass

# --- hypotheses ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Suspect:
    """Whom a hypothesis names and why; ``detail`` completes the cause's words, ``index`` is ``None`` of one not observed."""

    place: Culprit
    cause: Cause
    detail: str = ""
    index: int | None = None
    group: int = -1


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One explanation of a job's state. ``confidence`` is between 0 and 1; ``victims`` are indices of the processes that wait for
    the suspects; ``rule``: whose it is, written on it when it is weighed; ``follows``: rules whose hypotheses it was made from.
    """

    verdict_class: VerdictClass
    cause: Cause
    suspects: tuple[Suspect, ...] = ()
    victims: frozenset[int] = frozenset()
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
    group: int = -1
    """The communicator it is about, where that is not the suspects' own."""
    seconds: float = 0.0
    """For how long a pause may last, or a link has carried nothing, where the cause speaks of that."""
    planes: tuple[str, ...] = ("state",)
    rule: str = ""
    follows: tuple[str, ...] = ()

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
    def open_to_doubt(self) -> bool:
        """Whether it says where waits end; what the operating system states, and calls that disagree, stand by themselves."""
        return self.verdict_class in (VerdictClass.NOT_ENTERED, VerdictClass.DEADLOCK, VerdictClass.UNKNOWN)


def naming(
    verdict_class: VerdictClass, suspects: Iterable[Suspect], victims: Iterable[int], confidence: float, supports: Iterable[Fact],
    **more: Any,
) -> Hypothesis:  # fmt: skip
    """A hypothesis that names somebody, for the cause of the first; nobody it names is a victim."""
    named = tuple(suspects)
    waiting = frozenset(victims) - {suspect.index for suspect in named}
    return Hypothesis(verdict_class, named[0].cause, named, waiting, confidence, tuple(supports), **more)


def nobody(cause: Cause, supports: Iterable[Fact] = (), **more: Any) -> Hypothesis:
    """A hypothesis that names nobody."""
    return Hypothesis(VerdictClass.UNKNOWN, cause, supports=tuple(supports), **more)


class Retraction(NamedTuple):
    """A wait of the graph that counts no longer."""

    wait: Wait


Conclusion = Wait | StallMark | Retraction | Hypothesis


@dataclass(slots=True)
class Trail:
    """How a verdict came about: rules with waits they drew or took back, hypotheses that lost and the rule they lost to."""

    drawn: list[tuple[str, Fact]] = field(default_factory=list)
    retracted: list[tuple[str, Fact]] = field(default_factory=list)
    lost: list[tuple[Hypothesis, str]] = field(default_factory=list)


# --- whom a hypothesis names ---------------------------------------------------------------------------------------------

POINT_TO_POINT = frozenset({"", "Send", "Recv", "SendRecv"})
"""Names of operations that the rest of a communicator does not take part in."""


def observed(
    job: Job, member: Member, waits: Sequence[Wait], stalls: Sequence[StallMark], cause: Cause, detail: str = "",
    *, link: LinkRef | None = None,
) -> Suspect:  # fmt: skip
    """An observed process, placed by its first wait or stall that has begun, else by the first: what is called ahead waits."""
    found = sorted((*waits, *stalls), key=lambda one: one.end is None or not one.end.under_way)
    communicators = member.last.communicators
    largest = max(communicators, key=lambda c: c.nranks, default=None)
    group_id = found[0].key.group if found else job.number(member.index, largest) if largest else -1
    own = next((c for c in communicators if job.number(member.index, c) == group_id), None)
    place = Culprit(
        member.rank, own.rank if own else None, member.info.host, member.info.pid, own.device if own else None,
        job.groups[group_id].reference() if group_id in job.groups else None, _operation(found), link=link,
    )  # fmt: skip
    return Suspect(place, cause, detail, member.index, group_id)


def absent(job: Job, sink: Sink, node: AbsentNode, cause: Cause) -> Suspect:
    """A rank of a communicator that no observed process holds, where waits end."""
    rank, reference = job.global_rank(node.group_id, node.comm_rank), job.groups[node.group_id].reference()
    place = Culprit(rank, node.comm_rank, "", None, None, reference, _operation(sink.waits), observed=False)
    return Suspect(place, cause, group=node.group_id)


def caller(group: Group, rank: int, operation: OperationRef | None, cause: Cause, detail: str = "") -> Suspect:
    """An observed rank of a communicator that is named for what it called, or has not called."""
    member, own = group.members[rank]
    place = Culprit(member.rank, rank, member.info.host, member.info.pid, own.device, group.reference(), operation)
    return Suspect(place, cause, detail, member.index, group.id)


def _operation(found: Sequence[OnConnection]) -> OperationRef | None:
    one = next((one.end.operation for one in found if one.end is not None), None)
    if one is not None:
        return OperationRef(one.collective, one.sequence, one.protocol, one.algorithm)
    return next((one.operation for one in found if one.operation is not None), None)


def one_of_each(suspects: Sequence[Suspect]) -> list[Suspect]:
    """Each rank once: one that nobody observed may be missing in several communicators."""
    kept: dict[object, Suspect] = {}
    for number, suspect in enumerate(suspects):
        place = suspect.place
        kept.setdefault(number if place.observed or place.rank is None else ("rank", place.rank), suspect)
    return list(kept.values())


def peers(job: Job, suspects: Sequence[Suspect]) -> set[int]:
    """Members that share a suspect's communicator: a collective that one rank does not finish, no rank finishes."""
    collectives = (one for one in suspects if one.place.operation and one.place.operation.name not in POINT_TO_POINT)
    return {index for one in collectives if one.group in job.groups for index in job.groups[one.group].ranks}


# --- a job -------------------------------------------------------------------------------------------------------------

SOURCES: tuple[Source, ...] = (
    Exits(), Proxies(), SharedMemory(), DeviceShim(), Calls(), OpenCalls(), SequenceCounts(), Ports(), Sockets(), KernelLog(),
    CpuLimits(), WorkRequests(), Paths(),
)  # fmt: skip
"""Every source of evidence, in the order in which what they say is told (docs/adding-a-source.md)."""


@dataclass(slots=True)
class Known:
    """What is known about the jobs besides their samples.

    ``patience``: how long nothing must have moved before a rank is accused on the evidence of waits alone (``None``: no time
    at all); ``creation_patience_s``: the same for the creation of a communicator, at least as long as those who wait in it
    were seen to need before they came (``prepared``, seconds by process). ``complete_hosts``: hosts on which every NCCL
    process was looked at. ``silent``: (communicator's hash, rank in it) of ranks whose node has fallen silent: they are not
    seen, which says nothing of them. ``failed``: processes that ended by a signal or with a status other than 0.
    """

    patience: Patience | None = None
    creation_patience_s: float = CREATION_S
    prepared: dict[ProcessKey, float] = field(default_factory=dict)
    complete_hosts: Collection[str] = frozenset()
    silent: Collection[tuple[int, int]] = frozenset()
    failed: Set[ProcessKey] = frozenset()
    ledger: Ledger | None = None
    """What the calls plane recorded."""
    orders: Orders | None = None
    """In which order each process called what."""
    conflicts: ConflictWatch = field(default_factory=ConflictWatch)
    """Compares what the ranks of running jobs call."""
    stage_of: StageOf | None = None
    """Where in an iteration a call was."""
    network: NetworkMemory = field(default_factory=NetworkMemory)
    """What the nodes say of their network and their kernels."""
    sources: Sequence[Source] = SOURCES
    """Where facts come from."""


@dataclass
class Case:
    """A job with everything a source may read and a rule may conclude from.

    ``still``: seconds without progress; ``time``: the newest sample, seconds since the epoch; ``loners``: observed processes
    without a communicator; ``standing``: the hypothesis that stands. ``patience_s``: seconds for which nothing must have moved
    before anybody is accused; ``retries_s``: before a link whose sockets try again to send is dead. ``blind``: whether memory
    shows nothing that is open: counts and calls are all there is.
    """

    job: Job
    known: Known = field(default_factory=Known)
    still: float = 0.0
    time: float = 0.0
    loners: Sequence[Member] = ()
    standing: Hypothesis | None = None
    trail: Trail = field(default_factory=Trail)
    patience_s: float = 0.0
    retries_s: float = 0.0
    blind: bool = False
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
    def compared(self) -> Compared:
        """What each of them shows that is not finished. O(transfers), once."""
        return Compared(self.transfers)

    @cached_property
    def waits(self) -> Waits:
        """The wait-for graph: drawn from what the sources say when it is first asked for; rules put another in its place."""
        return Waits(self.job, self.facts.nodes, self.facts.parts(FactKind.WAITS_FOR), self.facts.parts(FactKind.STANDS))

    @cached_property
    def rings(self) -> dict[int, dict[int, Ring]]:
        """The rings of each communicator, by its id, that go through nodes, by channel. O(connections), once."""
        return {number: rings_inside(group) for number, group in self.job.groups.items()}

    @cached_property
    def amid(self) -> set[int]:
        """Indices of the processes that are amid an operation in a ring inside their node."""
        amid = ((number, rank) for number, rings in self.rings.items() for ring in rings.values() for rank in ring.amid)
        return {self.job.groups[number].members[rank][0].index for number, rank in amid}

    @cached_property
    def findings(self) -> dict[int, CallsFinding]:
        """What the calls plane says of each communicator of the job; empty without one."""
        return {called.subject: called.finding for called in self.facts.of(FactKind.CALLED, Called)}

    @cached_property
    def messages(self) -> Messages | None:
        """Who waits for whom in sends and receives; ``None`` without a calls plane."""
        known = self.known
        return Messages(self.job, known.ledger, known.orders) if known.ledger is not None else None

    @cached_property
    def alive(self) -> list[Member]:
        """The processes that have not ended."""
        return [member for member in self.job.members if not member.gone] if self.job.gone else self.job.members

    @cached_property
    def newcomers(self) -> set[int]:
        """Indices of the processes that were sampled only once: whether they move is not known."""
        return {member.index for member in self.alive if len(member.samples) < 2}

    def change(self, rule: str, concluded: Iterable[Conclusion]) -> bool:
        """Change the graph as a rule says, which solves it again; whether anything is new."""
        facts: list[Wait | StallMark] = []
        retracted: list[Wait] = []
        for one in concluded:
            if isinstance(one, Retraction):
                retracted += [one.wait] if one.wait.number not in self.waits.retracted else []
            elif isinstance(one, Wait | StallMark):
                what = one.subject, one.object if isinstance(one, Wait) else one.stall, one.key
                facts += [one] if what not in self._concluded else []
                self._concluded.add(what)
        if not facts and not retracted:
            return False
        self.waits = self.waits.plus(facts, (wait.number for wait in retracted))
        self.trail.drawn += [(rule, fact) for fact in wait_facts(fact for fact in facts if isinstance(fact, Wait))]
        self.trail.retracted += [(rule, wait_facts([wait])[0]) for wait in retracted]
        return True
