"""Which flows share a bottleneck, by their rates alone: a hint where no router answers, and nothing is probed.

When something else crosses a link, all flows on it get less, and flows on other links do not (network tomography; Rubenstein,
Kurose and Towsley, "Detecting shared congestion of flows via end-to-end measurement"). Two signs are looked for:

- *Company.* Flows that share a link fairly get 1/k of it each, so the inverse of a rate grows by the same step with every other
  flow that sends. What a flow suffers from is found by regression on when others send, one after the other. Flows of one job
  send at the same times and cannot be told apart by that; two that share a link suffer from the same others, and from each other.
- *Drops together.* What no flow that is known explains may come from outside: then all on the link drop in the same looks.

Rates are those while there was something to send, so a flow that waits for another one of its ring has not dropped. How likely
drops are to fit by chance is told by shifting one series against the other: that keeps what each does by itself over time.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from ncclwatch.paths.fabric import Floats

SLOWER = 0.25
"""A flow has dropped when it takes by this part longer than usual for the same bytes; less is noise."""
USUAL = 80
"""The percentile of a flow's rates that is usual for it."""
FEWEST_LOOKS = 30
"""So many looks at a flow are needed."""
FEWEST_DROPS = 3
"""And so many looks with a drop, or with another flow sending, and at rest."""
CHANCE = 0.05
"""Pairs are told such that of all told at most this part is expected to be chance (Benjamini and Hochberg). The same is the
chance, over all others that are tried, that a flow is taken to suffer from one that it has nothing to do with."""
LEAST_STEP = 1 / 3
"""All who share a link fairly take the same from a flow, kinds of several flows more: one that takes less than this part of what
another takes shares no link with it."""
ALIKE = 0.67
"""Of all that two flows on a link suffer from, this part is common to both."""
SAME_TIMES = 0.02
"""Flows that send at the same times differ in this part of the looks at most."""
JOINED = 0.5
"""Two groups are one when this part of the pairs between them is told: one pair that is told by chance joins no bottlenecks."""
BIN_S = 3.0
"""Seconds of one look: a recording lists flows every two seconds, at the next sample."""
MAX_FLOWS = 256
"""Bound: flows that are compared, those that vary most first."""
MOST_OTHERS = 64
"""Bound: kinds of others that one flow is found to suffer from."""


Listing = tuple[float, str, Mapping[Hashable, float]]
"""(seconds, host, rate of each flow of the host, 0 while it does not send)."""
Pair = tuple[int, int]


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


def slowness(rates: Floats) -> Floats:
    """(looks, flows): by which part a flow takes longer for the same bytes than is usual for it; NaN where it did not send."""
    sent = np.where(rates > 0, rates, np.nan)
    usual = np.array([np.nanpercentile(column, USUAL) if np.isfinite(column).any() else np.nan for column in sent.T])
    return usual / sent - 1


def shared(rates: Floats) -> list[Shared]:
    """Groups of flows that seem to share a bottleneck. ``rates`` (looks, flows) in bytes a second, 0 or NaN where one did not
    send; looks are at even distances."""
    slow = slowness(rates)
    if slow.shape[0] < FEWEST_LOOKS or slow.shape[1] < 2:
        return []
    vary = np.nansum(slow, axis=0)
    # A flow that never drops may still be what others drop for.
    chosen = sorted(np.argsort(-vary, kind="stable")[:MAX_FLOWS].tolist())
    found = _Company(slow[:, chosen])
    told = {**_drop_together(found.rest), **dict(found.pairs())}
    return [Shared(tuple(chosen[flow] for flow in group), 1 - weakest) for group, weakest in _groups(told)]


class _Company:
    """What each flow suffers from: kinds of others, a kind being flows that send at the same times."""

    def __init__(self, slow: Floats) -> None:
        sends = np.isfinite(slow)
        self.kind = _kinds(sends)
        self.members = Counter(self.kind)
        # Who always sends, or never, explains nothing: his company is known by what both suffer from.
        self.varying = [k for k in self.members if min(sends[:, k].sum(), (~sends[:, k]).sum()) >= FEWEST_DROPS]
        self._when = sends[:, self.varying].astype(np.float64)
        found = [self._suffers(slow[:, flow], self.kind[flow]) for flow in range(slow.shape[1])]
        self.chance = [chances for chances, _ in found]
        self.rest = np.stack([rest for _, rest in found], axis=1)

    def _suffers(self, slow: Floats, own: int) -> tuple[dict[int, float], Floats]:
        """Kinds that this flow suffers from, each with the chance that it does not, and the slowness that they do not explain."""
        known = np.isfinite(slow)
        others = [
            at
            for at, kind in enumerate(self.varying)
            if kind != own and min(self._when[known, at].sum(), (1 - self._when[known, at]).sum()) >= FEWEST_DROPS
        ]
        chances: dict[int, float] = {}
        taken: list[int] = []
        rest = slow.copy()
        if known.sum() < FEWEST_LOOKS:
            return chances, rest
        while len(taken) < min(MOST_OTHERS, len(others)):
            left = [at for at in others if at not in taken]
            best, chance = _most_alike(rest[known], self._when[known][:, left], len(taken))
            if chance * len(others) > CHANCE:
                break
            sending = np.column_stack([np.ones(known.sum()), self._when[known][:, [*taken, left[best]]]])
            steps = np.linalg.lstsq(sending, slow[known], rcond=None)[0]
            if steps[-1] < LEAST_STEP * steps[1:].max():
                break
            taken.append(left[best])
            chances[self.varying[left[best]]] = chance * len(others)
            rest[known] = slow[known] - sending @ steps
        return chances, rest

    def pairs(self) -> Iterator[tuple[Pair, float]]:
        """Flows that keep the same company, with the chance that they do not."""
        signs = [{*self.chance[flow], kind}.intersection(self.varying) for flow, kind in enumerate(self.kind)]
        for a, b in combinations(range(len(self.kind)), 2):
            common, every = signs[a] & signs[b], signs[a] | signs[b]
            if not self._may(a, b) or len(common) < ALIKE * len(every) or len(common) < 2 - self._sure(a, b):
                continue
            chances = [self.chance[one].get(self.kind[other], 0.0) for one, other in ((a, b), (b, a))]
            yield (a, b), max(*chances, 1 - len(common) / len(every))

    def _may(self, a: int, b: int) -> bool:
        """Each suffers from the other's kind, as far as that can be seen."""
        if self.kind[a] == self.kind[b]:
            return self.kind[a] not in self.varying
        return all(
            self.kind[other] in self.chance[one] or self.kind[other] not in self.varying for one, other in ((a, b), (b, a))
        )

    def _sure(self, a: int, b: int) -> bool:
        """One of them is the only one of its kind: then the other suffers from nobody else."""
        return any(self.members[self.kind[one]] == 1 and self.kind[one] in self.varying for one in (a, b))


