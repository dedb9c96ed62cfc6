"""What the wire says of connections beside a verdict: those of the culprit, the worst first, and loss where it is plain."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.collect.network_memory import LOSSY_SEGMENTS as LOST
from ncclwatch.collect.network_memory import NetworkMemory
from ncclwatch.engine import beside
from ncclwatch.model.network import FlowKind, FlowRecord, FlowState, NetworkLook, SocketFacts
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from unit.engine.evidence.said import of_network

CULPRIT = Culprit(4, 4, "node1", 4711, 0)
SLOW = Verdict(VerdictClass.SLOW_COMMUNICATION, "rank 4's NIC is slow", (CULPRIT,), (0, 1, 2, 3, 5))
FACTS = SocketFacts(1, "10.0.0.1:1", "10.0.0.2:1")


def flow(rank: int, peer: int, state: FlowState = FlowState.SLOW, *, share: float | None = 0.5, retries: int = 0) -> FlowRecord:
    """A connection that carries ``share`` of what it used to; its other end tells of it as well."""
    return FlowRecord(
        1, FlowKind.SOCKET, "Socket", "eth0", 0, state, f"{rank} to {peer}", rank, 0xA, rank, 0, peer, Direction.SEND,
        bandwidth=None if share is None else share * 1e6, expected=1e6, retries=retries,
        socket=replace(FACTS, local=f"10.0.0.{rank}:{peer}", remote=f"10.0.0.{peer}:{rank}"),
    )  # fmt: skip


def flow_lines(flows: list[FlowRecord], verdict: Verdict) -> tuple[list[str], list[str]]:
    memory = NetworkMemory()
    memory.feed("node1", NetworkLook(flows=tuple(flows)), 1)
    told = list(beside.flow_lines(of_network(memory), verdict))
    return [line for line, _ in told], [step for _, step in told if step]


def test_of_a_slow_job_only_connections_with_an_end_at_a_culprit_are_told_the_worst_first() -> None:
    flows = [flow(0, 1, share=0.1), flow(4, 5, share=0.6), flow(5, 4, share=0.2), flow(4, 3, FlowState.BLOCKED, share=None)]
    lines, steps = flow_lines(flows, SLOW)
    assert [line.partition(" of its")[0].partition(" over")[0] for line in lines] == [
        "rank 5 to rank 4",
        "rank 4 to rank 5",
        "rank 4 to rank 3",
    ]
    assert steps == []


def test_where_nobody_is_named_connections_of_all_are_told() -> None:
    lines, _ = flow_lines([flow(0, 1)], replace(SLOW, verdict_class=VerdictClass.UNKNOWN, culprits=(), victims=()))
    assert lines == []
    lines, _ = flow_lines([flow(0, 1)], replace(SLOW, culprits=(), victims=()))
    assert len(lines) == 1


def test_loss_is_spoken_of_where_the_culprit_has_more_of_it_than_any_other() -> None:
    others = [flow(0, 1, FlowState.ACTIVE, retries=2), flow(1, 0, FlowState.ACTIVE, retries=LOST)]
    for count, told in ((LOST - 1, False), (LOST, False), (LOST + 1, True), (50, True)):
        lines, steps = flow_lines([*others, flow(4, 5, retries=count)], SLOW)
        assert (len(steps) == 1) is told, count
        assert lines[0].startswith(f"{count} segments retransmitted on 1 connection, {LOST + 2} on 2 others") is told, lines
    lines, steps = flow_lines([flow(4, 5, retries=LOST - 1)], SLOW)
    assert not steps, "a few say nothing"
    hung = replace(SLOW, verdict_class=VerdictClass.HARDWARE)
    assert flow_lines([*others, flow(4, 5, FlowState.STALLED, retries=50)], hung)[1] == []


def test_both_ends_tell_of_a_connection_and_it_counts_once() -> None:
    """What a receiving end lists of its socket has no retransmissions of data."""
    received = replace(flow(5, 4, retries=30), direction=Direction.RECV)
    assert flow_lines([received], SLOW)[1] == []
