"""What a judge of a fleet does: takes its share of the jobs, judges them as an engine would, and writes down what it says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nats.errors import Error as NatsError

from ncclwatch.cli.engine_service import EngineService, Job
from ncclwatch.cli.fleet_log import JudgeLog
from ncclwatch.cli.output import plain
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.engine.session import Update
from ncclwatch.errors import NcclwatchError
from ncclwatch.fleet import directory, streams
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.directory import Directory
from ncclwatch.fleet.follow import Follower
from ncclwatch.fleet.judge_hub import JudgeHub
from ncclwatch.fleet.lease import TTL_S, Lease
from ncclwatch.fleet.replay import BACK_S, Replay
from ncclwatch.fleet.share import Share
from ncclwatch.fleet.telling import Teller
from ncclwatch.fleet.verdict_log import SupersededError, VerdictLog
from ncclwatch.messaging import subjects
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.transport import Take
from ncclwatch.model.verdict import Verdict

CATCH_UP_S = 5.0
"""For how long a judge that takes over hears the past before it says what stands."""
SWEEP_S = 60.0
PER_STEP = 512


@dataclass(slots=True)
class _Held:
    """A job that is judged here. ``replay`` is there until its past was heard."""

    lease: Lease
    teller: Teller
    replay: Replay | None
    since: float


Shown = Callable[[Job, Update, Sequence[Verdict]], None]
"""Shown a judgement, and the verdicts that it added to the log."""


class Judging:
    """One judge. ``service`` makes the engine that judges, with a transport of ours."""

    def __init__(
        self,
        connection: Connection,
        name: str,
        service: Callable[[Callable[[Take], JudgeHub]], EngineService],
        log: JudgeLog,
        *,
        ttl_s: float = TTL_S,
    ) -> None:
        self.name = name
        self._connection, self._log = connection, log
        self._held: dict[str, _Held] = {}
        self._directory = Directory()
        names = (subjects.BATCHES, subjects.REDUCED, subjects.VERDICTS, streams.JOBS)
        connection.call(streams.ensure(connection.jetstream, *names), 30.0)
        self._bell = threading.Event()
        self._claims = Follower(connection, streams.JOBS, streams.ALL_CLAIMS, self._bell)
        self.service = service(self._transport)
        self._hub: JudgeHub = self.service.hub  # type: ignore[assignment]
        self._share = Share(connection, "judge", name, ttl_s=ttl_s)
        self._next_sweep = 0.0

    def _transport(self, take: Take) -> JudgeHub:
        def take_at(job: str, life: str, batch: NodeBatch, at_ns: int) -> None:
            held = self._held.get(job)
            if held is None:
                return
            if held.replay is None:
                take(job, life, batch)
                return
            try:
                held.replay.take(life, batch, at_ns)
            except Exception as error:
                # As of any batch: what breaks our reading must not end the others.
                self._hub.tell(f"replay {job}", f"a batch of {batch.host} cannot be judged ({type(error).__name__}: {error})")

        return JudgeHub(self._connection, take_at, self._holds)

    def _holds(self, job: str) -> bool:
        held = self._held.get(job)
        return held is not None and held.lease.holds

    def step(self, show: Shown, *, until: float) -> None:
        """Take and let go of jobs, hear, and judge what is due."""
        self._share.beat()
        self._find_jobs()
        mine = self._share.mine
        for job in [job for job, held in self._held.items() if mine.get(job) is not held.lease]:
            self._drop(job, "its lease is another's, or has run out")
        for job, lease in mine.items():
            if job not in self._held and job not in self._share.leaving:
                self._begin(job, lease)
        for job, held in list(self._held.items()):
            if held.replay is not None and (self._hub.caught_up(job) or time.monotonic() - held.since > CATCH_UP_S):
                # As known so far; what is heard from here on is heard as of now.
                self.service.adopt(job, held.replay.session).lives |= held.replay.lives
                held.replay = None
            elif held.replay is None and job not in self.service.jobs:
                self._drop(job, "nothing was heard of it for long", release=True)
        self.service.step(lambda job, update: self._judged(job, update, show), until=min(until, time.monotonic() + TTL_S / 10))

    def _find_jobs(self) -> None:
        now = time.time_ns()
        while found := self._claims.take(PER_STEP):
            for message in found:
                try:
                    self._directory.take(directory.decode(message.data), now)
                except FormatError as error:
                    self._hub.tell("claim", f"a claim makes no sense: {error.message}")
        for job, into in self._directory.renamed:
            held = self._held.get(job)
            if held is not None:
                if held.lease.holds:
                    self._try(held.teller.log.join(into))
                self._drop(job, f"it is part of job {into}", release=True)
        self._directory.renamed.clear()
        if time.monotonic() >= self._next_sweep:
            self._next_sweep = time.monotonic() + SWEEP_S
            self._directory.forget(now)
        self._share.wanted = list(self._directory.jobs)

    def _begin(self, job: str, lease: Lease) -> None:
        log = VerdictLog(self._connection.jetstream, job, self.name)
        try:
            record = self._connection.call(log.take_over(lease.epoch))
        except SupersededError:
            self._share.release(job)
            return
        except (NatsError, NcclwatchError, OSError) as error:
            self._hub.tell(f"begin {job}", f"job {job} cannot be judged yet: {error}")
            return
        teller = Teller(self._connection, log, shown)
        replay = Replay(self.service.session())
        self._held[job] = _Held(lease, teller, replay, time.monotonic())
        self._hub.add(job, BACK_S)
        self._log.took(record)

    def _drop(self, job: str, why: str, *, release: bool = False) -> None:
        del self._held[job]
        self._hub.remove(job)
        self.service.jobs.pop(job, None)
        if release:
            self._share.release(job)
        self._log.lost(job, why)

    def _judged(self, job: Job, update: Update, show: Shown) -> None:
        held = self._held.get(job.name)
        if held is None or not held.lease.holds:
            return
        try:
            told = held.teller.update(job.session, update, unheard=self._hub.is_behind(job.name))
        except SupersededError as error:
            self._drop(job.name, error.message, release=True)
            return
        # What the log had before is not said again, and nothing that it does not have is.
        update.told = told.verdicts
        if not any(record.type == "recovery" for record in told.records):
            update.recoveries = []
        show(job, update, told.verdicts)
        for record in told.records:
            if record.type == "recovery":
                self._log.recovered(job, record)

    def _try(self, work: Any) -> None:
        try:
            self._connection.call(work)
        except (NatsError, NcclwatchError, OSError) as error:
            self._hub.tell("log", f"a record cannot be appended: {error}")

    def close(self) -> None:
        """Let others judge."""
        self._share.close()
        self._claims.close()
        self.service.close()


def shown(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON, as ``--json`` and ``--on-verdict`` give it."""
    found: dict[str, Any] = plain(verdict.to_json())
    return found