def _kinds(sends: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> list[int]:
    """The kind of each flow: the number of the first that sends at the same times."""
    kinds: list[int] = []
    for flow in range(sends.shape[1]):
        alike = (k for k in dict.fromkeys(kinds) if (sends[:, k] != sends[:, flow]).mean() <= SAME_TIMES)
        kinds.append(next(alike, flow))
    return kinds


def _most_alike(rest: Floats, when: Floats, taken: int) -> tuple[int, float]:
    """Which column ``rest`` grows with most surely, and how likely that is by chance (one-sided test of a correlation)."""
    rest, when = rest - rest.mean(), when - when.mean(axis=0)
    alike = rest @ when / np.maximum(np.linalg.norm(rest) * np.linalg.norm(when, axis=0), 1e-12)
    best = int(np.argmax(alike))
    free = max(1, len(rest) - 2 - taken)
    return best, 0.5 * math.erfc(alike[best] * math.sqrt(free / max(1e-12, 1 - alike[best] ** 2)) / math.sqrt(2))


def _drop_together(rest: Floats) -> dict[Pair, float]:
    """Pairs of flows that drop in the same looks, with the chance that they do by chance."""
    below = np.where(np.nan_to_num(rest) >= SLOWER, rest, np.where(np.isfinite(rest), 0.0, np.nan))
    known = np.isfinite(below)
    found = []
    for a, b in combinations(range(below.shape[1]), 2):
        both = known[:, a] & known[:, b]
        if both.sum() >= FEWEST_LOOKS and min((below[both, one] > 0).sum() for one in (a, b)) >= FEWEST_DROPS:
            found.append((_by_shifts(*(np.where(both, below[:, one], 0.0) for one in (a, b))), (a, b)))
    return {pair: chance for chance, pair in _told(found)}


def _told(found: Iterable[tuple[float, Pair]]) -> Sequence[tuple[float, Pair]]:
    """Benjamini and Hochberg: the pairs up to the last whose chance is below its place among all, times :data:`CHANCE`."""
    ranked = sorted(found)
    last = max((k for k, (p, _) in enumerate(ranked, 1) if p <= CHANCE * k / len(ranked)), default=0)
    return ranked[:last]


def _by_shifts(a: Floats, b: Floats) -> float:
    """The part of all shifts of one series around the other, forwards and backwards, that fit at least as well as it does."""
    a, b = a - a.mean(), b - b.mean()
    turned = np.fft.rfft(a)
    fits = np.concatenate([np.fft.irfft(turned * np.conj(np.fft.rfft(each)), len(a)) for each in (b, b[::-1])])
    return float((fits >= fits[0] - 1e-9 * max(1.0, abs(float(fits[0])))).mean())


def _groups(told: Mapping[Pair, float]) -> list[tuple[tuple[int, ...], float]]:
    """Flows joined by pairs, surest first, where enough of the pairs between two groups are told. With the largest chance that
    joined each group."""
    group: dict[int, tuple[int, ...]] = {flow: (flow,) for pair in told for flow in pair}
    is_told = np.zeros((max(group, default=0) + 1,) * 2, np.bool_)
    for a, b in told:
        is_told[a, b] = is_told[b, a] = True
    weakest: dict[tuple[int, ...], float] = {}
    for (a, b), chance in sorted(told.items(), key=lambda item: item[1]):
        one, other = group[a], group[b]
        if one == other:
            continue
        if is_told[np.ix_(one, other)].mean() >= JOINED:
            joined = tuple(sorted(one + other))
            weakest[joined] = max(chance, weakest.get(one, 0.0), weakest.get(other, 0.0))
            group |= dict.fromkeys(joined, joined)
    return [(each, weakest[each]) for each in sorted(set(group.values())) if len(each) > 1]
