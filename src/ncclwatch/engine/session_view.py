"""What surfaces ask of everything that is judged: a live session, a recording, a job of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ncclwatch.collect.batch import Overhead, PlaneState
    from ncclwatch.collect.watched import Problem
    from ncclwatch.collect.windows import RankWindow
    from ncclwatch.engine.session import DiagnosisSession
    from ncclwatch.model.identity import ProcessKey
    from ncclwatch.model.state import ProcessInfo, ProcessSample
    from ncclwatch.model.verdict import Verdict


class Judged:
    """Answers from the judging session ``judge``; who knows more than it does (a collector of this node) says so itself."""

    def __init__(self, judge: DiagnosisSession) -> None:
        self.judge = judge

    @property
    def infos(self) -> Sequence[ProcessInfo]:
        """The processes that are watched."""
        return self.judge.infos

    @property
    def problems(self) -> Sequence[Problem]:
        """What was asked for and could not be watched: nothing, where others collect."""
        return ()

    @property
    def planes(self) -> Sequence[PlaneState]:
        """Which planes see the job, and why the others do not."""
        return self.judge.planes()

    @property
    def verdict(self) -> Verdict | None:
        """The verdict that stands, of the worst job."""
        return self.judge.verdict

    @property
    def verdicts(self) -> Sequence[Verdict]:
        """One verdict for each job, worst first."""
        return self.judge.verdicts

    @property
    def windows(self) -> Sequence[RankWindow]:
        """The newest window of every process."""
        return self.judge.windows

    @property
    def samples(self) -> Mapping[ProcessKey, ProcessSample]:
        """The newest look at every process."""
        return self.judge.samples

    @property
    def lost(self) -> int:
        """Call records lost since the beginning."""
        return self.judge.lost

    @property
    def roles(self) -> Mapping[int, str]:
        """What communicators are for, by hash."""
        return self.judge.roles

    @property
    def layout(self) -> str:
        """How the job is divided."""
        return self.judge.layout

    def overhead(self) -> Overhead | None:
        """What watching costs, over the last seconds, on the node where it costs most."""
        return self.judge.overhead()
