"""Probes of our own sockets that vary the source port: how long each way takes under each five-tuple.

A switch hashes the five-tuple, so each source port may take another path. A probe connects from a port to a listener of ours and
exchanges a few times; the job's own ports and connections are never touched. Times of two hosts are compared as they are: an
offset between their clocks is the same in all, and is subtracted with the shortest (:mod:`ncclwatch.paths.bottlenecks`).

    python -m ncclwatch.pathprobe.varied listen ADDRESS SECONDS PORT [PORT ...]
    python -m ncclwatch.pathprobe.varied probe DESTINATION ROUNDS PORT:SOURCE_PORT [PORT:SOURCE_PORT ...]

``probe`` prints a line of JSON: [[port, source port, [[there, back], ...]], ...], in ns; a path that does not answer has none.
"""

from __future__ import annotations

import contextlib
import json
import random
import selectors
import socket
import struct
import sys
import time
from collections.abc import Sequence

PATIENCE_S = 2.0
"""A probe that is not answered in this time is lost."""
PAUSE_S = 0.01
"""Between two rounds, on average."""
MOST_PATHS = 256
MOST_ROUNDS = 1000
MOST_CLIENTS = 512
_TIME = struct.Struct("!q")
_TIMES = struct.Struct("!qq")

Trips = list[tuple[int, int]]
"""(there, back) in ns, each with the offset of the two clocks in it."""


def answer(address: str, ports: Sequence[int], seconds: float) -> None:
    """Answer probes on these ports for so long: with the time a probe arrived, and the time it was answered. Raises OSError."""
    ends = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for port in ports[:MOST_PATHS]:
            listener = stack.enter_context(socket.create_server((address, port), backlog=64))
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, "listener")
        print("ready", flush=True)
        while (left := ends - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                arrived = time.monotonic_ns()
                end = key.fileobj
                assert isinstance(end, socket.socket)  # noqa: S101 - nothing else is registered
                if key.data == "listener":
                    _accept(end, selector, stack)
                elif not _answer_one(end, arrived):
                    selector.unregister(end)
                    end.close()


def _accept(listener: socket.socket, selector: selectors.BaseSelector, stack: contextlib.ExitStack) -> None:
    with contextlib.suppress(OSError):
        client, _ = listener.accept()
        if len(selector.get_map()) > MOST_CLIENTS:
            client.close()
            return
        stack.callback(client.close)
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(client, selectors.EVENT_READ, "client")


def _answer_one(client: socket.socket, arrived: int) -> bool:
    """Whether the client goes on."""
    try:
        if len(client.recv(_TIME.size)) != _TIME.size:
            return False
        client.send(_TIMES.pack(arrived, time.monotonic_ns()))
    except OSError:
        return False
    return True


def probe(destination: str, paths: Sequence[tuple[int, int]], rounds: int) -> list[tuple[int, int, Trips]]:
    """(port, source port, trips) of each path.

    All are asked once a round, in another order each time: an iteration has a period of its own, and a path that is always asked
    in the pause of the job would look empty.
    """
    draw = random.Random()  # noqa: S311 - no secret
    with contextlib.ExitStack() as stack:
        opened = [(path, _connect(destination, *path, stack)) for path in paths[:MOST_PATHS]]
        trips: list[Trips] = [[] for _ in opened]
        for _ in range(min(rounds, MOST_ROUNDS)):
            for number in draw.sample(range(len(opened)), len(opened)):
                end = opened[number][1]
                if end is not None and (trip := _trip(end)) is not None:
                    trips[number].append(trip)
            time.sleep(PAUSE_S * 2 * draw.random())
        return [(*path, trips[number]) for number, (path, _) in enumerate(opened)]


def _connect(destination: str, port: int, source_port: int, stack: contextlib.ExitStack) -> socket.socket | None:
    end = stack.enter_context(socket.socket(socket.AF_INET6 if ":" in destination else socket.AF_INET, socket.SOCK_STREAM))
    end.settimeout(PATIENCE_S)
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Reset at the end: a port in TIME_WAIT would be taken from the plan that is made of this.
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.bind(("", source_port))
        end.connect((destination, port))
    except OSError:
        return None
    return end


def _trip(end: socket.socket) -> tuple[int, int] | None:
    sent = time.monotonic_ns()
    try:
        end.sendall(_TIME.pack(sent))
        data = end.recv(_TIMES.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(data) != _TIMES.size:
        return None
    arrived, answered = _TIMES.unpack(data)
    return arrived - sent, time.monotonic_ns() - answered


def main(words: Sequence[str]) -> int:
    """One of the two commands above."""
    what, address, number, *rest = words
    if what == "listen":
        answer(address, [int(word) for word in rest], float(number))
        return 0
    paths = [(int(port), int(source)) for port, _, source in (word.partition(":") for word in rest)]
    print(json.dumps(probe(address, paths, int(number))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
