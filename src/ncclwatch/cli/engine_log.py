"""What an engine writes: a line when something changes in a job, and a short summary once a minute."""

from __future__ import annotations

import time
from collections import Counter
from datetime import datetime

from ncclwatch.cli.engine_service import EngineService, Job
from ncclwatch.cli.live_log import summary
from ncclwatch.cli.output import emit, emit_json, flush
from ncclwatch.engine.session import Update
from ncclwatch.text import Style, clean, duration, size
from ncclwatch.view.verdict_text import verdict_lines

SUMMARY_EVERY_S = 60.0
BEHIND_S = 1.0
"""Later than this behind is said."""


class EngineLog:
    """Lines for people, or with ``as_json`` one object a line (types as of ``attach --json``, with ``job``)."""

    def __init__(self, *, as_json: bool, traffic_every_s: float = 60.0) -> None:
        self._json = as_json
        self._traffic_every_s = traffic_every_s
        self._next: dict[str, float] = {}
        self._next_traffic = time.monotonic() + traffic_every_s
        self._before = (0, 0, time.monotonic())
        self._behind: set[str] = set()

    def listening(self, service: EngineService, *, secured: bool, known: int, bus: bool = False) -> None:
        """It listens, or with ``bus`` reads the stream of a NATS server."""
        address = service.hub.address
        if bus:
            self._say(
                "listening", f"hearing agents through NATS server {address}", address=address, secured=address.startswith("tls")
            )
            return
        how = f"CURVE, {known} known key{'s' if known != 1 else ''}" if secured else "no keys: loopback only"
        self._say("listening", f"listening at {address} ({how})", address=address, secured=secured)

    def update(self, job: Job, update: Update) -> None:
        """What one update of a job brought."""
        counted = Counter((change.host, str(change.change)) for change in update.changes)
        for (host, what), number in counted.items():
            plural = "es" if number > 1 else ""
            self._say("process", f"{host}: {number} process{plural} {what}", job=job, host=host, change=what, number=number)
        for text in update.notes:
            self._say("note", clean(text, 300), job=job, text=text)
        if update.newly_lost:
            lost = update.newly_lost
            self._say("loss", f"{lost} call records lost: rates and groups of this moment are too low", job=job, lost=lost)
        for recovery in update.recoveries:
            text = f"RECOVERED: NCCL moves again after {duration(recovery.duration_s)}; it was: {recovery.verdict.summary}"
            self._say("recovery", clean(text, 400), job=job, id=recovery.verdict.id, duration_s=recovery.duration_s)
        told = [("verdict", "", verdict) for verdict in update.told]
        for kind, before, verdict in (*told, *(("answer", "asked: ", verdict) for verdict in update.answers)):
            first, *rest = verdict_lines(verdict, Style())
            self._say(kind, before + first, job=job, verdict=verdict.to_json())
            if not self._json:
                for line in rest:
                    emit(f"         {line}")
        self._tell_behind(job)
        if update.windows and time.monotonic() >= self._next.get(job.name, 0.0):
            self._next[job.name] = time.monotonic() + SUMMARY_EVERY_S
            nodes = job.session.nodes.values()
            silent = sum(node.silent for node in nodes)
            where = f"{len(nodes)} node{'s' if len(nodes) != 1 else ''}" + (f" ({silent} silent)" if silent else "")
            self._say("summary", f"{where}, {summary(update.windows)}", job=job, nodes=len(nodes), ranks=len(update.windows))
        flush()

    def _tell_behind(self, job: Job) -> None:
        late = job.late_s > BEHIND_S
        if late and job.name not in self._behind:
            what = f"it judges {job.behind_s:.1f} s late"
            if job.unheard_s > job.behind_s:
                what = f"for {job.unheard_s:.1f} s agents have sent more than it can hear"
            text = f"this engine is overloaded: {what}; run another one for part of the jobs"
            self._say("overload", text, job=job, behind_s=round(job.late_s, 1))
        elif not late and job.name in self._behind:
            self._say("overload", "this engine keeps up again", job=job, behind_s=0.0)
        (self._behind.add if late else self._behind.discard)(job.name)

    def traffic(self, service: EngineService) -> None:
        """What was turned away, and once a minute what came in."""
        for text in service.hub.take_news():
            self._say("peer", clean(text, 300), text=text)
        now = time.monotonic()
        if now >= self._next_traffic:
            self._next_traffic = now + self._traffic_every_s
            counts = service.hub.counts
            batches, nbytes, then = self._before
            seconds = max(now - then, 1e-3)
            self._before = (counts.batches, counts.nbytes, now)
            refused = counts.refused_keys + counts.failed_handshakes + counts.refused_peers
            text = (
                f"{service.hub.npeers} peers, {(counts.batches - batches) / seconds:.0f} batches/s, "
                f"{size((counts.nbytes - nbytes) / seconds)}/s; refused so far: {refused} peers, {counts.bad} messages"
                f"{f', {counts.flooded} of a flood' if counts.flooded else ''}"
            )
            self._say(
                "traffic",
                text,
                peers=service.hub.npeers,
                batches=counts.batches,
                nbytes=counts.nbytes,
                bad=counts.bad,
                refused=refused,
                duplicates=counts.duplicates,
                flooded=counts.flooded,
                missed=counts.missed,
            )
        flush()

    def end(self, reason: str) -> None:
        """The engine ends."""
        self._say("end", f"end: {reason}", reason=reason)
        flush()

    def _say(self, kind: str, text: str, /, *, job: Job | None = None, **fields: object) -> None:
        if self._json:
            emit_json({"type": kind, "time": round(time.time(), 3), "job": job.name if job else None, **fields}, indent=None)
            return
        name = f"[{job.name}] " if job is not None and job.name != "default" else ""
        emit(f"{datetime.now():%H:%M:%S} {name}{text}")
