"""Where flows go: a first spread that is even, then moves in chains until no link carries more than it must.

The measure is the largest load over capacity of any link. :func:`bound` says how small it can be at best.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ncclwatch.paths.colouring import halves, spread
from ncclwatch.paths.fabric import NO_PATHS, Fabric, Floats, Ints
from ncclwatch.paths.fluid import SAME, loads, worst
from ncclwatch.paths.traffic import Traffic

MAX_STATES = 400
"""Bound: links that the search for one chain looks at."""
MAX_TRIED = 64
"""Bound: flows of a link that the search tries to move, and full links that it continues at from each."""
LEVELS = 6
"""Bound: targets tried one after the other, each halfway between the bound and what was reached."""


def evenly(fabric: Fabric, traffic: Traffic, demand: Floats) -> Ints:
    """(F, 4): a first placing as if no link were dead; rows of -1 where a flow got no live path, or the fabric is irregular."""
    paths = np.full((len(traffic), 4), -1, np.int64)
    lanes = _lanes(fabric)
    both = (fabric.nic_ports[traffic.source] >= 0).all(axis=1) & (fabric.nic_ports[traffic.destination] >= 0).all(axis=1)
    groups = _leaf_groups(fabric)
    near = groups[traffic.source] == groups[traffic.destination]
    ends = [(side * 2 + near, side, groups[side] + len(fabric.nics) * 2) for side in (traffic.source, traffic.destination)]
    half = halves(ends[0], ends[1], np.where(both, demand, 0.0)).astype(np.int64)
    out, into = (
        np.where(fabric.nic_ports[side, 1] >= 0, fabric.nic_ports[side, half], fabric.nic_ports[side, 0])
        for side in (traffic.source, traffic.destination)
    )
    leaves = (fabric.port_leaf[out], fabric.port_leaf[into])
    inside = leaves[0] == leaves[1]
    paths[:, 0], paths[:, 3] = out, fabric.ports + into
    far = np.flatnonzero(~inside)
    if lanes is None:
        paths[far] = -1
    elif len(far):
        lane = spread(leaves[0][far], leaves[1][far], traffic.job[far], demand[far], lanes.shape[1])
        paths[far, 1] = fabric.first_up + lanes[leaves[0][far], lane]
        paths[far, 2] = fabric.first_down + lanes[leaves[1][far], lane]
    paths[~fabric.is_path(paths)] = -1
    return paths


def _lanes(fabric: Fabric) -> Ints | None:
    """(leaves, K): the uplinks of each leaf, lane k of all of them to one spine; None where leaves have not the same uplinks."""
    order = np.lexsort((fabric.uplink_spine, fabric.uplink_leaf))
    if not len(order) or len(order) % len(fabric.leaves):
        return None
    lanes = order.reshape(len(fabric.leaves), -1)
    same = (fabric.uplink_spine[lanes] == fabric.uplink_spine[lanes[0]]).all()
    return lanes if same and (fabric.uplink_leaf[lanes] == np.arange(len(lanes))[:, None]).all() else None


def _leaf_groups(fabric: Fabric) -> Ints:
    """(NICs): which NICs are on the same leaves, in the same order."""
    leaves = np.where(fabric.nic_ports >= 0, fabric.port_leaf[fabric.nic_ports], -1)
    return np.asarray(np.unique(leaves, axis=0, return_inverse=True)[1].reshape(-1), np.int64)


def bound(fabric: Fabric, traffic: Traffic, demand: Floats) -> float:
    """A lower bound of the largest load over capacity, over all placings: from cuts.

    All that leaves (or reaches) a NIC, and all that leaves (or reaches) the leaves of a group of NICs and cannot stay on them,
    must cross the links that are there. Equal flows over equal links cannot do better than the rounded-up number of them on
    one link.
    """
    groups = _leaf_groups(fabric)
    best = 0.0
    for ends, live, uplinks in (
        (traffic.source, fabric.capacity[: fabric.ports], fabric.capacity[fabric.first_up : fabric.first_down]),
        (traffic.destination, fabric.capacity[fabric.ports : 2 * fabric.ports], fabric.capacity[fabric.first_down :]),
    ):
        best = max(best, _cut(ends, fabric.port_nic, live, demand, len(fabric.nics)))
        # Groups whose leaves are theirs alone: all that they send afar takes their uplinks.
        leaf_group = np.full(len(fabric.leaves), -1, np.int64)
        leaf_group[fabric.port_leaf] = groups[fabric.port_nic]
        mixed = np.unique(fabric.port_leaf[groups[fabric.port_nic] != leaf_group[fabric.port_leaf]])
        shared = np.zeros(int(groups.max(initial=0)) + 1, bool)
        shared[groups[np.isin(fabric.port_leaf[fabric.nic_ports], mixed).any(axis=1)]] = True
        far = (groups[traffic.source] != groups[traffic.destination]) & ~shared[groups[ends]]
        owner = leaf_group[fabric.uplink_leaf]
        best = max(best, _cut(groups[ends[far]], owner, uplinks, demand[far], len(shared)))
    return best


def _cut(flow_cut: Ints, link_cut: Ints, capacity: Floats, demand: Floats, cuts: int) -> float:
    """The largest bound of cuts: ``flow_cut`` is the cut that each flow crosses, ``link_cut`` that of each link (-1: none)."""
    live = (capacity > 0) & (link_cut >= 0)
    room = np.bincount(link_cut[live], capacity[live], cuts)
    total = np.bincount(flow_cut, demand, cuts)
    used = (total > 0) & (room > 0)
    ratio = np.divide(total, room, out=np.zeros(cuts), where=used)
    links = np.bincount(link_cut[live], minlength=cuts)
    high, low = np.zeros(cuts), np.full(cuts, np.inf)
    np.maximum.at(high, link_cut[live], capacity[live])
    np.minimum.at(low, link_cut[live], capacity[live])
    most, least = np.zeros(cuts), np.full(cuts, np.inf)
    np.maximum.at(most, flow_cut, demand)
    np.minimum.at(least, flow_cut, demand)
    number = np.bincount(flow_cut, minlength=cuts)
    # Some link carries the rounded-up number of flows, each of at least the least demand.
    stacked = used & np.isclose(low, high)
    ratio[stacked] = np.maximum(ratio[stacked], np.ceil(number[stacked] / links[stacked]) * least[stacked] / high[stacked])
    ratio[used] = np.maximum(ratio[used], most[used] / high[used])
    return float(ratio.max(initial=0.0))


class Board:
    """A placing that changes: paths, what each link carries, which flows are on it."""

    def __init__(self, fabric: Fabric, traffic: Traffic, demand: Floats, paths: Ints) -> None:
        self.fabric, self.traffic, self.demand = fabric, traffic, demand
        self.paths = paths.copy()
        # One link more, without load and never full, stands for -1.
        self.load = np.append(loads(fabric, paths, demand), 0.0)
        self.per = np.append(np.divide(1.0, fabric.capacity, out=np.zeros_like(fabric.capacity), where=fabric.capacity > 0), 0.0)

    def choices(self, flow: int) -> Ints:
        """Live paths that a flow may take."""
        return self.fabric.alternatives(int(self.traffic.source[flow]), int(self.traffic.destination[flow]))

    def put(self, flow: int, path: Ints) -> None:
        """Move a flow, or place it."""
        self.load[self.paths[flow]] -= self.demand[flow]
        self.load[path] += self.demand[flow]
        self.load[-1] = 0.0
        self.paths[flow] = path

    def place(self, flow: int) -> bool:
        """Put a flow where the fullest of its links is least full; False where it has no live path."""
        choices = self.choices(flow)
        if not len(choices):
            return False
        use = (self.load[choices] + self.demand[flow]) * self.per[choices]
        self.put(flow, choices[int((use.max(axis=1) + 1e-3 * use.sum(axis=1)).argmin())])
        return True

    def use(self) -> Floats:
        """Load over capacity of each link."""
        return np.asarray(self.load[:-1] * self.per[:-1])

    def relieve(self, link: int, target: float, until: float) -> bool:
        """Bring a link to ``target`` or below by chains of moves, fewest moves first; False where none is found."""
        while self.load[link] * self.per[link] > target + SAME:
            chain = self._chain(link, target, until)
            if chain is None or not self._apply(chain, target):
                return False
        return True

    def _chain(self, link: int, target: float, until: float) -> list[tuple[int, Ints]] | None:
        came: dict[int, list[tuple[int, Ints]]] = {link: []}
        queue = deque([link])
        while queue and len(came) < MAX_STATES and time.monotonic() < until:
            here = queue.popleft()
            trail = came[here]
            # What the moves so far free counts: most chains go to and fro between two spines.
            self._weigh(trail, 1.0)
            steps = list(self._steps(here, target, {flow for flow, _ in trail}))
            self._weigh(trail, -1.0)
            for flow, path, full in steps:
                if full < 0:
                    return [*trail, (flow, path)]
                if full not in came:
                    came[full] = [*trail, (flow, path)]
                    queue.append(full)
        return None

    def _weigh(self, moves: list[tuple[int, Ints]], sign: float) -> None:
        """Loads as after these moves (1), or as before them again (-1)."""
        for flow, path in moves:
            self.load[self.paths[flow]] -= sign * self.demand[flow]
            self.load[path] += sign * self.demand[flow]
        self.load[-1] = 0.0

    def _steps(self, link: int, target: float, moved: set[int]) -> Iterator[tuple[int, Ints, int]]:
        """Moves off a link: (flow, path, link that this makes too full, or -1); flows that were moved before stay."""
        on = np.flatnonzero((self.paths == link).any(axis=1) & self.traffic.movable)
        on = on[~np.isin(on, list(moved))]
        for flow in on[np.argsort(-self.demand[on], kind="stable")][:MAX_TRIED].tolist():
            choices = self.choices(flow)
            choices = choices[(choices != link).all(axis=1)]
            fresh = (choices >= 0) & (choices != self.paths[flow])
            over = fresh & ((self.load[choices] + self.demand[flow]) * self.per[choices] > target + SAME)
            count = over.sum(axis=1)
            free = np.flatnonzero(count == 0)
            if len(free):
                # Least full first, so that chains do not meet.
                use = (self.load[choices[free]] * self.per[choices[free]]).max(axis=1)
                yield flow, choices[free[int(use.argmin())]], -1
            for row in np.flatnonzero(count == 1)[:MAX_TRIED].tolist():
                yield flow, choices[row], int(choices[row][over[row]][0])

    def _apply(self, chain: list[tuple[int, Ints]], target: float) -> bool:
        """Make all moves of a chain, or none where they meet on a link and overfill it."""
        before = [(flow, self.paths[flow].copy()) for flow, _ in chain]
        touched = np.unique(np.concatenate([path for _, path in chain]))
        old = self.load[touched] * self.per[touched]
        for flow, path in chain:
            self.put(flow, path)
        new = self.load[touched] * self.per[touched]
        if ((new > target + SAME) & (new > old + SAME)).any():
            for flow, path in before:
                self.put(flow, path)
            return False
        return True


def improve(board: Board, least: float, until: float) -> None:
    """Lower the largest load over capacity towards ``least``, until time ``until`` (of the monotonic clock)."""
    target = least
    for _ in range(LEVELS):
        reached = float(board.use().max(initial=0.0))
        if reached <= least + SAME or time.monotonic() > until:
            return
        target = min(target, reached)
        hot = np.flatnonzero(board.use() > target + SAME)
        done = [board.relieve(link, target, until) for link in hot[np.argsort(-board.use()[hot])].tolist()]
        if all(done):
            return
        target = (target + float(board.use().max())) / 2


def place(fabric: Fabric, traffic: Traffic, demand: Floats, now: Ints, seconds: float) -> Ints:
    """(F, 4): a new placing of every flow that may be moved; flows that may not stay where they are ``now`` (-1: nowhere yet)."""
    until = time.monotonic() + seconds
    paths = now.copy() if len(now) else np.full((len(traffic), 4), -1, np.int64)
    free = np.flatnonzero(traffic.movable)
    paths[free] = evenly(fabric, traffic.part(free), demand[free]) if len(free) else NO_PATHS
    return finish(fabric, traffic, demand, paths, until)


def finish(fabric: Fabric, traffic: Traffic, demand: Floats, paths: Ints, until: float) -> Ints:
    """The placing with whatever has no live path placed, heaviest first, and improved."""
    lost: NDArray[np.bool_] = ~fabric.is_path(paths) & traffic.movable
    paths = paths.copy()
    paths[~fabric.is_path(paths)] = -1
    board = Board(fabric, traffic, demand, paths)
    for flow in np.flatnonzero(lost)[np.argsort(-demand[lost], kind="stable")].tolist():
        board.place(flow)
    improve(board, bound(fabric, traffic, demand), until)
    return board.paths


def best_of(fabric: Fabric, demand: Floats, placings: list[Ints]) -> Ints:
    """The placing whose fullest link is least full, the first of equals."""
    return min(placings, key=lambda paths: worst(fabric, paths, demand))
