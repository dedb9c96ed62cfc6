"""Judging other tools' records: what their lack of times leaves out."""

from __future__ import annotations

import numpy as np
import pytest

from ncclwatch.cli.foreign import _NoPace
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind


@pytest.mark.parametrize("in_order", [True, False])
def test_calls_without_times_have_no_iterations_and_an_order_where_it_is_known(in_order: bool) -> None:
    watch = _NoPace(in_order=in_order)
    events = np.zeros(6, EVENT_DTYPE)
    events["pid"], events["function"], events["time_ns"] = 7, Function.ALL_REDUCE, np.arange(6)
    events["kind"], events["flags"] = Kind.ENTER, Flag.COMM_READ
    LiveDiagnosis(slow=watch).add_calls(events, source="host0")
    assert not watch.cadences.of
    assert list(watch.cadences.orders) == ([("host0", 7)] if in_order else [])
