"""A judging session: takes the batches of one node or many, and says which verdicts stand.

It is a function of the batches and of the times it is given: the same live, over the network, and on a recording.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ncclwatch.collect.batch import NodeBatch, Overhead, PlaneState, ProcessChange
from ncclwatch.collect.windows import RankWindow
from ncclwatch.engine.beside import add_network
from ncclwatch.engine.case import Known, of_nodes
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.ordering import Ordering
from ncclwatch.engine.topology.model import Role
from ncclwatch.model.events import EVENT_DTYPE, Flag
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.network import FlowRecord, KernelLogLine, LinkChange, NicRecord
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.model.work import FlowWindow, WorkOrder

if TYPE_CHECKING:
    from numpy.typing import NDArray

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

MAX_NODES, MAX_NOTES = 65536, 200
"""Bound: nodes, and notes between two judgements."""
MAX_WAITING_CALLS, MAX_WAITING_EVENTS, MAX_WORK = 100_000, 1000, 65536
"""Bound: what is kept of nodes, and of calls and windows of work that wait for a judgement."""
ORDERED = ("wire", "paths")
"""Planes of a node that take orders: to count work requests, to probe paths."""

_NO_EVENTS = np.zeros(0, EVENT_DTYPE)


@dataclass(frozen=True, slots=True)
class Recovery:
    """A verdict that no longer stands because the job went on, and for how long it stood."""

    verdict: Verdict
    duration_s: float


@dataclass(slots=True)
class Update:
    """What the batches since the last update brought. ``windows`` and ``verdict`` are there when memory was looked at."""

    now_ns: int
    changes: list[ProcessChange] = field(default_factory=list)
    events: list[NDArray[Any]] = field(default_factory=list)
    windows: list[RankWindow] | None = None
    verdict: Verdict | None = None
    """The worst of ``verdicts``."""
    verdicts: list[Verdict] = field(default_factory=list)
    """One for each job, worst first."""
    told: list[Verdict] = field(default_factory=list)
    """Verdicts that accuse and did not stand at the update before."""
    answers: list[Verdict] = field(default_factory=list)
    """What is to be said, however short the standstill, to somebody who asked."""
    recoveries: list[Recovery] = field(default_factory=list)
    lost: int = 0
    newly_lost: int = 0
    notes: list[str] = field(default_factory=list)
    nics: list[NicRecord] = field(default_factory=list)
    """NICs of the nodes that were looked at since the last update."""
    flows: list[FlowRecord] = field(default_factory=list)
    """Connections over a network that were looked at since the last update."""
    work: list[FlowWindow] = field(default_factory=list)
    """Windows of work requests and sockets that came since the last update."""
    orders: list[WorkOrder] = field(default_factory=list)
    """What is to be counted now: for whoever can reach the nodes."""
    links: list[LinkChange] = field(default_factory=list)
    kernel: list[KernelLogLine] = field(default_factory=list)
    finished: str = ""
    """Why the session is over; empty while it goes on."""


@dataclass(slots=True)
class Node:
    """What is known of one node: its newest look, and when it was heard. ``name`` is the host's."""

    name: str
    boot_id: str
    heard_ns: int
    """Time of the newest batch, by the session's clock."""
    interval_s: float = 1.0
    complete: bool = False
    samples: dict[ProcessKey, ProcessSample] = field(default_factory=dict)
    windows: Sequence[RankWindow] = ()
    lost: int = 0
    sequence: int = -1
    missed: int = 0
    """Batches that never came."""
    planes: tuple[PlaneState, ...] = ()
    overhead: Overhead | None = None
    silent: bool = False
    finished: str = ""

    @property
    def patience_ns(self) -> int:
        """How long it may say nothing."""
        return int(STALE_LOOKS * max(self.interval_s, SHORTEST_LOOK_S) * 1e9)


