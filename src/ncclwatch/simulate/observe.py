"""How a simulated job looks from outside: names of hosts and processes, node clocks, communicators. All of it is marked as
simulated.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ChannelRing, Direction, PeerInfo, ProcessInfo, Transport, VersionSource
from ncclwatch.simulate.geometry import Paths, double_tree
from ncclwatch.simulate.layout import groups, membership, node_of, stage_of
from ncclwatch.simulate.program import roles
from ncclwatch.simulate.scenario import LookalikeKind, Scenario

SIMULATED_LIBRARY = "(simulated libnccl)"
HOST_PREFIX = "sim-node-"
_EPOCH_NS = 1_700_000_000_000_000_000
"""Wall time of simulated second 0; any fixed number does."""
_BOOT_NS = 1_000_000_000_000
"""What CLOCK_MONOTONIC of a simulated node shows at second 0."""


@dataclass(frozen=True, slots=True)
class NodeClock:
    """A node's clocks: wrong by ``offset_s`` and running fast by ``drift`` (relative)."""

    offset_s: float
    drift: float

    def wall_ns(self, time: float) -> int:
        """CLOCK_REALTIME of the node at a true time (seconds)."""
        return _EPOCH_NS + round((time * (1 + self.drift) + self.offset_s) * 1e9)

    def monotonic_ns(self, time: float) -> int:
        """CLOCK_MONOTONIC of the node at a true time (seconds); it is not set by anybody, so it has the drift only."""
        return _BOOT_NS + round(time * (1 + self.drift) * 1e9)


@dataclass(frozen=True, slots=True)
class Membership:
    """One communicator of one rank: what does not change while the job runs."""

    role: str
    group: int
    hash: int
    rank: int
    members: tuple[int, ...]
    rings: tuple[ChannelRing, ...]
    transports: tuple[tuple[int, int, str, Transport], ...]
    peers: tuple[PeerInfo, ...]
    nodes: tuple[int, ...]
    has_proxy_work: bool


@dataclass(frozen=True, slots=True)
class Columns:
    """What a role's communicators are to every global rank, as arrays of shape (world,)."""

    hashes: NDArray[np.uint64]
    index: NDArray[np.int64]
    proxy_work: NDArray[np.bool_]
    visible: NDArray[np.bool_]
    observed: NDArray[np.bool_]


