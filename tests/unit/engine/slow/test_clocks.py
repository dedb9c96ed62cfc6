"""Clocks of nodes, from operations they take part in together."""

from __future__ import annotations

import numpy as np

from ncclwatch.engine.slow.clocks import estimate


def test_clocks_are_found_within_their_error() -> None:
    rng = np.random.default_rng(4)
    offsets, drifts = np.array([0.0, 0.013, -0.004, 0.0]), np.array([0.0, 40e-6, -20e-6, 0.0])
    rows = []
    for number in range(400):
        true = 0.1 * number
        begins = true + 0.002 * rng.random(3)
        end = begins.max() + 0.0005
        for node in range(3):
            shown = [t * (1 + drifts[node]) + offsets[node] for t in (begins[node], end)]
            rows.append((node, number, *shown))
    rows.append((3, 10_000, 1.0, 2.0))
    table = np.array(rows)
    model = estimate(table[:, 0].astype(int), table[:, 1].astype(int), table[:, 2], table[:, 3])
    for node in (1, 2):
        late = np.array([35.0 * (1 + drifts[node]) + offsets[node]])
        assert abs(float(model.correct(np.array([node]), late)[0]) - 35.0) <= model.error(0, node) < 0.002
    assert model.error(0, 3) == float("inf")
    assert model.error(2, 2) == 0.0
