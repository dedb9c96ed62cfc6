"""The column that says whether the cause was right."""

from __future__ import annotations

import pytest

from ncclwatch.knowledge.rows import rows
from ncclwatch.model.cause import Cause
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from ncclwatch.simulate.scenario import FaultKind
from score.archive import JOBS, recordings_in
from score.causes import CAUSES, right_cause, told
from score.kept_causes import Judged, judge, table


def test_every_fault_has_rows_and_they_exist() -> None:
    assert set(CAUSES) == set(FaultKind)
    known = {row.id for row in rows() if not row.defect}
    assert all(names and names <= known for names in CAUSES.values())


def accusing(verdict_class: VerdictClass, cause: Cause) -> Verdict:
    return Verdict(verdict_class, "s", (Culprit(2, 2, "node0", 7, 0, reason=str(cause)),))


def test_the_first_row_counts_and_healthy_jobs_have_no_cause() -> None:
    stopped = accusing(VerdictClass.STOPPED, Cause.STOPPED)
    assert told(stopped) == "stopped-by-signal"
    assert right_cause([FaultKind.STOP], stopped) is True
    assert right_cause([FaultKind.PROXY_STALL], stopped) is False
    assert right_cause([FaultKind.PROXY_STALL, FaultKind.STOP], stopped) is True
    assert right_cause([FaultKind.STOP], None) is False
    assert right_cause([], stopped) is None


@pytest.mark.parametrize(("part", "fault"), [("stopped", "stop"), ("killed", "kill")])
def test_a_kept_recording_is_judged_by_what_a_seed_drew(part: str, fault: str) -> None:
    path = next(path for path in recordings_in(JOBS) if f"-{part}-" in path.name and path.name.startswith("drawn-1"))
    judged = judge(path)
    assert judged is not None and (judged.fault, judged.right) == (fault, True), judged


def test_the_table_says_what_was_told_instead() -> None:
    right, wrong = Judged("a", "stop", "stopped", "stopped-by-signal", True), Judged("b", "stop", "hardware", "", False)
    lines = [line.split() for line in table([right, wrong, Judged("c", "", "", "", True)])[1:]]
    assert lines == [["healthy", "1", "0", "1"], ["stop", "2", "2", "1", "nothing"]]
