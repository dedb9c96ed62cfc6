"""What is asked by name: jobs, nodes, downtime by phase, trends, comparisons, gaps, and whether a node was blamed before."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.errors import UsageError
from ncclwatch.history import questions
from ncclwatch.history.downtime import How, Outage, downtime
from ncclwatch.history.query import History
from ncclwatch.history.recurrence import Blame, Recurrence, episodes, read, said
from ncclwatch.history.rows import Run, verdict_row
from ncclwatch.history.tables import Row
from ncclwatch.model.verdict import Culprit, Ticket, Verdict, VerdictClass
from unit.histories import DAY_NS, NOON_NS, SECOND_NS, document, incident, keep, run_of

EVER = datetime(2000, 1, 1)
FIRST, SECOND = Run("train", "run1"), Run("train", "run2")
MINUTE_NS = 60 * SECOND_NS


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run that hangs after ten minutes and is ended five minutes later; the next works after another two."""
    second_ns = NOON_NS + 17 * MINUTE_NS
    keep(tmp_path, [
        *run_of(FIRST, NOON_NS, 15 * 60, ended=True),
        *incident(FIRST, "node7", NOON_NS + 10 * MINUTE_NS, told_s=6),
        *run_of(SECOND, second_ns, 600, ended=False, iteration_s=1.5),
        *incident(SECOND, "node8", second_ns + 2 * MINUTE_NS, told_s=3, stood_s=30, kind="stopped", number="v2"),
        *incident(SECOND, "node8", second_ns + 5 * MINUTE_NS, told_s=3, kind="slow-communication", number="v3"),
    ])  # fmt: skip
    return tmp_path


def ask(root: Path, question: Any, *given: Any) -> Any:
    with History(str(root)) as history:
        return question(history, *given)


def test_every_run_is_listed_the_newest_first(root: Path) -> None:
    found = ask(root, questions.jobs, EVER)
    assert [(one["job"], one["run"], one["verdicts"], one["standing"], one["ended"] is None) for one in found] == [
        ("train", "run2", 2, 1, True), ("train", "run1", 1, 1, False),
    ]  # fmt: skip
    assert (found[0]["iteration_s"], found[0]["iterations"], found[0]["nccl"]) == (1.5, 60, "2.27.5")
    assert ask(root, questions.jobs, datetime.fromtimestamp(0) + timedelta(days=36500)) == []


def test_a_node_is_known_by_when_and_for_what_it_was_blamed(root: Path) -> None:
    found = ask(root, questions.blamed, "node8", EVER)
    assert [(one["class"], one["ended_by"], one["stood_s"]) for one in found.incidents] == [
        ("slow-communication", None, None), ("stopped", "recovery", 30.0),
    ]  # fmt: skip
    assert found.reasons == {"slow-communication": 1, "stopped": 1}
    unknown = ask(root, questions.blamed, "NODE7.cluster.local", EVER)
    assert (unknown.incidents, unknown.others) == ([], ["node7"])
    assert ask(root, questions.blamed, "'; DROP TABLE verdicts; --", EVER).incidents == []


def test_what_else_a_node_showed(tmp_path: Path) -> None:
    keep(tmp_path, [
        Row("nics", NOON_NS, "", "", {"node": "node7", "nic": "mlx5_0:1", "event": "down", "up": False, "state": "down"}),
        Row("nics", NOON_NS, "", "", {"node": "node7", "nic": "mlx5_1:1", "event": "seen", "up": True}),
        Row("gpus", NOON_NS, "", "", {"node": "node7", "gpu": 3, "source": "nvml", "troubles": ["lost"], "detail": "gone"}),
        Row("gpus", NOON_NS, "", "", {"node": "node7", "gpu": 4, "source": "nvml", "troubles": []}),
        Row("flows", NOON_NS, "", "", {"node": "node7", "device": "mlx5_0", "state": "stalled"}),
        Row("flows", NOON_NS, "", "", {"node": "other", "device": "mlx5_0", "state": "stalled"}),
    ])  # fmt: skip
    found = ask(tmp_path, questions.blamed, "node7", EVER)
    assert {(one["part"], one["what"], one["times"]) for one in found.health} == {
        ("NIC mlx5_0:1", "down", 1), ("GPU 3", "gone", 1), ("flows over mlx5_0", "stalled", 1),
    }  # fmt: skip


