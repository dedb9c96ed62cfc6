"""The live session on prepared processes: what it tells, what it survives, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import pytest

from ncclwatch.cli import main
from ncclwatch.cli.live import LiveSession
from ncclwatch.cli.live_json import JsonSurface
from ncclwatch.cli.live_log import LogSurface
from ncclwatch.cli.surfaces import watch
from ncclwatch.collect.batch import Change, NodeBatch
from ncclwatch.engine.session import Update
from ncclwatch.errors import NcclwatchError, PrivilegeError, TargetError, TargetGoneError
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import schema
from ncclwatch.model.work import WorkOrder
from unit import fake_targets
from unit.fake_targets import FakeTarget
from unit.synthetic import Rank, communicator, frozen_ring, moved

ORDER = WorkOrder(3, "host", (1,), standing=True)
GONE = TargetGoneError("process 1002 exited", "look again")


def fake(target: FakeTarget | NcclwatchError) -> FakeTarget:
    assert isinstance(target, FakeTarget)
    return target


@contextmanager
def session(pids: list[int], *, every: bool = False) -> Iterator[LiveSession]:
    live = LiveSession(every=every, interval_s=0.001)
    try:
        live.start(pids, calls=False)
        yield live
    finally:
        live.close()


def looks(live: LiveSession, count: int) -> list[Update]:
    """Steps until memory was looked at that many times; steps in between are returned too."""
    updates: list[Update] = []
    while sum(update.windows is not None for update in updates) < count:
        updates.append(live.step())
    return updates


def changes(updates: list[Update]) -> list[tuple[Change, int]]:
    return [(change.change, change.pid) for update in updates for change in update.changes]


def test_a_stopped_rank_is_told_once_and_its_recovery_too(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2), count=6)
    for target in targets.values():
        # The job runs again after the prepared looks.
        last = fake(target).looks[-1]
        assert isinstance(last, ProcessSample)
        later = replace(moved(last), run_state="S", time_ns=last.time_ns + 10**9, wall_ns=last.wall_ns + 10**9)
        fake(target).looks.append(later)
    fake_targets.install(monkeypatch, targets)
    with session([1000, 1001, 1002, 1003]) as live:
        updates = looks(live, 7)
    told = [verdict for update in updates for verdict in update.told]
    assert [[culprit.rank for culprit in verdict.culprits] for verdict in told] == [[2]]
    [recovery] = [recovery for update in updates for recovery in update.recoveries]
    assert recovery.verdict.id == told[0].id
    assert recovery.duration_s > 0


def test_windows_come_with_every_look_one_a_rank_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_targets.install(monkeypatch, fake_targets.still(reversed(frozen_ring(2))))
    with session([1003, 1002, 1001, 1000]) as live:
        for update in looks(live, 3):
            if update.windows is not None:
                assert [window.rank for window in update.windows] == [0, 1, 2, 3]
                assert [window.rate_plane for window in update.windows] == ["state"] * 4


def test_a_process_that_ends_is_told_once_and_becomes_the_culprit_only_when_others_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    targets = fake_targets.still(frozen_ring(2, run_state="S"), count=8)
    victim = fake(targets[1002])
    victim.looks = [*victim.looks[:2], GONE]
    fake_targets.install(monkeypatch, targets)
    with session([1000, 1001, 1002, 1003]) as live:
        updates = looks(live, 6)
        assert changes(updates) == [(Change.EXITED, 1002)]
        verdicts = [verdict for update in updates for verdict in update.told]
        assert [[culprit.rank for culprit in verdict.culprits] for verdict in verdicts] == [[2]]
        assert victim.closed
        windows = updates[-1].windows
        assert windows is not None
        assert [window.run_state for window in windows] == ["S", "S", "X", "S"]


def test_the_end_of_a_whole_job_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2, run_state="S"), count=3)
    for target in targets.values():
        fake(target).looks = [*fake(target).looks[:2], GONE]
    fake_targets.install(monkeypatch, targets)
    with session([1000, 1001, 1002, 1003]) as live:
        updates: list[Update] = []
        while not updates or not updates[-1].finished:
            updates.append(live.step())
    assert not any(update.told for update in updates)
    assert sorted(changes(updates)) == [(Change.EXITED, pid) for pid in (1000, 1001, 1002, 1003)]
    assert updates[-1].finished == "every watched process has ended"


def test_a_look_that_fails_is_told_once_and_so_is_the_next_good_one(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2, run_state="S"))
    shaky = fake(targets[1001])
    good = shaky.looks[0]
    shaky.looks = [good, TargetError("torn", "wait"), TargetError("torn", "wait"), good]
    fake_targets.install(monkeypatch, targets)
    with session([1000, 1001]) as live:
        updates = looks(live, 5)
    assert changes(updates) == [(Change.UNREADABLE, 1001), (Change.READABLE, 1001)]


def test_processes_that_come_later_are_taken_up_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2, run_state="S"), count=3)
    late = targets.pop(1003)
    fake_targets.install(monkeypatch, targets)
    with session([1000, 1001, 1002], every=True) as live:
        looks(live, 1)
        targets[1003] = late
        live.collector._next_rescan = 0.0
        updates = looks(live, 2)
        assert changes(updates) == [(Change.STARTED, 1003)]
        assert [window.rank for window in live.collector.aggregator.windows(0)] == [0, 1, 2, 3]


def test_a_process_that_cannot_be_read_with_all_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2, run_state="S"), count=3)
    closed = fake(targets.pop(1003))
    fake_targets.install(monkeypatch, targets)
    monkeypatch.setattr("ncclwatch.target.discover.find_processes", lambda: [closed.info])
    monkeypatch.setattr("ncclwatch.collect.node.RESCAN_S", 0.0)
    targets[1003] = PrivilegeError("closed", "be root")
    with session([1000, 1001, 1002], every=True) as live:
        assert changes(looks(live, 5)) == [(Change.UNREADABLE, 1003)]


def test_a_pid_that_lives_on_as_another_program_is_taken_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2, run_state="S"), count=3)
    fake(targets[1002]).looks = [fake(targets[1002]).looks[0], GONE]
    fake_targets.install(monkeypatch, targets)
    with session([1000, 1001, 1002, 1003], every=True) as live:
        first = looks(live, 1)
        [other] = Rank(2, 4, (communicator(2, 4, comm_hash=0xB2),)).looks(1)
        targets[1002] = FakeTarget([other])
        live.collector._next_rescan = 0.0
        assert changes(first + looks(live, 1)) == [(Change.EXITED, 1002), (Change.STARTED, 1002)]


def test_nothing_to_watch_is_an_error_and_one_of_many_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2, run_state="S"), count=3)
    fake_targets.install(monkeypatch, targets)
    with session([1000, 77]) as live:
        assert [problem.pid for problem in live.problems] == [77]
        assert list(live.collector.watched) == [1000]
    with pytest.raises(TargetGoneError):
        LiveSession(every=False).start([77], calls=False)


def test_what_breaks_our_reading_of_one_process_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2, run_state="S"), count=3)
    monkeypatch.delenv("NCCLWATCH_DEBUG", raising=False)

    def broken() -> ProcessSample:
        raise IndexError("nonsense")

    fake_targets.install(monkeypatch, targets)
    with session([1000, 1001]) as live:
        monkeypatch.setattr(fake(targets[1001]), "sample", broken)
        [told] = [change for update in looks(live, 3) for change in update.changes]
    assert (told.change, told.pid) == (Change.UNREADABLE, 1001)
    assert "IndexError: nonsense" in told.detail


def test_a_session_can_be_stopped_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_targets.install(monkeypatch, fake_targets.still(frozen_ring(2)))
    with session([1000]) as live:
        assert live.step(until=0.0).finished == "duration over"
        live.stop.set()
        assert live.step().finished == "interrupted"


Lines = Callable[[], list[str]]


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Lines:
    """What a surface wrote about a session in which rank 2 stands still, until all processes are gone."""
    targets = fake_targets.still(frozen_ring(2), count=4)
    for target in targets.values():
        fake(target).looks.append(GONE)
    targets[77] = TargetError("process 77 has no NCCL", "choose another")
    fake_targets.install(monkeypatch, targets)

    def read() -> list[str]:
        return capsys.readouterr().out.splitlines()

    return read


def test_json_is_one_object_a_line_with_a_type(lines: Lines) -> None:
    with session([77, 1000, 1001, 1002, 1003]) as live:
        watch(live, JsonSurface(), None)
    objects = [json.loads(line) for line in lines()]
    types = [data["type"] for data in objects]
    assert types[0] == "attached"
    assert types[-1] == "end"
    assert set(types) - {"nic"} == {"attached", "rank", "verdict", "process", "overhead", "end"}
    assert objects[0]["errors"] == [{"pid": 77, "error": "process 77 has no NCCL", "hint": "choose another"}]
    assert objects[0]["planes"]["calls"] == {"running": False, "reason": "switched off"}
    [verdict] = [data["verdict"] for data in objects if data["type"] == "verdict"]
    jsonschema.validate(verdict, schema())
    ranks = [data for data in objects if data["type"] == "rank"]
    assert {data["operation"]["comm_hash"] for data in ranks if data["operation"]} == {f"{0xA1:016x}"}
    assert all(isinstance(data["time"], float) for data in objects)


def test_the_log_has_a_line_for_what_changed_and_none_for_what_did_not(lines: Lines) -> None:
    with session([77, 1000, 1001, 1002, 1003]) as live:
        watch(live, LogSurface(), None)
    text = [line[9:] for line in lines()]
    assert text[0].startswith("attached to 4 processes, ranks 0-3, NCCL 2.27.5; planes: state, no calls (switched off)")
    assert text[1] == "not watched: pid 77: process 77 has no NCCL: choose another"
    assert sum("STOPPED" in line for line in text) == 1
    assert sum("exited: rank" in line for line in text) == 4
    assert text[-1].startswith("end: every watched process has ended; verdict stands: rank 2")


def test_attach_ends_with_10_when_a_verdict_stands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.stopping.signal.signal", lambda *_arguments: None)
    for extra, status in ([], 0), (["--exit-code"], 10):
        fake_targets.install(monkeypatch, fake_targets.still(frozen_ring(2), count=3))
        arguments = ["attach", "--all", "--no-probes", "--json", "--interval", "0.1", "--duration", "1", *extra]
        assert main.run(arguments) == status
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["reason"] == "duration over"


def test_exec_of_another_program_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = fake_targets.still(frozen_ring(2, run_state="S"), count=4)
    fake(targets[1002]).looks = [fake(targets[1002]).looks[0], GONE]
    fake_targets.install(monkeypatch, targets)
    monkeypatch.setattr("ncclwatch.collect.watched.lives_on", lambda info: info.pid == 1002)
    with session([1000, 1001, 1002, 1003]) as live:
        [told] = [change for update in looks(live, 3) for change in update.changes]
    assert (told.change, told.pid, told.detail) == (Change.REPLACED, 1002, "it runs another program now")


def test_counts_that_the_engine_orders_are_made_and_every_batch_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_targets.install(monkeypatch, fake_targets.still(frozen_ring(2), count=6))
    with session([1000, 1001]) as live:
        recorded = list[NodeBatch]()
        live.taps.append(recorded.append)
        judge = live.judge
        monkeypatch.setattr(live, "judge", lambda now_ns: replace(judge(now_ns), orders=[ORDER]))
        monkeypatch.setattr(live, "_desk", SimpleNamespace(take=lambda order: f"order {order.number} taken"))
        updates = looks(live, 2)
    judged = [update for update in updates if update.windows is not None]
    assert [update.notes for update in judged] == [["order 3 taken"]] * 2
    assert not any("order" in note for update in updates if update.windows is None for note in update.notes)
    assert len(recorded) == len(updates) and sum(batch.looked for batch in recorded) == 2
