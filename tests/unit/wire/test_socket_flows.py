"""What TCP_INFO says of a connection: a dead path, a peer that does not read, a slow wire, and what is none of these."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.model.network import FlowState
from ncclwatch.model.state import Direction
from ncclwatch.nic.sockets import TcpSocket
from ncclwatch.wire.socket_flows import JUDGED, LEARNING, SocketJudgement, SocketWatch

MS = 1_000_000
STEP_NS = 250 * MS

BASE = TcpSocket(
    local="10.0.0.1", local_port=40000, remote="10.0.0.2", remote_port=50000, state="established", inode=1, receive_queue=0,
    send_queue=0, rtt_us=100, retransmits=3, unacknowledged=0, timeouts=0, window_probes=0, bytes_acknowledged=0,
    bytes_received=0, busy_us=0, receive_window_limited_us=0, last_acknowledged_ms=0, congestion_window=10, delivery_rate=1,
    min_rtt_us=50,
)  # fmt: skip


def run(watch: SocketWatch, sockets: list[TcpSocket], start: int = 0) -> SocketJudgement:
    for number, socket in enumerate(sockets):
        judged = watch.look([socket], (start + number) * STEP_NS)
    return judged


def sending(rates: list[float], *, rtt_us: int = 100, retransmits: int = 3, after: TcpSocket = BASE) -> list[TcpSocket]:
    """Looks at a socket that sent with these bytes a second for 100 ms of each window."""
    found, sent, busy = [], after.bytes_acknowledged or 0, after.busy_us or 0
    for rate in rates:
        sent += int(rate / 10)
        busy += 100_000
        found.append(replace(BASE, bytes_acknowledged=sent, busy_us=busy, rtt_us=rtt_us, retransmits=retransmits))
    return found


def test_throughput_is_of_the_time_in_which_there_was_something_to_send() -> None:
    judged = run(SocketWatch(Direction.SEND), sending([1e9, 1e9]))
    assert judged.state is FlowState.ACTIVE
    assert judged.bandwidth == 1e9
    assert judged.expected is None
    assert judged.retransmitted == 0


def test_a_dead_path_is_told_by_timeouts_without_an_answer() -> None:
    lost = replace(BASE, unacknowledged=4, timeouts=3, last_acknowledged_ms=1800, send_queue=9000)
    judged = run(SocketWatch(Direction.SEND), [BASE, lost])
    assert judged.state is FlowState.STALLED
    assert "4 segments to 10.0.0.2:50000 unacknowledged for 1.8 s" in judged.reason
    # One timeout, or a moment of silence, is daily bread.
    for mild in (replace(lost, timeouts=1), replace(lost, last_acknowledged_ms=40)):
        assert run(SocketWatch(Direction.SEND), [BASE, mild]).state is not FlowState.STALLED


def test_a_peer_that_does_not_read_is_not_a_dead_path() -> None:
    full = replace(BASE, send_queue=65536, window_probes=2, busy_us=500_000, receive_window_limited_us=400_000)
    judged = run(SocketWatch(Direction.SEND), [BASE, full])
    assert judged.state is FlowState.BLOCKED
    assert "does not read" in judged.reason
    assert judged.facts is not None and judged.facts.window_limited == 0.8


def test_a_receiver_that_does_not_read_itself() -> None:
    judged = run(SocketWatch(Direction.RECV), [BASE, replace(BASE, receive_queue=4096)])
    assert judged.state is FlowState.BLOCKED
    assert "not read here" in judged.reason


def test_nothing_to_send_is_idle() -> None:
    assert run(SocketWatch(Direction.SEND), [BASE, BASE, BASE]).state is FlowState.IDLE
    assert run(SocketWatch(Direction.RECV), [BASE, BASE]).state is FlowState.IDLE


def test_a_slow_wire_needs_a_second_witness() -> None:
    """Less throughput alone may be the sender's doing; queues that fill, or loss, are the wire's."""
    usual = sending([1e9] * (LEARNING + 1))
    for rtt_us, retransmits, state in ((100, 3, FlowState.ACTIVE), (900, 3, FlowState.SLOW), (100, 40, FlowState.SLOW)):
        watch = SocketWatch(Direction.SEND)
        run(watch, usual)
        slow = sending([3e8] * JUDGED, rtt_us=rtt_us, retransmits=retransmits, after=usual[-1])
        judged = run(watch, slow, start=len(usual))
        assert judged.state is state, (rtt_us, retransmits, judged)
        assert judged.expected == 1e9  # the slow windows taught nothing
        if state is FlowState.SLOW:
            assert "300.0 MB/s where 1000.0 is usual" in judged.reason


def test_what_was_sent_again_long_ago_is_no_witness_of_now() -> None:
    watch = SocketWatch(Direction.SEND)
    usual = sending([1e9] * (LEARNING + 1))
    run(watch, usual)
    slow = sending([3e8] * 200, retransmits=40, after=usual[-1])
    assert run(watch, slow[:JUDGED], start=len(usual)).retransmitted == 37
    late = run(watch, slow[JUDGED:], start=len(usual) + JUDGED)
    assert (late.retransmitted, late.state) == (0, FlowState.ACTIVE)


def test_counts_of_other_sockets_begin_anew() -> None:
    watch = SocketWatch(Direction.SEND)
    run(watch, [replace(BASE, retransmits=90), replace(BASE, retransmits=95)])
    assert run(watch, [replace(BASE, retransmits=2), replace(BASE, retransmits=4)], start=2).retransmitted == 2


def test_a_job_that_computes_for_a_while_is_not_slow() -> None:
    usual = sending([1e9] * (LEARNING + 1))
    watch = SocketWatch(Direction.SEND)
    run(watch, usual)
    pause = [replace(usual[-1], rtt_us=900)] * 6
    assert run(watch, pause, start=len(usual)).state is FlowState.IDLE


def test_one_noisy_window_is_not_slow() -> None:
    usual = sending([1e9] * (LEARNING + JUDGED))
    watch = SocketWatch(Direction.SEND)
    run(watch, usual)
    judged = run(watch, sending([1e8], rtt_us=900, after=usual[-1]), start=len(usual))
    assert judged.state is FlowState.ACTIVE


def test_several_sockets_are_summed() -> None:
    second = replace(BASE, inode=2, local_port=40001, retransmits=5, rtt_us=700, busy_us=1, send_queue=10)
    judged = SocketWatch(Direction.SEND).look([BASE, second], 0)
    assert judged.facts is not None
    assert (judged.facts.sockets, judged.facts.retransmits, judged.facts.rtt_us, judged.facts.send_queue) == (2, 8, 700, 10)


def test_sockets_that_cannot_be_told_apart_are_unknown() -> None:
    assert SocketWatch(Direction.SEND).look([], 0).state is FlowState.UNKNOWN


def test_a_counter_that_falls_begins_anew() -> None:
    """Another socket has the descriptor now."""
    watch = SocketWatch(Direction.SEND)
    run(watch, sending([1e9, 1e9]))
    judged = run(watch, [BASE, *sending([2e9])], start=2)
    assert judged.bandwidth == 2e9
