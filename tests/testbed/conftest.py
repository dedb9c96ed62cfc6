"""Fixtures of tests about paths: two leaves and their spines, and the library of pins for jobs on them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from testbed.job import build, build_folder
from testbed.spines import Spines


@pytest.fixture(scope="module")
def library() -> str:
    build("2.27.5")
    path = build_folder().resolve() / "libncclwatch_pins.so"
    assert path.exists()
    return str(path)


@pytest.fixture
def fabric(request: pytest.FixtureRequest) -> Iterator[Spines]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with Spines(**getattr(request, "param", {})) as made:
        yield made