class DiagnosisSession:
    """Everything known of the jobs whose nodes send here, and what is said about them.

    ``feed`` takes batches as they come, ``judge`` says what stands. Times given are CLOCK_MONOTONIC of the judging machine in
    nanoseconds (of a recording: the recorded ones).
    """

    def __init__(self, diagnosis: LiveDiagnosis | None = None) -> None:
        self.diagnosis = diagnosis or LiveDiagnosis()
        self.nodes: dict[str, Node] = {}
        self.verdict: Verdict | None = None
        self.verdicts: list[Verdict] = []
        self.windows: list[RankWindow] = []
        self.network = self.diagnosis.network
        """What every node last said of its NICs."""
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

    # --- in ------------------------------------------------------------------------------------------------------------

    def feed(
        self, batch: NodeBatch, now_ns: int | None = None, *, source: str | None = None, wall_ns: int | None = None
    ) -> Node | None:
        """Take one batch; ``source`` names the node where host names are not unique.

        With ``wall_ns``, CLOCK_REALTIME here, batches that were long under way are told from fresh ones: their calls and changes
        count, what they saw is past. Returns the node, or ``None`` when there are too many.
        """
        name = source if source is not None else batch.host
        now_ns = batch.time_ns if now_ns is None else now_ns
        node = self.nodes.get(name)
        if node is None:
            if len(self.nodes) >= MAX_NODES:
                return None
            node = self.nodes[name] = Node(batch.host, batch.boot_id, now_ns)
        late = _is_late(batch, node, wall_ns)
        if node.silent and not late:
            node.silent = False
            self._note(f"{node.name} is heard again")
        node.name, node.boot_id, node.interval_s = batch.host, batch.boot_id, batch.interval_s
        node.complete, node.finished = batch.complete, batch.finished
        if not late:
            node.heard_ns = now_ns
        if batch.sequence > node.sequence + 1 and node.sequence >= 0:
            node.missed += batch.sequence - node.sequence - 1
        began_anew = node.sequence >= 0 and batch.sequence <= node.sequence
        gap = began_anew or (node.sequence >= 0 and batch.sequence > node.sequence + 1)
        node.sequence = batch.sequence
        self._take_calls(node, batch, began_anew=began_anew, gap=gap)
        node.planes = batch.planes or node.planes
        node.overhead = batch.overhead or node.overhead
        if batch.looked and not late:
            self._take_look(node, batch)
        self._pending.changes += batch.changes
        for text in batch.notes:
            self._note(text)
        if len(self._pending.work) < MAX_WORK:
            self._pending.work += batch.work
        if batch.network is not None:
            self.network.feed(batch.host, batch.network, batch.wall_ns)
            self._pending.nics += batch.network.nics
            self._pending.flows += batch.network.flows
            self._pending.links += batch.network.changes
            self._pending.kernel += batch.network.kernel
        self._ordered -= {window.order for window in batch.work}
        if batch.work:
            self.network.feed_work(batch.host, batch.work, batch.wall_ns)
        return node

    def _take_calls(self, node: Node, batch: NodeBatch, *, began_anew: bool, gap: bool) -> None:
        newly = batch.lost if began_anew else max(batch.lost - node.lost, 0)
        node.lost = batch.lost
        self.lost += newly
        self._pending.newly_lost += newly
        events = batch.events if batch.events is not None else _NO_EVENTS
        if gap:
            self._give_calls(batch.host)
        if gap and self.diagnosis.ledger.rows:
            # Nobody knows how many records were in what never came: none of this node's histories can be continued.
            self.diagnosis.add_calls(_NO_EVENTS, 1, batch.host)
        if len(events) and len(self._pending.events) < MAX_WAITING_EVENTS:
            self._pending.events.append(events)
        if len(events):
            waiting = self._calls.setdefault(batch.host, [])
            waiting.append(events)
            if newly or sum(map(len, waiting)) > MAX_WAITING_CALLS:
                self._give_calls(batch.host, newly)
        elif newly:
            self._give_calls(batch.host, newly)

    def _give_calls(self, host: str, lost: int = 0) -> None:
        """Hand a node's calls to the diagnosis: once a judgement, for its cost is by the batch more than by the record."""
        waiting = self._calls.pop(host, None)
        if waiting or lost:
            events = _of_known_pids(np.concatenate(waiting)) if waiting else _NO_EVENTS
            self.diagnosis.add_calls(events, lost, host)

    def _take_look(self, node: Node, batch: NodeBatch) -> None:
        offset = batch.clock_offset_ns or 0
        ahead = offset if abs(offset) > (batch.clock_error_ns or 0) else 0
        samples = {s.process.key: replace(s, wall_ns=s.wall_ns + ahead) if ahead else s for s in batch.samples}
        for key, sample in samples.items():
            if sample.run_state == "X":
                self._ended[key] = sample
        before = node.samples
        node.samples = samples
        node.windows = batch.windows
        if batch.complete:
            # It went while nobody looked (the agent was down): had it not been told, it would be missed by nobody.
            for key, sample in before.items():
                if key not in samples and sample.run_state != "X":
                    self._ended[key] = sample.ended(batch.time_ns, batch.wall_ns + ahead)

    def _note(self, text: str) -> None:
        if len(self._pending.notes) < MAX_NOTES:
            self._pending.notes.append(text)

    # --- out -----------------------------------------------------------------------------------------------------------

    def judge(self, now_ns: int) -> Update:
        """Look at what all nodes said last and say what stands."""
        update = self.take(now_ns)
        for host in list(self._calls):
            self._give_calls(host)
        self._find_silent(now_ns, update)
        heard = [node for node in self.nodes.values() if not node.silent]
        self._forget_ended_jobs(heard)
        samples = {key: sample for node in heard for key, sample in node.samples.items()} | self._ended
        self.diagnosis.silent = frozenset(
            (c.hash, c.rank)
            for node in self.nodes.values()
            if node.silent
            for s in node.samples.values()
            for c in s.communicators
        )
        self.diagnosis.slow.delays, self.diagnosis.slow.network = self.network.delays(), self.network
        self.diagnosis.complete_hosts = frozenset(node.name for node in heard if node.complete)
        countable = {node.name for node in heard if any(plane.name in ORDERED and plane.running for plane in node.planes)}
        self._answer(countable, now_ns, update)
        said = of_nodes(Known(network=self.network, sources=self.diagnosis.sources))
        if any(sample.run_state != "X" for sample in samples.values()):
            self.verdict = self.diagnosis.update(list(samples.values()))
            self.verdicts = list(self.diagnosis.verdicts)
            if self.verdicts:
                self.verdicts[0] = self.verdict
            self._name_silent(now_ns)
            self.verdicts = [add_network(said, verdict) for verdict in self.verdicts]
            self.verdict = self.verdicts[0] if self.verdicts else add_network(said, self.verdict)
            update.orders += self._ordering.orders(self.diagnosis.judged, countable, now_ns)
        self.windows = self._merge_windows(heard)
        update.windows = self.windows
        update.verdict, update.verdicts = self.verdict, self.verdicts
        accusing = {verdict.id: verdict for verdict in self.verdicts if verdict.verdict_class.accuses}
        update.told = [verdict for number, verdict in accusing.items() if number not in self._standing]
        self._standing = frozenset(accusing)
        update.recoveries = [Recovery(verdict, seconds) for verdict, seconds in self.diagnosis.closed]
        self.diagnosis.closed.clear()
        update.answers = [add_network(said, verdict) for verdict in self.diagnosis.answers]
        self.diagnosis.answers.clear()
        return update

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
    def samples(self) -> dict[ProcessKey, ProcessSample]:
        """The newest look at every process of nodes that are heard, of one that ended its last."""
        return {key: s for node in self.nodes.values() if not node.silent for key, s in node.samples.items()} | self._ended

    @property
    def roles(self) -> dict[int, str]:
        """What communicators are for, by hash, as far as it was inferred and equal hashes do not disagree."""
        found: dict[int, str] = {}
        for learned in self.diagnosis.namer.jobs:
            for group in learned.topology.groups:
                known = group.role not in (Role.UNSURE, Role.UNUSED)
                found[group.hash] = (
                    group.role.value if known and found.get(group.hash, group.role.value) == group.role.value else ""
                )
        return {number: role for number, role in found.items() if role}

    @property
    def layout(self) -> str:
        """How the largest job is divided (``TP 2 x PP 2 x …``); empty before that is known."""
        learned = self.diagnosis.namer.learned
        return learned.topology.layout.text() if learned is not None and learned.topology.layout.known else ""

    def planes(self) -> list[PlaneState]:
        """Planes over all nodes; of one that does not run everywhere the first reason is given, with the number of nodes."""
        by_name: dict[str, list[PlaneState]] = {}
        for node in self.nodes.values():
            for plane in node.planes:
                by_name.setdefault(plane.name, []).append(plane)
        return [_joined(found, len(self.nodes)) for found in by_name.values()]

    def overhead(self) -> Overhead | None:
        """What watching costs on the node where it costs most."""
        known = [node.overhead for node in self.nodes.values() if node.overhead is not None]
        return max(known, key=lambda o: o.own_share + (o.probe_share or 0.0), default=None)

    def _find_silent(self, now_ns: int, update: Update) -> None:
        for node in self.nodes.values():
            if not node.silent and now_ns - node.heard_ns > node.patience_ns:
                node.silent = True
                seconds = (now_ns - node.heard_ns) / 1e9
                why = f"its agent has ended ({node.finished})" if node.finished else f"it has said nothing for {seconds:.0f} s"
                update.notes.append(f"{node.name}: {why}: its ranks are not observed")
        for name in [name for name, node in self.nodes.items() if now_ns - node.heard_ns > FORGET_NS]:
            del self.nodes[name]

    def _name_silent(self, now_ns: int) -> None:
        """Whoever reads a verdict has to know which nodes it was reached without."""
        silent = [(node.name, (now_ns - node.heard_ns) / 1e9) for node in self.nodes.values() if node.silent]
        if not silent:
            return
        lines = [
            f"{name}: its agent has been silent for {seconds:.0f} s, its ranks are not observed" for name, seconds in silent[:4]
        ]
        if len(silent) > len(lines):
            lines.append(f"{len(silent) - len(lines)} more nodes are silent")
        told = [v for v in self.verdicts if v.verdict_class not in (VerdictClass.RUNNING, VerdictClass.IDLE)]
        more = {id(verdict): replace(verdict, unobserved=(*lines, *verdict.unobserved)) for verdict in told}
        self.verdicts = [more.get(id(verdict), verdict) for verdict in self.verdicts]
        self.verdict = self.verdicts[0] if self.verdicts else self.verdict

    def _forget_ended_jobs(self, heard: Sequence[Node]) -> None:
        """A process that ended is kept while a live one shares a communicator with it: it may be whom that one waits for."""
        if not self._ended:
            return
        live = [s for node in heard for key, s in node.samples.items() if s.run_state != "X"]
        hashes = {c.hash for sample in live for c in sample.communicators}
        for key, sample in list(self._ended.items()):
            if hashes.isdisjoint(c.hash for c in sample.communicators):
                del self._ended[key]

    def _merge_windows(self, heard: Sequence[Node]) -> list[RankWindow]:
        if len(heard) == 1:
            return list(heard[0].windows)
        found = [window for node in heard for window in node.windows]
        return sorted(found, key=lambda w: (w.rank is None, w.rank or 0, w.process.host, w.process.pid))


def _is_late(batch: NodeBatch, node: Node, wall_ns: int | None) -> bool:
    """Whether a batch lay in a spool for so long that what it saw is past."""
    if wall_ns is None or batch.clock_offset_ns is None:
        return False
    return wall_ns - batch.wall_ns - batch.clock_offset_ns > node.patience_ns


def _joined(found: Sequence[PlaneState], nodes: int) -> PlaneState:
    broken = [plane for plane in found if not plane.running]
    if not broken:
        return found[0]
    where = f" (on {len(broken)} of {nodes} nodes)" if nodes > 1 else ""
    return PlaneState(broken[0].name, len(broken) < len(found), broken[0].reason + where)


def _of_known_pids(events: NDArray[Any]) -> NDArray[Any]:
    """Records whose pid is one in the node's pid namespace: a process nobody watches yet comes with the number of its own."""
    foreign = (events["flags"] & Flag.UNKNOWN_PROCESS != 0) & (events["pid_namespace"] != 0)
    return events[~foreign] if foreign.any() else events
