"""Fixtures of the tests of NICs and links."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nic.cables import virtual_cable


@pytest.fixture
def cable() -> Iterator[tuple[str, str]]:
    """Both ends of a virtual cable, switched on."""
    with virtual_cable() as ends:
        yield ends
