"""Where a process stands in the order of its calls, by what of its messages inside its node is over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ncclwatch.collect.call_order import RECORD, CallOrder
from ncclwatch.collect.message_steps import Place
from ncclwatch.collect.standing import Standing, find_standing
from ncclwatch.model.events import Function
from ncclwatch.model.state import Direction, HostConnection, ProcessSample, Transport
from unit.synthetic import Rank, communicator

BACK, ON = 0, 2
OWN = communicator(1, 3, transport=Transport.SHM)
AFAR = communicator(1, 3, comm_hash=0xB2, transport=Transport.NET)
FROM_BEFORE: Place = (OWN.address, (False, BACK))
TO_NEXT: Place = (OWN.address, (True, ON))
EACH = 4
"""Steps of a message."""
BATCHES = 4
"""Micro-batches of an iteration: of each a message is received and one is sent."""
SECOND = 10**9


def calls_of(second: int, *, grouped: bool = False, between: int = 0) -> np.ndarray:
    """The calls of an iteration: receive from the stage before and send to the next, by turns; ``between``: address of a
    communicator on which an AllReduce is called before each send.
    """
    made: list[tuple[int, int, int]] = []
    for _ in range(BATCHES):
        inner = [(Function.RECV, OWN.address, BACK), *([(Function.ALL_REDUCE, between, -1)] if between else [])]
        inner.append((Function.SEND, OWN.address, ON))
        made += [(Function.GROUP_START, 0, -1), *inner, (Function.GROUP_END, 0, -1)] if grouped else inner
    calls = np.zeros(len(made), RECORD)
    for number, (function, comm, peer) in enumerate(made):
        calls[number]["function"], calls[number]["comm"], calls[number]["peer"] = function, comm, peer
    calls["count"], calls["time_ns"] = 64, second * SECOND - len(made) + np.arange(len(made))
    return calls


def sample_of(second: int, received: float, sent: float, *, unread: int = 0, unread_by_next: int = 0) -> ProcessSample:
    """So many messages were received and sent since ever; ``unread``: steps that lie ready for the process, or for the next."""
    read, written = int(received * EACH), int(sent * EACH)
    ends = (
        HostConnection(0, BACK, Direction.RECV, 1, read, read + unread),
        HostConnection(0, ON, Direction.SEND, 1, written - unread_by_next, written),
    )
    (taken,) = Rank(1, 3, (replace(OWN, host_connections=ends), AFAR), host="node").looks(1)
    return replace(taken, time_ns=second * SECOND, wall_ns=second * SECOND)


def stands(
    received: float, sent: float, *, unread: int = 0, unread_by_next: int = 0, grouped: bool = False, between: int = 0,
    unfinished: Sequence[int] = (),
) -> Standing | None:  # fmt: skip
    """After thirty iterations that came to their end, one in which so many messages were received and sent."""
    order, iterations = CallOrder(), 30
    for second in range(1, iterations + 1):
        order.add(calls_of(second, grouped=grouped, between=between))
        find_standing(order, sample_of(second, second * BATCHES, second * BATCHES), {})
    order.add(calls_of(iterations + 1, grouped=grouped, between=between))
    done = iterations * BATCHES
    last = sample_of(iterations + 1, done + received, done + sent, unread=unread, unread_by_next=unread_by_next)
    return find_standing(order, last, {(AFAR.address, None): unfinished} if unfinished else {})


@pytest.mark.parametrize(
    ("received", "sent", "unread", "expected"),
    [
        # It has received the second message, and not sent: it computes.
        (2, 1, 0, Standing(-4, begun=False, awaits=[])),
        # It waits for the third, or computes before it: of the two nothing shows, and there is nothing to read.
        (2, 2, 0, Standing(-3, begun=None, awaits=[FROM_BEFORE])),
        # There is something to read, and it does not: it computes.
        (2, 2, EACH, Standing(-3, begun=False, awaits=[])),
        # A part is read.
        (2.5, 2, 0, Standing(-3, begun=True, awaits=[FROM_BEFORE])),
        # All is over: its host has not called more.
        (4, 4, 0, Standing(1, begun=False, awaits=[])),
    ],
)
def test_a_stage_stands_at_the_oldest_message_that_is_not_over(
    received: float, sent: float, unread: int, expected: Standing
) -> None:
    assert stands(received, sent, unread=unread) == expected


def test_who_finds_no_room_to_write_waits_for_who_does_not_read() -> None:
    assert stands(2, 1, unread_by_next=8) == Standing(-4, begun=None, awaits=[TO_NEXT])


def test_in_an_exchange_who_has_sent_and_finds_nothing_waits_inside() -> None:
    assert stands(1, 2, grouped=True) == Standing(-2, begun=True, awaits=[FROM_BEFORE])
    assert stands(1, 1, grouped=True) == Standing(-2, begun=False, awaits=[])


def test_counts_that_contradict_the_order_say_nothing() -> None:
    """More is sent than was received: the process runs its messages in some other order."""
    assert stands(1, 4) is None


def test_where_something_lies_between_of_which_nothing_shows_nothing_is_said() -> None:
    hidden = communicator(1, 3, comm_hash=0xC3, transport=Transport.SHM).address + 1
    assert stands(2, 1, between=hidden) is None
    assert stands(2, 2, between=hidden) == Standing(-5, begun=None, awaits=[FROM_BEFORE]), "the send before it is over"


def test_what_passes_the_network_shows_by_its_proxy() -> None:
    before = stands(2, 1, between=AFAR.address, unfinished=[8, 9])
    assert before == Standing(-6, begun=False, awaits=[]), "two more were called, the AllReduce before it is over"
    assert stands(4, 3, between=AFAR.address, unfinished=[9]) is None, "it is in the AllReduce"


def test_without_messages_inside_the_node_nothing_is_said() -> None:
    (taken,) = Rank(1, 3, (AFAR,), host="node").looks(1)
    assert find_standing(CallOrder(), taken, {}) is None
