"""For whom the ranks of a communicator waited, by the times of their calls.

All ranks need each other in a collective. Between the last call but one and the last all others wait for one rank. A rank that
is late because it waited itself, for a rank that called late on another of its communicators, is excused for so long. Clocks of
hosts that differ are put right by what their calls differ by at the median.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.rank_log_groups import POINT_TO_POINT, Chain, Shared

LONGEST_WAIT_S = 60.0
"""Bound: a longer one is no wait for a slow rank."""
FASTEST = 0.75
"""The quantile of windows by calls from which on a job is taken for healthy, to compare clocks; chosen."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Equal parts of a job's time: where they begin (s since the epoch), how long each is, how many."""

    begin: float
    length: float
    number: int

    def of(self, times: NDArray[np.float64]) -> NDArray[np.int64]:
        """The window of each time."""
        found: NDArray[np.int64] = np.clip(((times - self.begin) / self.length).astype(np.int64), 0, self.number - 1)
        return found


@dataclass(frozen=True, slots=True)
class Called:
    """When each rank of a communicator called what all of them called. ``times``: s on its own clock, shape (ranks,
    operations); ``ahead``: by what each clock is ahead of the first rank's; ``window`` of each operation.
    """

    shared: Shared
    ranks: tuple[int, ...]
    times: NDArray[np.float64]
    ahead: NDArray[np.float64]
    window: NDArray[np.int64]

    @property
    def on_one_clock(self) -> NDArray[np.float64]:
        """The times on the first rank's clock."""
        made: NDArray[np.float64] = self.times - self.ahead[:, None]
        return made


def called(one: Shared, windows: Windows, fewest: int) -> Called | None:
    """The calls of a communicator of which every rank has a log; ``None`` where there are fewer than ``fewest``."""
    chains = [chain for chain in one.chains.values() if not chain.exchanges and len(chain.rows) >= fewest]
    if len(chains) < len(one.chains) or len(chains) < 2:
        return None
    times = _lined_up(chains)
    if times.shape[1] < fewest:
        return None
    window = windows.of(times.max(axis=0))
    calls = np.bincount(window)
    # In the windows with most calls the job was fastest: there clocks are compared.
    fast = calls[window] >= np.quantile(calls[calls >= fewest], FASTEST) if (calls >= fewest).any() else window >= 0
    ahead = np.median((times - times[:1])[:, fast], axis=1)
    return Called(one, tuple(chain.rank for chain in chains), times, ahead, window)


def _lined_up(chains: Sequence[Chain]) -> NDArray[np.float64]:
    parts = []
    for chain in chains:
        own = chain.lines[~np.isin(chain.lines["function"], POINT_TO_POINT)]
        counts, first = np.unique(own["op_count"], return_index=True)
        parts.append((counts, own["time_ns"][first]))
    common = parts[0][0]
    for counts, _ in parts[1:]:
        common = np.intersect1d(common, counts, assume_unique=True)
    return np.stack([own[np.searchsorted(counts, common)] / 1e9 for counts, own in parts])


class Excuses:
    """When ranks waited themselves for another rank's call, s on their own clocks; by rank, of all their communicators."""

    def __init__(self, found: Sequence[Called]) -> None:
        spans: dict[int, list[NDArray[np.float64]]] = defaultdict(list)
        for one in found:
            last = one.on_one_clock.max(axis=0)
            for place, rank in enumerate(one.ranks):
                until = last + one.ahead[place]
                waits = until > one.times[place]
                spans[rank].append(np.stack([one.times[place][waits], until[waits]]))
        self._edges = {rank: _edges(np.concatenate(own, axis=1)) for rank, own in spans.items()}

    def within(self, rank: int, begin: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
        """For how long the rank waited in each of these intervals (s)."""
        times, total = self._edges[rank]
        if not len(times):
            return np.zeros(len(begin))
        found: NDArray[np.float64] = np.interp(end, times, total) - np.interp(begin, times, total)
        return found


def _edges(spans: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Where disjoint intervals begin and end, and how much of them lies before that."""
    begin, end = spans[:, np.argsort(spans[0], kind="stable")]
    begin = np.maximum(begin, np.r_[-np.inf, np.maximum.accumulate(end)[:-1]])
    begin, end = begin[end > begin], end[end > begin]
    length = np.cumsum(end - begin)
    return np.stack([begin, end], axis=1).ravel(), np.stack([length - (end - begin), length], axis=1).ravel()


def waited_for(one: Called, place: int, excuses: Excuses, windows: Windows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """For how long all others waited for the rank at a place, by window (s), and the longest wait of each. Hosts run ahead of
    their GPUs, so waits for operations in a row overlap; each counts: the further behind a host is, the more of them.
    """
    times = one.on_one_clock
    order = np.sort(times, axis=0)
    mine = times.argmax(axis=0) == place
    ahead, rank = one.ahead[place], one.ranks[place]
    begin = np.maximum(order[-2], order[-1] - LONGEST_WAIT_S)[mine] + ahead
    end = order[-1][mine] + ahead
    length = np.maximum(end - begin - excuses.within(rank, begin, end), 0.0)
    total, longest = np.zeros((2, windows.number))
    at = windows.of(end)
    np.add.at(total, at, length)
    np.maximum.at(longest, at, length)
    return total, longest


def replicas(shared: Sequence[Shared], busiest: Mapping[int, Shared]) -> dict[int, int]:
    """Which ranks work on the same samples: those that exchange messages, or share the communicator that they call most on,
    where that is not all of the job. Rank → a number that they have in common.
    """
    world = {chain.rank for one in shared for chain in one.chains.values()}
    number = {rank: rank for rank in world}
    together = [one for one in shared if any(chain.exchanges for chain in one.chains.values())]
    together += [one for one in {id(one): one for one in busiest.values()}.values() if len(one.chains) < len(world)]
    for one in together:
        own = {number[chain.rank] for chain in one.chains.values()}
        number = {rank: min(own) if old in own else old for rank, old in number.items()}
    return number
