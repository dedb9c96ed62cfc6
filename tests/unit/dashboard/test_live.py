"""A live session under the dashboard, on prepared processes: views come while nobody draws, and its end and errors are told."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclwatch.cli.live import LiveSession
from ncclwatch.cli.live_dashboard import Recording
from ncclwatch.cli.surfaces import watch
from ncclwatch.dashboard.live import LiveSource
from ncclwatch.errors import NcclwatchError, TargetGoneError
from ncclwatch.stopping import Stop
from ncclwatch.store.replay import Recordings
from ncclwatch.view.frame import View
from unit import fake_targets
from unit.fake_targets import FakeTarget
from unit.synthetic import frozen_ring

GONE = TargetGoneError("process exited", "look again")
PIDS = [1000, 1001, 1002, 1003]


def wait(done: Callable[[], object], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def install(monkeypatch: pytest.MonkeyPatch, *, ends: bool) -> None:
    targets = fake_targets.still(frozen_ring(2), count=4)
    for target in targets.values():
        assert isinstance(target, FakeTarget)
        if ends:
            target.looks.append(GONE)
    fake_targets.install(monkeypatch, targets)


def test_views_come_with_verdict_planes_and_log_until_the_job_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ends=True)
    live = LiveSession(every=False, interval_s=0.001)
    source = LiveSource(live.stop)
    live.start(PIDS, calls=False)
    source.run(lambda: watch(live, source, None))
    wait(lambda: source.finished)
    views: list[View] = source.take()
    source.join()
    live.close()
    assert source.finished == "every watched process has ended"
    assert source.error is None
    accused = [view.verdict for view in views if view.verdict and view.verdict.verdict_class.accuses]
    assert {culprit.rank for verdict in accused for culprit in verdict.culprits} == {2}
    assert [plane.name for plane in views[-1].frame.planes][:2] == ["state", "calls"]
    assert {"verdict", "process"} <= {entry.kind for entry in views[-1].frame.log}


def test_an_error_of_the_session_is_kept_for_who_started_it() -> None:
    source = LiveSource(Stop())

    def broken() -> None:
        raise NcclwatchError("the ring is damaged")

    source.run(broken)
    wait(lambda: source.finished)
    source.join()
    assert isinstance(source.error, NcclwatchError)


def test_a_key_records_from_here_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    install(monkeypatch, ends=False)
    live = LiveSession(every=False, interval_s=0.001)
    live.start(PIDS, calls=False)
    recording = Recording(live)
    assert recording.state() == ""
    assert "recording into" in recording.toggle()
    for _ in range(5):
        live.step()
    assert recording.state() == "REC"
    assert "recorded" in recording.toggle()
    assert live.taps == []
    live.close()
    [path] = tmp_path.iterdir()
    with Recordings([path]) as recordings:
        assert recordings.problems == []
        assert len(list(recordings.batches())) >= 3


def test_where_nothing_can_be_saved_it_says_what_to_do() -> None:
    source = LiveSource(Stop())
    for act in (source.save, source.toggle_recording):
        with pytest.raises(NcclwatchError, match=r"node of the job|run 'ncclwatch"):
            act()
    assert source.recording == ""
