"""A recording under the dashboard: it plays in order, stops, moves and changes speed without a job or a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ncclwatch.dashboard.replay import ReplaySource
from ncclwatch.errors import NcclwatchError
from ncclwatch.store.recorder import Recorder
from ncclwatch.store.replay import Recordings
from ncclwatch.view.frame import View
from unit.batches import WALL, node_batches, ring_looks
from unit.synthetic import SECOND

BEGIN = WALL / SECOND


@pytest.fixture
def recordings(tmp_path: Path) -> Iterator[Recordings]:
    recorder = Recorder(tmp_path / "a")
    for batch in node_batches(list(ring_looks(60, stuck_from=30))):
        recorder.put(batch)
    recorder.close()
    with Recordings([tmp_path / "a"]) as opened:
        yield opened


def collect(source: ReplaySource, until: Callable[[list[View]], bool], timeout: float = 60.0) -> list[View]:
    found: list[View] = []
    end = time.monotonic() + timeout
    while not until(found):
        assert time.monotonic() < end, [view.frame.time - BEGIN for view in found][-5:]
        found += source.take()
        time.sleep(0.005)
    return found


def seconds(views: list[View]) -> list[int]:
    return [round(view.frame.time - BEGIN) for view in views]


def test_it_plays_to_its_end_in_order(recordings: Recordings) -> None:
    source = ReplaySource(recordings, speed=1000.0)
    views = collect(source, lambda _found: bool(source.finished)) + source.take()
    assert seconds(views) == sorted(seconds(views))
    assert seconds(views)[-1] == 59
    assert "the recording ends here" in source.finished
    verdict = views[-1].verdict
    assert verdict is not None
    assert verdict.verdict_class.accuses
    source.join()


def test_it_begins_where_it_was_told_to_with_the_verdict_it_would_have_reached(recordings: Recordings) -> None:
    source = ReplaySource(recordings, speed=1.0, from_ns=WALL + 45 * SECOND)
    views = collect(source, bool)
    assert seconds(views)[0] in (44, 45)
    verdict = views[0].verdict
    assert verdict is not None
    assert [culprit.rank for culprit in verdict.culprits] == [2]
    source.join()


def test_it_is_held_moved_and_let_go_on(recordings: Recordings) -> None:
    source = ReplaySource(recordings, speed=1.0)
    collect(source, bool)
    assert source.hold()
    assert "held" in source.label
    assert source.seek(40.0)
    # How far it had got before it was held is up to the machine; held, it shows the moment sought and no other.
    views = collect(source, lambda found: bool(found) and seconds(found)[-1] >= 39)
    assert 39 <= seconds(views)[-1] <= 59
    assert not source.finished
    assert source.hold()
    assert source.faster(1e9)
    assert source.label.startswith("REPLAY 1024x")
    collect(source, lambda _found: bool(source.finished))
    assert source.seek(-1e6)
    views = collect(source, lambda found: 0 in seconds(found))
    source.join()


def test_what_needs_a_live_job_says_so(recordings: Recordings) -> None:
    source = ReplaySource(recordings, speed=1000.0)
    with pytest.raises(NcclwatchError, match="this is a recording"):
        source.save()
    with pytest.raises(NcclwatchError, match="recording already"):
        source.toggle_recording()
    source.join()
