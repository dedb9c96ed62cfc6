"""Replays of CUDA graphs come to the engine as the calls that the graphs captured; where they cannot, it says so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclwatch.collect.ledger import Ledger
from ncclwatch.engine.evidence.calls import Calls
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from unit.engine.evidence.said import case_of
from unit.synthetic import frozen_ring, looks


def launches(pid: int, *flags: int) -> NDArray[Any]:
    records = np.zeros(len(flags), EVENT_DTYPE)
    records["pid"], records["kind"], records["function"], records["flags"] = pid, Kind.ENTER, Function.GRAPH_LAUNCH, flags
    return records


def untold(ledger: Ledger | None, captured: int | None = 1) -> bool:
    """Whether it is said that replays are not seen as calls, of a ring whose communicators have captured plans."""
    ranks = frozen_ring()
    for rank in ranks:
        rank.communicators = tuple(replace(own, captured_plans=captured) for own in rank.communicators)
    return any("replays of CUDA graphs" in line for line in Calls().coverage(case_of(looks(ranks), ledger=ledger)))


PIDS = tuple(samples[0].process.pid for samples in looks(frozen_ring()))


def ledger_of(*flags: int, pids: tuple[int, ...] = PIDS) -> Ledger:
    ledger = Ledger()
    for pid in pids:
        ledger.add_calls(launches(pid, *flags))
    return ledger


def test_replays_whose_captures_were_seen_need_no_word() -> None:
    assert not untold(ledger_of(0, 0))


@pytest.mark.parametrize(
    "ledger",
    [
        pytest.param(None, id="no-calls"),
        pytest.param(Ledger(), id="no-launches"),
        pytest.param(ledger_of(0, pids=PIDS[1:]), id="none-of-one-process"),
        pytest.param(ledger_of(0, Flag.UNKNOWN_GRAPH, 0), id="captured-before"),
    ],
)
def test_replays_that_are_not_seen_are_told(ledger: Ledger | None) -> None:
    assert untold(ledger)
    assert not untold(ledger, captured=0), "nothing is captured"


def test_launches_of_a_process_that_is_gone_are_forgotten() -> None:
    ledger = ledger_of(Flag.UNKNOWN_GRAPH)
    ledger.forget({("", pid) for pid in PIDS})
    assert ledger.replays == {}
