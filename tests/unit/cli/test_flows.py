"""What ``flows`` prints: one row a flow that fits the terminal, troubles in words, and where the figures come from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ncclwatch.cli import flows_text
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, QueuePairEnds, RdmaCounts, SocketFacts, StepRate
from ncclwatch.model.state import Direction
from ncclwatch.text import Style, time_text, width

SOCKET = FlowRecord(
    pid=4711, kind=FlowKind.SOCKET, network="Socket", device="eth0", port=0, state=FlowState.ACTIVE, global_rank=3,
    comm_hash=0xABC, rank=3, channel=1, peer=0, direction=Direction.SEND, connection_index=0, role="data", bandwidth=2.5e9,
    expected=2.6e9, retries=2, steps=StepRate(4096, 1234.0, 19, 20, 2.0),
    socket=SocketFacts(3, "10.0.0.1:1", "10.0.0.2:2", rtt_us=87),
)  # fmt: skip
RDMA = replace(
    SOCKET, kind=FlowKind.RDMA, network="IB", device="mlx5_0", port=1, socket=None, retries=0,
    rdma=RdmaCounts(117, 900, 890, 10, False, 12_000.0, 3_400_000.0, {}),
)  # fmt: skip
STALLED = replace(RDMA, state=FlowState.STALLED, reason="3 requests in flight, no completion for 900 ms", channel=2)
STRANGER = FlowRecord(
    4711, FlowKind.RDMA, "", "mlx5_1", 1, FlowState.UNKNOWN, "why", role="data", rdma=RdmaCounts(5, 1, 1, 0, True)
)


class Wire:
    running = True
    reason = ""
    reasons: dict[int, str] = {}  # noqa: RUF012


class Collector:
    def networks(self) -> dict[int, tuple[str, ...]]:
        return {4711: ("IB", "AWS Libfabric")}


def lines(records: list[FlowRecord], cells: int, wire: Any = None) -> list[str]:
    found = flows_text.screen(records, Collector(), wire or Wire(), "cheap", width=cells, style=Style(enabled=False))  # type: ignore[arg-type]
    return list(found)


@pytest.mark.parametrize("cells", [40, 80, 100, 120, 160])
def test_no_line_is_wider_than_the_terminal(cells: int) -> None:
    hostile = replace(SOCKET, device="é" * 200 + "\x1b[2J", reason="x" * 500 + "\x1b[2J", state=FlowState.BLOCKED)
    for line in lines([SOCKET, RDMA, STALLED, STRANGER, hostile], cells):
        assert width(line) <= cells or " " not in line.strip()
        assert "\x1b" not in line


def test_eighty_columns_hold_what_matters() -> None:
    heading, first, second, *_ = lines([SOCKET, RDMA], 80)
    assert heading.split() == ["RANK", "CH", "WAY", "PEER", "NIC", "STATE", "DATA/S", "STEPS/S", "LATENCY", "RETRIES"]
    assert first.split() == ["3", "1", "send", "0", "eth0", "active", "2.3", "GiB", "1,234", "87", "µs", "2"]
    assert second.split()[4:6] == ["mlx5_0:1", "active"]


def test_a_wide_terminal_shows_counts_and_percentiles() -> None:
    heading, row, *_ = lines([RDMA], 160)
    for name in ("EXPECTED", "RATE", "P99", "POSTED", "DONE", "FLIGHT", "QP/SOCKETS"):
        assert name in heading
    for cell in ("qp 117", "1/19", "12 µs", "3.4 ms", "900", "890"):
        assert cell in row


def test_a_queue_pair_that_nobody_counted_has_its_number() -> None:
    assert "qp 118" in lines([replace(RDMA, rdma=None, ends=QueuePairEnds(118))], 160)[1]


def test_trouble_is_said_in_words_once() -> None:
    text = "\n".join(lines([RDMA, STALLED, replace(STALLED, channel=3)], 160))
    assert "stalled: rank 3 ch 2 → rank 0 over mlx5_0:1 and 1 more: 3 requests in flight, no completion for 900 ms" in text


def test_what_is_not_seen_is_said() -> None:
    class Without(Wire):
        running = False
        reason = "BCC cannot be imported"
        reasons = {1: "NCCL uses TCP sockets here, not RDMA", 2: "NCCL uses TCP sockets here, not RDMA"}  # noqa: RUF012

    text = "\n".join(lines([RDMA], 200, Without()))
    assert "wire plane unavailable (2 processes): NCCL uses TCP sockets here, not RDMA" in text
    assert "wire plane unavailable: BCC cannot be imported" in text
    assert "external network: AWS Libfabric" in text
    assert "cost to the job: cheap" in text
    assert "no connection over a network" in lines([], 80)[0]


def test_the_troubled_come_first_when_there_are_too_many() -> None:
    many = [replace(RDMA, channel=n) for n in range(flows_text.MAX_ROWS + 50)] + [replace(STALLED, channel=999)]
    chosen = flows_text.choose(many)
    assert len(chosen) == flows_text.MAX_ROWS
    assert chosen[-1].channel == 999
    assert "and 51 more flows, none of them in trouble" in "\n".join(lines(many, 120))


def test_json_has_ccl_ds_rate_beside_its_counts() -> None:
    data = flows_text.flow_json(RDMA)
    assert data["steps"]["rate"] == 1 / 19
    assert (data["comm_hash"], data["state"], data["rdma"]["queue_pair"]) == (f"{0xABC:016x}", "active", 117)
    assert flows_text.flow_json(STRANGER)["steps"] is None


@pytest.mark.parametrize(
    ("ns", "text"), [(None, "-"), (850, "850 ns"), (1500, "1.5 µs"), (12e3, "12 µs"), (3.4e6, "3.4 ms"), (1.2e9, "1.2 s")]
)
def test_times(ns: float | None, text: str) -> None:
    assert time_text(ns) == text
