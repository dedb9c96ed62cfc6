"""Which flows share a bottleneck, by drops of their rates that come together: a hint where no router answers.

When something else crosses a link, all flows on it get less, and flows on other links do not (network tomography; Rubenstein,
Kurose and Towsley, "Detecting shared congestion of flows via end-to-end measurement"). Two signs are looked for in a pair: both
drop in the same looks, or one drops in looks in which the other sends, and not in those in which it rests. How likely either is
by chance is told by shifting one series against the other: that keeps what each does by itself over time. Rates are those while
there was something to send, so a flow that waits for another one of its ring has not dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import networkx as nx
import numpy as np

from ncclwatch.paths.fabric import Floats

DROP = 0.2
"""A rate has dropped when it is below the usual by this part; less is noise."""
USUAL = 80
"""The percentile of a flow's rates that is usual for it."""
FEWEST_LOOKS = 30
"""So many looks at both flows are needed."""
FEWEST_DROPS = 3
"""And so many looks with a drop, or with the other flow at rest."""
CHANCE = 0.05
"""Pairs are told such that of all told at most this part is expected to be chance (Benjamini and Hochberg)."""
BIN_S = 3.0
"""Seconds of one look: a recording lists flows every two seconds, at the next sample."""
MAX_FLOWS = 256
"""Bound: flows that are compared, those that vary most first."""


Listing = tuple[float, str, Mapping[Hashable, float]]
"""(seconds, host, rate of each flow of the host, 0 while it does not send)."""


def series(listings: Iterable[Listing]) -> tuple[list[Hashable], Floats]:
    """(flows, (looks, flows) rates) of listings of several hosts, for each :data:`BIN_S` in which every host has listed."""
    bins: defaultdict[int, dict[str, Mapping[Hashable, float]]] = defaultdict(dict)
    for seconds, host, rates in listings:
        bins[int(seconds // BIN_S)][host] = rates
    hosts = {host for each in bins.values() for host in each}
    whole = [bins[number] for number in sorted(bins) if bins[number].keys() == hosts]
    flows = list(dict.fromkeys(flow for each in whole for rates in each.values() for flow in rates))
    number = {flow: at for at, flow in enumerate(flows)}
    made = np.zeros((len(whole), len(flows)))
    for look, each in enumerate(whole):
        for rates in each.values():
            for flow, rate in rates.items():
                made[look, number[flow]] = rate
    return flows, made


@dataclass(frozen=True, slots=True)
class Shared:
    """Flows (columns) that seem to share a bottleneck. ``confidence`` (0 to 1) is that of the weakest pair that joins them."""

    flows: tuple[int, ...]
    confidence: float


def drops(rates: Floats) -> Floats:
    """(looks, flows): by which part each rate is below its usual; 0 where that is noise, NaN where the flow did not send."""
    sent = np.where(rates > 0, rates, np.nan)
    usual = np.array([np.nanpercentile(column, USUAL) if np.isfinite(column).any() else np.nan for column in sent.T])
    below = 1 - sent / usual
    return np.where(below >= DROP, below, np.where(np.isfinite(below), 0.0, np.nan))


def shared(rates: Floats) -> list[Shared]:
    """Groups of flows whose rates drop together. ``rates`` (looks, flows) in bytes a second, 0 or NaN where one did not send;
    looks are at even distances."""
    below = drops(rates)
    vary = np.nansum(below, axis=0)
    # A flow that never drops may still be what others drop for.
    chosen = sorted(np.argsort(-vary, kind="stable")[:MAX_FLOWS].tolist())
    found = [(p, pair) for pair in combinations(chosen, 2) if (p := _chance(below[:, pair[0]], below[:, pair[1]])) is not None]
    joined: nx.Graph[int] = nx.Graph()
    for p, (one, other) in _told(found):
        joined.add_edge(one, other, chance=p)
    groups = []
    for members in nx.connected_components(joined):
        # What holds a group together is a spanning tree of its surest pairs; its weakest is what the group rests on.
        tree = nx.minimum_spanning_tree(joined.subgraph(members), weight="chance")
        weakest = max(data["chance"] for _, _, data in tree.edges(data=True))
        groups.append(Shared(tuple(sorted(members)), 1 - weakest))
    return sorted(groups, key=lambda group: group.flows)


def _told(found: Iterable[tuple[float, tuple[int, int]]]) -> Sequence[tuple[float, tuple[int, int]]]:
    """Benjamini and Hochberg: the pairs up to the last whose chance is below its place among all, times :data:`CHANCE`."""
    ranked = sorted(found)
    last = max((k for k, (p, _) in enumerate(ranked, 1) if p <= CHANCE * k / len(ranked)), default=0)
    return ranked[:last]


def _chance(one: Floats, other: Floats) -> float | None:
    """How likely it is that these series fit as well by chance; ``None`` where there is nothing to compare.

    One sign is looked at, chosen by what can be compared and not by what comes of it: a drop of one while the other sends, where
    that one also rests; of two such the one with more looks on its rarer side; else drops of both.
    """
    ways = [(_sides(a, b), a, b) for a, b in ((one, other), (other, one))]
    sides, drops_of, sends = max(ways, key=lambda way: way[0])
    if sides >= FEWEST_DROPS:
        known, sending = np.isfinite(drops_of), np.isfinite(sends)
        return _by_shifts(np.where(known, drops_of, 0.0), sending.astype(np.float64))
    both = np.isfinite(one) & np.isfinite(other)
    if both.sum() < FEWEST_LOOKS or min((one[both] > 0).sum(), (other[both] > 0).sum()) < FEWEST_DROPS:
        return None
    return _by_shifts(*(np.where(np.isfinite(each), each, 0.0) for each in (one, other)))


def _sides(one: Floats, other: Floats) -> int:
    """Looks on the rarer side: drops of ``one``, the ``other`` sending, or at rest; 0 where there are too few looks."""
    known, sends = np.isfinite(one), np.isfinite(other)
    if known.sum() < FEWEST_LOOKS:
        return 0
    return int(min((one[known] > 0).sum(), (known & sends).sum(), (known & ~sends).sum()))


def _by_shifts(a: Floats, b: Floats) -> float:
    """The part of all shifts of one series around the other, forwards and backwards, that fit at least as well as it does."""
    a, b = a - a.mean(), b - b.mean()
    turned = np.fft.rfft(a)
    fits = np.concatenate([np.fft.irfft(turned * np.conj(np.fft.rfft(each)), len(a)) for each in (b, b[::-1])])
    return float((fits >= fits[0] - 1e-9 * max(1.0, abs(float(fits[0])))).mean())
