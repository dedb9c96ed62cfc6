"""When agents look and engines judge: nodes that cannot see each other look at one moment of the engine's clock."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from ncclwatch.cli.engine_service import PHASE, EngineService
from ncclwatch.collect.look_times import SPREAD, look_time, next_time
from ncclwatch.collect.node import NodeCollector

NOW = 1_700_000_000.0


@pytest.mark.parametrize("interval_s", [0.1, 0.25, 1.0, 5.0])
def test_nodes_that_began_at_different_times_look_at_the_same_times(interval_s: float) -> None:
    taken: list[list[float]] = []
    for late in (0.0, 0.2, 0.6, 0.7, 0.99):
        clock, times = NOW + late * interval_s, []
        collector = NodeCollector(every=False, interval_s=interval_s, common_ns=lambda: round(clock * 1e9))  # noqa: B023
        for _ in range(50):
            clock += collector._look_after(100.0) - 100.0 - 1e-3 * interval_s  # each comes a moment early
            times.append(clock)
        taken.append(times)
    for times in taken:
        assert 0.8 * interval_s < min(np.diff(times)) and max(np.diff(times)) < 1.32 * interval_s
        assert all(min(abs(np.subtract(taken[0], time))) < 0.01 * interval_s for time in times[2:-3])


def test_looks_that_were_missed_are_not_made_up_for() -> None:
    clock = NOW
    collector = NodeCollector(every=False, interval_s=1.0, common_ns=lambda: round(clock * 1e9))
    clock += collector._look_after(0.0) + 17.3
    waits = []
    for _ in range(3):
        waits.append(collector._look_after(0.0))
        clock += waits[-1]
    assert 0.25 <= waits[0] <= 1.57 and min(waits[1:]) > 0.8 and max(waits) < 1.57


@pytest.mark.parametrize("ratio", [1.0, 0.5, 1 / 3, 2.0])
def test_no_iteration_is_seen_at_the_same_moments_for_ever(ratio: float) -> None:
    seen = np.array([look_time(number, 1.0) % ratio / ratio for number in range(1_700_000_000, 1_700_000_040)])
    tenths = np.histogram(seen, 10, (0.0, 1.0))[0]
    assert np.count_nonzero(tenths) >= 10 * min(1.0, (SPREAD if ratio <= 1 else 0.5) / ratio) - 1


@pytest.mark.parametrize("part", [0.0, 0.1, 0.35, 0.6, 0.99])
def test_the_next_time_is_the_first(part: float) -> None:
    now = NOW + part
    later = [look_time(number, 1.0) + PHASE for number in range(int(now) - 5, int(now) + 5)]
    assert next_time(now, 1.0, after_s=PHASE) == min(time for time in later if time >= now)


@pytest.mark.parametrize("interval_s", [2.0, 2.0 / 3])
def test_judged_is_when_the_looks_have_come(monkeypatch: pytest.MonkeyPatch, interval_s: float) -> None:
    clocks = SimpleNamespace(time=lambda: 1_700_000_001.3, monotonic=lambda: 50.0)
    monkeypatch.setattr("ncclwatch.cli.engine_service.time", clocks)
    for last in (49.0, 50.7, 51.9):
        judged = EngineService._judgement_after(last, interval_s)
        assert last + interval_s / 2 <= judged <= last + 1.85 * interval_s
        looked = clocks.time() + judged - clocks.monotonic() - PHASE * interval_s
        assert next_time(looked - 1e-3, interval_s) == pytest.approx(looked, abs=1e-5)
