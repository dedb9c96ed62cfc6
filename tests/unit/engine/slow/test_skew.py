"""Who calls later than its fellows on a node keeps them waiting, where NVLink does not show it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclwatch.collect.ledger import Ledger
from ncclwatch.engine.slow.detect import SlowDown
from ncclwatch.engine.slow.lateness import Lateness, with_calls
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.job import Job, assemble
from ncclwatch.model.state import Transport
from unit.synthetic import WORLD, Rank, address_of, communicator, looks

NORMAL_S, SLOW_S, SINCE_S = 0.2, 0.7, 4.0
SLOW = SlowDown(SINCE_S, SINCE_S, NORMAL_S, SLOW_S, 20, 20)
CALLS = 8
"""Calls an iteration, four of them ahead of the GPU."""


def times(late: dict[int, float], ranks: int, always: dict[int, float]) -> NDArray[np.float64]:
    """When each rank calls: shape (ranks, calls), seconds. Who is late since ``SINCE_S`` is so with the first half of its calls;
    the others wait for it before the second half.
    """
    rows: list[list[float]] = [[] for _ in range(ranks)]
    begin = 1.0
    for number in range(40):
        now = begin >= SINCE_S
        held = max(late.values(), default=0.0) if now else 0.0
        for rank in range(ranks):
            own = late.get(rank, 0.0) if now else 0.0
            for call in range(CALLS):
                waited = own if call < CALLS // 2 else held
                rows[rank].append(begin + waited + 0.002 * call + always.get(rank, 0.0) + 1e-4 * ((number + rank) % 3))
        begin += NORMAL_S + held
    return np.array(rows)


def skew_of(
    called: NDArray[np.float64],
    *,
    host: str | None = "node",
    transport: Transport = Transport.P2P,
    clocks: dict[int, float] | None = None,
) -> tuple[Lateness, NDArray[np.bool_]]:
    size = len(called)
    job, ledger = make_job(size, host, transport), Ledger()
    for rank, own in enumerate(called):
        ledger.add_calls(records(rank, size, own), 0, host or f"node{rank}")
    since = [SINCE_S + (clocks or {}).get(rank, 0.0) for rank in range(size)]
    return with_calls(Lateness.of_nobody(size), job, ledger, since, SLOW)


def make_job(size: int, host: str | None, transport: Transport) -> Job:
    ranks = [Rank(r, size, (communicator(r, size, transport=transport),), host=host) for r in range(size)]
    (job,) = assemble(looks(ranks))
    return job


def records(rank: int, size: int, called: NDArray[np.float64]) -> NDArray[Any]:
    events = np.zeros(len(called) + 1, EVENT_DTYPE)
    events["kind"], events["flags"] = Kind.ENTER, Flag.COMM_READ
    events["comm"], events["rank"], events["nranks"] = address_of(WORLD), rank, size
    events["pid"], events["peer"], events["count"], events["datatype"] = 1000 + rank, -1, 64, 7
    events["function"] = Function.ALL_REDUCE
    events["time_ns"][1:] = called * 1e9
    events["kind"][0], events["function"][0] = Kind.LEAVE, Function.COMM_INIT_RANK
    return events


@pytest.mark.parametrize("size", [2, 8])
def test_who_calls_late_is_told_and_how_late_and_that_the_others_wait(size: int) -> None:
    skew, waits = skew_of(times({1: 0.5}, size, {}))
    assert skew.share[1] == pytest.approx(0.5 / 0.7, rel=0.1) and not np.delete(skew.share, 1).any()
    assert skew.seconds[1] == pytest.approx(0.5, rel=0.02) and skew.late[1] >= 20
    assert waits.tolist() == [rank != 1 for rank in range(size)]


def test_clocks_of_several_nodes_are_put_together_by_the_past() -> None:
    clocks = {0: 0.05, 3: 7.0, 2: -0.3}
    skew, waits = skew_of(times({1: 0.5}, 4, clocks), host=None, clocks=clocks)
    assert skew.share[1] == pytest.approx(0.5 / 0.7, rel=0.1) and np.count_nonzero(skew.share) == 1
    assert not waits.any(), "those of other nodes are seen to wait"


@pytest.mark.parametrize(
    ("called", "other"),
    [
        (times({}, 4, {}), {}),
        # A host a little behind the others at every call, as it has always been: its GPU has enough to do.
        (times({}, 4, {2: 0.004}), {}),
        (times({}, 4, {2: 0.15}), {}),
        # All hosts wait for their own GPUs alike: which of these is slow does not show.
        (times(dict.fromkeys(range(4), 0.5), 4, {}), {}),
        # Two are late together: neither keeps all the others waiting.
        (times({1: 0.5, 2: 0.5}, 4, {}), {}),
        # What explains little of what is lost.
        (times({1: 0.1}, 4, {}), {}),
        # Waits over the network show in the looks.
        (times({1: 0.5}, 4, {}), {"transport": Transport.NET}),
        # Clocks of several nodes, and no past to compare them by.
        (times({1: 0.5}, 4, {3: 0.5})[:, -160:], {"host": None}),
    ],
    ids=["healthy", "a little behind", "always behind", "all", "two", "little", "network", "no past"],
)
def test_otherwise_nothing_is_told(called: NDArray[np.float64], other: dict[str, Any]) -> None:
    skew, waits = skew_of(called, **other)
    assert not skew.share.any() and not waits.any()


def test_a_rank_nobody_sees_may_be_the_last() -> None:
    called = times({1: 0.5}, 3, {})
    job, ledger = make_job(3, "node", Transport.P2P), Ledger()
    for rank in range(2):
        ledger.add_calls(records(rank, 3, called[rank]), 0, "node")
    assert not with_calls(Lateness.of_nobody(3), job, ledger, [SINCE_S] * 3, SLOW)[0].share.any()


def test_of_several_jobs_each_is_told_its_own() -> None:
    """Processes are numbered through all jobs, ranks of a job by their place in it."""
    called, other = times({1: 0.5}, 4, {}), 0xB7
    first = [Rank(rank, 6, (communicator(rank, 6, comm_hash=other),), host="elsewhere") for rank in range(6)]
    ranks = [Rank(rank, 4, (communicator(rank, 4, transport=Transport.P2P),), host="node") for rank in range(4)]
    before, job = assemble([*looks(first), *looks(ranks)])
    assert len(before.members) == 6 and [member.index for member in job.members] == [6, 7, 8, 9]
    ledger = Ledger()
    for rank, own in enumerate(called):
        ledger.add_calls(records(rank, 4, own), 0, "node")
    skew, waits = with_calls(Lateness.of_nobody(4), job, ledger, [SINCE_S] * 4, SLOW)
    assert skew.share[1] == pytest.approx(0.5 / 0.7, rel=0.1) and np.count_nonzero(skew.share) == 1
    assert waits.tolist() == [True, False, True, True]
