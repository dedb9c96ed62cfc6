"""A judging session: takes the batches of one node or many, and says which verdicts stand.

It is a function of the batches and of the times it is given: the same live, over the network, and on a recording.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclwatch.collect.batch import NodeBatch, Overhead, PlaneState, ProcessChange
from ncclwatch.collect.windows import RankWindow
from ncclwatch.collect.work_orders import Ordering
from ncclwatch.engine.beside import add_network
from ncclwatch.engine.case import Case
from ncclwatch.engine.live import LiveDiagnosis, Recovery
from ncclwatch.model.events import EVENT_DTYPE, Flag
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.job import Job
from ncclwatch.model.network import FlowRecord, KernelLogLine, LinkChange, NicRecord
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.model.topology import Role
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.model.work import FlowWindow, WorkOrder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ncclwatch.collect.watched import Problem

STALE_LOOKS = 3.0
"""Unit: samples, of a second at the least; a node that has said nothing for so long is silent: its last word counts no longer.
From: chosen: one batch may be late, and one lost with a connection that is made anew.
"""
SHORTEST_LOOK_S = 1.0
"""Fact: seconds between two samples, by default."""
FORGET_NS = 3600 * 10**9
"""Bound: a node that has been silent for an hour is gone for good."""
ANSWER_NS = 2_000_000_000
"""Bound: an answer waits so long for counts of work requests that were ordered for it."""
MAX_NODES, MAX_NOTES, SILENT_SHOWN = 65536, 200, 4
"""Bound: nodes, notes between two judgements, and nodes that a verdict says are silent."""
MAX_WAITING_CALLS, MAX_WAITING_EVENTS, MAX_WORK = 100_000, 1000, 65536
"""Bound: what is kept of nodes, and of calls and windows of work that wait for a judgement."""
ORDERED = ("wire", "paths")
"""Planes of a node that take orders: to count work requests, to probe paths."""
_NO_EVENTS = np.zeros(0, EVENT_DTYPE)


@dataclass(slots=True)
class Update:
    """What the batches since the last update brought. ``windows`` and ``verdicts`` (one for each job, worst first) are there when
    memory was looked at.

    ``told``: verdicts that accuse and did not stand at the update before; ``answers``: what is to be said, however short the
    standstill, to somebody who asked. ``flows``: connections over a network; ``work``: windows of work requests and sockets;
    ``orders``: what is to be counted now, for whoever can reach the nodes. ``finished``: why the session is over, if it is.
    """

    now_ns: int
    changes: list[ProcessChange] = field(default_factory=list)
    events: list[NDArray[Any]] = field(default_factory=list)
    windows: Sequence[RankWindow] | None = None
    verdicts: list[Verdict] = field(default_factory=list)
    told: list[Verdict] = field(default_factory=list)
    answers: list[Verdict] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    lost: int = 0
    newly_lost: int = 0
    notes: list[str] = field(default_factory=list)
    nics: list[NicRecord] = field(default_factory=list)
    flows: list[FlowRecord] = field(default_factory=list)
    work: list[FlowWindow] = field(default_factory=list)
    orders: list[WorkOrder] = field(default_factory=list)
    links: list[LinkChange] = field(default_factory=list)
    kernel: list[KernelLogLine] = field(default_factory=list)
    finished: str = ""

    @property
    def verdict(self) -> Verdict | None:
        """The worst of ``verdicts``."""
        return next(iter(self.verdicts), None)


@dataclass(slots=True)
class Node:
    """What is known of one node; ``missed``: batches that never came; ``called_ns``: calls are known up to then."""

    name: str
    heard_ns: int
    interval_s: float = 1.0
    complete: bool = False
    samples: dict[ProcessKey, ProcessSample] = field(default_factory=dict)
    windows: Sequence[RankWindow] = ()
    lost: int = 0
    sequence: int = -1
    missed: int = 0
    planes: tuple[PlaneState, ...] = ()
    overhead: Overhead | None = None
    silent: bool = False
    finished: str = ""
    fresh: bool = False
    called_ns: int | None = None

    @property
    def patience_ns(self) -> int:
        """How long it may say nothing."""
        return int(STALE_LOOKS * max(self.interval_s, SHORTEST_LOOK_S) * 1e9)

    def falls_silent(self, now_ns: int) -> bool:
        """Whether it has just said nothing for longer than that."""
        return not self.silent and now_ns - self.heard_ns > self.patience_ns


class DiagnosisSession:
    """Everything known of the jobs whose nodes send here, and what is said about them.

    ``feed`` takes batches as they come, ``judge`` says what stands. Times given are CLOCK_MONOTONIC of the judging machine in
    nanoseconds (of a recording: the recorded ones). What surfaces ask of it are its properties; who knows more than the
    batches say (a collector of this node) answers for itself. ``verdicts``: one for each job, worst first; ``windows``: the
    newest of every process; ``network``: what every node last said of its NICs; ``lost``: call records lost in all.
    """

    def __init__(self, diagnosis: LiveDiagnosis | None = None) -> None:
        self.diagnosis = diagnosis or LiveDiagnosis()
        self.nodes: dict[str, Node] = {}
        self.verdicts: list[Verdict] = []
        self.windows: list[RankWindow] = []
        self.network = self.diagnosis.known.network
        self.lost = 0
        self._pending = Update(0)
        self._calls: dict[str, list[NDArray[Any]]] = {}
        """Calls of each host since the last judgement."""
        self._ended: dict[ProcessKey, ProcessSample] = {}
        """Processes that have ended and that live ones may be waiting for, with their last samples."""
        self._ordering = Ordering()
        self._ordered: set[int] = set()
        """Orders of which no count has come yet."""
        self._answer_by: int | None = None
        """When to answer somebody who has asked, though counts that were ordered for it have not come; 0: not ordered yet."""
        self._standing: frozenset[str] = frozenset()

    def feed(
        self, batch: NodeBatch, now_ns: int | None = None, *, source: str | None = None, wall_ns: int | None = None
    ) -> Node | None:
        """Take one batch; ``source`` names the node where host names are not unique.

        With ``wall_ns``, CLOCK_REALTIME here, batches that were long under way are told from fresh ones: their calls and changes
        count, what they saw is past. Returns the node, or ``None`` when there are too many.
        """
        name = source if source is not None else batch.host
        now_ns = batch.time_ns if now_ns is None else now_ns
        if name not in self.nodes and len(self.nodes) >= MAX_NODES:
            return None
        node = self.nodes.setdefault(name, Node(batch.host, now_ns))
        offset = batch.clock_offset_ns
        late = wall_ns is not None and offset is not None and wall_ns - batch.wall_ns - offset > node.patience_ns
        if node.silent and not late:
            node.silent = False
            self._note(f"{node.name} is heard again")
        node.name, node.interval_s, node.complete, node.finished = batch.host, batch.interval_s, batch.complete, batch.finished
        node.heard_ns = node.heard_ns if late else now_ns
        # Below zero: it began anew.
        missed = batch.sequence - node.sequence - 1 if node.sequence >= 0 else 0
        node.missed, node.sequence = node.missed + max(missed, 0), batch.sequence
        self._take_calls(node, batch, missed)
        node.planes = batch.planes or node.planes
        node.overhead = batch.overhead or node.overhead
        node.called_ns = None if batch.looked else batch.time_ns
        if batch.looked and not late:
            self._take_look(node, batch)
        self.diagnosis.known.failed |= {end.key for end in batch.ends if end.signal or end.status}
        pending = self._pending
        pending.changes += batch.changes
        for text in batch.notes:
            self._note(text)
        if len(pending.work) < MAX_WORK:
            pending.work += batch.work
        if batch.network is not None:
            self.network.feed(batch.host, batch.network, batch.wall_ns)
            pending.nics += batch.network.nics
            pending.flows += batch.network.flows
            pending.links += batch.network.changes
            pending.kernel += batch.network.kernel
        self.network.ways.take(batch.paths)
        if batch.work:
            self._ordered -= {window.order for window in batch.work}
            self.network.feed_work(batch.host, batch.work, batch.wall_ns)
        return node

    def _take_calls(self, node: Node, batch: NodeBatch, missed: int) -> None:
        newly = batch.lost if missed < 0 else max(batch.lost - node.lost, 0)
        node.lost = batch.lost
        self.lost += newly
        self._pending.newly_lost += newly
        if missed:
            self._give_calls(batch.host)
        if missed and self.diagnosis.ledger.rows:
            # Nobody knows how many records were in what never came: none of this node's histories can be continued.
            self.diagnosis.add_calls(_NO_EVENTS, 1, batch.host)
        waiting = self._calls.setdefault(batch.host, [])
        if batch.events is not None and len(batch.events):
            waiting.append(batch.events)
            if len(self._pending.events) < MAX_WAITING_EVENTS:
                self._pending.events.append(batch.events)
        if newly or sum(map(len, waiting)) > MAX_WAITING_CALLS:
            self._give_calls(batch.host, newly)

    def _give_calls(self, host: str, lost: int = 0) -> None:
        """Hand a node's calls to the diagnosis: once a judgement, for its cost is by the batch more than by the record."""
        waiting = self._calls.pop(host, None)
        if waiting or lost:
            events = (waiting[0] if len(waiting) == 1 else np.concatenate(waiting)) if waiting else _NO_EVENTS
            # A process nobody watches yet comes with its number in a pid namespace of its own: that may be another's here.
            foreign = (events["flags"] & Flag.UNKNOWN_PROCESS != 0) & (events["pid_namespace"] != 0)
            self.diagnosis.add_calls(events[~foreign] if foreign.any() else events, lost, host)

    def _take_look(self, node: Node, batch: NodeBatch) -> None:
        offset = batch.clock_offset_ns or 0
        ahead = offset if abs(offset) > (batch.clock_error_ns or 0) else 0
        samples = {s.process.key: replace(s, wall_ns=s.wall_ns + ahead) if ahead else s for s in batch.samples}
        self._ended |= {key: sample for key, sample in samples.items() if sample.run_state == "X"}
        for key, sample in node.samples.items() if batch.complete else ():
            # It went while nobody looked (the agent was down): had it not been told, it would be missed by nobody.
            if key not in samples and sample.run_state != "X":
                self._ended[key] = sample.ended(batch.time_ns, batch.wall_ns + ahead)
        node.samples, node.windows, node.fresh = samples, batch.windows, True

    def _note(self, text: str) -> None:
        if len(self._pending.notes) < MAX_NOTES:
            self._pending.notes.append(text)

    def judge(self, now_ns: int) -> Update:
        """Look at what all nodes said last and say what stands."""
        update, diagnosis = self.take(now_ns), self.diagnosis
        for host in list(self._calls):
            self._give_calls(host)
        self._find_silent(now_ns, update)
        silent = [node for node in self.nodes.values() if node.silent]
        heard = [node for node in self.nodes.values() if not node.silent]
        for node in heard:
            node.fresh = False
        self._forget_ended_jobs(heard)
        present, known = self.samples, diagnosis.known
        samples, known.failed = list(present.values()), known.failed & present.keys()
        known.silent = frozenset((c.hash, c.rank) for node in silent for s in node.samples.values() for c in s.communicators)
        known.complete_hosts = frozenset(node.name for node in heard if node.complete)
        diagnosis.slow.delays, diagnosis.slow.network = self.network.delays(), self.network
        countable = {node.name for node in heard if any(plane.name in ORDERED and plane.running for plane in node.planes)}
        self._answer(countable, now_ns, update)
        said = Case(Job([]), known)
        if any(sample.run_state != "X" for sample in samples):
            standing = diagnosis.update(samples)
            self.verdicts = [
                add_network(said, _without(silent, now_ns, verdict)) for verdict in (standing, *diagnosis.verdicts[1:])
            ]
            update.orders += self._ordering.orders(diagnosis.judged, countable, now_ns)
        windows = (window for node in heard for window in node.windows)
        by_rank = sorted(windows, key=lambda w: (w.rank is None, w.rank or 0, w.process.host, w.process.pid))
        self.windows = update.windows = by_rank
        update.verdicts = self.verdicts
        accusing = {verdict.id: verdict for verdict in self.verdicts if verdict.verdict_class.accuses}
        update.told = [verdict for number, verdict in accusing.items() if number not in self._standing]
        self._standing = frozenset(accusing)
        update.recoveries, diagnosis.closed = diagnosis.closed, []
        update.answers, diagnosis.answers = [add_network(said, verdict) for verdict in diagnosis.answers], []
        return update

    def is_due(self, now_ns: int) -> bool:
        """Whether there is anything to judge: a look that is new, a node that has fallen silent, or somebody who waits."""
        return self._answer_by is not None or any(node.fresh or node.falls_silent(now_ns) for node in self.nodes.values())

    def settled(self) -> frozenset[str]:
        """Hosts that need few looks, by what was judged last and every call since: all goes well with every job of theirs."""
        for host in list(self._calls):
            self._give_calls(host)
        if self._answer_by is not None or any(node.silent for node in self.nodes.values()):
            return frozenset()
        heard_s = {node.name: node.called_ns / 1e9 for node in self.nodes.values() if node.called_ns is not None}
        settled, others = set[str](), set[str]()
        for job, verdict in self.diagnosis.judged:
            which = settled if self.diagnosis.slow.settles(job, verdict, heard_s) else others
            which.update(member.info.host for member in job.members)
        return frozenset(settled - others)

    def searching(self) -> frozenset[str]:
        """Hosts of jobs that are slow, of which not all is known that more looks would tell."""
        cost = {node.name: node.overhead.search_share for node in self.nodes.values() if node.overhead is not None}
        found = (job for job, _ in self.diagnosis.judged if self.diagnosis.slow.searches(job, cost))
        return frozenset(member.info.host for job in found for member in job.members)

    def ask(self) -> None:
        """Answer, whatever patience says: at the next judgement, or once work requests were counted for it, where they can be."""
        self._answer_by = self._answer_by or 0

    def answer_due(self, now_ns: int) -> bool:
        """Whether somebody who has asked waits for nothing but a judgement."""
        return self._answer_by is not None and (not self._ordered or now_ns >= self._answer_by)

    def _answer(self, countable: Collection[str], now_ns: int, update: Update) -> None:
        """Have counted what a question wants counted, or have it answered in this judgement."""
        if self._answer_by == 0:
            update.orders = self._ordering.orders(self.diagnosis.judged, countable, now_ns, asked=True)
            self._ordered = {order.number for order in update.orders}
            self._answer_by = now_ns + ANSWER_NS
        if self.answer_due(now_ns):
            self._answer_by = None
            self.diagnosis.ask()

    def take(self, now_ns: int) -> Update:
        """What came since the last time, without judging."""
        update, self._pending = self._pending, Update(0)
        update.now_ns = now_ns
        update.lost = self.lost
        return update

    @property
    def infos(self) -> list[ProcessInfo]:
        """Every process of the newest looks, also of silent nodes."""
        return [window.process for node in self.nodes.values() for window in node.windows]

    @property
    def problems(self) -> Sequence[Problem]:
        """What was asked for and could not be watched: nothing, where others collect."""
        return ()

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that stands, of the worst job."""
        return next(iter(self.verdicts), None)

    @property
    def samples(self) -> dict[ProcessKey, ProcessSample]:
        """The newest look at every process of nodes that are heard, of one that ended its last."""
        return {key: s for node in self.nodes.values() if not node.silent for key, s in node.samples.items()} | self._ended

    @property
    def roles(self) -> dict[int, str]:
        """What communicators are for, by hash, as far as it was inferred and equal hashes do not disagree."""
        found: dict[int, set[Role]] = defaultdict(set)
        for learned in self.diagnosis.namer.jobs:
            for group in learned.topology.groups:
                found[group.hash].add(group.role)
        only = {number: next(iter(roles)) for number, roles in found.items() if len(roles) == 1}
        return {number: role.value for number, role in only.items() if role not in (Role.UNSURE, Role.UNUSED)}

    @property
    def layout(self) -> str:
        """How the largest job is divided (``TP 2 x PP 2 x …``); empty before that is known."""
        learned = self.diagnosis.namer.learned
        return learned.topology.layout.text() if learned is not None and learned.topology.layout.known else ""

    @property
    def planes(self) -> Sequence[PlaneState]:
        """Planes over all nodes; of one that does not run everywhere the first reason is given, with the number of nodes."""
        by_name: dict[str, list[PlaneState]] = defaultdict(list)
        for node in self.nodes.values():
            for plane in node.planes:
                by_name[plane.name].append(plane)
        return [_joined(found, len(self.nodes)) for found in by_name.values()]

    def overhead(self) -> Overhead | None:
        """What watching costs on the node where it costs most."""
        known = [node.overhead for node in self.nodes.values() if node.overhead is not None]
        return max(known, key=lambda o: o.own_share + (o.probe_share or 0.0), default=None)

    def _find_silent(self, now_ns: int, update: Update) -> None:
        for node in self.nodes.values():
            if node.falls_silent(now_ns):
                node.silent = True
                seconds = (now_ns - node.heard_ns) / 1e9
                why = f"its agent has ended ({node.finished})" if node.finished else f"it has said nothing for {seconds:.0f} s"
                update.notes.append(f"{node.name}: {why}: its ranks are not observed")
        gone = [name for name, node in self.nodes.items() if now_ns - node.heard_ns > FORGET_NS]
        hosts = {self.nodes.pop(name).name for name in gone}
        for host in hosts - {node.name for node in self.nodes.values()} if hosts else ():
            self.diagnosis.forget_host(host)

    def _forget_ended_jobs(self, heard: Sequence[Node]) -> None:
        """A process that ended is kept while a live one shares a communicator with it: it may be whom that one waits for."""
        if self._ended:
            live = (s for node in heard for s in node.samples.values() if s.run_state != "X")
            hashes = {c.hash for sample in live for c in sample.communicators}
            self._ended = {k: s for k, s in self._ended.items() if not hashes.isdisjoint(c.hash for c in s.communicators)}


def _without(silent: Sequence[Node], now_ns: int, verdict: Verdict) -> Verdict:
    """Whoever reads a verdict has to know which nodes it was reached without."""
    if not silent or verdict.verdict_class in (VerdictClass.RUNNING, VerdictClass.IDLE):
        return verdict
    lines = [
        f"{node.name}: its agent has been silent for {(now_ns - node.heard_ns) / 1e9:.0f} s, its ranks are not observed"
        for node in silent[:SILENT_SHOWN]
    ]
    if len(silent) > len(lines):
        lines.append(f"{len(silent) - len(lines)} more nodes are silent")
    return replace(verdict, unobserved=(*lines, *verdict.unobserved))


def _joined(found: Sequence[PlaneState], nodes: int) -> PlaneState:
    broken = [plane for plane in found if not plane.running]
    if not broken:
        return found[0]
    where = f" (on {len(broken)} of {nodes} nodes)" if nodes > 1 else ""
    return PlaneState(broken[0].name, len(broken) < len(found), broken[0].reason + where)
