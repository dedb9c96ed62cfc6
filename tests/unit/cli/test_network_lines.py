"""NICs, links, the kernel's log and flows in the lines of ``attach``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ncclwatch.cli.live_json import JsonSurface
from ncclwatch.cli.live_log import LogSurface
from ncclwatch.cli.network_text import link_line, nic_line, worth_showing
from ncclwatch.engine.session import Update
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, KernelLogLine, LinkChange, NicRecord
from ncclwatch.model.state import Direction

NIC = NicRecord("node1", "mlx5_0:1", "rdma", True, "active", 200.0, "eth0", receive_rate=2.0**30, send_rate=0.0, used_by=(0, 1))
FAILING = replace(NIC, errors={"packet_seq_err": 3})
DOWN = LinkChange("node1", "mlx5_0:1", False, "no carrier", 1, 2)
XID = KernelLogLine("node1", "xid", "0000:3b:00", "NVRM: Xid (PCI:0000:3b:00): 79\x1b[2J", 1, 3, 79)
FLOW = FlowRecord(
    7, FlowKind.SOCKET, "Socket", "eth0", 0, FlowState.STALLED, "4 segments unacknowledged", 0, 0xA, 0, 2, 1, Direction.SEND
)
SESSION: Any = None


def log_lines(capsys: pytest.CaptureFixture[str], *updates: Update) -> list[str]:
    surface = LogSurface()
    for update in updates:
        surface.update(SESSION, update)
    return [line[9:] for line in capsys.readouterr().out.splitlines()]


def test_the_log_tells_news_once(capsys: pytest.CaptureFixture[str]) -> None:
    well = replace(FLOW, state=FlowState.ACTIVE)
    more = replace(NIC, errors={"packet_seq_err": 4})
    many = replace(NIC, errors={"packet_seq_err": 9})
    updates = [
        Update(0, nics=[NIC], flows=[well]),
        Update(0, nics=[FAILING], links=[DOWN], kernel=[XID], flows=[FLOW]),
        Update(0, nics=[more], flows=[FLOW]),
        Update(0),
        Update(0, nics=[many], flows=[well]),
    ]
    assert log_lines(capsys, *updates) == [
        "link mlx5_0:1 on node1 is DOWN (no carrier); ranks 0-1 use it",
        "kernel log of node1: NVRM: Xid (PCI:0000:3b:00): 79",
        "nic mlx5_0:1 (eth0)  up  200 Gb/s  in 1 GiB/s  out 0 B/s  ranks 0-1  packet_seq_err 3",
        "flow rank 0 ch 2 → rank 1 over eth0 is stalled: 4 segments unacknowledged",
        "nic mlx5_0:1 (eth0)  up  200 Gb/s  in 1 GiB/s  out 0 B/s  ranks 0-1  packet_seq_err 9",
        "flow rank 0 ch 2 → rank 1 over eth0 is well again",
    ]


def test_a_link_below_an_rdma_port_takes_the_port_and_its_users_along() -> None:
    below = replace(DOWN, name="eth0")
    elsewhere = [replace(NIC, host="node2"), replace(NIC, namespace=71), replace(NIC, netdev="eth1", used_by=(5,))]
    said = "link eth0 on node1 is DOWN (no carrier), and mlx5_0:1 with it; ranks 0-1 use it"
    assert link_line(below, [*elsewhere, NIC]) == said
    assert link_line(below, elsewhere) == "link eth0 on node1 is DOWN (no carrier)"


def test_json_has_an_object_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    surface = JsonSurface()
    idle = replace(NIC, name="eno9", used_by=())
    for _ in range(2):
        surface.update(SESSION, Update(0, nics=[NIC, idle], links=[DOWN], kernel=[XID], flows=[FLOW]))
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    first, second = ["link-event", "kernel-log", "nic", "nic", "flow"], ["link-event", "kernel-log", "nic", "flow"]
    # The NIC that nobody uses is told again when it changes.
    assert [one["type"] for one in objects] == [*first, *second]
    nic = next(one for one in objects if one["type"] == "nic")
    assert (nic["name"], nic["kind"], nic["used_by"]) == ("mlx5_0:1", "rdma", [0, 1])
    flow = objects[4]
    assert (flow["state"], flow["channel"], flow["comm_hash"]) == ("stalled", 2, f"{0xA:016x}")


def test_nics_worth_showing_are_those_of_the_job_the_troubled_first() -> None:
    idle = replace(NIC, name="eno9", used_by=())
    broken = replace(idle, name="eno8", errors={"rx_errors": 1})
    down = replace(NIC, name="mlx5_1:1", up=False, state="down (disabled)")
    assert [nic.name for nic in worth_showing([idle, broken, NIC, down])] == ["mlx5_1:1", "mlx5_0:1", "eno8"]
    assert "DOWN (down (disabled))" in nic_line(down)
    assert nic_line(down, host=True).startswith("node1 mlx5_1:1 (eth0)")
