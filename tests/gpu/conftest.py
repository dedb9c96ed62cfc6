"""The GPU layer: skipped with its reason where there is no GPU."""

from __future__ import annotations

import pytest

from gpu.gpujob import STANDIN, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, and say once why they are skipped."""
    reason = missing()
    for item in items:
        if "gpu" in item.path.parts:
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=f"GPU layer: {reason}"))
            elif STANDIN and item.get_closest_marker("real_gpu"):
                item.add_marker(pytest.mark.skip(reason="GPU layer: the CPU testbed plays the GPU, which has none of this"))
