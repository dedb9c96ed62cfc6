"""What hearing workers and judges of a fleet write, beside what an engine does."""

from __future__ import annotations

import time

from ncclwatch.cli.engine_log import EngineLog
from ncclwatch.cli.engine_service import Job
from ncclwatch.cli.output import flush
from ncclwatch.fleet.hearing import HearingCounts
from ncclwatch.fleet.verdict_log import Record
from ncclwatch.fleet.worker import Worker
from ncclwatch.text import clean, duration, size


class JudgeLog(EngineLog):
    """Lines of a judge, for people or with ``as_json`` as objects."""

    def begun(self, address: str, name: str) -> None:
        """It looks for jobs."""
        self._say("listening", f"judge {name} looks for jobs at {address}", address=address, judge=name)

    def took(self, record: Record) -> None:
        """A job is judged here from now on."""
        stands = f"; what stands: {clean(str(record.verdict['summary']), 300)}" if record.verdict is not None else ""
        self._say("takeover", f"judges job {record.job} (epoch {record.epoch}){stands}", name=record.job, epoch=record.epoch)

    def lost(self, job: str, why: str) -> None:
        """A job is judged here no longer."""
        self._say("handover", f"no longer judges job {job}: {why}", name=job, reason=why)

    def recovered(self, job: Job, record: Record) -> None:
        """What stood is over."""
        said = clean(str(record.verdict["summary"]), 300) if record.verdict is not None else ""
        text = f"RECOVERED: NCCL moves again after {duration(record.duration_s or 0.0)}; it was: {said}"
        self._say("recovery", text, job=job, id=record.id, duration_s=record.duration_s)

    def _tell_behind(self, job: Job) -> None:
        # That a worker is silent is no overload of the judge.
        unheard, job.unheard_s = job.unheard_s, 0.0
        super()._tell_behind(job)
        job.unheard_s = unheard


class HearLog(EngineLog):
    """Lines of a hearing worker."""

    def __init__(self, *, as_json: bool, traffic_every_s: float) -> None:
        super().__init__(as_json=as_json, traffic_every_s=traffic_every_s)
        self._every_s, self._next_s = traffic_every_s, time.monotonic() + traffic_every_s
        self._last, self._then = HearingCounts(), time.monotonic()
        self._parts: list[str] | None = None

    def begun(self, address: str, name: str) -> None:
        """It looks for its share."""
        self._say("listening", f"worker {name} hears batches at {address}", address=address, worker=name)

    def worker(self, worker: Worker) -> None:
        """What is new with a worker, and once a minute what it heard."""
        if worker.parts != self._parts:
            self._parts = worker.parts
            self._say("share", f"hears {len(self._parts)} parts of the nodes", parts=self._parts)
        for text in worker.take_news():
            self._say("peer", clean(text, 300), text=text)
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + self._every_s
            counts, last, seconds = worker.hearing.counts, self._last, max(now - self._then, 1e-3)
            self._last, self._then = counts.copy(), now
            nodes, jobs = len(worker.hearing), len(worker.hearing.jobs)
            text = (
                f"{nodes} nodes of {jobs} jobs, {(counts.batches - last.batches) / seconds:.0f} batches/s, "
                f"{(counts.windows - last.windows) / seconds:.0f} windows/s, "
                f"in {size((counts.nbytes - last.nbytes) / seconds)}/s, "
                f"out {size((counts.sent_bytes - last.sent_bytes) / seconds)}/s; so far {counts.bad} bad, {counts.missed} missed"
            )
            self._say("traffic", text, nodes=nodes, jobs=jobs, counts=counts.as_dict())
        flush()
