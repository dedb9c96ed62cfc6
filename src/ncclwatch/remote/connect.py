"""Where an engine is watched from: by ZeroMQ at its own address, or through a NATS server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ncclwatch.messaging import protocol
from ncclwatch.messaging.bus_keys import bus_address, is_bus
from ncclwatch.messaging.keys import client_keys
from ncclwatch.messaging.transports import bus_viewer, fleet_viewer
from ncclwatch.remote.session import RemoteSession
from ncclwatch.stopping import Stop

Connect = Callable[[Stop], RemoteSession]
"""Begins to follow a job, until ``Stop`` says no."""


def engine_address(engine: str) -> str:
    """The full address of an engine, or of the NATS server it is on, as a user writes it. Raises ``UsageError``."""
    return bus_address(engine) if is_bus(engine) else protocol.endpoint(engine)


def connecting(address: str, keys: Path | None, token: str) -> Connect:
    """How to follow the job with a token of the engine at an address. Keys of ZeroMQ are looked at now: raises ``UsageError``."""
    if is_bus(address):
        return lambda stop: RemoteSession(address, stop=stop, transport=bus_viewer(address, keys, token))
    pair = client_keys(address, keys, "viewer")
    return lambda stop: RemoteSession(address, keys=pair, token=token, stop=stop)


def following(address: str, keys: Path | None, job: str) -> Connect:
    """How to follow a job of a fleet, as the fleet calls it. Raises ``UsageError``."""
    full = bus_address(address)
    return lambda stop: RemoteSession(full, stop=stop, transport=fleet_viewer(full, keys, job))
