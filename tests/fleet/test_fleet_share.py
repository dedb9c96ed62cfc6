"""Work that several processes share by leases, and streams that are followed over a server that is killed: real nats-server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from fleet.servers import NatsServer
from ncclwatch.fleet import streams
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.follow import Follower
from ncclwatch.fleet.share import Share
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.messaging.subjects import REDUCED

TTL_S = 1.0


@pytest.fixture
def bus(nats_server: NatsServer) -> Iterator[Connection]:
    with Connection(Access(nats_server.address)) as connection:
        connection.call(streams.ensure(connection.jetstream, REDUCED))
        yield connection


def until(condition: Callable[[], bool], within_s: float = 60.0) -> float:
    """Wait for a condition; how long it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < within_s, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - began


def test_work_is_shared_and_taken_over(bus: Connection) -> None:
    pieces = [f"p{number}" for number in range(6)]
    one, two = Share(bus, "hear", "one", ttl_s=TTL_S), Share(bus, "hear", "two", ttl_s=TTL_S)
    one.wanted = two.wanted = pieces

    def whole() -> bool:
        one.beat()
        two.beat()
        return set(one.mine) | set(two.mine) == set(pieces)

    until(whole)
    assert not set(one.mine) & set(two.mine)
    # What somebody lets go of is another's at once; what somebody holds who dies, when its lease is over.
    two.close()
    until(lambda: set(one.mine) == set(pieces))
    third = Share(bus, "hear", "three", ttl_s=TTL_S)
    third.wanted = pieces
    until(lambda: third.share == 3)
    assert not third.mine
    one.release("p0")
    until(lambda: "p0" in third.mine)
    one._stop()
    took = until(lambda: set(third.mine) == set(pieces))
    print(f"the leases of who died were another's after {took:.2f} s (they run for {TTL_S:.0f} s)")
    third.close()


def test_a_stream_is_followed_over_a_server_that_is_killed(nats_server: NatsServer, bus: Connection) -> None:
    bell = threading.Event()
    follower = Follower(bus, REDUCED, "ncw.reduced.j.*", bell)
    got: list[bytes] = []

    def heard(number: int) -> Callable[[], bool]:
        def enough() -> bool:
            got.extend(message.data for message in follower.take(100))
            return len(got) >= number

        return enough

    def say(numbers: range) -> None:
        for number in numbers:
            bus.call(bus.jetstream.publish(f"ncw.reduced.j.w{number % 3}", str(number).encode()))

    until(lambda: follower.caught_up)
    say(range(50))
    until(heard(50))
    for turn in range(2):
        nats_server.kill()
        nats_server.start()
        until(lambda: bus.connected)
        say(range(50 + 20 * turn, 70 + 20 * turn))
    until(heard(90))
    assert got == [str(number).encode() for number in range(90)]
    # A part of the past, by time.
    later = Follower(bus, REDUCED, "ncw.reduced.*.w1", bell, back_s=3600.0)
    until(lambda: len(later) == 30)
    later.close()
    follower.close()
