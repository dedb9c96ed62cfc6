"""Which paths are queued, and which flows crowd on them while others are empty: tomography by probes that vary the source port.

Nothing is known of the fabric. Paths between two hosts differ by what a probe waits in queues under load: where a flow fills a
link, probes by that link wait, and probes by others do not. A queue is not always full (an iteration pauses), so a path is called
empty only when it was asked often enough for a queued one to have shown itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ncclwatch.model.paths import Load, PathKey, PathLoad

QUEUED_FACTOR = 5.0
"""A probe waited when it took so many times as long as the quickest of all, beyond it."""
QUEUED_NS = 2_000_000
"""And at least so long: a millisecond is a busy CPU's. Below that no queue is told from none."""
CONFIDENT = 0.95
NOISE = 0.05
"""Share of probes that wait for other reasons (the host's CPU) on an empty path, at most."""
LEAST_PROBES = 5


@dataclass(frozen=True, slots=True)
class Crowd:
    """Flows from one host to another that wait in queues while other paths between the same hosts are empty.

    ``flows`` are those flows' keys, ``empty`` the paths that have room. Two flows or more: one alone may just fill its link. How
    many links those flows share is not told; that they leave others unused is.
    """

    flows: tuple[Any, ...]
    empty: tuple[PathKey, ...]
    confidence: float


def loads(delays: Mapping[PathKey, Sequence[int]]) -> dict[PathKey, PathLoad]:
    """What each path was seen to be. ``delays`` are one-way times in ns, in turns over all paths, all with the same offset.

    A path is empty when even the least queued of the others would have shown more waits: with w the smallest share of probes that
    wait on a queued path, a path of that kind shows so few in k probes with the probability of the binomial distribution. (With
    the mean share in its place a link that is filled half as often as another looked empty.) Waits by noise on an empty path:
    NOISE^waits.
    """
    every = [delay for row in delays.values() for delay in row]
    if not every:
        return {path: PathLoad(path, Load.UNKNOWN, 0.0, 0, 0) for path in delays}
    # One-way times have an offset of clocks in them, of which a factor says nothing: spread among the quick ones stands for it.
    quickest = min(every)
    usual = sorted(every)[len(every) // 20] - quickest
    edge = quickest + max(QUEUED_NS, QUEUED_FACTOR * usual)
    waits = {path: sum(delay > edge for delay in row) for path, row in delays.items()}
    queued = [path for path, row in delays.items() if row and waits[path] > max(1, 3 * NOISE * len(row))]
    share = min((waits[path] / len(delays[path]) for path in queued), default=0.0)
    return {path: _load(path, waits[path], len(row), share, path in set(queued)) for path, row in delays.items()}


def _load(path: PathKey, waited: int, probes: int, share: float, queued: bool) -> PathLoad:
    if probes < LEAST_PROBES:
        return PathLoad(path, Load.UNKNOWN, 0.0, waited, probes)
    if queued:
        return PathLoad(path, Load.QUEUED, 1 - NOISE**waited, waited, probes)
    # Where nothing was queued anywhere no load shows what differs: the share is 0, and so is the confidence.
    doubt = sum(math.comb(probes, k) * share**k * (1 - share) ** (probes - k) for k in range(waited + 1))
    confidence = max(0.0, 1 - doubt)
    return PathLoad(path, Load.EMPTY if confidence >= CONFIDENT else Load.UNKNOWN, confidence, waited, probes)


def is_queued(now_us: float, least_us: float) -> bool:
    """Whether a flow waits in a queue, by its round trip now and the shortest of its connection."""
    return (now_us - least_us) * 1000 > max(QUEUED_NS, (QUEUED_FACTOR - 1) * least_us * 1000)


def crowd(flows: Mapping[Any, tuple[float, float]], paths: Mapping[PathKey, PathLoad]) -> Crowd | None:
    """Whether flows from one host to another crowd; ``flows`` are their (round trip, shortest round trip) in µs.

    ``None`` where fewer than two wait, or no path between these hosts was seen to be empty.
    """
    waiting = tuple(key for key, (now, least) in flows.items() if is_queued(now, least))
    empty = sorted((path for path in paths.values() if path.load is Load.EMPTY), key=lambda one: (-one.confidence, one.path))
    if len(waiting) < 2 or not empty:
        return None
    return Crowd(waiting, tuple(one.path for one in empty), empty[0].confidence)
