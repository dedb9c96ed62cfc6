"""A culprit of a slow job as it is found, and what is known besides the samples."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.lateness import Lateness
from ncclwatch.engine.slow.profile import Profile, Shares
from ncclwatch.engine.slow.snapshot import LinkPlace
from ncclwatch.model.identity import ProcessKey

FEWEST_PAST = 4
"""Samples of the healthy past below which it is not used: of fewer a share is mostly chance."""


class Kind(StrEnum):
    """What a finding is about, as it is said."""

    COMPUTE = "computation"
    HOST = "host"
    KERNEL = "communication kernel"
    PROXY = "proxy"
    NIC = "network interface"
    LINK = "link"

    @property
    def computes(self) -> bool:
        """Whether it counts as slow computation (S1); the rest is communication (S2)."""
        return self in (Kind.COMPUTE, Kind.HOST)


@dataclass(slots=True)
class Finding:
    """One culprit: ``members`` index the profile's processes; ``share`` of the job's time is spent waiting for it, as far as
    samples show; ``confidence`` is the posterior probability of its being one.
    """

    kind: Kind
    members: tuple[int, ...]
    share: float
    looks: int
    confidence: float
    reference: float = float("nan")
    link: LinkPlace | None = None
    keys: tuple[object, ...] = ()
    weighed: tuple[tuple[str, float], ...] = ()
    """What spoke for it, most first: term and its part of the log-odds."""
    rivals: tuple[tuple[str, tuple[int, ...], float], ...] = ()
    """What was weighed beside it and lost, likeliest first: kind of candidate ("nobody" too), members, posterior probability."""
    rule: str = ""
    """Which of the estimate's parts named it, as verdicts tell it."""


@dataclass(frozen=True, slots=True)
class Context:
    """What is known besides the samples. Arrays of shape (processes,).

    ``equal`` numbers sets of peers that do equal work and are seen by equal means (−1: none), ``alike`` sets that do equal work
    whatever shows of them; ``host`` numbers hosts, ``node`` nodes as NCCL tells them apart (``hostHash``). ``factor`` is how much
    longer a rank's work between calls lasts than before (nan: not known), ``lost`` the share of time that is lost compared
    with the healthy past (``None`` without one).
    """

    equal: NDArray[np.int64]
    host: NDArray[np.int64]
    factor: Shares
    lost: float | None
    before: Profile | None = None
    late: Lateness | None = None
    """Host threads that begin iterations late, or call later than their peers on the node."""
    unseen: NDArray[np.bool_] | None = None
    """Who waits, where samples do not show it, for a peer on the node that calls late."""
    node: NDArray[np.int64] | None = None
    alike: NDArray[np.int64] | None = None
    delayed: frozenset[tuple[ProcessKey, ProcessKey]] = frozenset()
    """Links (sender, receiver) of which the wire says that they have become much slower, as no other has."""
    hidden: NDArray[np.int64] | None = None
    """Sets of ranks joined by what the host cannot see into (−1: none): which of them waits for which does not show."""
    idle: float = 0.0
    """Part of the lost time in which nothing was open on any rank: the job pauses as a whole, and nobody in it holds it up."""

    @property
    def nodes(self) -> NDArray[np.int64]:
        """``node``, or the hosts where that is not known."""
        return self.host if self.node is None else self.node

    @property
    def past(self) -> Profile | None:
        """The profile of the healthy past, where it has enough samples."""
        return self.before if self.before is not None and self.before.looks >= FEWEST_PAST else None

    def others(self, at: int) -> NDArray[np.int64]:
        """A rank's peers but itself, in order; empty where it has none."""
        if self.equal[at] < 0:
            return np.empty(0, np.int64)
        return np.flatnonzero((self.equal == self.equal[at]) & (np.arange(len(self.equal)) != at))

    def places(self, limits: NDArray[np.int64]) -> list[tuple[int, ...]]:
        """Ranks that are together: on one host, one node, or under one CPU limit (``limits`` numbers these); two of them and
        more, and not all.
        """
        found: dict[tuple[int, ...], None] = {}
        for numbers in (self.host, self.nodes, limits):
            for number in np.unique(numbers[numbers >= 0]).tolist() if len(numbers) else ():
                inside = tuple(np.flatnonzero(numbers == number).tolist())
                if 2 <= len(inside) < len(self.host):
                    found[inside] = None
        return list(found)
