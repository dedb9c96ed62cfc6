"""LLDP: names of a switch and its port out of a frame, and nothing out of anything else."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time

import pytest

from ncclwatch.nic.lldp import Neighbour, listen, parse

HEAD = bytes.fromhex("0180c200000e" + "020000000001" + "88cc")


def part(kind: int, value: bytes) -> bytes:
    return struct.pack("!H", kind << 9 | len(value)) + value


def frame(system: bytes = b"leaf0", port: bytes = b"\x05swp7", chassis: bytes = b"\x04" + bytes(range(6))) -> bytes:
    named = part(5, system) if system else b""
    return HEAD + part(1, chassis) + part(2, port) + part(3, b"\0\x78") + named + part(0, b"")


def test_a_switch_and_its_port() -> None:
    assert parse(frame()) == Neighbour("leaf0", "swp7")
    assert parse(frame(system=b"")) == Neighbour("00:01:02:03:04:05", "swp7")
    assert parse(frame(port=b"\x03" + bytes(6))) == Neighbour("leaf0", "00:00:00:00:00:00")


def test_anything_else_is_nothing() -> None:
    assert parse(b"") is None and parse(HEAD) is None and parse(frame().replace(b"\x88\xcc", b"\x08\x00")) is None
    whole = frame()
    for length in range(len(whole)):
        parse(whole[:length])
    evil = parse(frame(system=b"a\x1b[2J\n" + b"x" * 400))
    assert evil is not None and evil.switch.startswith("a[2Jx") and len(evil.switch) <= 64


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_frame_on_the_wire_is_heard() -> None:
    def send() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as end:
            end.bind(("lo", 0))
            for _ in range(20):
                end.send(frame())
                time.sleep(0.05)

    try:
        sender = threading.Thread(target=send)
        sender.start()
        assert listen(["lo", "nosuchnic"], 1.5) == {"lo": Neighbour("leaf0", "swp7")}
    except PermissionError:
        pytest.skip("packet sockets are refused")
    finally:
        sender.join()
