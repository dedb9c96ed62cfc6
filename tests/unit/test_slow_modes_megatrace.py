"""MegaTrace's check of the network as a mode: a drop of a flow's throughput, requests that do not complete, and near misses."""

from __future__ import annotations

from typing import Any

import pytest

from ncclwatch.collect.network_memory import NetworkMemory
from ncclwatch.model.job import assemble
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow
from ncclwatch.slow_modes import WARM_UP, ModeWatch, SlowMode, SlowRule
from unit.synthetic import SECOND, WORLD, Rank, communicator, looks

RUNNING = Verdict(VerdictClass.RUNNING, "")
RATE = 1e9
Rates = dict[tuple[int, int], float | None]
MB = 1 << 20


def watch() -> ModeWatch:
    made = SlowRule(SlowMode.MEGATRACE).watch()
    assert isinstance(made, ModeWatch)
    made.network = NetworkMemory()
    return made


def step(mode: ModeWatch, second: int, rates: Rates, **work: Any) -> Verdict:
    """A window of each flow of a job of four ranks, and what is said then."""
    assert mode.network is not None
    for (rank, peer), rate in rates.items():
        counts: dict[str, Any] = {"posted": 9, "posted_bytes": MB, "completed": 9, "in_flight": 0, "throughput": rate} | work
        window = WorkWindow(Counting.BURSTS, (second - 1) * SECOND, second * SECOND, 0.1, **counts)
        flow = FlowWindow(1000 + rank, Scope.PEER, window, rank, comm_hash=WORLD, rank=rank, peer=peer, role="data")
        mode.network.feed_work(f"node{rank}", [flow], second * SECOND)
    ranks = [Rank(rank, 4, (communicator(rank, 4),)) for rank in range(4)]
    (job,) = assemble(looks(ranks))
    return mode.judge(job, RUNNING)


RING: Rates = {(0, 1): RATE, (1, 2): RATE, (2, 3): RATE, (3, 0): RATE}


def warm(mode: ModeWatch) -> int:
    for second in range(1, WARM_UP + 1):
        assert step(mode, second, RING) is RUNNING
    return WARM_UP


def test_a_drop_of_more_than_a_fifth_flags_the_path_at_once_and_as_long_as_it_lasts() -> None:
    mode = watch()
    second = warm(mode)
    assert step(mode, second + 1, RING | {(1, 2): 0.81 * RATE}) is RUNNING, "a fifth is allowed"
    said = step(mode, second + 2, RING | {(1, 2): 0.5 * RATE})
    assert said.verdict_class is VerdictClass.SLOW_COMMUNICATION and [c.rank for c in said.culprits] == [1, 2]
    assert said.link is not None and (said.link.source, said.link.destination) == (1, 2)
    assert "rank 1 to rank 2: 500.0 MB/s over the last completions" in said.evidence[0]
    for later in range(3, 40):
        assert step(mode, second + later, RING | {(1, 2): 0.5 * RATE}).culprits, "a slow path teaches nothing"
    assert step(mode, second + 40, RING) is RUNNING


def test_who_has_an_end_of_most_flagged_paths_is_named_alone() -> None:
    mode = watch()
    second = warm(mode)
    said = step(mode, second + 1, RING | {(1, 2): 0.5 * RATE, (2, 3): 0.4 * RATE})
    assert [c.rank for c in said.culprits] == [2] and "an end of 2 of 2 flagged paths" in said.culprits[0].reason


def test_the_first_windows_and_windows_without_a_throughput_say_nothing() -> None:
    mode = watch()
    for second in range(1, WARM_UP):
        step(mode, second, RING)
    assert step(mode, WARM_UP, RING | {(1, 2): 0.1 * RATE}) is RUNNING, "it is still learned"
    mode = watch()
    second = warm(mode)
    assert step(mode, second + 1, RING | {(1, 2): None}) is RUNNING
    assert step(mode, second + 2, RING | {(1, 2): 0.1 * RATE}, posted_bytes=0) is RUNNING, (
        "what it receives is its peer's to send"
    )


@pytest.mark.parametrize(("oldest_s", "completed", "named"), [(0.6, 0, True), (0.4, 0, False), (0.6, 1, False)])
def test_requests_in_flight_while_nothing_completes_are_the_network(oldest_s: float, completed: int, named: bool) -> None:
    mode = watch()
    second = warm(mode)
    assert mode.network is not None
    step(mode, second + 1, RING)
    work = WorkWindow(
        Counting.EXACT, 0, (second + 2) * SECOND, 1.0, posted=0, completed=completed, in_flight=4, oldest_s=oldest_s
    )  # fmt: skip
    flow = FlowWindow(1001, Scope.PEER, work, 1, comm_hash=WORLD, rank=1, peer=2, role="data")
    mode.network.feed_work("node1", [flow], 0)
    said = step(mode, second + 2, {})
    assert bool(said.culprits) == named
    if named:
        assert "4 in flight, none completed" in said.evidence[0]


def test_another_verdict_than_that_it_runs_stands() -> None:
    mode = watch()
    second = warm(mode)
    step(mode, second + 1, RING | {(1, 2): 0.5 * RATE})
    hangs = Verdict(VerdictClass.HARDWARE, "")
    (job,) = assemble(looks([Rank(rank, 4, (communicator(rank, 4),)) for rank in range(4)]))
    assert mode.judge(job, hangs) is hangs
    assert mode.judge(job, RUNNING).culprits
