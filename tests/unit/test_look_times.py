"""When agents look and engines judge: nodes that cannot see each other look at one moment of the engine's clock."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ncclwatch.cli.engine_service import PHASE, EngineService
from ncclwatch.collect.node import NodeCollector


@pytest.mark.parametrize("interval_s", [0.25, 1.0, 5.0])
@pytest.mark.parametrize("part", [0.0, 0.2, 0.6, 0.7, 0.99])
def test_looks_are_taken_at_multiples_of_the_interval_on_the_common_clock(interval_s: float, part: float) -> None:
    clock = 1_700_000_000.0 + part * interval_s
    collector = NodeCollector(every=False, interval_s=interval_s, common_ns=lambda: round(clock * 1e9))
    wait = collector._look_after(100.0) - 100.0
    assert (clock + wait) / interval_s == pytest.approx(round((clock + wait) / interval_s), abs=1e-5)
    # A look that came a little early is not followed by another one at once, and none is left out without need.
    assert interval_s / 4 < wait <= 1.25 * interval_s


def test_without_a_common_clock_looks_that_were_missed_are_not_made_up_for() -> None:
    collector = NodeCollector(every=False, interval_s=1.0)
    collector._next_look = 100.0
    assert collector._look_after(100.1) == 101.0
    assert collector._look_after(107.5) == 108.5


def test_judged_is_when_the_looks_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    service = EngineService("tcp://127.0.0.1:*", interval_s=2.0)
    clocks = SimpleNamespace(time=lambda: 1_700_000_001.3, monotonic=lambda: 50.0)
    monkeypatch.setattr("ncclwatch.cli.engine_service.time", clocks)
    try:
        for earliest in (50.0, 50.7, 51.9):
            judged = service._judgement_after(earliest)
            assert earliest <= judged <= earliest + 2.0
            assert (clocks.time() + judged - clocks.monotonic()) % 2.0 == pytest.approx(PHASE * 2.0, abs=1e-5)
    finally:
        service.close()
