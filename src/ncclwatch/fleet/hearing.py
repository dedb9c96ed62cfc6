"""A hearing worker without its network: takes batches, checks and decodes them, and reduces them to messages for judges."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ncclwatch.fleet.directory import Claim, Directory
from ncclwatch.fleet.reduced import NODES_A_BUNDLE, BundleWriter, Heard
from ncclwatch.fleet.split import NodeSplitter
from ncclwatch.messaging.bus_batch import Allowance, allowance
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.subjects import token_of
from ncclwatch.messaging.values import Shared

MAX_NODES = 65536
LIVES_OF_A_NODE = 8
"""Agents of a node, one after the other, of which it is known what their batches build on: what one left its successor sends."""
ASK_AGAIN_NS = 10**9
MAX_WAITING_EVENTS = 200_000
"""Calls of a node between two messages; a job that is sent on no more is not kept."""


@dataclass(slots=True)
class HearingCounts:
    """What was heard since the beginning: ``windows`` and ``looks`` by rank, ``missed`` batches that never came; ``flooded`` of
    nodes that say too much.
    """

    batches: int = 0
    nbytes: int = 0
    windows: int = 0
    looks: int = 0
    calls: int = 0
    duplicates: int = 0
    bad: int = 0
    missed: int = 0
    keys_asked: int = 0
    flooded: int = 0
    refused_nodes: int = 0
    messages: int = 0
    sent_bytes: int = 0

    def as_dict(self) -> dict[str, int]:
        """All of them by name."""
        return asdict(self)

    def copy(self) -> HearingCounts:
        """As they are now."""
        return replace(self)


@dataclass(frozen=True, slots=True)
class WorkerState:
    """How a worker stands at ``at_s`` (seconds since the epoch): how many parts, nodes and jobs it hears; how many batches are
    ``waiting`` to be heard, and how long ago the oldest of them was stored (``lag_s``); messages for judges that are ``unsent``.
    """

    at_s: float
    connected: bool
    parts: int
    nodes: int
    jobs: int
    waiting: int
    lag_s: float
    unsent: int
    counts: HearingCounts


@dataclass(slots=True)
class _Life:
    reader: BatchReader
    upto: int = -1
    refused: int = 0
    """Batches after ``upto`` that came, and were more than is heard of a node."""
    first: int | None = None
    """The first batch that no message holds yet."""


@dataclass(slots=True)
class _Node:
    splitter: NodeSplitter
    part: str
    """As part of which it was heard last."""
    allowance: Allowance
    lives: OrderedDict[str, _Life] = field(default_factory=OrderedDict)
    asked_ns: int = 0


@dataclass(slots=True)
class _Bundle:
    writer: BundleWriter
    nodes: set[tuple[str, str]] = field(default_factory=set)
    waiting: OrderedDict[tuple[str, str, str], Heard] = field(default_factory=OrderedDict)


@dataclass(slots=True)
class _Job:
    bundles: list[_Bundle] = field(default_factory=list)
    of_node: dict[tuple[str, str], _Bundle] = field(default_factory=dict)


class Hearing:
    """Everything one worker knows. ``claims`` and ``asks`` (nodes that have to send a key batch) are taken by the caller.

    ``max_bytes``: what a message may hold; ``interval_s``: how often messages are taken.
    """

    def __init__(self, max_bytes: int = 900_000, interval_s: float = 1.0) -> None:
        self.counts = HearingCounts()
        self.directory = Directory()
        self.claims: list[Claim] = []
        self.asks: list[tuple[str, str]] = []
        self._max_bytes, self._interval_s = max_bytes, interval_s
        self._shared = Shared()
        self._nodes: dict[tuple[str, str], _Node] = {}
        self._jobs: dict[str, _Job] = {}
        self._bundles = 0

    def __len__(self) -> int:
        return len(self._nodes)

    def take(
        self, token: str, node: str, life: str, n: int, data: bytes, now_ns: int, of_part: str = "", stored_ns: int = 0
    ) -> None:
        """Take batch ``n`` of a life of a node's agent; raises ``FormatError`` for one that makes no sense. ``of_part``: as which
        part of the nodes it was heard; ``stored_ns``: when the stream had it, by the server's clock (0: now).
        """
        self.counts.nbytes += len(data)
        stored_ns = stored_ns or now_ns
        known = self._node(token, node, of_part, stored_ns)
        if known is None:
            self.counts.refused_nodes += 1
            return
        speaker = known.lives.get(life)
        if not known.allowance.take(stored_ns):
            self.counts.flooded += 1
            if speaker is not None:
                speaker.refused += 1
            return
        if speaker is None:
            speaker = known.lives[life] = _Life(BatchReader(self._shared))
            while len(known.lives) > LIVES_OF_A_NODE:
                known.lives.popitem(last=False)
        if n <= speaker.upto:
            self.counts.duplicates += 1
            return
        self.counts.missed += max(0, n - speaker.upto - 1 - speaker.refused) if speaker.upto >= 0 else 0
        speaker.upto, speaker.refused = n, 0
        try:
            decoded = speaker.reader.decode(data)
            batch = decoded.batch
            if token_of(batch.host) != node:
                raise FormatError("a batch names another host than its subject")
        except FormatError:
            self.counts.bad += 1
            raise
        self._count(batch)
        if decoded.needs_key and now_ns - known.asked_ns > ASK_AGAIN_NS:
            known.asked_ns = now_ns
            self.counts.keys_asked += 1
            self.asks.append((token, node))
        parts, claims = known.splitter.split(batch, self.directory, now_ns)
        self.claims += claims
        first, speaker.first = n if speaker.first is None else speaker.first, None if parts else (speaker.first or n)
        for job, part in parts.items():
            waiting = self._bundle(job, token, node).waiting
            before = waiting.get((token, node, life))
            if before is None:
                waiting[token, node, life] = Heard(token, node, life, first, n, part)
            else:
                before.add(n, part)

    def _count(self, batch: Any) -> None:
        self.counts.batches += 1
        self.counts.windows += getattr(batch.windows, "rows", None) or 0
        self.counts.looks += len(batch.samples)
        self.counts.calls += 0 if batch.events is None else len(batch.events)

    def _node(self, token: str, node: str, part: str, stored_ns: int) -> _Node | None:
        known = self._nodes.get((token, node))
        if known is None:
            if len(self._nodes) >= MAX_NODES:
                return None
            known = self._nodes[token, node] = _Node(NodeSplitter(token), part, allowance(stored_ns))
        known.part = part
        return known

    def _bundle(self, job: str, token: str, node: str) -> _Bundle:
        whole = self._jobs.setdefault(job, _Job())
        bundle = whole.of_node.get((token, node))
        if bundle is None:
            bundle = next((one for one in whole.bundles if len(one.nodes) < NODES_A_BUNDLE), None)
            if bundle is None:
                bundle = _Bundle(BundleWriter(self._bundles, self._interval_s))
                self._bundles += 1
                whole.bundles.append(bundle)
            bundle.nodes.add((token, node))
            whole.of_node[token, node] = bundle
        return bundle

    def flush(self) -> list[tuple[str, bytes]]:
        """Messages of what waits, by job, in their order. Of a job that turned out to be another's part nothing is sent under its
        old name.
        """
        for old, new in self.directory.renamed:
            gone = self._jobs.pop(old, None)
            for bundle in gone.bundles if gone is not None else ():
                for (token, node, _), heard in bundle.waiting.items():
                    self._bundle(new, token, node).waiting[token, node, heard.life] = heard
        self.directory.renamed.clear()
        found = []
        for name, job in self._jobs.items():
            for bundle in job.bundles:
                found += [(name, data) for data in self._encoded(bundle, list(bundle.waiting.values()))]
                bundle.waiting.clear()
        self.counts.messages += len(found)
        self.counts.sent_bytes += sum(len(data) for _, data in found)
        return found

    def _encoded(self, bundle: _Bundle, heard: list[Heard]) -> list[bytes]:
        if not heard:
            return []
        data = bundle.writer.encode(heard)
        if len(data) <= self._max_bytes:
            return [data]
        # It was not sent: what comes next must not build on it.
        bundle.writer.request_key()
        if len(heard) == 1:
            self.counts.bad += 1
            return []
        half = len(heard) // 2
        return self._encoded(bundle, heard[:half]) + self._encoded(bundle, heard[half:])

    def request_keys(self, job: str) -> None:
        """Let the next messages for a job build on none before them."""
        for bundle in self._jobs[job].bundles if job in self._jobs else ():
            bundle.writer.request_key()

    @property
    def jobs(self) -> list[str]:
        """Jobs of the nodes that are heard."""
        return list(self._jobs)

    def forget(self, part: str) -> None:
        """Let go of the nodes of a part: somebody else hears them now."""
        gone = {key for key, node in self._nodes.items() if node.part == part}
        for key in gone:
            del self._nodes[key]
        for job in list(self._jobs):
            whole = self._jobs[job]
            for bundle in whole.bundles:
                bundle.nodes -= gone
                for waiting in [waiting for waiting in bundle.waiting if waiting[:2] in gone]:
                    del bundle.waiting[waiting]
            whole.bundles = [bundle for bundle in whole.bundles if bundle.nodes]
            whole.of_node = {key: bundle for key, bundle in whole.of_node.items() if key not in gone}
            if not whole.bundles:
                del self._jobs[job]
