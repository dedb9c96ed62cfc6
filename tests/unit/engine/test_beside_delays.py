"""The delay matrix: slow rows, columns and cells, and that of a running job, made of what the wire says of its connections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ncclwatch.collect.network_memory import NetworkMemory
from ncclwatch.engine.beside import SlowPart, add_network, delay_lines, slow_parts
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, NetworkLook, RdmaCounts, SocketFacts
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from unit.engine.evidence.said import of_network

RANKS = 6
COMM = 0xABC


def flow(source: int, destination: int, delay_us: float, kind: FlowKind = FlowKind.RDMA) -> FlowRecord:
    rdma = RdmaCounts(1, 100, 100, 0, True, latency_p50_ns=delay_us * 1e3) if kind is FlowKind.RDMA else None
    socket = SocketFacts(1, "a", "b", rtt_us=int(delay_us)) if kind is FlowKind.SOCKET else None
    return FlowRecord(
        100 + source, kind, "IB", "mlx5_0", 1, FlowState.ACTIVE, global_rank=10 + source, comm_hash=COMM, rank=source, channel=0,
        peer=destination, direction=Direction.SEND, role="data", rdma=rdma, socket=socket,
    )  # fmt: skip


def all_pairs(slow: dict[tuple[int, int], float], kind: FlowKind = FlowKind.RDMA) -> list[FlowRecord]:
    return [flow(a, b, slow.get((a, b), 20.0 + a + b), kind) for a in range(RANKS) for b in range(RANKS) if a != b]


def verdict(*ranks: int) -> Verdict:
    culprits = tuple(Culprit(rank, None, "node0", 100 + rank, None) for rank in ranks)
    return Verdict(VerdictClass.SLOW_COMMUNICATION, "slow", culprits=culprits)


def ends(parts: list[SlowPart]) -> list[tuple[int, int]]:
    return [(part.source, part.destination) for part in parts]


def test_rows_columns_and_cells() -> None:
    rng = np.random.default_rng(1)
    delays = {(i, j): 1.0 + 0.02 * rng.random() for i in range(6) for j in range(6) if i != j}

    def found(slow: Callable[[int, int], bool]) -> list[tuple[int, int]]:
        return ends(slow_parts({(i, j): [d * (5 if slow(i, j) else 1)] * 3 for (i, j), d in delays.items()}))

    assert found(lambda i, j: False) == []
    assert found(lambda i, j: i == 2) == [(2, -1)]
    assert found(lambda i, j: j == 4) == [(-1, 4)]
    assert found(lambda i, j: (i, j) == (1, 3)) == [(1, 3)]


def test_a_ring_names_links() -> None:
    ring = {(i, (i + 1) % 5): [8.0 if i == 3 else 1.0] for i in range(5)}
    assert ends(slow_parts(ring)) == [(3, 4)]


def test_a_row_is_a_sender_a_column_a_receiver_and_a_cell_a_link() -> None:
    row = {(2, b): 400.0 for b in range(RANKS)}
    (line,) = delay_lines(all_pairs(row), verdict(12))
    assert "all that rank 12 sends" in line and "30 pairs" in line and "completion of work requests" in line
    column = {(a, 2): 400.0 for a in range(RANKS)}
    (line,) = delay_lines(all_pairs(column, FlowKind.SOCKET), verdict(12))
    assert "all that rank 12 receives" in line and "TCP round trip" in line
    (line,) = delay_lines(all_pairs({(1, 4): 400.0}), verdict(11, 14))
    assert "from rank 11 to rank 14" in line


def test_only_what_concerns_a_culprit_is_told_and_equal_delays_say_nothing() -> None:
    assert delay_lines(all_pairs({(1, 4): 400.0}), verdict(12)) == []
    assert delay_lines(all_pairs({}), verdict(12)) == []
    nothing = [replace(f, rdma=None) for f in all_pairs({})]
    assert delay_lines(nothing, verdict(12)) == []


def test_a_slow_verdict_gets_it_as_evidence() -> None:
    memory = NetworkMemory()
    memory.feed("node0", NetworkLook(flows=tuple(all_pairs({(1, 4): 400.0}))), 1)
    told = add_network(of_network(memory), verdict(11, 14))
    assert any("delay matrix of communicator" in line for line in told.evidence)
    hang = add_network(of_network(memory), replace(verdict(11, 14), verdict_class=VerdictClass.HARDWARE))
    assert not any("delay matrix" in line for line in hang.evidence), "a hang has no delays"
