"""The steps of a sample's proxy operations in columns: what comparing two samples, and both ends of a connection, needs.

They are made once for each tuple of operations: where a batch is decoded, of all its samples at once, else when first asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

UNKNOWN = -(1 << 62)
"""Fact: stands in a column where there is no value."""
LIMIT = 1 << 60
"""Bound: values come out of the memory of other processes: sums and differences of two must still fit."""
NET, PHASES = 4, 3
"""Fact: bits of ``state``: whether the transport is a network, and the phase."""
BEGUN, READY = 1, 2
"""Fact: phases that matter (``OpPhase``)."""
_STATES = {"progress": BEGUN, "ready": READY, "net": NET}

COUNTERS = ("channel", "peer", "nsteps", "base", "posted", "received", "transmitted", "done")
OPTIONAL = ("gpu_ready", "rank", "connection_index")
COLUMNS = ("comm_address", "comm_hash", "op_count", "sends", "state", "name", "place", *COUNTERS, *OPTIONAL)
"""One row a sub-operation. ``name`` stands for the collective, ``place`` is (operation, sub-operation) in the tuple."""
HEAD = 2
"""Fact: so many columns in front hold words of 64 bits, which are not counted with."""
WORD = (1 << 64) - 1
"""Fact: all bits of a word."""
PLACE_BITS = 24
"""Fact: ``place`` holds the sub-operation in so many bits."""

_OF_OPERATION = attrgetter("comm_address", "comm_hash", "op_count", "direction", "phase", "transport", "collective", "subs")
_OF_SUB = attrgetter(*COUNTERS, *OPTIONAL)


class Steps(NamedTuple):
    """Rows of 64-bit integers; ``exact``: none had to be cut off."""

    rows: bytes
    exact: bool = True


class Operations(tuple[Any, ...]):
    """The operations of a sample (``ProxyOperation``), and their steps in columns."""

    @cached_property
    def steps(self) -> Steps:
        """One row a sub-operation."""
        values = [value for number, one in enumerate(self) for value in _rows(number, one)]
        try:
            return Steps(array("q", values).tobytes())
        except OverflowError:
            fitting = (signed(v & WORD) if place % len(COLUMNS) < HEAD else bounded(v) for place, v in enumerate(values))
            return Steps(array("q", fitting).tobytes(), exact=False)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        # Names stand for themselves in one process only.
        return Operations, (tuple(self),)


def state_of(phase: str, transport: str) -> int:
    """Phase and transport as ``state``."""
    return _STATES.get(phase, 0) | (_STATES.get(transport, 0) & NET)


def signed(word: int) -> int:
    """An unsigned number of 64 bits as the signed one with the same bits."""
    return word - (1 << 64) if word >> 63 else word


def bounded(value: int) -> int:
    """What fits, and can be added to another."""
    return value if value == UNKNOWN else max(-LIMIT, min(LIMIT, value))


def _rows(number: int, operation: Any) -> Iterable[int]:
    address, comm_hash, op_count, direction, phase, transport, name, subs = _OF_OPERATION(operation)
    head = signed(address), signed(comm_hash), op_count, direction == "send", state_of(phase, transport), hash(name)
    place, rows = number << PLACE_BITS, list[int]()
    for sub in subs:
        *counters, produced, rank, index = _OF_SUB(sub)
        rows += head
        rows.append(place)
        rows += counters
        rows.append(UNKNOWN if produced is None else produced)
        rows.append(UNKNOWN if rank is None else rank)
        rows.append(UNKNOWN if index is None else index)
        place += 1
    return rows
