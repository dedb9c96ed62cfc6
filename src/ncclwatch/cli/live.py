"""The live session behind ``attach``: the collector of this node and a judging session, in one process.

It knows nothing of terminals: ``step`` returns an ``Update`` for whoever shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ncclwatch.collect.batch import NodeBatch, Overhead, PlaneState
from ncclwatch.collect.node import NodeCollector
from ncclwatch.collect.ordering import STANDING_BUDGET, OrderDesk
from ncclwatch.collect.paths import PathProbes
from ncclwatch.collect.sampling import Sampling
from ncclwatch.collect.watched import Problem
from ncclwatch.collect.windows import RankWindow
from ncclwatch.engine.case import Known
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.patience import Patience
from ncclwatch.engine.session import Update
from ncclwatch.knowledge.session import InformedSession
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.model.verdict import Verdict
from ncclwatch.slow_modes import SlowRule
from ncclwatch.stopping import Stop
from ncclwatch.wire.governor import DEFAULT_BUDGET, Mode


class Session(Protocol):
    """What a surface may ask of a session, here or on the other side of a network."""

    @property
    def infos(self) -> Sequence[ProcessInfo]:
        """The processes that are watched."""

    @property
    def problems(self) -> Sequence[Problem]:
        """What was asked for and could not be watched."""

    @property
    def planes(self) -> Sequence[PlaneState]:
        """Which planes see the job, and why the others do not."""

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that stands, of the worst job."""

    @property
    def verdicts(self) -> Sequence[Verdict]:
        """One verdict for each job, worst first."""

    @property
    def windows(self) -> Sequence[RankWindow]:
        """The newest window of every process."""

    @property
    def samples(self) -> Mapping[ProcessKey, ProcessSample]:
        """The newest sample of every process."""

    @property
    def lost(self) -> int:
        """Call records lost since the beginning."""

    def overhead(self) -> Overhead | None:
        """What watching costs, over the last seconds."""


class Steps(Session, Protocol):
    """A session that can be run."""

    @property
    def stop(self) -> Stop:
        """Set it to end the session."""

    def step(self, *, until: float | None = None) -> Update:
        """Wait for a moment and say what came."""


class LiveSession(InformedSession):
    """Watches processes until they end, the duration is over, or ``stop`` is set."""

    def __init__(
        self,
        *,
        every: bool,
        interval_s: float = 1.0,
        stop: Stop | None = None,
        patience: Patience | None = None,
        sampling: Sampling | None = None,
        asked: Callable[[], bool] | None = None,
        slow: SlowRule | None = None,
        wire: tuple[Mode, float] = (Mode.BURSTS, DEFAULT_BUDGET),
        order_budget: float = STANDING_BUDGET,
        paths: PathProbes | None = None,
        tell: Callable[[str], None] = lambda _: None,
        widest_s: float = 0.0,
        stacks: bool = True,
        probe_files: Sequence[Path] = (),
    ) -> None:
        # By the wall clock, so that recordings of several nodes hold samples of the same moments.
        self.collector = NodeCollector(
            every=every,
            interval_s=interval_s,
            stop=stop,
            sampling=sampling,
            common_ns=time.time_ns,
            wire=wire,
            paths=paths,
            tell=tell,
            widest_s=widest_s,
            stacks=stacks,
            probe_files=probe_files,
        )
        self._next_ease = 0.0
        super().__init__(LiveDiagnosis(Known(patience or Patience()), slow=(slow or SlowRule()).watch()))
        self._desk = OrderDesk(self.collector, wire[1] if wire[0] is not Mode.STATE else 0.0, order_budget)
        self._asked = asked
        self.taps: list[Callable[[NodeBatch], None]] = []
        """Who else takes every batch: a recording."""

    # --- beginning, steps, end -----------------------------------------------------------------------------------------

    def start(self, pids: Sequence[int], *, calls: bool = True) -> None:
        """Open every process, read each once, and load the probes. Raises when no process at all can be read."""
        self._take(self.collector.start(pids, calls=calls))

    def step(self, *, until: float | None = None) -> Update:
        """Wait for a moment, collect, and judge when memory was looked at.

        ``until`` is the time of ``time.monotonic`` at which the session ends.
        """
        if self._asked is not None and self._asked():
            self.ask()
            self.collector.look_now()
        if self.answer_due(time.monotonic_ns()):
            self.collector.look_now()
        return self._take(self.collector.step(until=until))

    def _take(self, batch: NodeBatch) -> Update:
        for tap in list(self.taps):
            tap(batch)
        self.feed(batch)
        update = self.judge(batch.time_ns) if batch.looked else self.take(batch.time_ns)
        self._ease(batch.time_ns / 1e9)
        update.finished = batch.finished
        update.notes += [line for order in update.orders if (line := self._desk.take(order))]
        return update

    def _ease(self, now: float) -> None:
        """Looks are far apart while all is well, nearer while a culprit is looked for: decided as often as looks are steady."""
        ease = self.collector.ease
        if now >= self._next_ease:
            self._next_ease = now + self.collector.interval_s / 2
            well = ease.widest_s > 0 and {info.host for info in self.collector.infos} <= self.settled()
            ease.allow(now, well=well, narrow=bool(self.searching()))

    def close(self) -> None:
        """Detach the probes and let go of every process."""
        self.collector.close()

    # --- what surfaces ask ---------------------------------------------------------------------------------------------

    @property
    def stop(self) -> Stop:
        """Set it to end the session."""
        return self.collector.stop

    @property
    def infos(self) -> list[ProcessInfo]:
        """The processes that are watched."""
        return self.collector.infos

    @property
    def problems(self) -> list[Problem]:
        """What was asked for and could not be watched."""
        return self.collector.problems

    @property
    def planes(self) -> Sequence[PlaneState]:
        """Which planes see the job, and why the others do not."""
        return self.collector.planes()


def verdict_stands(verdict: Verdict | None) -> bool:
    """Whether a verdict accuses somebody."""
    return verdict is not None and verdict.verdict_class.accuses


def until_of(duration_s: float | None) -> float | None:
    """The time of ``time.monotonic`` at which a duration is over."""
    return None if duration_s is None else time.monotonic() + duration_s
