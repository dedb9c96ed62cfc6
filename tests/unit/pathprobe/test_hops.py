"""Paths followed by packets of our own: what arrives at once, what a kernel's answer says, and segments that die on the way."""

from __future__ import annotations

import errno
import socket
import struct

import pytest

from ncclwatch.errors import NcclwatchError
from ncclwatch.model.paths import Protocol
from ncclwatch.pathprobe import hops, look, segments
from ncclwatch.paths.ports import ROCE_PORT

A, B = "10.0.0.1", "10.0.1.1"


def test_a_host_next_door_has_no_routers() -> None:
    """Nobody listens on the first port: its kernel refuses, which is an arrival; on the second somebody does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            closed = free.getsockname()[1]
        paths = [(closed, 0), (listener.getsockname()[1], 0)]
        assert [(one.path, one.hops, one.arrived) for one in hops.traces("127.0.0.1", paths)] == [
            (path, (), True) for path in paths
        ]


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("0.0.0.0", 0))  # noqa: S104 - the attempt binds to every address too
        port = taken.getsockname()[1]
        (one,) = hops.traces("127.0.0.1", [(listener.getsockname()[1], port)], Protocol.UDP)
        assert not one.arrived and str(port) in one.reason and "in use" in one.reason


def test_nothing_is_sent_to_the_port_of_roce_on_a_host_next_door() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", ROCE_PORT))
        listener.settimeout(0.2)
        (one,) = hops.traces("127.0.0.1", [(ROCE_PORT, 50000)], Protocol.UDP)
        with pytest.raises(TimeoutError):
            listener.recv(16)
        assert one.hops == ()


@pytest.mark.parametrize(("first_there", "late"), [(4, []), (5, [4]), (6, [4, 5]), (4, [2]), (1, [])])
def test_how_far_a_host_is_is_told_though_its_answer_stood_in_a_queue(
    monkeypatch: pytest.MonkeyPatch, first_there: int, late: list[int]
) -> None:
    """One hop too many, and a packet would arrive at the port of RoCE. Router 2 never answers."""
    asked = []

    def answers(_: str, hop: int, __: float, effort: hops.Effort) -> hops._Answer:
        asked.append((hop, effort is hops.LATE))
        if hop in late:
            return hops._Answer(there=effort is hops.LATE and hop > 3)
        return hops._Answer(there=True) if hop >= first_there else hops._Answer(router="" if hop == 2 else f"10.0.0.{hop}")

    monkeypatch.setattr(hops, "_at", answers)
    assert hops.distance(A, 0.0) == min(4, first_there)
    assert [hop for hop, patient in asked if patient] == sorted((hop for hop in late if hop > 3), reverse=True)


def test_a_path_that_is_silent_is_left() -> None:
    assert hops._is_lost(["a", None, None, None, None]) and not hops._is_lost([None, None, None, "a"])
    assert hops._trimmed(["a", None, None], keep=False) == ("a",) and hops._trimmed(["a", None], keep=True) == ("a", None)


def test_an_answer_of_a_router_is_read_from_the_kernels_record() -> None:
    address = struct.pack("=HH", socket.AF_INET, 0) + socket.inet_aton("10.8.0.2") + bytes(8)
    assert hops._address(address) == "10.8.0.2"
    six = struct.pack("=HHI", socket.AF_INET6, 0, 0) + socket.inet_pton(socket.AF_INET6, "fe80::2") + bytes(4)
    assert hops._address(six) == "fe80::2"
    assert hops._address(struct.pack("=HH", 99, 0) + bytes(8)) == "" and hops._address(six[:12]) == ""
    assert (
        hops._EXTENDED.size == 16
        and hops._EXTENDED.unpack(struct.pack("=IBBBBII", errno.EHOSTUNREACH, 2, 11, 0, 0, 0, 0))[2] == 11
    )


def test_a_segment_is_right_and_bare() -> None:
    made = segments.segment(A, B, 500, 40000)
    pseudo = socket.inet_aton(A) + socket.inet_aton(B) + struct.pack("!HH", socket.IPPROTO_TCP, len(made))
    total = sum(struct.unpack(f"!{len(pseudo + made) // 2}H", pseudo + made))
    assert (total & 0xFFFF) + (total >> 16) == 0xFFFF
    assert len(made) == 20 and struct.unpack_from("!HH", made) == (500, 40000) and made[13] == 0x10


def quote(source: str = A, destination: str = B, kind: int = 11, protocol: int = socket.IPPROTO_TCP) -> bytes:
    inner = struct.pack("!BBHHHBBH", 0x45, 0, 40, 0, 0, 1, protocol, 0) + socket.inet_aton(source) + socket.inet_aton(destination)
    return bytes([0x45]) + bytes(19) + struct.pack("!BBHI", kind, 0, 0, 0) + inner + struct.pack("!HHI", 500, 40000, 1)


def test_a_quoted_segment_is_told_from_others() -> None:
    assert segments.quoted(quote(), A, B) == (40000, 500)
    for other in (quote(B, A), quote(kind=3), quote(protocol=17), b"", quote()[:30], quote()[:49], bytes(80)):
        assert segments.quoted(other, A, B) is None
    for length in range(len(quote())):
        segments.quoted(quote()[:length], A, B)


def test_a_look_at_a_host_next_door() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = look.look(look.Asked("127.0.0.1", [(listener.getsockname()[1], 0)], apart_s=0.0), "me")
    assert (made.source, made.destination, made.wrong) == ("127.0.0.1", "127.0.0.1", 0.5) and made.paths[0].arrived


def test_queues_need_somebody_who_answers() -> None:
    with pytest.raises(NcclwatchError, match="paths answer"):
        look.look(look.Asked("127.0.0.1", [(1, 0)], apart_s=0.0, looks=1, rounds=1), "me")
