"""Transfers in columns: values that no healthy process has break nothing."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ncclwatch.engine.diagnose import diagnose
from unit.synthetic import Rank, communicator, looks, recv, send

EXTREMES = (0, 1, 7, -1, 2**31 - 1, 2**31, -(2**31), 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


@pytest.mark.parametrize("seed", range(60))
def test_values_that_no_healthy_process_has_do_not_break_location(seed: int) -> None:
    """Memory of another process is not to be trusted: some verdict comes of anything."""
    chance = random.Random(seed)

    def odd(operation: object) -> object:
        [sub] = operation.subs  # type: ignore[attr-defined]
        names = chance.sample(
            ["channel", "peer", "nsteps", "base", "posted", "received", "transmitted", "done", "gpu_ready", "rank"], 3
        )
        return replace(operation, subs=(replace(sub, **{name: chance.choice(EXTREMES) for name in names}),))  # type: ignore[type-var]

    ranks = []
    for rank in range(4):
        operations = (
            send((rank + 1) % 4, sent=8, done=4, produced=8),
            recv((rank - 1) % 4, posted=12, received=4, delivered=4, consumed=4),
        )
        ranks.append(Rank(rank, 4, (communicator(rank, 4),), tuple(odd(one) for one in operations)))  # type: ignore[misc]
    assert diagnose(looks(ranks)).summary