class Cast:
    """Processes, clocks and communicators of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.paths = Paths(scenario.layout, scenario.network)
        rng = np.random.default_rng([scenario.seed, 77])
        nodes = node_of(scenario.layout, scenario.layout.world - 1) + 1
        offsets = rng.uniform(-1, 1, nodes) * scenario.observe.clock_offset_ms / 1e3
        drifts = rng.uniform(-1, 1, nodes) * scenario.observe.clock_drift_ppm / 1e6
        self.clocks = [NodeClock(float(o), float(d)) for o, d in zip(offsets, drifts, strict=True)]
        self._info: dict[int, ProcessInfo] = {}
        self._memberships: dict[int, tuple[Membership, ...]] = {}
        self._peers: dict[tuple[str, int], tuple[PeerInfo, ...]] = {}
        self._columns: dict[str, Columns] = {}
        self._members: dict[tuple[str, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._rings: dict[tuple[ChannelRing, ...], tuple[ChannelRing, ...]] = {}
        self._transports: dict[tuple[tuple[int, int, str, Transport], ...], tuple[tuple[int, int, str, Transport], ...]] = {}

    @cached_property
    def roles(self) -> list[str]:
        """Roles that have communicators."""
        return roles(self.scenario)

    def clock(self, rank: int) -> NodeClock:
        """The clock of a rank's node."""
        return self.clocks[node_of(self.scenario.layout, rank)]

    def observed(self, rank: int) -> bool:
        """Whether a collector runs on the node of this rank."""
        return node_of(self.scenario.layout, rank) not in self.scenario.observe.missing_nodes

    def columns(self, role: str) -> Columns:
        """The role's communicators as arrays."""
        if role not in self._columns:
            layout = self.scenario.layout
            by_rank, index = membership(layout, role)
            hashes = np.array([self.communicator_hash(role, g) for g in range(len(groups(layout, role)))], np.uint64)
            ranks = np.arange(layout.world)
            proxy_work = np.array([self.uses(int(r), role, Transport.NET) for r in ranks])
            shared = np.array([self.uses(int(r), role, Transport.SHM) for r in ranks])
            observed = ~np.isin(ranks // layout.ranks_per_node, self.scenario.observe.missing_nodes)
            self._columns[role] = Columns(hashes[by_rank], index, proxy_work, proxy_work | shared, observed)
        return self._columns[role]

    def monotonic_ns(self, ranks: NDArray[np.int64], times: NDArray[np.float64]) -> NDArray[np.uint64]:
        """CLOCK_MONOTONIC of each rank's node at true times (seconds)."""
        drifts = np.array([clock.drift for clock in self.clocks])[ranks // self.scenario.layout.ranks_per_node]
        stamps: NDArray[np.uint64] = (_BOOT_NS + np.rint(times * (1 + drifts) * 1e9)).astype(np.uint64)
        return stamps

    @cached_property
    def version(self) -> tuple[int, int, int]:
        """The simulated library's version."""
        a, b, c = (int(part) for part in self.scenario.network.nccl.split("."))
        return a, b, c

    @property
    def counts_only_proxy_plans(self) -> bool:
        """Whether ``ncclComm.opCount`` rises only with plans that give this rank's proxy work (measured for 2.27.5, read up to
        2.30.7).
        """
        return (2, 27, 3) <= self.version <= (2, 30, 7)

    def info(self, rank: int) -> ProcessInfo:
        """The process of a global rank."""
        if rank not in self._info:
            layout = self.scenario.layout
            node = node_of(layout, rank)
            key = ProcessKey(f"simulated-boot-{node}", 10_000 + rank, 5_000 + rank, "simulated")
            self._info[rank] = ProcessInfo(
                key=key,
                host=f"{HOST_PREFIX}{node}",
                name="simulated-rank",
                command=("simulated-training-job",),
                library=SIMULATED_LIBRARY,
                version=self.version,
                version_source=VersionSource.VERSION,
                rank=rank,
                local_rank=rank % layout.ranks_per_node,
                world_size=layout.world,
                rank_source="RANK",
            )
        return self._info[rank]

    def communicator_hash(self, role: str, group: int) -> int:
        """``commHash`` of a communicator: any number that all its ranks share."""
        text = f"{self.scenario.seed}/{self.scenario.name}/{role}/{group}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    @cached_property
    def _by_hash(self) -> dict[str, tuple[int, ...]]:
        layout = self.scenario.layout
        return {
            f"{self.communicator_hash(role, number):016x}": tuple(int(r) for r in members)
            for role in self.roles
            for number, members in enumerate(groups(layout, role))
        }

    def members_of(self, comm_hash: str) -> tuple[int, ...]:
        """Global ranks of a communicator, by its hash in hexadecimal; empty for an unknown one."""
        return self._by_hash.get(comm_hash, ())

    def memberships(self, rank: int) -> tuple[Membership, ...]:
        """Every communicator a rank belongs to."""
        if rank not in self._memberships:
            self._memberships[rank] = tuple(self._membership(rank, role) for role in self.roles)
        return self._memberships[rank]

    def membership(self, rank: int, role: str) -> Membership:
        """The communicator of a rank for one role."""
        return next(m for m in self.memberships(rank) if m.role == role)

    def _membership(self, rank: int, role: str) -> Membership:
        layout, net = self.scenario.layout, self.scenario.network
        by_rank, index = membership(layout, role)
        group, own = int(by_rank[rank]), int(index[rank])
        if (role, group) not in self._members:
            ranks = tuple(groups(layout, role)[group].tolist())
            self._members[role, group] = (ranks, tuple(dict.fromkeys(node_of(layout, r) for r in ranks)))
        members, nodes = self._members[role, group]
        wanted = self._wanted(rank, role, own, len(members))
        n = len(members)
        ring = n > 1 and role != "pp"
        rings = tuple(ChannelRing(c, (own - 1) % n, (own + 1) % n) for c in range(net.channels)) if ring else ()
        transports = tuple(
            (channel, peer, str(direction), self.paths(rank, members[peer]).transport)
            for channel in range(net.channels)
            for peer, direction in sorted(wanted)
        )
        return Membership(
            role=role,
            group=group,
            hash=self.communicator_hash(role, group),
            rank=own,
            members=members,
            rings=self._rings.setdefault(rings, rings),
            transports=self._transports.setdefault(transports, transports),
            peers=self._peer_infos(role, group, members),
            nodes=nodes,
            has_proxy_work=any(t is Transport.NET for _, _, _, t in transports),
        )

    def _wanted(self, rank: int, role: str, own: int, n: int) -> set[tuple[int, Direction]]:
        """Peers (ranks of the communicator) that a rank is connected with."""
        if role == "pp":
            stage, last = stage_of(self.scenario.layout, rank), self.scenario.layout.pp - 1
            wrap = self.scenario.workload.virtual_stages > 1
            near = {s for s, ok in ((stage - 1, stage > 0 or wrap), (stage + 1, stage < last or wrap)) if ok}
            return {(s % n, d) for s in near for d in Direction}
        if n == 1 or (role == "world" and not self._world_is_connected):
            return set()
        if role == "ep":
            return {(i, d) for i in range(n) if i != own for d in Direction}
        wanted = {((own + 1) % n, Direction.SEND), ((own - 1) % n, Direction.RECV)}
        if self.scenario.network.algorithm == "Tree":
            parent, children = double_tree(n)[0][own]
            wanted |= {(i, d) for i in (*children, parent) if i >= 0 for d in Direction}
        return wanted

    @cached_property
    def _world_is_connected(self) -> bool:
        """NCCL 2.22 and later connect a communicator's rings when they are first used; here only a barrier uses the world's."""
        used = any(e.kind is LookalikeKind.BARRIER for e in self.scenario.lookalikes)
        return used or self.version < (2, 22, 0)

    def uses(self, rank: int, role: str, transport: Transport) -> bool:
        """Whether some connection of a rank on a role's communicator has this transport."""
        by_rank, index = membership(self.scenario.layout, role)
        members = groups(self.scenario.layout, role)[by_rank[rank]]
        wanted = self._wanted(rank, role, int(index[rank]), len(members))
        return any(self.paths(rank, int(members[peer])).transport is transport for peer, _ in wanted)

    def _peer_infos(self, role: str, group: int, members: tuple[int, ...]) -> tuple[PeerInfo, ...]:
        if (role, group) not in self._peers:
            layout = self.scenario.layout
            self._peers[role, group] = tuple(
                PeerInfo(i, host_hash=node_of(layout, r) + 1, pid_hash=10_000 + r, device=r % layout.ranks_per_node)
                for i, r in enumerate(members)
            )
        return self._peers[role, group]
