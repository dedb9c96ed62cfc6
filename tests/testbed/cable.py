"""A cable that delays and loses frames, between two network interfaces: ``python cable.py ONE OTHER``.

Kernels without netem (as this project's CI machine has one) can limit a rate, but neither delay nor lose; this program does, in
user space, for test networks. It moves whole frames with their offload headers (PACKET_VNET_HDR of linux/if_packet.h), so a frame
may be a batch of up to 64 KiB of TCP segments, and that is what gets lost as one. It takes one JSON object a line on standard
input (``delay_s`` one way, ``loss`` as a share, for both directions alike) and answers each with its counts of frames.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import sys
import time
from collections import deque
from typing import Any

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 32 << 20
FRAME_BYTES = (1 << 16) + 256
SEED = 4
PRIORITY = -20


def open_interface(name: str) -> socket.socket:
    """A socket that gets what arrives on an interface and sends out of it."""
    packet = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    packet.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    packet.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    packet.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    packet.setblocking(False)
    packet.bind((name, ETH_P_ALL))
    return packet


class Direction:
    """One way through the cable."""

    def __init__(self, source: socket.socket, sink: socket.socket) -> None:
        self.source = source
        self.sink = sink
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.passed = 0
        self.dropped = 0

    def take(self, delay_s: float, loss: float, chance: random.Random) -> None:
        """Take what has arrived; it is due after the delay."""
        for _ in range(64):
            try:
                frame = self.source.recv(FRAME_BYTES)
            except BlockingIOError:
                return
            except OSError:  # the interface is down for the moment
                return
            if loss and chance.random() < loss:
                self.dropped += 1
            else:
                self.waiting.append((time.monotonic() + delay_s, frame))

    def release(self) -> None:
        """Send what is due."""
        while self.waiting and self.waiting[0][0] <= time.monotonic():
            try:
                self.sink.send(self.waiting[0][1])
            except (BlockingIOError, InterruptedError):
                return
            except OSError:  # no carrier, or a frame the interface does not take: what a cable would lose too
                self.dropped += 1
            else:
                self.passed += 1
            self.waiting.popleft()

    def due_s(self) -> float:
        """Seconds until something is due."""
        return max(0.0, self.waiting[0][0] - time.monotonic()) if self.waiting else 3600.0


def main() -> int:
    """Run until standard input ends."""
    with contextlib.suppress(PermissionError):  # it stands for hardware, which waits for no processor
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    one, other = open_interface(sys.argv[1]), open_interface(sys.argv[2])
    directions = {one: Direction(one, other), other: Direction(other, one)}
    settings: dict[str, Any] = {"delay_s": 0.0, "loss": 0.0}
    chance = random.Random(SEED)
    print("ready", flush=True)
    while True:
        timeout = min(direction.due_s() for direction in directions.values())
        readable, _, _ = select.select([*directions, sys.stdin], [], [], timeout)
        for source, direction in directions.items():
            if source in readable:
                direction.take(settings["delay_s"], settings["loss"], chance)
        if sys.stdin in readable:
            line = sys.stdin.readline()
            if not line:
                return 0
            settings.update(json.loads(line))
            counts = [{"passed": d.passed, "dropped": d.dropped} for d in directions.values()]
            print(json.dumps(counts), flush=True)
        for direction in directions.values():
            direction.release()


if __name__ == "__main__":
    sys.exit(main())
