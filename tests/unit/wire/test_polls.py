"""How often a process asks for completions, in the windows of its flows."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ncclwatch.model.state import Direction
from ncclwatch.model.work import Counting, FlowWindow, added
from ncclwatch.wire.governor import Mode
from ncclwatch.wire.orders import Owner
from ncclwatch.wire.session import WireSession
from ncclwatch.wire.windows import WorkWindows

OWNERS = {(pid, 1, 7): Owner(pid, 1, 7, 0xA, 0, 0, 1, Direction.SEND) for pid in (10, 11)}


def taken(windows: WorkWindows, end_ns: int, polls: dict[int, int]) -> list[FlowWindow]:
    counting = Counting.ORDER
    return windows.take([], OWNERS, {}, pids=(10, 11), counting=counting, began_ns=end_ns - 5, ended_ns=end_ns, polls=polls)


def test_windows_say_how_often_their_process_asked_since_the_one_before() -> None:
    windows = WorkWindows()
    first, second = taken(windows, 10, {10: 40}), taken(windows, 20, {10: 100})
    assert {window.work.polls for window in first if window.pid == 10} == {40}
    assert {window.work.polls for window in second if window.pid == 10} == {60}
    assert {window.work.polls for window in first if window.pid == 11} == {None}, "its polling functions are not probed"
    assert {window.work.polls for window in taken(windows, 30, {10: 100}) if window.pid == 10} == {0}
    total = added(window.work for window in second if window.pid == 10)
    assert total is not None and total.polls == 60, "of the process, not of each flow"
    windows.forget(10)
    assert {window.work.polls for window in taken(windows, 40, {10: 3}) if window.pid == 10} == {3}, "another process"


class Stub:
    """A plane of three processes: one polls, of one the polling functions are not probed, one is not ours."""

    def __init__(self) -> None:
        site = type("Site", (), {"role": "poll_cq"})
        post = type("Site", (), {"role": "post_send"})
        self.processes = {10: self._process(site), 11: self._process(post), 12: self._process(site)}
        self.kernel = self
        self.light = False

    @staticmethod
    def _process(site: type) -> Any:
        return type("Process", (), {"sites": {0: site()}})()

    def threads(self) -> dict[tuple[int, int], Any]:
        record = np.zeros(1, [("polls", "<u8")])
        record["polls"] = 8
        return {(10, 1): record[0], (10, 2): record[0], (11, 3): record[0], (99, 4): record[0]}


def test_who_never_polls_is_told_from_who_is_not_probed() -> None:
    session = WireSession(Mode.BURSTS)
    assert session.polls() == {}
    session.plane = cast("Any", Stub())
    assert session.polls() == {10: 8, 12: 0}
    session.plane.light = True  # of those that find something alone nobody can tell how many there were
    assert session.polls() == {}
