"""Processes that give prepared samples, or errors, in place of live ones: for tests of the commands without a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from ncclwatch.errors import NcclwatchError, TargetGoneError
from ncclwatch.model.state import ProcessInfo, ProcessSample
from unit.synthetic import Rank

Look = ProcessSample | NcclwatchError


class FakeTarget:
    """Gives one look after the other; the last one is repeated."""

    def __init__(self, looks: Iterable[Look]) -> None:
        self.looks = list(looks)
        self.info: ProcessInfo = next(look for look in self.looks if isinstance(look, ProcessSample)).process
        self.closed = 0

    def sample(self) -> ProcessSample:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, NcclwatchError):
            raise look
        return look

    def close(self) -> None:
        self.closed += 1


def install(monkeypatch: pytest.MonkeyPatch, targets: dict[int, FakeTarget | NcclwatchError]) -> None:
    """Let commands find these processes, by pid, and no others."""

    def open_target(pid: int) -> FakeTarget:
        target = targets.get(pid, TargetGoneError(f"there is no process {pid}", "list the NCCL processes with 'ncclwatch ps'"))
        if isinstance(target, NcclwatchError):
            raise target
        return target

    monkeypatch.setattr("ncclwatch.target.session.TargetProcess.open", open_target)
    found: Callable[[], list[ProcessInfo]] = lambda: [t.info for t in targets.values() if isinstance(t, FakeTarget)]  # noqa: E731
    monkeypatch.setattr("ncclwatch.target.discover.find_processes", found)


def still(ranks: Iterable[Rank], count: int = 8) -> dict[int, FakeTarget | NcclwatchError]:
    """A target for each rank that shows the same at every look, a second apart; by pid."""
    series = [rank.looks(count) for rank in ranks]
    return {samples[0].process.pid: FakeTarget(samples) for samples in series}
