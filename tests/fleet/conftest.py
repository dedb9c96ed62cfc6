"""Servers for the tests of what many jobs need."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.servers import NatsServer, running


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A nats-server with JetStream and without accounts, on loopback."""
    with running(tmp_path / "nats") as server:
        yield server
