"""Clients of somebody hostile, on the server that packaging/nats describes."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import nats
from nats.aio.client import Client

from fleet.bus import PATIENCE_S, rings
from fleet.servers import PackagedServer
from ncclwatch.messaging import packing, subjects
from ncclwatch.messaging.bus_keys import Access, access, add_user, write_tenants
from ncclwatch.messaging.keys import job_of
from ncclwatch.messaging.limits import MAX_RAW
from ncclwatch.messaging.writer import BatchWriter

RED, BLUE = "red", "blue"


@contextmanager
def two_tenants(folder: Path) -> Iterator[PackagedServer]:
    """Each with an engine, an agent and a viewer; a second agent of red may speak for one job and node alone."""
    made = PackagedServer(folder)
    folder = made.folder / "tenants"
    for tenant in (RED, BLUE):
        for role in ("engine", "agent", "viewer"):
            add_user(folder, tenant, role, role)
    add_user(folder, RED, "bound", "agent", job=job_of("one"), node="a")
    write_tenants(folder)
    try:
        made.start()
        yield made
    finally:
        made.kill()


def bound(server: PackagedServer) -> Access:
    """The key of red that is bound to a job and a node."""
    keys = server.keys(RED)
    own = keys.parent / "bound-only"
    own.mkdir(exist_ok=True)
    (own / "agent.nk").write_bytes((keys / "bound.nk").read_bytes())
    (own / "agent.nk").chmod(0o600)
    (own / "ca.pem").write_bytes((keys / "ca.pem").read_bytes())
    return access(server.address, own, "agent")


def with_client(who: Access, work: Callable[[Client], Awaitable[None]], refusals: int = 0) -> list[str]:
    """Do something with a client of a key, and wait for so many refusals; returns what the server refused."""
    refused: list[str] = []

    async def run() -> None:
        async def failed(error: Exception) -> None:
            refused.append(str(error).lower())

        client = await nats.connect(
            who.address,
            nkeys_seed_str=who.seed.decode(),
            inbox_prefix=who.inbox,
            tls=ssl.create_default_context(cadata=who.ca),
            error_cb=failed,
            pending_size=64 << 20,
        )
        await work(client)
        await client.flush()
        limit = time.monotonic() + PATIENCE_S
        while len(refused) < refusals and time.monotonic() < limit:
            await asyncio.sleep(0.01)
        await client.close()

    asyncio.run(run())
    return refused


def batch(host: str = "a") -> bytes:
    return BatchWriter().encode(rings(host, (0, 1)).batch())


def marks(life: str, n: int, **more: str) -> dict[str, str]:
    return {subjects.LIFE: life, subjects.NUMBER: str(n), subjects.FORMAT: str(packing.VERSION), **more}


def damaged(good: bytes) -> list[tuple[bytes, dict[str, str]]]:
    """Batches, with their headers, of which each makes no sense in another way."""
    return [
        (good[:-7], marks("L", 10)),
        (b"", marks("L", 11)),
        (b"\x00" * 5000, marks("L", 12)),
        (good[:8] + (MAX_RAW - 1).to_bytes(4, "little") + good[12:], marks("L", 13)),
        (good, {}),
        (good, marks("L", 14) | {subjects.NUMBER: "-1"}),
        (good, marks("L", 15) | {subjects.NUMBER: "9" * 19}),
        (good, marks("a b", 16)),
        (good, marks("x" * 65, 17)),
        (good, marks("L", 18) | {subjects.FORMAT: "99"}),
    ]
