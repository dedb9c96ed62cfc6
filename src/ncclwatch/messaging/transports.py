"""Which transport an address means: ``tcp://`` and ``ipc://`` are ZeroMQ, ``nats://`` and ``tls://`` a NATS server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ncclwatch.messaging.bus_keys import access, missing

if TYPE_CHECKING:
    from ncclwatch.messaging.transport import HubMaker, LinkMaker, ViewerTransport


def require_client() -> None:
    """Raise one clear line where the client of NATS is not installed."""
    try:
        import nats  # noqa: F401 - only whether it is there
        import nkeys  # noqa: F401
    except ImportError as error:
        raise missing() from error


def bus_link(address: str, keys: Path | None) -> tuple[LinkMaker, int]:
    """The agent's side of a NATS server, and after how many batches one builds on nothing there."""
    require_client()
    from ncclwatch.messaging.nats_link import KEY_EVERY, NatsLink

    return partial(NatsLink, access(address, keys, "agent")), KEY_EVERY


def bus_hub(address: str, keys: Path | None) -> HubMaker:
    """The engine's side of a NATS server."""
    require_client()
    from ncclwatch.messaging.nats_hub import NatsHub

    return partial(NatsHub, access(address, keys, "engine"))


def bus_viewer(address: str, keys: Path | None, token: str) -> ViewerTransport:
    """A viewer's side of a NATS server."""
    require_client()
    from ncclwatch.messaging.nats_viewer import NatsViewer

    return NatsViewer(access(address, keys, "viewer"), token=token)


def fleet_viewer(address: str, keys: Path | None, job: str) -> ViewerTransport:
    """The same of a job as a fleet calls it, with an engine's key: who finds the jobs of a fleet reads its leases."""
    require_client()
    from ncclwatch.messaging.nats_viewer import NatsViewer

    return NatsViewer(access(address, keys, "engine"), job=job)
