"""What an unfinished transfer waits for, in words."""

from __future__ import annotations

import pytest

from ncclwatch.model.state import Direction, OpPhase, ProxyOperation
from ncclwatch.view.steps import host_waits_for, waits_for
from unit.synthetic import recv, send, shared


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        (send(1, sent=60, done=56, produced=64), "the network to complete step 57"),
        (send(1, sent=60, done=60, produced=64), "rank 1 to accept step 61"),
        (send(1, sent=60, done=60, produced=60), "this GPU to produce step 61"),
        (send(1, sent=60, done=60, produced=None), "this GPU to produce, or rank 1 to accept, step 61"),
        (send(1, sent=96, done=96, produced=96), "nothing: all steps done"),
        (recv(3, posted=96, received=92, delivered=92, consumed=92), "step 93 from rank 3"),
        (recv(3, posted=96, received=92, delivered=90, consumed=90), "step 91 to be flushed to this GPU"),
        (recv(3, posted=96, received=92, delivered=92, consumed=90), "this GPU to consume step 91"),
        (recv(3, posted=92, received=92, delivered=92, consumed=92), "a receive for step 93 to be posted"),
        (send(1, sent=0, done=0, produced=0, phase=OpPhase.READY), "its turn: not started"),
        (send(1, sent=0, done=0, produced=0, phase=OpPhase.READY, queued_behind=2), "2 earlier operations on this connection"),
    ],
)
def test_what_a_transfer_waits_for(operation: ProxyOperation, words: str) -> None:
    assert waits_for(operation, operation.subs[0]) == words


def test_what_a_shared_memory_connection_waits_for() -> None:
    assert host_waits_for(shared(Direction.SEND, 1, 100, 108)) == "rank 1 to consume (buffer full)"
    assert host_waits_for(shared(Direction.SEND, 1, 100, 104)) == ""
    assert host_waits_for(shared(Direction.RECV, 1, 100, 101)) == "this GPU to consume 1 step"
    assert host_waits_for(shared(Direction.RECV, 1, 100, 100)) == ""
