"""What an engine does: sessions by job, judged at their times, shown to whoever watches."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.ease import NARROW
from ncclwatch.collect.look_times import next_time
from ncclwatch.engine.case import Known
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.patience import Patience
from ncclwatch.engine.session import Update
from ncclwatch.knowledge.match import Before
from ncclwatch.knowledge.session import InformedSession
from ncclwatch.messaging.hub import Hub
from ncclwatch.messaging.keys import Key, KnownKeys
from ncclwatch.messaging.transport import EngineTransport, HubMaker
from ncclwatch.remote.job_view import ViewWriter
from ncclwatch.slow_modes import SlowRule

MAX_JOBS = 1024
FORGET_JOB_S = 3600.0
MAX_HOSTS = 65536
"""Of a job, of which it is known which agent speaks for them."""
PHASE = 0.35
"""Judged is this part of an interval after the agents' samples, when what they saw has arrived."""
BUSY_SHARE = 0.4
"""Judging takes at most this share of an engine's time: the rest hears the agents."""


@dataclass(slots=True)
class Job:
    """One job: everything its agents said, and nothing of any other."""

    name: str
    session: InformedSession
    views: ViewWriter
    heard: float
    next_judge: float = 0.0
    behind_s: float = 0.0
    """By how much later than asked for it is judged: judging takes as long."""
    unheard_s: float = 0.0
    """For how long messages have been waiting to be heard."""
    lives: dict[str, str] = field(default_factory=dict)
    """Host → the life of the agent that was heard there last."""

    @property
    def late_s(self) -> float:
        """By how much what is said of it is behind what happens, for want of time."""
        return max(self.behind_s, self.unheard_s)


Shown = Callable[[Job, Update], None]


class EngineService:
    """One engine: ``step`` hears agents for a moment, and judges the jobs whose time has come.

    ``transport`` makes another than ZeroMQ at ``address``.
    """

    def __init__(
        self,
        address: str,
        *,
        keys: tuple[Key, KnownKeys] | None = None,
        interval_s: float = 1.0,
        patience: Callable[[], Patience] = Patience,
        asked: Callable[[], bool] = lambda: False,
        slow: SlowRule | None = None,
        transport: HubMaker | None = None,
    ) -> None:
        self._slow = slow or SlowRule()
        self.jobs: dict[str, Job] = {}
        self._patience = patience
        self._asked = asked
        self.hub: EngineTransport = transport(self._take) if transport else Hub(address, self._take, keys=keys)
        self.interval_s = interval_s
        self.before: Before | None = None
        """Who knows the past of a verdict's culprits: a history."""
        self.refused_jobs = 0
        self.judged = 0
        self.failures = 0

    def close(self) -> None:
        """Stop listening."""
        self.hub.close()

    def session(self) -> InformedSession:
        """A session as this engine's options want it."""
        session = InformedSession(LiveDiagnosis(Known(self._patience()), slow=self._slow.watch()))
        session.before = self.before
        return session

    def adopt(self, name: str, session: InformedSession) -> Job:
        """Judge a job of which a session may know something already."""
        job = self.jobs[name] = Job(name, session, ViewWriter(self.hub.engine), time.monotonic())
        return job

    def _take(self, name: str, life: str, batch: NodeBatch) -> None:
        job = self.jobs.get(name)
        if job is None:
            if len(self.jobs) >= MAX_JOBS:
                self.refused_jobs += 1
                return
            job = self.adopt(name, self.session())
        job.heard = time.monotonic()
        if job.lives.get(batch.host) != life:
            # The longest known goes first: of hosts that are gone nothing is ordered any more.
            job.lives.pop(batch.host, None)
            if len(job.lives) >= MAX_HOSTS:
                del job.lives[next(iter(job.lives))]
            job.lives[batch.host] = life
        try:
            job.session.feed(batch, time.monotonic_ns(), wall_ns=time.time_ns())
        except Exception as error:
            # What an agent says can be anything: a batch that breaks our reading must not end the other nodes' and jobs'.
            self._failed(f"a batch of {batch.host}", error)

    def _failed(self, what: str, error: Exception) -> None:
        if os.environ.get("NCCLWATCH_DEBUG") == "1":
            raise error
        self.failures += 1
        text = f"{what} could not be judged ({type(error).__name__}: {error}): run with NCCLWATCH_DEBUG=1 and report it"
        self.hub.tell(f"failed {type(error).__name__}", text)

    def step(self, show: Shown, *, until: float) -> None:
        """Hear until ``until`` (of ``time.monotonic``) at most, and judge what is due; whoever asks is answered at once."""
        now = time.monotonic()
        if self._asked():
            for job in self.jobs.values():
                job.session.ask()
                job.next_judge = 0.0
        for job in self.jobs.values():
            if job.session.answer_due(time.monotonic_ns()):
                job.next_judge = 0.0
        due = min((job.next_judge for job in self.jobs.values()), default=until)
        self.hub.poll(max(0.0, min(due, until, now + 0.5) - now))
        for job in list(self.jobs.values()):
            if time.monotonic() >= job.next_judge:
                self._judge(job, show)

    def _judge(self, job: Job, show: Shown) -> None:
        began, cpu = time.monotonic(), time.thread_time()
        if began - job.heard > FORGET_JOB_S:
            del self.jobs[job.name]
            return
        try:
            # Whoever waits to be heard is not silent: silence counts up to when everything had been heard.
            now_ns = time.monotonic_ns() - int(self.hub.unheard_s * 1e9)
            viewers = self.hub.viewers(job.name)
            # Who watches sees every look, and what nobody has looked at is judged.
            update = job.session.judge(now_ns) if viewers or job.session.is_due(now_ns) else job.session.take(now_ns)
            settled = frozenset() if viewers else job.session.settled()
            searching = job.session.searching()
        except Exception as error:
            self._failed(f"job {job.name}", error)
            job.next_judge = self._judgement_after(began, self.interval_s)
            return
        for order in update.orders:
            self.hub.order(job.lives.get(order.host, ""), order)
        for host, life in job.lives.items():
            self.hub.ease(life, well=host in settled, narrow=host in searching)
        interval, job.unheard_s = self.interval_s + job.behind_s, self.hub.unheard_s
        if viewers:
            payload = job.views.encode(job.session, update, viewers, interval_s=interval, behind_s=job.late_s)
            self.hub.show(job.name, payload)
        show(job, update)
        cost = time.thread_time() - cpu
        # Hearing the agents comes first: a job that takes long to judge is judged less often, and that is said.
        least_s = cost / BUSY_SHARE * max(1, len(self.jobs))
        job.behind_s = max(0.0, least_s - self.interval_s)
        narrow = searching and least_s * NARROW <= self.interval_s
        job.next_judge = self._judgement_after(began + job.behind_s, self.interval_s / (NARROW if narrow else 1))
        self.judged += 1

    @staticmethod
    def _judgement_after(last: float, interval_s: float) -> float:
        """The first time to judge from half an interval after ``last`` (of ``time.monotonic``) on."""
        earliest = last + interval_s / 2
        wall = time.time() + earliest - time.monotonic()
        return earliest + next_time(wall, interval_s, after_s=PHASE * interval_s) - wall
