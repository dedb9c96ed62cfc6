"""What the process that counts tells, and what it leaves out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from ncclwatch.model.state import Direction
from ncclwatch.model.work import Counting, Scope
from ncclwatch.wire import layouts
from ncclwatch.wire.accounts import QueuePairAccount
from ncclwatch.wire.child import Service
from ncclwatch.wire.orders import Owner


def account(number: int) -> QueuePairAccount:
    record = np.zeros(1, layouts.QP)[0]
    record["posted"] = record["posted_bytes"] = 5
    return QueuePairAccount(10, 1, number, record)


def counted(*, light: bool) -> list[tuple[Scope, int]]:
    """What is told of NCCL's queue pair 7 and of another library's, 8."""
    session = SimpleNamespace(
        accounts=[account(7), account(8)],
        counted={10},
        devices=lambda _: {},
        polls=dict,
        plane=SimpleNamespace(light=light),
        bursts=SimpleNamespace(complete=True, counted_ns=(1, 2_000_000_000)),
    )
    service = Service(cast("Any", session), owners={(10, 1, 7): Owner(10, 1, 7, 0xA, 0, 0, 1, Direction.SEND)})
    windows = service._counted()
    assert all(window.work.counting is Counting.EXACT for window in windows)
    return [(window.scope, window.queue_pair) for window in windows]


@pytest.mark.parametrize("light", [False, True])
def test_of_another_library_nothing_is_told_where_its_completions_are_not_seen(light: bool) -> None:
    told = counted(light=light)
    assert (Scope.FLOW, 7) in told and (Scope.PORT, 0) in told
    assert ((Scope.FLOW, 8) in told) is not light
