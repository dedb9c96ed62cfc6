"""Robust statistics of times: proportional growth is told from additions."""

from __future__ import annotations

import numpy as np
import pytest

from ncclwatch.engine.slow.lateness import slope


def test_slope_tells_work_from_additions() -> None:
    before = np.tile([0.010, 0.020, 0.001], 12)
    grown = np.where(before > 0.005, 2.0 * before + 0.003, 0.4)
    factor, extra = slope(before, grown)
    assert factor == pytest.approx(2.0) and extra == pytest.approx(0.003)
    assert np.isnan(slope(np.full(40, 0.01), np.full(40, 0.02))[0]), "equal stretches say nothing of a factor"
