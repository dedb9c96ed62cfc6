"""Faults of the network as they are drawn, what is expected of them, what a view leaves of a recording, and the table."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, NetworkLook, RdmaCounts
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow
from ncclwatch.simulate.testbed import plan
from score.network import (
    FAULTS,
    IN_GUEST,
    VIEWS,
    Row,
    as_json,
    draw,
    judge,
    later,
    scenario_of,
    table,
    wanted,
    without_windows,
)
from score.real import Attach, Saved, Transport, as_played
from score.scoring import Result


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_drawn_can_be_played_and_names_the_rank_that_is_struck(fault: str) -> None:
    places, moments = set(), set()
    for number in range(20):
        drawn = draw(fault, 7, number)
        assert drawn == draw(fault, 7, number) == scenario_of(drawn.name)
        played = wanted(as_played(drawn, "2.27.5", Transport.SOCKET))
        made = plan(played, links=True)
        assert not made.unsupported and made.hosts == (1,) * made.ranks
        (struck,) = played.faults
        assert played.expect.ranks == (struck.rank,) and struck.rank not in played.expect.also
        # Of four ranks one is at no end of a link that was struck, unless the traffic goes to it.
        assert len(played.expect.also) < made.ranks - 1 or made.ranks == 3 or fault == "other-traffic"
        places.add((made.ranks, struck.rank))
        moments.add((struck.start_s, struck.iteration))
    assert len(places) > 3 and len(moments) > 3


def test_a_proxy_that_sleeps_is_its_own_rank_s_alone() -> None:
    assert all(wanted(draw("sleeping-proxy", 7, number)).expect.also == () for number in range(9))


def test_a_fault_can_come_later() -> None:
    """Of a moment, not of an iteration."""
    for fault in FAULTS:
        (before,), (after,) = draw(fault, 1, 0).faults, later(draw(fault, 1, 0), 30.0).faults
        assert after.iteration == before.iteration
        assert (after.start_s, before.start_s) == (None, None) or (after.start_s or 0.0) - (before.start_s or 0.0) == 30.0


def test_seeds_differ_and_other_names_are_refused() -> None:
    assert draw("late-link", 7, 0).faults != draw("late-link", 8, 0).faults
    assert set(IN_GUEST) < set(FAULTS)
    for name in ("network-nothing-7-0", "drawn-7-0-stopped"):
        with pytest.raises(NcclwatchError):
            scenario_of(name)


def batch() -> NodeBatch:
    counts = RdmaCounts(5, 3, 3, 0, True)
    socket = FlowRecord(1, FlowKind.SOCKET, "Socket", "eth0", 1, FlowState.ACTIVE, bandwidth=7.0)
    rdma = FlowRecord(1, FlowKind.RDMA, "IB", "mlx5_0", 1, FlowState.ACTIVE, bandwidth=7.0, rdma=counts)
    work = WorkWindow(Counting.EXACT, 0, 1, 1.0)
    look = NetworkLook(flows=(socket, rdma))
    return NodeBatch(
        host="host", boot_id="boot", sequence=0, time_ns=1, wall_ns=1, network=look, work=[FlowWindow(1, Scope.PORT, work)]
    )  # fmt: skip


def test_a_view_leaves_out_what_the_windows_brought_and_nothing_else() -> None:
    whole = batch()
    left = without_windows(whole)
    assert not left.work and left.network is not None and whole.network is not None
    assert left.network.flows[0] == whole.network.flows[0], "sockets were listed before there were windows"
    assert left.network.flows[1] == replace(whole.network.flows[1], rdma=None, bandwidth=None)
    see, _ = VIEWS["no network"]
    assert see(whole).network is None and not see(whole).work
    see, _ = VIEWS["all"]
    assert see(whole) is whole


def row(fault: str, view: str, *, right: bool, visible: bool = True, seconds: float = 5.0, computation: bool = False) -> Row:
    result = Result(
        "case", "S2", "ncclwatch", True, right, right, None, None, False, seconds, seconds if right else None, "said", [1], "",
        visible=visible, innocents=() if right else (2,),
    )  # fmt: skip
    return Row(fault, view, result, computation)


def test_the_table_counts_what_shows_and_tells_times_of_what_is_right() -> None:
    rows = [row("nic-limit", "all", right=True, seconds=second) for second in (4.0, 6.0, 9.0)]
    rows += [row("nic-limit", "all", right=False, computation=True), row("nic-limit", "all", right=False, visible=False)]
    lines = [line.split() for line in table(rows, markdown=True).splitlines()]
    (line,) = [[cell for cell in line if cell != "|"] for line in lines if "nic-limit" in line]
    assert line == ["nic-limit", "all", "5", "4", "3", "3", "3", "19%", "to", "99%", "6.0", "9.0", "1", "2"]
    assert sum("faults" in line for line in lines) == 1, "of views that nothing was judged in there is no line"
    assert [one["named_s"] for one in as_json(rows)["rows"]] == [4.0, 6.0, 9.0, None, None]


def test_a_recording_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "network-x.ncclwatch"
    saved = Saved("quick-stop", "2.27.5", Transport.SOCKET, Attach.LIVE, 1, 0, 1.0)
    path.with_suffix(".json").write_text(json.dumps(asdict(saved)))
    with pytest.raises(NcclwatchError, match="quick-stop"):
        judge(path)
