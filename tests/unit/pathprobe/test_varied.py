"""Probes that vary the source port: against a listener of ours, over loopback."""

from __future__ import annotations

import socket
import threading

from ncclwatch.pathprobe import varied


def free_ports(number: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [end.getsockname()[1] for end in held]
    for end in held:
        end.close()
    return ports


def test_every_path_is_asked_from_its_port_and_a_dead_one_says_nothing() -> None:
    port, dead, first, second, third = free_ports(5)
    thread = threading.Thread(target=varied.answer, args=("127.0.0.1", [port], 1.0))
    thread.start()
    while True:
        with socket.socket() as end:
            if end.connect_ex(("127.0.0.1", port)) == 0:
                end.sendall(b"short")  # a stranger is let go
                break
    found = varied.probe("127.0.0.1", [(port, first), (port, second), (dead, third)], 3)
    thread.join()
    assert [(row[0], row[1], len(row[2])) for row in found] == [(port, first, 3), (port, second, 3), (dead, third, 0)]
    assert all(0 < way < 1e9 for _, _, trips in found for trip in trips for way in trip)