def outage(root: Path, checkpoint_s: float | None = None) -> Outage:
    found = ask(root, downtime, EVER, "", checkpoint_s)
    one: Outage
    (one,) = [one for one in found.outages if one.run == "run1"]
    return one


def test_downtime_by_phase(root: Path) -> None:
    one = outage(root)
    assert (one.detection.seconds, one.detection.how) == (6.0, How.MEASURED)
    assert (one.diagnosis.seconds, one.diagnosis.how) == (5 * 60 - 6.0, How.MEASURED)
    assert (one.restart.seconds, one.restart.how) == (120.0, How.MEASURED)
    assert (one.lost_work.seconds, one.lost_work.how) == (0.0, How.UNKNOWN)
    assert one.seconds == 7 * 60
    told = outage(root, 1800.0)
    assert (told.lost_work.seconds, told.lost_work.how) == (900.0, How.INFERRED)
    found = ask(root, downtime, EVER)
    # A slow job is not down; one that recovered has lost nothing and was not restarted.
    assert [(one.run, one.verdict_class) for one in found.outages] == [("run1", "hardware"), ("run2", "stopped")]
    recovered = found.outages[1]
    assert (recovered.detection.seconds, recovered.diagnosis.seconds, recovered.restart.seconds) == (3.0, 27.0, 0.0)
    assert recovered.restart.how is recovered.lost_work.how is How.MEASURED
    assert found.total("restart") == 120.0
    assert found.total("restart", How.INFERRED) == 0.0


def test_what_was_not_seen_of_an_outage_is_inferred_and_marked(tmp_path: Path) -> None:
    keep(tmp_path, [*run_of(FIRST, NOON_NS, 900, ended=False), *incident(FIRST, "node7", NOON_NS + 600 * SECOND_NS)])
    one = outage(tmp_path)
    assert one.stands
    assert (one.diagnosis.how, one.restart.how, one.lost_work.how) == (How.INFERRED, How.UNKNOWN, How.UNKNOWN)
    keep(tmp_path, run_of(SECOND, NOON_NS + 1200 * SECOND_NS, 60), "later")
    one = outage(tmp_path)
    assert not one.stands
    # The last row of the first run is of 890 s after its begin, the verdict was told at 605.
    assert (one.diagnosis.seconds, one.diagnosis.how) == (285.0, How.INFERRED)
    assert (one.restart.seconds, one.restart.how) == (310.0, How.MEASURED)


def test_verdicts_in_other_words_are_one_outage(tmp_path: Path) -> None:
    begin = NOON_NS + 600 * SECOND_NS
    rows = [row for number in range(3) for row in incident(FIRST, "node7", begin + number * SECOND_NS, number=f"v{number}")]
    keep(tmp_path, [*run_of(FIRST, NOON_NS, 900), *rows])
    assert outage(tmp_path).detection.seconds == 5.0


def test_a_trend_tells_runs_apart(root: Path) -> None:
    found = ask(root, questions.trend, "train", "", EVER, 4)
    assert [(one["run"], one["median_s"]) for one in found] == [
        ("run1", 1.0), ("run1", 1.0), ("run1", 1.0), ("run2", 1.5), ("run2", 1.5),
    ]  # fmt: skip
    assert sum(one["iterations"] for one in found) == 150


def test_a_run_is_found_by_its_job_or_its_id(root: Path) -> None:
    with History(str(root)) as history:
        assert questions.find_run(history, "train") == ("train", "run2")
        assert questions.find_run(history, "train@run1") == questions.find_run(history, "run1") == ("train", "run1")
        assert questions.find_job(history, "train") == ("train", "")
        for wrong in ("run", "other", "other@run1", ""):
            with pytest.raises(UsageError):
                questions.find_run(history, wrong)
        assert questions.about_run(history, "train", "run1")["iteration_median_s"] == 1.0


def life(kind: str, at_s: int) -> Row:
    return Row("lives", NOON_NS + at_s * SECOND_NS, "", "", {"kind": kind})


