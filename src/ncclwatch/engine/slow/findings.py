"""A culprit of a slow job as it is found, and what is known besides the samples: who can be compared, and who is together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.connections import is_hidden
from ncclwatch.engine.evidence.device import sees_everything
from ncclwatch.engine.job import Job, Member, identity_of
from ncclwatch.engine.slow.cadence import Cadences
from ncclwatch.engine.slow.lateness import Lateness
from ncclwatch.engine.slow.profile import Profile
from ncclwatch.engine.slow.snapshot import LinkPlace
from ncclwatch.engine.topology.model import Topology
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Communicator

FEWEST_PAST = 4
"""Samples below which a stretch, slow or healthy, is not used: of fewer a share is mostly chance. Unit: samples. From: the
standard error of a share of four samples is a quarter, as much as a straggler costs that is worth naming at once.
"""


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
    whatever shows of them; ``host`` numbers hosts, ``node`` nodes as NCCL tells them apart (``hostHash``). ``lost`` is the share
    of time that is lost compared with the healthy past (``None`` without one).
    """

    equal: NDArray[np.int64]
    host: NDArray[np.int64]
    lost: float | None
    before: Profile | None = None
    late: Lateness | None = None
    """Host threads that begin iterations late, or call later than their peers on the node."""
    unseen: NDArray[np.bool_] | None = None
    """Who waits, where samples do not show it, for a peer on the node that calls late."""
    node: NDArray[np.int64] | None = None
    alike: NDArray[np.int64] | None = None
    delayed: Mapping[tuple[ProcessKey, ProcessKey], float] = field(default_factory=dict)
    """Seconds by which messages of a link (sender, receiver) take longer to be acknowledged than they did: the wire's own word.
    """
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
        """Two ranks or more, but not all, that are on one host, one node, or under one CPU limit (``limits`` numbers these)."""
        found: dict[tuple[int, ...], None] = {}
        for numbers in (self.host, self.nodes, limits):
            for number in np.unique(numbers[numbers >= 0]).tolist() if len(numbers) else ():
                inside = tuple(np.flatnonzero(numbers == number).tolist())
                if 2 <= len(inside) < len(self.host):
                    found[inside] = None
        return list(found)


# --- which ranks can be compared ---------------------------------------------------------------------------------------------


def equals(job: Job, topology: Topology | None, cadences: Cadences, *, by_means: bool = True) -> NDArray[np.int64]:
    """Sets of ranks that do equal work and (``by_means``) are seen by equal means; −1 for a rank without a known equal."""
    keys: list[object] = []
    for member, cadence in zip(job.members, cadences.of_members(job), strict=True):
        seen = _means(member) if by_means else ()
        rank, stage = member.rank, -1
        if topology is not None and rank is not None and 0 <= rank < topology.world:
            stage = int(topology.stage[rank])
        if stage >= 0:
            keys.append((seen, "stage", stage))
        elif cadence is not None and cadence.program:
            keys.append((seen, "program", cadence.program))
        else:
            keys.append(None)
    times = Counter(keys)
    return _numbered([key if times[key] > 1 else None for key in keys])


def _numbered(keys: Sequence[object]) -> NDArray[np.int64]:
    """A number for each of the keys, equal ones alike, in the order in which they come; −1 for ``None``."""
    numbers: dict[object, int] = {}
    return np.array([-1 if key is None else numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def hosts(job: Job) -> NDArray[np.int64]:
    """A number for each host, by member."""
    return _numbered([member.info.host for member in job.members])


def nodes(job: Job) -> NDArray[np.int64]:
    """A number for each node as NCCL tells them apart, by member; hosts where it was not read."""
    return _numbered([
        (member.info.host, next((known[0] for c in member.last.communicators if (known := identity_of(c, c.rank))), None))
        for member in job.members
    ])  # fmt: skip


def hidden_together(job: Job) -> NDArray[np.int64]:
    """Sets of ranks of one node that are joined by what the host cannot see into (NVLink): a number each, −1 for none."""
    hidden = np.array([any(is_hidden(own) for own in member.last.communicators) for member in job.members], np.bool_)
    return np.where(hidden & (not sees_everything(job)), nodes(job), -1)


def _means(member: Member) -> tuple[object, ...]:
    """Which kinds of connections there are, not how many: at the ends of a ring some are not made that others have."""
    used = [c for c in member.last.communicators if _is_used(c)]
    return tuple(sorted({(c.nranks, str(way), str(kind)) for c in used for _, _, way, kind in c.transports}))


def _is_used(communicator: Communicator) -> bool:
    """Whether anything was ever called on it, as far as NCCL counts: of what is not, no look shows anything."""
    if communicator.op_count or communicator.sequence_numbers:
        return True
    moved = any(s.step for s in communicator.net_steps) or any(h.tail for h in communicator.host_connections)
    return moved or is_hidden(communicator)
