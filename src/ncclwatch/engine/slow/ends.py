"""Where the waits that samples show end: at ranks, proxies and links, now and in the healthy past."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.findings import Context
from ncclwatch.engine.slow.profile import LinkKey, Profile, Shares
from ncclwatch.engine.slow.snapshot import Part

OWN_END = 0.7
"""Part of the lost time in which the waits that a sample shows end at the culprit; the others end at whom it holds up first.
Unit: share. From: chosen; the weight of the term takes up what it is off by.
"""
INDEPENDENT = 40.0
"""Samples follow each other and see one state twice: n of them count as n / (1 + n / 40). Unit: samples. From: leaving out one
seed at a time (1001, 1101, 1401, 1402): 12 to 40 alike, a logarithm of the ratio names no second rank.
"""
LEAST_GROWN = 0.02
"""Share of the time that waits must have grown by to be divided among candidates: of less the parts are chance. Unit: share.
From: one sample in fifty.
"""
NEVER = 0.002
"""Bound: keeps every probability above 0."""


@dataclass(slots=True)
class Ends:
    """Shares of the time that the waits end there; ``past``: the same in the healthy past, scaled to the part of the time that is
    not lost. ``own`` and ``proxy`` by rank, ``link`` by link.
    """

    looks: int
    own: Shares
    own_past: Shares
    proxy: Shares
    proxy_past: Shares
    links: list[LinkKey]
    source: NDArray[np.int64]
    """Ranks at the ends of each link; -1 for one that was not observed."""
    destination: NDArray[np.int64]
    link: Shares
    link_past: Shares
    link_looks: Shares
    delayed: Shares
    """By how much longer messages of each link take to be acknowledged than they did, seconds."""

    @classmethod
    def of(cls, profile: Profile, context: Context, kept: float) -> Ends:
        """``kept``: the part of the time that is not lost."""
        index = {key: at for at, key in enumerate(profile.processes)}
        before, size = context.past, len(profile.processes)
        measured = [(one, other, 0, 0, 0) for one, other in context.delayed if one in index and other in index]
        links: list[LinkKey] = list(dict.fromkeys([*profile.links, *(before.links if before is not None else ()), *measured]))
        own, proxy = profile.own(), profile.hold[Part.PROXY]
        link = np.array([profile.links.get(key, 0.0) for key in links])
        if before is not None:
            own_past = kept * before.of(profile.processes, before.own(), 0.0)
            proxy_past = kept * before.of(profile.processes, before.hold[Part.PROXY], 0.0)
            link_past = kept * np.array([before.links.get(key, 0.0) for key in links])
        elif context.lost is not None:
            own_past, proxy_past, link_past = np.zeros(size), np.zeros(size), np.zeros(len(links))
        else:
            own_past = _of_peers(own, context)
            proxy_past, link_past = _mean_of_others(proxy, size), _mean_of_others(link, 2 * size)
        source = np.array([-1 if one is None else index.get(one, -1) for one, *_ in links], np.int64)
        destination = np.array([-1 if other is None else index.get(other, -1) for _, other, *_ in links], np.int64)
        delayed = [context.delayed.get((key[0], key[1]), 0.0) if key[0] and key[1] else 0.0 for key in links]
        looks = np.array([profile.link_looks[key] for key in links], np.float64)
        return cls(
            profile.looks, own, own_past, proxy, proxy_past, links, source, destination, link, link_past, looks,
            np.array(delayed, np.float64),
        )  # fmt: skip

    @property
    def grown(self) -> Shares:
        """By how much more others wait for each link."""
        return np.maximum(self.link - self.link_past, 0.0)

    @property
    def excess(self) -> float:
        """What all ends that have grown have grown by together."""
        own, proxy = (np.maximum(now - past, 0.0) for now, past in ((self.own, self.own_past), (self.proxy, self.proxy_past)))
        return max(float(own.sum() + proxy.sum() + self.grown.sum()), LEAST_GROWN)

    def ratio(self, now: Shares, past: Shares, parts: Shares, lost: float) -> Shares:
        """Log-likelihood ratio of each candidate: waits end at its ``parts`` ends for ``OWN_END`` of the lost time, or at any."""
        total = float(self.own.sum() + self.proxy.sum() + self.link.sum())
        chance = np.minimum(parts / max(len(self.own) * 2 + len(self.link), 1), 0.5) / 2
        blamed, innocent = past + lost * OWN_END + NEVER, past + lost * chance + NEVER
        elsewhere = np.maximum(min(total, 1.0) - np.minimum(now, 1.0), 0.0)
        missed = np.log(np.maximum(1 - blamed, 0.05) / np.maximum(1 - innocent, 0.05))
        samples = self.looks / (1.0 + self.looks / INDEPENDENT)
        ratio: Shares = samples * (np.minimum(now, 1.0) * np.log(blamed / innocent) + elsewhere * missed)
        return ratio


def _of_peers(values: Shares, context: Context) -> Shares:
    """For each rank the median of its peers; its own where it has none: then nothing stands out."""
    result = values.copy()
    for at in range(len(values)):
        others = context.others(at)
        if len(others):
            result[at] = np.median(values[others])
    return result


def _mean_of_others(values: Shares, fewest: int) -> Shares:
    """For each value the mean of the others, of which there are so many at least (those that nobody waited for count as 0)."""
    mean: Shares = (values.sum() - values) / max(fewest - 1, len(values) - 1, 1)
    return mean
