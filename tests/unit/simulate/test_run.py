"""Whole runs: two executors that agree, invariants of time, and that every fault shows in the job itself."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import Scenario, parse
from ncclwatch.simulate.timeline import Timeline

FAULTY = {"score_class": "H1", "verdicts": ["not-entered"], "ranks": [0]}
LARGE = {"workload": {"dp_bytes": 64 << 20}}
TWICE = {"layout": {"cp": 2, "pp": 2, "ranks_per_node": 4}}
SMALL = {"tp": 2, "pp": 2, "dp": 2, "ranks_per_node": 4}


def make(faults: list[dict[str, Any]] | None = None, **tables: Any) -> Scenario:
    data: dict[str, Any] = {"name": "t", "title": "t", "seed": 3, "layout": SMALL, "network": {"intra_node": "net"}}
    data["workload"] = {"iterations": 5, **tables.pop("workload", {})}
    data |= tables
    data["faults"] = faults or []
    data["expect"] = FAULTY if faults else {"score_class": "clean"}
    return parse(data)


def same(a: Timeline, b: Timeline) -> None:
    right = {(x.stage, x.role, x.sequence): x for x in b.blocks}
    compared = 0
    for block in a.blocks:
        other = right.get((block.stage, block.role, block.sequence))
        for name in ("called", "started", "finished"):
            mine: np.ndarray = getattr(block, name)
            if other is None:
                assert not np.isfinite(mine).any()
            else:
                np.testing.assert_allclose(mine, getattr(other, name), rtol=0, atol=1e-9)
                compared += int(np.isfinite(mine).sum())
    assert compared > 100


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"workload": {"grad_norm": True, "gather_communicator": True, "merge_exchanges": True}},
        {"workload": {"schedule": "gpipe", "sequence_parallel": True}, "layout": SMALL | {"cp": 2, "ep": 2}},
        {"workload": {"schedule": "interleaved-1f1b", "virtual_stages": 2, "micro_batches": 4, "iterations": 3}},
        {"faults": [{"kind": "slow-gpu", "rank": 3, "strength": 3.0, "start_s": 0.5}]},
        {"faults": [{"kind": "gc-pause", "rank": 5, "strength": 0.2, "period_s": 0.3, "start_s": 0.5}]},
        {"faults": [{"kind": "slow-link", "rank": 0, "peer": 2, "strength": 30.0, "start_s": 0.4}]},
        {"faults": [{"kind": "stop", "rank": 3, "start_s": 0.5}]},
        {"faults": [{"kind": "stop", "rank": 3, "iteration": 3, "role": "dp", "duration_s": 1.0}]},
        {"faults": [{"kind": "never-enters", "rank": 5, "iteration": 2, "role": "tp", "occurrence": 4}]},
        {"faults": [{"kind": "proxy-stall", "rank": 1, "iteration": 2, "role": "dp", "offset_ms": 0.1}]},
    ],
    ids=lambda t: str(t.get("faults", [t])[0])[:40],
)
def test_both_executors_give_the_same_times(tables: dict[str, Any]) -> None:
    same(simulate(make(**tables)), simulate(make(**tables), exact_from=1))


def test_the_same_seed_gives_the_same_run_and_another_does_not() -> None:
    same(simulate(make()), simulate(make()))
    other = simulate(make(seed=4))
    assert not np.array_equal(simulate(make()).durations(), other.durations())


def test_no_operation_ends_before_its_last_member_began_or_begins_before_its_call() -> None:
    timeline = simulate(make())
    for block in timeline.blocks:
        assert (block.called <= block.launched).all()
        assert (block.launched <= block.started).all()
        assert (block.started <= block.finished).all()
        if not block.transfers:
            for group in set(block.groups.tolist()):
                here = block.groups == group
                assert block.finished[here].min() >= block.started[here].max()


def test_a_receive_never_ends_before_its_send_began() -> None:
    timeline = simulate(make())
    checked = 0
    for key, receives in timeline.receives.items():
        for receive, send in zip(receives, timeline.sends[key], strict=True):
            at = next(i for i, t in enumerate(receive.transfers) if not t.send and (t.peer, receive.stage, t.forward) == key)
            assert (receive.transfer_finished[at] > send.started).all()
            checked += 1
    assert checked == 2 * 4 * 5


def test_each_rank_runs_its_operations_in_the_order_it_called_them() -> None:
    timeline = simulate(make())
    for stage in (0, 1):
        blocks = [b for b in timeline.blocks if b.stage == stage]
        for before, after in itertools.pairwise(blocks):
            assert (before.finished <= after.started).all()
            assert (before.called <= after.called).all()


@pytest.mark.parametrize("kind", ["stop", "kill", "never-enters", "gpu-stall", "proxy-stall"])
@pytest.mark.parametrize("rank", [0, 3, 6])
def test_one_rank_that_stands_still_stops_everybody(kind: str, rank: int) -> None:
    timeline = simulate(make([{"kind": kind, "rank": rank, "iteration": 2, "role": "dp", "offset_ms": 0.1}]))
    assert timeline.hung
    assert not np.isfinite(timeline.iteration_ends[-1]).any()
    assert np.isfinite(timeline.iteration_ends[1]).all()


def test_a_hang_takes_nobody_back_before_its_start() -> None:
    clean = simulate(make())
    hung = simulate(make([{"kind": "stop", "rank": 2, "start_s": 0.7}]))
    onset = hung.disturbance.onsets[0][1]
    for a, b in zip(clean.blocks, hung.blocks, strict=False):
        early = a.finished < onset
        np.testing.assert_array_equal(a.finished[early], b.finished[early])


def test_a_rank_that_is_continued_costs_about_as_long_as_it_stood() -> None:
    clean, paused = simulate(make()), simulate(make([{"kind": "stop", "rank": 2, "start_s": 0.5, "duration_s": 2.0}]))
    assert not paused.hung
    assert paused.durations().sum() - clean.durations().sum() == pytest.approx(2.0, abs=0.05)


@pytest.mark.parametrize(
    ("fault", "ratio"),
    [
        ({"kind": "slow-gpu", "rank": 1, "strength": 3.0}, 1.8),
        ({"kind": "host-load", "rank": 1, "strength": 2.0}, 1.5),
        ({"kind": "slow-loader", "rank": 1, "strength": 0.5}, 1.8),
        ({"kind": "slow-copy", "rank": 1, "strength": 0.1}, 1.5),
        ({"kind": "gc-pause", "rank": 1, "strength": 0.3, "period_s": 0.3}, 1.3),
        ({"kind": "cpu-limit", "rank": 1, "strength": 5000.0}, 1.5),
        ({"kind": "few-cpus", "rank": 1, "strength": 5000.0}, 1.5),
        ({"kind": "slow-link", "rank": 0, "peer": 2, "strength": 3000.0}, 1.3),
        ({"kind": "lossy-link", "rank": 0, "peer": 2, "strength": 0.5, "delay_ms": 100.0}, 1.2),
        ({"kind": "nic-limit", "rank": 0, "strength": 1000.0}, 1.3),
        ({"kind": "background-traffic", "rank": 0, "strength": 1000.0, "delay_ms": 1.0}, 1.3),
        ({"kind": "proxy-sleep", "rank": 0, "strength": 0.2, "period_s": 0.3}, 1.2),
    ],
    ids=lambda v: v["kind"] if isinstance(v, dict) else "",
)
def test_every_slow_down_shows_in_the_iteration_time(fault: dict[str, Any], ratio: float) -> None:
    clean = simulate(make()).durations()
    slow = simulate(make([{**fault, "start_s": 0.7}]))
    assert not slow.hung
    spread = float(clean.std())
    later = slow.durations()[3:]
    assert later.mean() > ratio * clean.mean()
    assert later.mean() - clean.mean() > 5 * spread


def test_several_warm_ups_take_as_long_as_the_longest() -> None:
    def first(*factors: float) -> float:
        warm = [{"kind": "warmup", "iteration": 0, "count": 1, "factor": factor} for factor in factors]
        return float(simulate(make(lookalikes=warm)).durations()[0])

    assert first(2.0, 4.0, 3.0) == first(4.0) > first(2.0)


@pytest.mark.parametrize(
    ("tables", "faults"),
    [
        ({}, [{"kind": "skip", "rank": 3, "iteration": 2, "role": "dp"}]),
        ({}, [{"kind": "skip", "rank": 3, "iteration": 2, "role": "tp", "occurrence": 3}]),
        (
            {"workload": {"dp_bytes": 64 << 20}},
            [{"kind": "other-size", "rank": 3, "iteration": 2, "role": "dp", "strength": 4.0}],
        ),
        (
            {"workload": {"dp_bytes": 64 << 20}},
            [{"kind": "other-type", "rank": 3, "iteration": 2, "role": "dp", "strength": 0.5}],
        ),
        ({}, [{"kind": "other-operation", "rank": 3, "iteration": 2, "role": "tp", "occurrence": 2}]),
        (
            {"layout": {"cp": 2, "pp": 2, "ranks_per_node": 4}},
            [{"kind": "swap", "rank": 0, "iteration": 2, "role": "cp", "occurrence": 15}],
        ),
    ],
    ids=["skip-dp", "skip-tp", "larger", "type", "operation", "swap"],
)
def test_a_rank_that_asks_for_something_else_hangs_the_job(tables: dict[str, Any], faults: list[dict[str, Any]]) -> None:
    timeline = simulate(make(faults, **tables))
    assert timeline.hung
    assert len(timeline.disturbance.onsets) == len(faults)
    waits = [b for b in timeline.blocks if (np.isfinite(b.called) & ~np.isfinite(b.finished)).any()]
    assert waits, "somebody has called and waits"


def test_an_inconsistent_call_leaves_the_odd_rank_free() -> None:
    """A smaller message than the peers': its caller gets through it, they do not (CCL-D's sign of H2), until its next call
    feeds them.
    """
    fault = {"kind": "other-size", "rank": 3, "iteration": 4, "role": "dp", "occurrence": 1, "strength": 0.2}
    timeline = simulate(make([fault], workload={"dp_bytes": 64 << 20}))
    last = [b for b in timeline.blocks if b.role == "dp" and 3 in b.ranks.tolist()][-1]
    at = {r: i for i, r in enumerate(last.ranks.tolist())}
    assert math.isfinite(last.finished[at[3]])
    assert not math.isfinite(last.finished[at[1]])
    assert last.callings[3].nbytes < last.nbytes


def test_a_rank_that_never_reaches_creation_leaves_no_operation() -> None:
    timeline = simulate(make([{"kind": "init-missing", "rank": 5}]))
    assert timeline.hung
    assert timeline.never_initialised == (5,)
    assert not timeline.blocks


def test_a_fault_that_names_no_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="collectives of role"):
        simulate(make([{"kind": "skip", "rank": 3, "iteration": 2, "role": "dp", "occurrence": 9}]))
