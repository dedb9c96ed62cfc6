"""The address of a connection's other end, read from what both ends of NCCL's InfiniBand transport told each other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ncclwatch.model.state import Direction
from ncclwatch.wire.nccl_connections import NetConnection
from ncclwatch.wire.nccl_queues import REMOTE_BYTES, remote_address

ONE = NetConnection(0xABC, 2, 0, 3, Direction.SEND, 0, 0x10, "IB", 0x20000, 0, "mlx5_0", 5)
BASE, REMOTE = 8, 32920
OFFSETS = {"ncclIbSendComm.base": BASE, "ncclIbNetCommBase.remDevs": REMOTE}


def gid(address: tuple[int, ...]) -> bytes:
    return bytes(10) + b"\xff\xff" + bytes(address)


def told(address: bytes) -> bytes:
    """An ``ncclIbDevInfo``: lid, port, MTU, link layer; the other end's GID; a key; our own GID (v2.25.1-1)."""
    return bytes(16) + address + bytes(8) + gid((10, 0, 0, 1)) + bytes(8)


def decoder(memory: bytes | None, offsets: dict[str, int] = OFFSETS) -> Any:
    def read_many(places: list[tuple[int, int]]) -> list[bytes | None]:
        assert places == [(ONE.communicator + BASE + REMOTE, REMOTE_BYTES)]
        return [memory]

    layout = SimpleNamespace(has=lambda path: path in offsets, member=lambda path: SimpleNamespace(offset=offsets[path]))
    return SimpleNamespace(layout=layout, reader=SimpleNamespace(read_many=read_many))


def test_the_gid_of_the_other_end_is_its_address() -> None:
    assert remote_address(decoder(told(gid((10, 77, 0, 2)))), ONE) == "10.77.0.2"


@pytest.mark.parametrize("memory", [None, bytes(REMOTE_BYTES), b"\xfe\x80" + bytes(REMOTE_BYTES - 2), b"\xff" * REMOTE_BYTES])
def test_what_is_no_address_is_none(memory: bytes | None) -> None:
    """Unreadable, empty, InfiniBand, nonsense."""
    assert remote_address(decoder(memory), ONE) == ""


def test_builds_that_keep_it_elsewhere_say_nothing() -> None:
    other = decoder(told(gid((10, 77, 0, 2))), {"ncclIbSendComm.base": BASE})
    assert remote_address(other, ONE) == ""
