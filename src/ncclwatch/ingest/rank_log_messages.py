"""With whom a rank exchanges messages, which rank logs do not say: by the pipeline schedule that its calls follow.

A stage of a pipeline sends and receives in a fixed order that begins anew with each iteration (Megatron-LM,
``megatron/core/pipeline_parallel/schedules.py``: 1F1B without interleaving; GPipe: all forward, then all backward). Each
grouped call counts once in ``opCount``, so the count says where in the order a call stands, whatever is missing before it. A
schedule is taken only where all calls of all stages fit it; else peers stay unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.rank_log_groups import Chain, Shared
from ncclwatch.model.events import Function

MOST_MICRO_BATCHES = 512
FEWEST_CALLS = 4
"""Calls of a stage by which a schedule is told; chosen."""
NOBODY = -1


class Unit(NamedTuple):
    """One grouped call of a stage: to whom it sends, and from whom it receives; ``NOBODY``: it does not."""

    to: int = NOBODY
    of: int = NOBODY


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Unit]:
    """One iteration of 1F1B as Megatron-LM groups it."""
    before = stage - 1 if stage else NOBODY
    after = stage + 1 if stage < stages - 1 else NOBODY
    warm = min(stages - stage - 1, micro_batches)
    steady = micro_batches - warm
    units = [Unit(of=before), Unit(to=after)] * warm + ([Unit(of=before)] if steady else [])
    for left in range(steady, 0, -1):
        units += [Unit(after, after), Unit(before, before if left > 1 else NOBODY)]
    units += [Unit(of=after), Unit(to=before)] * warm
    return [unit for unit in units if unit != Unit()]


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Unit]:
    """One iteration of GPipe."""
    before = stage - 1 if stage else NOBODY
    after = stage + 1 if stage < stages - 1 else NOBODY
    units = [Unit(of=before), Unit(to=after)] * micro_batches + [Unit(of=after), Unit(to=before)] * micro_batches
    return [unit for unit in units if unit != Unit()]


def apart(units: Sequence[Unit]) -> list[Unit]:
    """The same where sends and receives are calls of their own."""
    return [one for unit in units for one in (Unit(to=unit.to), Unit(of=unit.of)) if one != Unit()]


def peers(shared: Sequence[Shared]) -> dict[int, NDArray[np.int32]] | None:
    """For each pipeline communicator (by ``id`` of its chain) the peer of every line, as ranks of it; ``None`` where no
    schedule fits all of them.
    """
    chains = [(rank, len(one.ranks), chain) for one in shared for rank, chain in one.chains.items()]
    if not chains or any(not chain.exchanges or len(one.ranks) < 2 for one in shared for chain in one.chains.values()):
        return None
    counted = {id(chain): _counts(chain) for _, _, chain in chains}
    # The longest log of a first stage tells most about the number of micro-batches.
    first = max(chains, key=lambda one: (one[0] == 0, len(one[2].rows)))
    # A log of less than one iteration fits many schedules, and so tells none.
    most = min(MOST_MICRO_BATCHES, len(counted[id(first[2])].number))
    grouped = any(bool(((counts.sends > 0) & (counts.receives > 0)).any()) for counts in counted.values())
    for schedule in (_Schedule(grouped, forward_first) for forward_first in (False, True)):
        for number in range(1, most + 1):
            if not _fits(counted[id(first[2])], schedule(first[0], first[1], number)):
                continue
            if all(_fits(counted[id(chain)], schedule(rank, size, number)) for rank, size, chain in chains):
                return {id(chain): _peers_of(chain, schedule(rank, size, number)) for rank, size, chain in chains}
            break
    return None


class _Schedule(NamedTuple):
    grouped: bool
    forward_first: bool

    def __call__(self, stage: int, stages: int, micro_batches: int) -> list[Unit]:
        units = (gpipe if self.forward_first else one_f_one_b)(stage, stages, micro_batches)
        return units if self.grouped else apart(units)


class _Counts(NamedTuple):
    """By ``opCount`` (each once): how many sends and receives it has, and whether all of them are known to be there."""

    number: NDArray[np.int64]
    sends: NDArray[np.int64]
    receives: NDArray[np.int64]
    whole: NDArray[np.bool_]


def _counts(chain: Chain) -> _Counts:
    number, inverse = np.unique(chain.lines["op_count"], return_inverse=True)
    function = chain.lines["function"]
    sends = np.bincount(inverse, function == Function.SEND, len(number)).astype(np.int64)
    receives = np.bincount(inverse, function == Function.RECV, len(number)).astype(np.int64)
    steps = np.diff(number) == 1
    # Beside a gap, and at the end, a grouped call may be there in part only.
    before = np.r_[number[0] == 0, steps]
    return _Counts(number, sends, receives, before & np.r_[steps, False])


def _fits(counts: _Counts, units: Sequence[Unit]) -> bool:
    """Whether calls are those of a schedule, iteration after iteration."""
    if len(counts.number) < FEWEST_CALLS or not units:
        return False
    at = counts.number % len(units)
    sends = np.array([unit.to != NOBODY for unit in units])[at]
    receives = np.array([unit.of != NOBODY for unit in units])[at]
    same = (counts.sends == sends) & (counts.receives == receives)
    part = (counts.sends <= sends) & (counts.receives <= receives)
    return bool(np.where(counts.whole, same, part).all())


def _peers_of(chain: Chain, units: Sequence[Unit]) -> NDArray[np.int32]:
    at = chain.lines["op_count"] % len(units)
    to, of = (np.array(values, np.int32)[at] for values in zip(*units, strict=True))
    found: NDArray[np.int32] = np.where(chain.lines["function"] == Function.SEND, to, of).astype(np.int32)
    return found
