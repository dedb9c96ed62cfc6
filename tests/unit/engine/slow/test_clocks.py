"""Clocks of nodes, from operations they take part in together."""

from __future__ import annotations

import numpy as np

from ncclwatch.engine.slow.gpu_operations import estimate


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
    table = np.array(rows)
    model = estimate(table[:, 0].astype(int), table[:, 1].astype(int), table[:, 2], table[:, 3])
    for node in (1, 2):
        late = np.array([40.0 * (1 + drifts[node]) + offsets[node]])
        assert abs(float(model.correct(np.array([node]), late)[0]) - 40.0) <= model.error < 0.002
    assert "clocks of 3 hosts differ by up to 14" in model.text() and "known to ±" in model.text()
    table = np.array([*rows, (3, 10_000, 1.0, 2.0)])
    alone = estimate(table[:, 0].astype(int), table[:, 1].astype(int), table[:, 2], table[:, 3])
    assert alone.error == float("inf") and "cannot be compared" in alone.text()
    assert estimate(np.zeros(1, int), np.zeros(1, int), np.zeros(1), np.ones(1)).error == 0.0


def test_a_stretch_in_which_somebody_waited_long_widens_no_error() -> None:
    """Of messages there and back, one hundred seconds apart: in the last stretch the answer comes ten seconds late."""
    rows = []
    for number in range(6):
        begin, late = 100.0 * number, 10.0 if number == 5 else 0.0
        rows += [(0, 2 * number, begin, np.nan), (1, 2 * number, np.nan, begin + 5.001)]
        rows += [(1, 2 * number + 1, begin + 5.002, np.nan), (0, 2 * number + 1, np.nan, begin + 0.003 + late)]
    table = np.array(rows)
    model = estimate(table[:, 0].astype(int), table[:, 1].astype(int), table[:, 2], table[:, 3])
    there = model.correct(np.array([1]), np.array([255.0]))[0]
    assert abs(there - 250.0) <= model.error < 0.02
