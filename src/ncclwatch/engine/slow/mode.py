"""What a rule by which jobs that run are judged is to the rest: it takes samples of one job and says what stands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from ncclwatch.engine.job import Job
from ncclwatch.engine.network import NetworkMemory
from ncclwatch.engine.slow.cadence import Cadence
from ncclwatch.engine.slow.snapshot import StageOf
from ncclwatch.engine.slow.watch import SlowWatch
from ncclwatch.engine.topology.model import Topology
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.verdict import Verdict, VerdictClass


class Sample(NamedTuple):
    """What the newest sample shows of one job that runs: its members, the calls of each (in their order), and what nodes say of
    their network."""

    job: Job
    cadences: Sequence[Cadence | None]
    network: NetworkMemory | None = None

    @property
    def time(self) -> float:
        """Wall time, seconds."""
        return max(member.last.wall_ns for member in self.job.members) / 1e9


class Mode(ABC):
    """A rule that judges one job that runs. It keeps what it needs; no clock is read."""

    @abstractmethod
    def judge(self, sample: Sample) -> Verdict | None:
        """Take one sample of the job and say what stands; ``None`` where nothing is slow."""


class ModeWatch(SlowWatch):
    """Judges each job by a mode of its own."""

    def __init__(self, make: Callable[[], Mode]) -> None:
        super().__init__()
        self._make = make
        self._modes: dict[ProcessKey, Mode] = {}

    def judge(
        self, job: Job, verdict: Verdict, topologies: Sequence[Topology] = (), stage_of: StageOf | None = None
    ) -> Verdict:  # fmt: skip
        """Take the newest samples of a job; the verdict on whether it hangs stands unless the job runs and is slow."""
        del topologies, stage_of
        keys = [member.info.key for member in job.members]
        mode = next((self._modes[key] for key in keys if key in self._modes), None) or self._make()
        self._modes.setdefault(keys[0], mode)
        cadences = [self.cadences.find(member.info.host, member.info.pid) for member in job.members]
        found = mode.judge(Sample(job, cadences, self.network))
        return found if found is not None and verdict.verdict_class is VerdictClass.RUNNING else verdict

    def forget(self, present: Collection[ProcessKey]) -> None:
        """Forget jobs that are watched no longer."""
        super().forget(present)
        kept = set(present)
        self._modes = {key: mode for key, mode in self._modes.items() if key in kept}
