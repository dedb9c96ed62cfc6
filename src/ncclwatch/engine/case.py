"""One job as it is judged: its records, what is known besides them, and what was concluded so far."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ncclwatch.engine.call_patterns import Orders
from ncclwatch.engine.conflicts import ConflictWatch, StageOf
from ncclwatch.engine.edges import StallMark, Wait
from ncclwatch.engine.evidence.base import FactKind, Facts, Source
from ncclwatch.engine.evidence.calls import Called, CallsFinding
from ncclwatch.engine.evidence.registry import SOURCES
from ncclwatch.engine.graph import Sink, Waits
from ncclwatch.engine.hypotheses import Hypothesis, Retraction, Trail
from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.ledger import Ledger, Place
from ncclwatch.engine.network import NetworkMemory
from ncclwatch.engine.patience import CREATION_S, Patience
from ncclwatch.engine.sends_and_receives import Messages
from ncclwatch.engine.transfers import Transfers
from ncclwatch.engine.waits import find_waits

T = TypeVar("T")


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
