"""The judging session: many nodes at their own times, silence, gaps, what lay in a spool, and clocks that differ."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.errors import UsageError
from ncclwatch.messaging import protocol
from ncclwatch.model.verdict import VerdictClass
from unit.fake_node import FakeNode, calls
from unit.synthetic import frozen_ring

SECOND = 10**9


def node(host: str, *ranks: int, run_state: str = "S", error: bool = False) -> FakeNode:
    chosen = [rank for rank in frozen_ring(2, 4, run_state=run_state) if rank.rank in ranks]
    if error:
        for rank in chosen:
            rank.communicators = (replace(rank.communicators[0], async_result="ncclRemoteError"),)
    return FakeNode(chosen, looks=100, host=host)


def rounds(session: DiagnosisSession, nodes: list[FakeNode], begin: int, count: int) -> None:
    for second in range(begin, begin + count):
        for each in nodes:
            session.feed(each.batch(), second * SECOND)
        session.judge(second * SECOND)


def test_ranks_of_a_node_that_fell_silent_are_not_called_dead_when_their_peers_lose_them() -> None:
    """The network between them is cut, and the agent's with it: NCCL's errors say that connections broke, not who ended."""
    for silent in (False, True):
        session = DiagnosisSession()
        left, right = node("a", 0, 1, 3, error=True), node("b", 2)
        if silent:
            rounds(session, [left, right], 0, 2)
        rounds(session, [left], 10, 12)
        verdict = session.verdict
        assert verdict is not None
        accused = [culprit.rank for culprit in verdict.culprits if not culprit.observed]
        assert accused == ([] if silent else [2]), verdict.summary
        assert any("b: its agent has been silent" in line for line in verdict.unobserved) is silent


def test_nodes_speak_at_their_own_times_and_no_look_counts_twice() -> None:
    """One node speaks every second, the other every third: it has not stood still for want of news."""
    session = DiagnosisSession()
    quick, slow = node("a", 0, 1), node("b", 2, 3)
    for second in range(9):
        session.feed(quick.batch(), second * SECOND)
        if second % 3 == 0:
            session.feed(slow.batch(), second * SECOND)
        session.judge(second * SECOND)
    for samples in session.diagnosis._series.values():
        times = [sample.time_ns for sample in samples]
        assert times == sorted(set(times))


def test_a_gap_in_the_sequence_breaks_the_histories_of_that_node_only() -> None:
    session = DiagnosisSession()
    left, right = node("a", 0, 1), node("b", 2, 3)
    for each in (left, right):
        samples = [series[0] for series in each.series]
        for sample, rank in zip(samples, each.series, strict=True):
            rank[0] = replace(sample, process=replace(sample.process, host=each.host))
        session.feed(each.batch(events=calls(samples, 5)), 0)
    session.judge(0)
    assert session.diagnosis.ledger.called[:4].tolist() == [5, 5, 5, 5]
    left.sequence += 1
    session.feed(left.batch(), SECOND)
    session.judge(SECOND)
    assert session.nodes["a"].missed == 1
    assert session.diagnosis.ledger.called[:4].tolist() == [0, 0, 5, 5]


def test_what_lay_in_a_spool_is_no_look_of_now() -> None:
    session = DiagnosisSession()
    one = node("a", 0, 1, 2, 3, run_state="T")
    now = time.time_ns()
    late = one.batch(wall_ns=now - 60 * SECOND, clock_offset_ns=0, clock_error_ns=1000)
    session.feed(late, 0, wall_ns=now)
    assert not session.nodes["a"].samples
    fresh = one.batch(wall_ns=now, clock_offset_ns=0, clock_error_ns=1000)
    session.feed(fresh, 0, wall_ns=now)
    assert len(session.nodes["a"].samples) == 4


def test_a_process_that_went_while_nobody_looked_is_dated_by_the_batch() -> None:
    """A recording says the same whenever it is judged: the engine reads no clock."""
    session = DiagnosisSession()
    alone = node("a", 0, 1)
    first, second = alone.batch(complete=True), alone.batch(complete=True)
    gone = second.samples[1].process.key
    second.samples = second.samples[:1]
    for batch in (first, second):
        session.feed(batch, batch.time_ns)
    ended = session.samples[gone]
    assert (ended.run_state, ended.time_ns, ended.wall_ns) == ("X", second.time_ns, second.wall_ns)


def test_since_when_is_told_by_one_clock() -> None:
    """The clock of a node is an hour behind the engine's."""
    session = DiagnosisSession()
    one = node("a", 0, 1, 2, 3, run_state="T")
    hour = 3600 * SECOND
    for second in range(4):
        session.feed(one.batch(clock_offset_ns=hour, clock_error_ns=SECOND // 1000), second * SECOND)
        session.judge(second * SECOND)
    verdict = session.verdict
    assert verdict is not None
    assert verdict.verdict_class is VerdictClass.STOPPED
    assert verdict.since == pytest.approx(1_700_000_000 + 3600)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("tcp://node1:7000", "tcp://node1:7000"), ("node1", "tcp://node1:7311"), ("10.0.0.1:80", "tcp://10.0.0.1:80"),
        ("tcp://[::1]:7000", "tcp://[::1]:7000"), ("ipc:///run/x", "ipc:///run/x"), ("tcp://0.0.0.0", "tcp://0.0.0.0:7311"),
    ],
)  # fmt: skip
def test_addresses(text: str, address: str) -> None:
    assert protocol.endpoint(text) == address


@pytest.mark.parametrize(
    "text", ["", "tcp://", "http://x:1", "tcp://x:99999", "tcp://u@x:1", "tcp://x:1/y", "tcp://x:abc", "ipc://"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match="write it like"):
        protocol.endpoint(text)


def test_only_loopback_is_loopback() -> None:
    assert all(
        map(protocol.is_loopback, ("tcp://127.0.0.1:1", "tcp://127.9.9.9:1", "tcp://[::1]:1", "tcp://localhost:1", "ipc://x"))
    )
    assert not any(
        map(protocol.is_loopback, ("tcp://0.0.0.0:1", "tcp://10.0.0.1:1", "tcp://node1:1", "tcp://[::]:1", "tcp://*:1"))
    )
