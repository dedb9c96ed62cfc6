"""Ranks that broke their own pattern of calls: left a call out, made another in its place, or swapped two.

A training job calls the same things in the same order again and again. What calls were made before a call says what used to
follow; the longest such context counts, since an iteration repeats small patterns inside (layers, micro-batches) that end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.edges import told
from ncclwatch.engine.evidence.base import Fact, RankNode
from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.slow.order import CallOrder, Place

RECENT = 256
"""Unit: calls back from the newest. From: a host runs ahead of its GPU by fewer. Of six simulated jobs with a call left out or
swapped 48 miss one, and 1,024 name other ranks in three, or none.
"""
SHORTEST_CONTEXT = 3
"""Unit: calls before a call. From: the tests, where one to six tell the same: fewer say nothing of what follows."""
DOUBLINGS = 9
"""Bound: the longest context that is compared is two to this power, twice, less one: 1,023 calls."""
ASKED = 32
"""Bound: ranks beside the suspects whose calls are looked at to tell whether patterns can be told at all, and processes of a job
of which all are asked.
"""
FEW = 0.1
"""Unit: share of these that may seem to have broken their pattern. From: the tests, where 0.02 to 0.3 tell the same. Where more
do, the job does something new (it evaluates, say), or an iteration is longer than the calls that are kept.
"""

Token = tuple[int, tuple[int, int, int], tuple[Place, ...]]


class Orders(Protocol):
    """Where the order of a process's calls is kept."""

    def find(self, host: str, pid: int) -> CallOrder | None:
        """The order of a process's last calls, where they were recorded."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """A call that is not what used to follow: ``due`` was (address of its communicator), ``called`` was made ``ago`` calls back.

    ``left_out``: the call and those after it are what used to come after the one that was due, which was left out, rather than
    another made in its place or the two swapped.
    """

    due: int
    called: int
    ago: int
    left_out: bool


def find_deviation(order: CallOrder) -> Deviation | None:
    """The last call that broke the pattern of a process. O(kept calls x (recent calls + log context)), once for equal calls."""
    return order.remember("deviation", lambda: _find_deviation(order))


def _find_deviation(order: CallOrder) -> Deviation | None:
    tokens: list[Token] = [
        (call.comm, call.what, tuple((call.comm, way) for way in sorted(call.ways, key=repr))) for call in order.calls
    ]
    if len(tokens) <= SHORTEST_CONTEXT:
        return None
    numbers: dict[Token, int] = {}
    kinds = np.array([numbers.setdefault(token, len(numbers)) for token in tokens])
    stretches = _stretches(kinds)
    # What follows a broken pattern was never seen before, so it breaks none; and of the older half too little was seen before.
    for position in range(len(tokens) - 1, max(SHORTEST_CONTEXT, len(tokens) // 2, len(tokens) - RECENT) - 1, -1):
        earlier = _same_before(kinds, stretches, position)
        if earlier is not None and kinds[earlier] != kinds[position]:
            ago = len(tokens) - 1 - position
            return Deviation(tokens[earlier][0], tokens[position][0], ago, _is_left_out(kinds.tolist(), earlier, position))
    return None


def _stretches(kinds: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """For each power of two a number for the stretch of so many calls that ends at each call: equal stretches, equal numbers.

    Calls with too few before them have numbers of their own.
    """
    found = [kinds]
    alone = -1 - np.arange(len(kinds))
    for power in range(DOUBLINGS):
        half, last = 1 << power, found[-1]
        if 2 * half > len(kinds):
            break
        pairs = np.stack([last[half:], last[:-half]], axis=1)[half - 1 :]
        numbers = alone.copy()
        numbers[2 * half - 1 :] = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
        found.append(numbers)
    return found


def _same_before(kinds: NDArray[np.int64], stretches: Sequence[NDArray[np.int64]], position: int) -> int | None:
    """The last place where the calls before ``position`` were made earlier, if the same call followed every time.

    The longest context counts that was met twice at least, and holds more than one kind of call: in a run of equal calls nothing
    tells how many are still to come.
    """
    earlier = np.arange(SHORTEST_CONTEXT, position)
    if len(earlier) < 2:
        return None
    length = np.zeros(len(earlier), np.int64)
    for power in range(len(stretches) - 1, -1, -1):
        numbers = stretches[power]
        # Only as many calls are taken on as both have before them: numbers below 0 are nobody else's.
        mine, theirs = np.maximum(position - 1 - length, 0), np.maximum(earlier - 1 - length, 0)
        same = (numbers[mine] == numbers[theirs]) & (earlier - length >= 1 << power)
        length[same] += 1 << power
    context = int(np.partition(length, -2)[-2])
    if context < SHORTEST_CONTEXT or len(np.unique(kinds[position - context : position])) < 2:
        return None
    met = earlier[length >= context]
    return int(met[-1]) if len(np.unique(kinds[met])) == 1 else None


def _is_left_out(kinds: Sequence[int], earlier: int, position: int) -> bool:
    """Whether what was called from ``position`` on goes on as after the call that was due there, for longer than if two calls had
    been swapped.
    """

    def agreeing(begin: int, as_from: int) -> int:
        pairs = zip(islice(kinds, begin, None), islice(kinds, as_from, position), strict=False)
        return next((n for n, (one, other) in enumerate(pairs) if one != other), min(len(kinds) - begin, position - as_from))

    left_out, due = agreeing(position, earlier + 1), kinds[earlier]
    swapped = kinds[position + 1 : position + 2] == [due] and kinds[position] == kinds[earlier + 1]
    return left_out > 0 and (not swapped or left_out > 2 + agreeing(position + 2, earlier + 2))


def find_deviations(job: Job, members: set[int], orders: Orders | None, *, proper: bool = True) -> dict[int, Deviation]:
    """The members of a cycle, or of a disagreement, that broke their pattern; with ``proper`` none when all of them did.

    None, too, when others that nobody suspects seem to have broken theirs.
    """
    if orders is None:
        return {}
    found = _deviations(job, sorted(members), orders)
    if not found or (proper and len(found) == len(members)):
        return {}
    others = [member.index for member in job.members if member.index not in members]
    asked = others[:: max(1, len(others) // ASKED)]
    return found if len(_deviations(job, asked, orders)) <= FEW * len(asked) else {}


def find_alone_in_deviating(job: Job, orders: Orders | None) -> dict[int, Deviation]:
    """The few processes of a job that broke their pattern, where nobody else did; empty for large jobs (:data:`ASKED`)."""
    alive = [member.index for member in job.members if not member.gone]
    if orders is None or not 1 < len(alive) <= ASKED:
        return {}
    found = _deviations(job, alive, orders)
    return found if len(found) <= max(1, FEW * len(alive)) else {}


def _deviations(job: Job, indices: Sequence[int], orders: Orders) -> dict[int, Deviation]:
    found: dict[int, Deviation] = {}
    for index in indices:
        info = job.member(index).info
        order = orders.find(info.host, info.pid)
        deviation = find_deviation(order) if order is not None else None
        if deviation is not None:
            found[index] = deviation
    return found


def deviation_fact(job: Job, member: Member, deviation: Deviation) -> Fact:
    """A broken pattern as evidence."""

    def name(address: int) -> str:
        number = job.group_of.get((member.index, address))
        return f"communicator {job.groups[number].hash:016x}" if number is not None else "another communicator"

    since = f", {deviation.ago} calls ago" if deviation.ago else ""
    then = ", which it has left out" if deviation.left_out else ""
    text = (
        f"{member.label} called an operation on {name(deviation.called)}{since}, where its calls always had another on "
        f"{name(deviation.due)}{then}"
    )
    return told(text, RankNode(member.index), source="calls")
