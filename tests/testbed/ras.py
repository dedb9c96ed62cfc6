"""A RAS service of its own for a job: all jobs of a machine share the usual port (SO_REUSEPORT)."""

from __future__ import annotations

import socket

from ncclwatch.ingest.ras_client import Address


def free_address() -> Address:
    """A port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return Address("127.0.0.1", probe.getsockname()[1])


def environment(address: Address) -> dict[str, str]:
    """What makes every rank of a job listen there."""
    return {"NCCL_RAS_ADDR": f"{address.host}:{address.port}"}