def test_gaps_are_told_and_when_nobody_watched(tmp_path: Path) -> None:
    keep(tmp_path, [life("begin", 0), life("end", 10)], "a")
    keep(tmp_path, [life("begin", 60), life("end", 100)], "b")
    keep(tmp_path, [life("begin", 90)], "c")
    times = {"since": NOON_NS + 120 * SECOND_NS, "until": NOON_NS + 300 * SECOND_NS}
    keep(tmp_path, [Row("gaps", NOON_NS, "", "", {"kind": "killed", **times})], "c", 1)
    keep(tmp_path, [life("begin", 299), life("end", 400)], "d")
    noon = datetime(1970, 1, 1) + timedelta(seconds=NOON_NS / 1e9)
    found = ask(tmp_path, questions.gaps, EVER)
    spans = [(one["kind"], (one["since"] - noon).total_seconds(), (one["until"] - noon).total_seconds()) for one in found]
    assert spans == [("killed", 120.0, 300.0), ("not watched", 10.0, 60.0)]


# --- blamed before -------------------------------------------------------------------------------------------------------

NOW = NOON_NS / 1e9
DAY = 86400.0


def test_blames_within_an_hour_are_one_episode_and_the_present_one_is_none() -> None:
    blames = [Blame(NOW - age, "hardware") for age in (40 * DAY, 9 * DAY, 9 * DAY - 600, 2 * DAY, 1000, 0, -5)]
    assert [one.time for one in episodes(blames, NOW)] == [NOW - 9 * DAY, NOW - 2 * DAY]
    assert episodes([], NOW) == []


def test_a_line_says_the_how_manyeth_time_it_is() -> None:
    past = [Blame(NOW - 9 * DAY, "hardware", "a"), Blame(NOW - 2 * DAY, "stopped", "a")]
    line = said("node7\x1b[31m", past, NOW)
    assert line.startswith("third time in 9 days that node7 is blamed; before: ")
    assert "12:00 hardware, " in line
    assert line.endswith("stopped UTC (job a)")
    assert said("node7", past[1:], NOW - 2 * DAY + 7300).startswith("second time in 2 hours")
    assert said("node7", [], NOW) == ""
    assert said("node7", [Blame(NOW - age * DAY, "x") for age in range(15, 1, -1)], NOW).startswith("15th time in 15 days")


def verdict(*hosts: str, kind: VerdictClass = VerdictClass.HARDWARE) -> Verdict:
    culprits = tuple(Culprit(3, 3, host, 7, 0, ticket=Ticket(node=host)) for host in hosts)
    return Verdict(kind, "rank 3 holds up the job", culprits, since=NOW, time=NOW)


def test_what_a_history_knows_enters_a_verdict(tmp_path: Path) -> None:
    for number, age in enumerate((9, 4)):
        rows = incident(Run("train", str(number)), "node7", NOON_NS - age * DAY_NS)
        keep(tmp_path, rows, f"life{number}")
        # The same told by another is no other time.
        keep(tmp_path, rows, f"copy{number}")
    past = Recurrence(str(tmp_path))
    assert past.lines(verdict("node7")) == ()
    assert past.is_due
    assert not past.is_due
    list(past.refresh())
    (line,) = past.lines(verdict("node7"))
    assert line.startswith("third time in 9 days that node7 is blamed")
    assert past.lines(verdict("node8")) == ()
    assert past.lines(verdict("node7", kind=VerdictClass.UNKNOWN)) == ()
    assert past.lines(verdict("node7", "a", "b", "c")) == ()
    # What stands now is no time before.
    past.note(verdict("node8"))
    assert past.lines(verdict("node8")) == ()


def test_what_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    past = Recurrence(str(tmp_path / "nowhere"))
    assert list(past.refresh()) == []
    assert past.lines(verdict("node7")) == ()


BROKEN: list[dict[str, Any]] = [
    {}, {"culprits": [1, {"host": 3, "ticket": "x", "reason": []}]}, {"since": "x", "culprits": "x", "operation": 1},
    {"since": 1e30, "victims": 3, "communicator": {"hash": {}}}, {"id": ["x"], "class": {"a": 1}, "time": float("nan")},
]  # fmt: skip


def test_verdicts_of_a_file_may_be_anything(tmp_path: Path) -> None:
    for broken in BROKEN:
        keep(tmp_path, [verdict_row(FIRST, NOON_NS, "verdict", broken)], f"life{id(broken)}")
    keep(tmp_path, [verdict_row(FIRST, NOON_NS, "verdict", document("node7", NOON_NS))], "good")
    assert list(read(str(tmp_path), 0.0)) == ["node7"]
    with History(str(tmp_path)) as history:
        assert len(questions.verdicts(history, EVER)) >= 2
