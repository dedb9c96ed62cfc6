"""A culprit of a slow job, and what is known besides the samples: who can be compared, who is together, what the wire says."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.cadence import Cadences
from ncclwatch.collect.network_memory import Measured
from ncclwatch.engine.evidence.device import sees_everything
from ncclwatch.engine.slow.detect import ENOUGH
from ncclwatch.engine.slow.lateness import Lateness
from ncclwatch.engine.slow.profile import Profile
from ncclwatch.engine.slow.snapshot import LinkPlace
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.job import Job, Member, identity_of
from ncclwatch.model.joined import hides, is_hidden
from ncclwatch.model.rows import distinct
from ncclwatch.model.topology import Topology
from ncclwatch.model.verdict import SlowKind as Kind

Pair = tuple[ProcessKey, ProcessKey]
"""Sender and receiver of a link."""
FEWEST_PAST = 4
"""Samples below which a stretch, slow or healthy, is not used: of fewer a share is mostly chance. Unit: samples. From: the
standard error of a share of four samples is a quarter, as much as a straggler costs that is worth naming at once.
"""
CONFIRMED = 2
"""So often a thing must be seen to be believed: judgements in a row that name the same, measurements of a link before the job was
slow and since. Unit: any of these. From: one may be odd; calibration judges by it, so that the false-alarm rate holds with it.
"""
KEPT = 40
"""Bound: newest measurements of a link; they are made every few seconds."""


@dataclass(slots=True)
class Finding:
    """One culprit; ``members`` index the profile's processes, ``share`` of the time is spent waiting for it."""

    kind: Kind
    members: tuple[int, ...]
    share: float
    looks: int
    confidence: float
    link: LinkPlace | None = None
    keys: tuple[object, ...] = ()
    """Processes or links by which the profile knows it."""
    weighed: tuple[tuple[str, float], ...] = ()
    """What spoke for it, most first: term and its part of the log-odds."""
    rivals: tuple[tuple[str, tuple[int, ...], float], ...] = ()
    """What was weighed beside it and lost, likeliest first: kind of candidate ("nobody" too), members, posterior probability."""
    rule: str = ""


@dataclass(frozen=True, slots=True)
class Context:
    """What is known besides the samples. Arrays of shape (processes,); −1 is in no set.

    ``equal`` numbers sets of peers that do equal work and are seen by equal means, ``alike`` sets that do equal work whatever
    shows of them, ``hidden`` those joined by what the host cannot see into (which of them waits for which does not show);
    ``host`` numbers hosts, ``node`` nodes as NCCL tells them apart (``hostHash``). ``unseen``: who waits, where samples do not
    show it, for a peer on the node that calls late. ``lost`` is the share of time that is lost compared with the healthy past
    (``None`` without one), ``idle`` the part of that in which nothing was open on any rank: nobody in the job holds it up.
    ``before``: of the healthy past, of the same processes. ``delayed``: seconds by which messages of a link take longer to be
    acknowledged than they did, by the wire's own word.
    """

    equal: NDArray[np.int64]
    host: NDArray[np.int64]
    lost: float | None
    before: Profile | None = None
    late: Lateness | None = None
    unseen: NDArray[np.bool_] | None = None
    node: NDArray[np.int64] | None = None
    alike: NDArray[np.int64] | None = None
    delayed: Mapping[Pair, float] = field(default_factory=dict)
    hidden: NDArray[np.int64] | None = None
    idle: float = 0.0

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
        return np.flatnonzero((self.equal == self.equal[at]) & (self.equal >= 0) & (np.arange(len(self.equal)) != at))

    def places(self, limits: NDArray[np.int64]) -> list[tuple[int, ...]]:
        """Two ranks or more, not all, on one host, node or CPU limit (``limits`` numbers them), where hosts can be compared."""
        most = len(self.host) if self.lost is not None or comparable(self.host) else 0
        found = (
            tuple(np.flatnonzero(numbers == number).tolist())
            for numbers in (self.host, self.nodes, limits) for number in distinct(numbers[numbers >= 0])
        )  # fmt: skip
        return [inside for inside in dict.fromkeys(found) if 2 <= len(inside) < most]


