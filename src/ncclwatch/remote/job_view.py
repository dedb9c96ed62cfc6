"""What a job looks like, as an engine sends it to whoever watches: the newest update of its session, as bytes and back."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.engine.live import Recovery
from ncclwatch.engine.session import DiagnosisSession, Update
from ncclwatch.knowledge.session import InformedSession
from ncclwatch.messaging.limits import UNDECODABLE, FormatError
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.looks import ProcessLook
from ncclwatch.model.verdict import Verdict
from ncclwatch.remote.iterations import Timed, recent_iterations

MAX_SAMPLES = 512
"""Processes up to which a view carries what their memory showed, for the pages that show one rank."""
MAX_CHANGES = 64


class NodeLine(msgspec.Struct):
    """One node of a job: whether it is heard, and what it costs."""

    name: str
    processes: int
    silent: bool
    heard_s: float
    missed: int = 0


class JobView(msgspec.Struct, omit_defaults=True):
    """Everything a surface shows of one update."""

    engine: str
    batch: bytes
    """A ``NodeBatch`` of all nodes together: windows, samples, changes, notes, planes."""
    verdicts: list[Verdict] = []
    told: list[int] = []
    """Positions in ``verdicts`` of those that are new."""
    recoveries: list[tuple[Verdict, float]] = []
    nodes: list[NodeLine] = []
    newly_lost: int = 0
    interval_s: float = 1.0
    behind_s: float = 0.0
    """How much later than asked for the engine judges: it is overloaded when this is not near 0."""
    iterations: list[Timed] = []
    """The newest iterations: (end in seconds since the epoch, seconds)."""
    roles: dict[int, str] = {}
    """What communicators are for, by hash, and how the job is divided, where that was inferred."""
    layout: str = ""
    stacks: list[ProcessLook] = []
    """Where those whom verdicts named were seen to stand, the newest first."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(JobView)


class ViewWriter:
    """Encodes the updates of one job for all who watch it."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._writer = BatchWriter(calls="none", key_every=60)
        self._sequence = 0
        self._watching: frozenset[bytes] = frozenset()

    def encode(
        self, session: DiagnosisSession, update: Update, viewers: Sequence[bytes], *, interval_s: float, behind_s: float
    ) -> bytes:
        """The view as bytes; somebody new gets a batch that builds on nothing."""
        watching = frozenset(viewers)
        if watching - self._watching:
            self._writer.request_key()
        self._watching = watching
        samples = session.samples
        batch = NodeBatch(
            host="", boot_id="", sequence=self._sequence, time_ns=update.now_ns, wall_ns=time.time_ns(), interval_s=interval_s,
            looked=True, windows=update.windows or (), lost=update.lost, changes=tuple(update.changes[:MAX_CHANGES]),
            notes=tuple(update.notes), planes=tuple(session.planes), overhead=session.overhead(),
            samples=tuple(samples.values()) if len(samples) <= MAX_SAMPLES else (),
        )  # fmt: skip
        self._sequence += 1
        positions = {id(verdict): place for place, verdict in enumerate(update.verdicts)}
        now_ns = update.now_ns
        nodes = [
            NodeLine(node.name, len(node.samples), node.silent, (now_ns - node.heard_ns) / 1e9, node.missed)
            for node in session.nodes.values()
        ]
        view = JobView(
            engine=self._engine,
            batch=self._writer.encode(batch),
            verdicts=list(update.verdicts),
            told=[positions[id(verdict)] for verdict in update.told if id(verdict) in positions],
            recoveries=list(update.recoveries),
            nodes=nodes,
            newly_lost=update.newly_lost,
            interval_s=interval_s,
            behind_s=behind_s,
            iterations=recent_iterations(session.diagnosis),
            roles=session.roles,
            layout=session.layout,
            stacks=session.seen_stacks if isinstance(session, InformedSession) else [],
        )
        return _encoder.encode(view)


class ViewReader:
    """Decodes views; ``None`` for one that builds on what was not received."""

    def __init__(self) -> None:
        self._reader = BatchReader()

    def decode(self, data: bytes) -> tuple[JobView, NodeBatch, Update] | None:
        """The next view; raises ``FormatError``."""
        try:
            view = _decoder.decode(data)
        except UNDECODABLE as error:
            raise FormatError(f"this is no view of a job: {error}") from error
        decoded = self._reader.decode(view.batch)
        if decoded.needs_key:
            return None
        batch = decoded.batch
        update = Update(now_ns=time.monotonic_ns(), changes=list(batch.changes), windows=batch.windows)
        update.verdicts = view.verdicts
        update.told = [view.verdicts[place] for place in view.told if 0 <= place < len(view.verdicts)]
        update.recoveries = [Recovery(*recovery) for recovery in view.recoveries]
        update.lost, update.newly_lost, update.notes = batch.lost, view.newly_lost, list(batch.notes)
        return view, batch, update
