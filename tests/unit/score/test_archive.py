"""The archive: every kept recording is judged at every look, and what was said is as it was frozen; and how that is told."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import pytest

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.simulate.scenario import load_all
from score import archive, keep
from score.__main__ import SCENARIOS
from score.archive import JOBS, PACKED, Accusation, Kept, Looked, Stretch, Timeline, look_at, name_of, recordings_in, wrongs
from score.drawn import by_name, draw
from score.real import Attach, Recording, Saved, Transport
from unit.synthetic import frozen_ring

KEPT = recordings_in(JOBS)
MOST_BYTES = 25 << 20


@cache
def judged(path: Path) -> Looked:
    return look_at(path)


@pytest.mark.parametrize("path", KEPT, ids=name_of)
def test_the_whole_timeline_of_a_kept_job_is_right(path: Path) -> None:
    looked = judged(path)
    assert not looked.complaint, "\n".join([looked.kept.about, looked.complaint, *looked.timeline.text])


@pytest.mark.parametrize("path", KEPT, ids=name_of)
def test_what_is_said_of_a_kept_job_is_what_was_frozen(path: Path) -> None:
    looked = judged(path)
    assert looked.frozen is not None, "python -m score.archive --freeze"
    assert looked.timeline.text == looked.frozen.text, "if it is meant to be said: python -m score.archive --freeze"


def test_the_archive_is_small_and_of_every_release_transport_and_attachment() -> None:
    kept = [Kept.load(path) for path in KEPT]
    assert {"2.21.5", "2.27.5", "2.32.3"} <= {one.nccl for one in kept}
    assert {"shm", "socket", "verbs"} <= {one.transport for one in kept}
    assert {"live", "post-hang"} <= {one.attach for one in kept}
    assert all(one.since and one.since_from for one in kept if one.verdicts), "when the fault began is known of each"
    assert sum(path.stat().st_size for path in JOBS.iterdir()) < MOST_BYTES


# --- how a timeline is judged ------------------------------------------------------------------------------------------------

STOPPED = Kept("a stop", "2.27.5", "socket", "live", ("stopped",), (3,), (5,), since=100.0, since_from="a test")


def said(*stretches: tuple[float, float, str | Accusation]) -> Timeline:
    made = [
        Stretch(first, last, (what,)) if isinstance(what, Accusation) else Stretch(first, last, quiet=what)
        for first, last, what in stretches
    ]
    return Timeline(len(made), tuple(made))


RIGHT = Accusation("stopped", (3,))


@pytest.mark.parametrize(
    ("timeline", "kinds"),
    [
        (said((-5, 1, "running"), (2, 9, RIGHT)), set()),
        (said((-5, 1, "running"), (2, 9, Accusation("stopped", (3, 5)))), set()),
        (said((-5, 1, "running"), (2, 3, Accusation("stopped", (4,))), (4, 9, RIGHT)), {"innocent"}),
        (said((-5, 9, RIGHT)), {"early"}),
        (said((-5, -3, Accusation("hardware", (7,))), (-2, 1, "running"), (2, 9, RIGHT)), {"early", "innocent"}),
        (said((-5, -3, RIGHT), (-2, 9, "running")), {"early", "silent"}),
        (said((-5, 9, "running")), {"silent"}),
        (said((2, 3, RIGHT), (4, 9, Accusation("dead", (3,)))), {"class"}),
        (said((2, 3, Accusation("dead", (3,))), (4, 9, RIGHT)), set()),
        (said((2, 9, Accusation("stopped", (5,)))), {"place"}),
        (said((2, 9, Accusation("stopped", (archive.UNKNOWN_RANK,)))), {"innocent", "place"}),
    ],
)
def test_every_moment_of_a_timeline_counts(timeline: Timeline, kinds: set[str]) -> None:
    assert set(wrongs(STOPPED, timeline)) == kinds


def test_a_healthy_job_is_silent_throughout() -> None:
    healthy = replace(STOPPED, verdicts=(), ranks=(), also=())
    assert not wrongs(healthy, said((-5, 9, "running")))
    assert wrongs(healthy, said((-5, 9, "running"), (10, 10, RIGHT), (11, 30, "running"))) == {"alarm": "10.0 s: stopped [3]"}


def test_of_a_fault_that_does_not_show_nothing_need_be_said_and_nobody_else() -> None:
    hidden = replace(STOPPED, verdicts=("slow-computation",), visible=False)
    assert not wrongs(hidden, said((-5, 9, "running")))
    assert set(wrongs(hidden, said((2, 9, Accusation("slow-computation", (4,)))))) == {"innocent", "place"}
    assert set(wrongs(replace(hidden, visible=True), said((-5, 9, "running")))) == {"silent"}


def test_calls_that_contradict_each_other_may_be_told_before_the_standstill() -> None:
    other = replace(STOPPED, verdicts=("inconsistent",))
    assert not wrongs(other, said((-1, 9, Accusation("inconsistent", (3,)))))
    assert set(wrongs(other, said((-1, 9, Accusation("hardware", (3,)))))) == {"early", "class"}


def test_what_is_known_to_be_wrong_must_stay_wrong() -> None:
    wrong, right = said((2, 9, Accusation("dead", (3,)))), said((2, 9, RIGHT))
    known = replace(STOPPED, known_wrong={"class": "for the test"})
    path = Path("x.ncclwatch")
    assert not Looked(path, known, wrong, None).complaint
    assert "no longer is" in Looked(path, known, right, None).complaint
    assert "class" in Looked(path, STOPPED, wrong, None).complaint
    assert "silent" in Looked(path, known, said((2, 9, "running")), None).complaint


def test_a_timeline_is_the_same_when_read_back() -> None:
    timeline = said((-5, 1, "running"), (2, 9, Accusation("hardware", (3,), (3, 4))))
    assert Timeline.from_json(timeline.to_json()) == timeline
    later = replace(timeline, stretches=tuple(replace(s, last_s=s.last_s + 1) for s in timeline.stretches))
    assert later.digest == timeline.digest != said((-5, 1, "idle")).digest


# --- keeping one -------------------------------------------------------------------------------------------------------------


def batches() -> list[NodeBatch]:
    rounds = zip(*(rank.looks(12) for rank in frozen_ring(3)), strict=True)
    return [
        NodeBatch(
            host="node", boot_id="boot", sequence=number, time_ns=samples[0].time_ns, wall_ns=samples[0].wall_ns, looked=True,
            samples=samples,
        )
        for number, samples in enumerate(rounds)
    ]  # fmt: skip


def test_a_recording_is_the_same_when_it_was_packed(tmp_path: Path) -> None:
    made = batches()
    archive.store(made, tmp_path / ("one" + PACKED))
    again = archive.batches_of(tmp_path / ("one" + PACKED))
    assert [batch.time_ns for batch in again] == [batch.time_ns for batch in made]
    assert archive.timeline_of(again, 0.0) == archive.timeline_of(made, 0.0)


@pytest.mark.parametrize("name", [draw(901, 4, slow=True).name, draw(801, 5).name, "quick-stop", "quick-clean"])
def test_recordings_of_every_kind_of_name_are_kept(name: str, tmp_path: Path) -> None:
    scenario = keep.scenario_of(name, {one.name: one for one in load_all(SCENARIOS)})
    assert scenario is not None and scenario.name == name
    path = tmp_path / f"{name}-2.27.5-socket-live-0.ncclwatch"
    made = batches()
    Recording(made).save(path)
    pace = [(0.5, made[0].time_ns / 1e9 + 0.5 * n) for n in range(12)]
    saved = Saved(name, "2.27.5", Transport.SOCKET, Attach.LIVE, 1, 0, made[3].time_ns / 1e9, pace)
    path.with_suffix(".json").write_text(json.dumps(asdict(saved)))
    kept = tmp_path / "kept"
    kept.mkdir()
    target = keep.keep(path, scenario, "about it", kept)
    assert len(archive.batches_of(target)) == len(made)
    one = Kept.load(target)
    assert one.since == saved.since and one.since_from and one.verdicts == tuple(map(str, scenario.expect.verdicts))
    assert (one.visible is not None) == name.startswith("drawn-slow")
    assert look_at(target).frozen == look_at(target).timeline


def test_a_name_of_another_generator_is_not_taken_for_ours() -> None:
    assert by_name("drawn-801-5-no-such-kind") is None
    assert by_name("quick-stop") is None