def context_of(job: Job, topology: Topology | None, cadences: Cadences) -> Context:
    """What is known of a job that was never seen to be healthy."""
    node, unseen = nodes(job), np.array([hides(member) for member in job.members], np.bool_)
    hidden = np.where(unseen & (not sees_everything(job)), node, -1)
    return Context(equals(job, topology, cadences), hosts(job), lost=None, node=node, hidden=hidden)


def equals(job: Job, topology: Topology | None, cadences: Cadences, *, by_means: bool = True) -> NDArray[np.int64]:
    """Sets of ranks that do equal work and (``by_means``) are seen by equal means; −1 for a rank without a known equal."""
    keys, several = list[object](), not by_means or comparable(hosts(job))
    for member, cadence in zip(job.members, cadences.of_members(job), strict=True):
        rank, stage = member.rank, -1
        if topology is not None and rank is not None and 0 <= rank < topology.world:
            stage = int(topology.stage[rank])
        program = cadence.whole_program(member.last.time_ns / 1e9) if cadence is not None else 0
        does = ("stage", stage) if stage >= 0 else ("program", program)
        seen = ("" if several else member.info.host, _means(member) if by_means else ())
        keys.append((seen, does) if stage >= 0 or program else None)
    times = Counter(keys)
    return _numbered([key if times[key] > 1 else None for key in keys])


def comparable(host: NDArray[np.int64]) -> bool:
    """Whether samples compare ranks of different hosts: of two, the one that is sampled later seems to be waited for."""
    return len(distinct(host)) >= ENOUGH


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


def _means(member: Member) -> tuple[object, ...]:
    """Which kinds of connections there are, not how many: at the ends of a ring some are not made that others have.

    Of a communicator on which nothing was ever called, as far as NCCL counts, no look shows anything.
    """
    used = (
        c for c in member.last.communicators
        if c.op_count or c.sequence_numbers or is_hidden(c)
        or any(step.step for step in c.net_steps) or any(connection.tail for connection in c.host_connections)
    )  # fmt: skip
    return tuple(sorted({(c.nranks, str(way), str(kind)) for c in used for _, _, way, kind in c.transports}))


# --- what the wire says of links ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RoundTrips:
    """Round trips (TCP) or completion times (RDMA) of a job's links, as C4D's delay matrix over time; bounded."""

    _delays: dict[Pair, deque[tuple[float, float]]] = field(default_factory=dict)
    """(wall time, delay) of each link, seconds, newest last."""
    _usual: dict[Pair, float] = field(default_factory=dict)
    """What each was before the job was slow, where that has been asked."""
    _taken: dict[str, int] = field(default_factory=dict)

    def take(self, job: Job, measured: Mapping[str, Measured]) -> None:
        """Take what is new of :meth:`NetworkMemory.delays`, by host."""
        fresh = {host: found for host, found in measured.items() if self._taken.get(host) != found[0]}
        if not fresh:
            return
        for host, (time_ns, delays) in fresh.items():
            self._taken[host] = time_ns
            pairs: dict[Pair, float] = defaultdict(float)
            for (pid, comm_hash, rank, peer), delay_us in delays.items():
                for group in job.of_rank(comm_hash, rank, (host, pid)):
                    if (receiver := group.holder(peer)) is not None:
                        pair = group.members[rank][0].info.key, receiver.info.key
                        pairs[pair] = max(pairs[pair], delay_us / 1e6)
            for pair, delay in pairs.items():
                self._delays.setdefault(pair, deque(maxlen=KEPT)).append((time_ns / 1e9, delay))
        present = {member.info.key for member in job.members}
        self._delays = {pair: seen for pair, seen in self._delays.items() if present.issuperset(pair)}
        self._usual = {pair: usual for pair, usual in self._usual.items() if pair in self._delays}

    def delayed(self, since: float) -> dict[Pair, float]:
        """By how much longer a link's messages take since a moment (wall time, seconds) than before: seconds. O(measurements)."""
        found: dict[Pair, float] = {}
        for pair, seen in self._delays.items():
            past = [delay for time, delay in seen if time < since]
            now = [delay for time, delay in seen if time >= since]
            if len(past) >= CONFIRMED:
                self._usual[pair] = median(past)
            if len(now) >= CONFIRMED and pair in self._usual and (longer := median(now) - self._usual[pair]) > 0:
                found[pair] = longer
        return found
