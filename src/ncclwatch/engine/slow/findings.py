"""A culprit as it is found, what it is compared with, and when a share of holding others up stands out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.lateness import Lateness
from ncclwatch.engine.slow.looks import LinkPlace
from ncclwatch.engine.slow.profile import Profile, Shares
from ncclwatch.model.identity import ProcessKey

FLOOR = 0.035
"""Below this share of the job's time nothing is blamed."""
FLOOR_LIMITED = 0.01
"""The same for one whom a CPU limit has begun to hold back, and nobody else, and who is waited for most often."""
EXPLAINS = 0.2
"""A culprit must explain at least this share of the time that was lost."""
EXPLAINS_MEASURED = 0.1
"""The same of one whose own calls say that its work takes longer than that of its equals: few looks then only say who waits."""
LOOKS = 3
"""Looks in which a culprit must have held others up."""

TOTAL_LOOKS = 6
"""Looks since a job is slow before anybody is blamed."""

START_SHARE = 0.15
START_LOOKS = 6
START_TOTAL_LOOKS = 12
START_TIMES = 4.0
"""Without a healthy past: the share, the looks, and how many times what its equals have."""

START_SHARE_FAR = 0.07
"""The share of one who is far from all of its equals: 238 recordings of jobs that were healthy so long have none above 0.06."""
START_SHARE_LIMITED = 0.08
"""The share of one whom a CPU limit holds back: that needs no comparison."""

BUSIER = 1.12
"""A rank that is blamed for its own work must be this much busier than its equals or its past."""

SLOWER = 1.25
"""From this factor on of the times between a rank's calls its work is slower, whatever its communication does."""


class Kind(StrEnum):
    """What a finding is about."""

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
    """One culprit: ``members`` index the profile's processes; ``share`` of the job's time spent waiting for it."""

    kind: Kind
    members: tuple[int, ...]
    share: float
    looks: int
    reference: float
    link: LinkPlace | None = None
    keys: tuple[object, ...] = ()
    evidence: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Context:
    """What is known besides the looks. Arrays of shape (processes,).

    ``equal`` numbers sets of equal ranks (−1: no equals); ``host`` numbers hosts. ``factor`` is how much longer a rank's
    stretches of work last than before (nan: not known), ``lost`` the share of time that is lost compared with the healthy past
    (``None`` without one), ``stretch`` how much longer an iteration is than in ``before``.
    """

    equal: NDArray[np.int64]
    host: NDArray[np.int64]
    factor: Shares
    lost: float | None
    stretch: float = 1.0
    before: Profile | None = None
    noise: float = 1.0
    """How much iterations of the healthy past differ, relative; 1 where that is not known."""
    late: Lateness | None = None
    """Hosts that begin iterations late, or call later than their fellows on the node."""
    unseen: NDArray[np.bool_] | None = None
    """Who waits, where looks do not show it, for a fellow on the node that calls late."""
    node: NDArray[np.int64] | None = None
    """Nodes as NCCL tells them apart (``hostHash``), of which a host of containers may be several."""

    alike: NDArray[np.int64] | None = None
    """Sets of ranks that do equal work, whatever shows of them: calls can be compared where looks cannot; as ``equal``."""

    replica: NDArray[np.int64] | None = None
    """Ranks of one place in the data group: a pipeline with its tensor groups (−1: not known)."""
    exposed: NDArray[np.bool_] | None = None
    """Whether everything that a rank does with others passes the network, so that none of its waits is unseen."""

    delayed: frozenset[tuple[ProcessKey, ProcessKey]] = frozenset()
    """Links (sender, receiver) of which the wire says that they have become much slower, as no other has."""

    @property
    def nodes(self) -> NDArray[np.int64]:
        """``node``, or the hosts where that is not known."""
        return self.host if self.node is None else self.node

    def others(self, at: int, *, by_means: bool = True) -> NDArray[np.int64]:
        """A rank's equals but itself, in order; empty where it has none. ``by_means=False``: whatever shows of them."""
        sets = self.equal if by_means or self.alike is None else self.alike
        same = np.asarray(sets == sets[at]) & (np.arange(len(sets)) != at)
        return np.flatnonzero(same) if sets[at] >= 0 else np.empty(0, np.int64)

    @property
    def doubt(self) -> float:
        """How much of a slow-down may be noise: a job that takes several times as long is slow however noisy it was."""
        return self.noise / max(1.0, self.stretch - 1.0)


QUIET_SIGMAS = 1.5
NOISY_SIGMAS = 3.5
NOISY = 0.1


def sigmas_needed(context: Context) -> float:
    """By how many standard errors a share of the network must be larger than others: the noisier the job the more."""
    return QUIET_SIGMAS + (NOISY_SIGMAS - QUIET_SIGMAS) * min(1.0, context.doubt / NOISY)


def stands_out(
    share: float, looks: float, reference: float, context: Context, shown: float = 1.0, *,
    measured: bool = False, limited: bool = False, far: bool = False,
) -> bool:  # fmt: skip
    """Whether a share of holding others up stands out. ``shown``: the part of all waits of which it is seen where they end;
    ``measured``: the calls say so as well; ``limited``: the kernel says that a CPU limit holds the rank back, and not the others;
    ``far``: it is unlike all of its equals, by everything that looks show.
    """
    excess = share - (0.0 if np.isnan(reference) else reference)
    if limited and context.lost is None:
        return bool(looks >= LOOKS and excess >= START_SHARE_LIMITED)
    if context.lost is not None:
        explains = EXPLAINS_MEASURED if measured or limited else EXPLAINS
        return bool(looks >= LOOKS and excess >= max(FLOOR, explains * context.lost * shown))
    return bool(
        not np.isnan(reference)
        and looks >= START_LOOKS
        and excess >= (START_SHARE_FAR if far else START_SHARE)
        and share >= START_TIMES * max(reference, FLOOR / 2)
    )
