"""RoCE packets: whose they are, to which queue pair, and what is none."""

from __future__ import annotations

import struct

from ncclwatch.pathprobe.capture import parse


def packet(*, port: int = 4791, protocol: int = 17, pair: int = 0x123456, options: bytes = b"") -> bytes:
    """IPv4, UDP and the base transport header of a packet from 10.0.0.1."""
    length = 20 + len(options)
    ip = struct.pack("!BBHHHBBH4s4s", 0x40 | length // 4, 0, 0, 0, 0, 64, protocol, 0, bytes([10, 0, 0, 1]), bytes([10, 0, 0, 2]))
    udp = struct.pack("!HHHH", 50001, port, 0, 0)
    return ip + options + udp + struct.pack("!BBHB", 0, 0, 0xFFFF, 0) + pair.to_bytes(3, "big") + bytes(4)


def test_the_queue_pair_and_the_port_are_read() -> None:
    assert parse(packet()) == (("10.0.0.1", 0x123456), 50001)
    assert parse(packet(options=bytes(8))) == (("10.0.0.1", 0x123456), 50001), "options make the header longer"


def test_what_is_no_roce_or_cut_off_is_nothing() -> None:
    assert parse(packet(port=53)) is None and parse(packet(protocol=6)) is None
    for end in range(40):
        assert parse(packet()[:end]) is None
    assert parse(b"\x6f" + packet()[1:]) is None and parse(b"\x41" + packet()[1:]) is None
