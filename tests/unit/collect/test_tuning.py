"""When an operation moves, and how looks become times in which something did."""

from __future__ import annotations

import pytest

from ncclwatch.collect.tuning import moves
from ncclwatch.model.state import OpPhase, ProxyOperation
from unit.synthetic import recv, send


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (send(1, sent=0, done=0, produced=0), False),  # its GPU has not begun
        (send(1, sent=2, done=0, produced=2), True),
        (send(1, sent=2, done=0, produced=2, phase=OpPhase.READY), False),
        (recv(1, posted=8, received=0, delivered=0, consumed=0), False),  # nothing has come yet
        (recv(1, posted=8, received=2, delivered=0, consumed=0), True),
    ],
)
def test_an_operation_moves_from_its_first_step_on(operation: ProxyOperation, expected: bool) -> None:
    assert moves(operation) is expected
