"""The steps of decoded proxy operations in columns, of all samples of a batch at once: what would else be made one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ncclwatch.model.state import ProxyOperation
from ncclwatch.model.steps import COLUMNS, COUNTERS, LIMIT, OPTIONAL, PLACE_BITS, UNKNOWN, Operations, Steps, state_of

MISSING = -(1 << 63)
"""Fact: what stands for ``None`` in a column of signed numbers."""
FEW = 64
"""Bound: rows that are made faster one by one."""
WIDTH = 8 * len(COLUMNS)
"""Fact: bytes of a row."""


def with_steps(
    dealt: Sequence[tuple[ProxyOperation, ...]], heads: NDArray[Any], subs: NDArray[Any]
) -> list[tuple[ProxyOperation, ...]]:
    """The operations of each sample, which know their steps; ``heads`` and ``subs``: the records they were made from.

    Of a few, and where there are numbers that no healthy process has, each makes its own.
    """
    made = [Operations(some) for some in dealt]
    if len(subs) < FEW or not _fill(made, heads, subs):
        for some in made:
            some.steps  # noqa: B018 - made once
    return list(made)


def _fill(dealt: Sequence[Operations], heads: NDArray[Any], subs: NDArray[Any]) -> bool:
    table = np.empty((len(subs), len(COLUMNS)), np.int64)
    for place, name in enumerate((*COUNTERS, *OPTIONAL), len(COLUMNS) - len(COUNTERS) - len(OPTIONAL)):
        values = subs[name]
        if name in OPTIONAL:
            values = np.where(values == MISSING, UNKNOWN, values)
        table[:, place] = values
        if ((np.clip(values, -LIMIT, LIMIT) != values) & (values != UNKNOWN)).any():
            return False
    operations = [one for some in dealt for one in some]
    in_operation, in_sample = heads["subs"].astype(np.int64), np.array([len(some) for some in dealt], np.int64)
    places = (_counted(in_sample) << PLACE_BITS).repeat(in_operation) + _counted(in_operation)
    states = np.array([state_of(one.phase, one.transport) for one in operations], np.int64)
    of_operations = (
        heads["comm_address"].view(np.int64), heads["comm_hash"].view(np.int64), heads["op_count"],
        np.array([one.direction == "send" for one in operations], np.int64), states,
        np.array([hash(one.collective) for one in operations], np.int64),
    )  # fmt: skip
    for number, column in enumerate(of_operations):
        table[:, number] = column.repeat(in_operation)
    table[:, len(of_operations)] = places
    data, ends = table.tobytes(), [0, *(np.r_[0, np.cumsum(in_operation)][np.cumsum(in_sample)] * WIDTH).tolist()]
    for number, some in enumerate(dealt):
        some.__dict__["steps"] = Steps(data[ends[number] : ends[number + 1]])
    return True


def _counted(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each of so many in each of several the place in its own."""
    found: NDArray[np.int64] = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return found
