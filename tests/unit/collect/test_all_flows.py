"""A node with more flows than a look holds tells all of them now and then, and each look's share as before."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.collect import network
from ncclwatch.collect.network import MAX_FLOWS, NetworkWatch
from unit.paths.test_flow_map import SEND


@pytest.mark.parametrize(("number", "told"), [(MAX_FLOWS, 0), (MAX_FLOWS + 1, MAX_FLOWS + 1), (20_000, network.MAX_ALL_FLOWS)])
def test_all_flows_are_told_twice_a_minute(number: int, told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr("ncclwatch.collect.network.time.monotonic", lambda: clock[0])
    watch = NetworkWatch("a", kernel_log=False)
    try:
        every = [replace(SEND, channel=n) for n in range(number)]
        monkeypatch.setattr(watch.flows, "observe", lambda looks, calm: None)
        monkeypatch.setattr(watch.flows, "flows", lambda: every)
        found = []
        for _ in range(20):
            shown = watch._list_flows([], False)
            assert len(shown) == min(number, MAX_FLOWS)
            found.append(len(watch.take_all()))
            clock[0] += network.FLOWS_EVERY_S
        assert found == [told, *[0] * 14, told, *[0] * 4]
    finally:
        watch.close()
