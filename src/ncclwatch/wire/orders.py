"""What the process of the wire plane is told and what it answers: msgpack in frames, over its standard input and output."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from ncclwatch.errors import NcclwatchError
from ncclwatch.model.state import Direction
from ncclwatch.model.work import FlowWindow

MAX_FRAME = 16 << 20
"""Bytes of one message at most."""

_HEAD = struct.Struct("<I")


class User(msgspec.Struct, frozen=True):
    """A process that has an RDMA device open, and NCCL's names of its networks."""

    pid: int
    networks: tuple[str, ...] = ()


class Follow(msgspec.Struct, frozen=True, tag=True):
    """From now on these processes, and no others."""

    users: tuple[User, ...]


class Owner(msgspec.Struct, frozen=True):
    """What the queue pair ``number`` of a context of a process serves: ranks are of the communicator but ``global_rank``."""

    pid: int
    context: int
    number: int
    comm_hash: int
    rank: int
    channel: int
    peer: int
    direction: Direction
    global_rank: int | None = None
    connection_index: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        """The key of its account."""
        return self.pid, self.context, self.number


class Owners(msgspec.Struct, frozen=True, tag=True):
    """Whose the queue pairs are, all of them: they are told anew when one changes."""

    owners: tuple[Owner, ...]


class Order(msgspec.Struct, frozen=True, tag=True):
    """Count now: every request of these processes, all that are followed if none is named, for ``seconds``.

    It ends early for a thread that has paid ``share`` of its time since it is followed. ``number`` comes back with the windows.
    What it costs is billed apart: it does not put off the bursts within the budget.
    """

    number: int
    pids: tuple[int, ...] = ()
    seconds: float = 0.25
    share: float = 0.01


class Bill(msgspec.Struct, frozen=True):
    """What bursts have cost by the governor's bill: the largest share of its time that a thread has paid, and what it may pay;
    ``ordered_s`` is the most time that a thread has paid for orders. ``words`` says it all in a line.
    """

    budget: float
    bursts: int = 0
    worst_share: float | None = None
    ordered: int = 0
    ordered_s: float = 0.0
    words: str = ""
    own_share: float = 0.0
    """CPU time of the process of the plane as a share of one core."""
    rss_bytes: int = 0


class Report(msgspec.Struct, frozen=True, tag=True):
    """What was counted since the last report. ``reason`` says why nothing can be, ``reasons`` why of one process."""

    windows: tuple[FlowWindow, ...] = ()
    running: bool = False
    reason: str = ""
    reasons: dict[int, str] = {}
    bill: Bill | None = None


class Frames:
    """Messages out of bytes as they come; damaged ones raise :class:`NcclwatchError`."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[object]) -> None:
        self._decoder = decoder
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[object]:
        """Take bytes; the messages that are whole now."""
        self._data += data
        while len(self._data) >= _HEAD.size:
            (size,) = _HEAD.unpack_from(self._data)
            if size > MAX_FRAME:
                raise NcclwatchError(f"a message of {size} bytes is more than the {MAX_FRAME} allowed", "update ncclwatch")
            if len(self._data) < _HEAD.size + size:
                return
            body = bytes(self._data[_HEAD.size : _HEAD.size + size])
            del self._data[: _HEAD.size + size]
            try:
                yield self._decoder.decode(body)
            except (msgspec.MsgspecError, ValueError) as error:
                raise NcclwatchError(f"a message of the wire plane makes no sense ({error})", "update ncclwatch") from error


_encoder = msgspec.msgpack.Encoder()


def framed(message: Follow | Owners | Order | Report) -> bytes:
    """A message as bytes."""
    body = _encoder.encode(message)
    return _HEAD.pack(len(body)) + body


def orders() -> Frames:
    """What the process of the plane reads."""
    return Frames(msgspec.msgpack.Decoder(Follow | Owners | Order))


def reports() -> Frames:
    """What it answers."""
    return Frames(msgspec.msgpack.Decoder(Report))
