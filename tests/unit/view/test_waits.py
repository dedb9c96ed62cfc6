"""Who waits for whom, by each rank's own counters."""

from __future__ import annotations

from ncclwatch.view.waits import matrix, pairs, paths_to
from unit.synthetic import frozen_ring


def test_waits_of_a_ring_lead_to_the_rank_that_stopped() -> None:
    samples = {s.process.key: s for rank in frozen_ring(2) for s in rank.looks(1)}
    found = pairs(samples)
    assert {(3, 2), (1, 2)} <= found
    assert not any(waiter == 2 for waiter, _ in found)
    ways = paths_to({2}, found)
    assert ways[3] == (2, 1)
    assert ways[1] == (2, 1)
    added = matrix([found, set()], range(4))
    assert added.share[3, 2] == 0.5
