"""How each group of a job is used, in one form for calls that were seen and for what NCCL has counted; and groups of one kind.

Memory keeps how often each communicator was used (``opCount`` and ``collOpCount`` of ``ncclComm``; by function, ``seqNumber``,
from 2.26 on) and how far every connection was used, those of Send and Recv apart from those of collectives (connection index 1
and 0). Calls also show their order and their sizes: within an iteration, in which pass, in which turns.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.connections import is_hidden
from ncclwatch.engine.topology.iteration import Shape, Specimen, Usage, shape_of
from ncclwatch.engine.topology.record import POINT_TO_POINT, JobMap, KnownGroup, KnownJob, Recorder
from ncclwatch.model.events import Function
from ncclwatch.model.state import Communicator, Direction

OFTEN = 2.0
"""Unit: ratio of calls. From: a layer has a pass forward and one backward, and gradients are reduced once for both; each pass
calls a tensor group twice for each time it exchanges (Megatron-LM).
"""
RARE = 0.05
"""Unit: share of the calls on a communicator. From: barriers and checkpoints of the simulated jobs are less; a layer has no 20
calls for each of one kind.
"""
COUNTED = {function.name.title().replace("_", ""): int(function) for function in Function}
"""Fact: functions by NCCL's names of them."""

T = TypeVar("T", bound=Hashable)
Line = tuple[int, ...]
"""Ranks of a group in order, −1 where unknown."""


@dataclass(slots=True)
class Use:
    """How a group was used, by the members that were observed."""

    group: KnownGroup
    times: float = 0.0
    """How often the operation that comes most often was called: in an iteration where one is known, else in all."""
    total: float = 0.0
    """Operations in all, the most of any member."""
    functions: frozenset[int] = frozenset()
    """Collectives that are no single call among many; empty where this build counts them together."""
    exchanges: bool = False
    """Whether Send and Recv alone are called on it, or nothing."""
    mixed: bool = False
    """Whether collectives as well as Send and Recv are: no role is known for both."""
    scatters: int = 0
    ways: frozenset[tuple[int, int, bool]] = frozenset()
    """(rank of the communicator, peer, whether it sends) of every connection that Send or Recv have used, or may have."""
    hidden: bool = False
    """Whether ranks are joined by NVLink and the like, where Send and Recv are not counted."""
    seen: Usage | None = None
    """What most of its members' calls show."""
    known: bool = True
    """Whether ``times`` is of one of them that was kept in full, where any was."""


@dataclass(slots=True)
class Family:
    """Groups of one kind, which divide ranks among them."""

    uses: list[Use]
    lines: list[Line]
    """Their ranks, each set once; of a pipeline the stages in order."""
    number: NDArray[np.int32]
    """rank → number of its line, −1 where that is not known. Shape (world,)."""
    whole: bool
    """Whether every rank that was observed is in one of them."""
    shape: Shape = Shape.NONE
    size: int = field(init=False)
    """Ranks of each."""
    times: float = field(init=False)
    """How often each was used."""
    functions: frozenset[int] = field(init=False)
    """Collectives that were called, empty where the build does not tell."""
    exchanges: bool = field(init=False)
    """Whether Send and Recv alone are called on them, or nothing."""
    uncounted: bool = field(init=False)
    """Whether nothing was counted, though Send and Recv may have been called."""
    hosts: int = field(init=False)
    """Over how many hosts one of them goes at most."""
    seen: Usage = field(init=False)
    """What the calls of most of them show."""

    def __post_init__(self) -> None:
        self.size, self.exchanges = len(self.lines[0]), self.uses[0].exchanges
        self.times = float(np.median([use.times for use in self.uses]))
        self.functions = frozenset[int]().union(*(use.functions for use in self.uses))
        self.uncounted = not any(use.total for use in self.uses)
        self.hosts = max(use.group.hosts for use in self.uses)
        self.seen = _pooled([use.seen for use in self.uses if use.seen is not None])


def common(values: Iterable[T | None]) -> T | None:
    """What most of those say that say anything."""
    known = Counter(value for value in values if value is not None)
    return known.most_common(1)[0][0] if known else None


# --- from calls ----------------------------------------------------------------------------------------------------------------


def uses_of_calls(job: KnownJob, recorder: Recorder, specimens: Sequence[Specimen]) -> list[Use]:
    """One for each group with an observed member."""
    whole = [specimen for specimen in specimens if specimen.iteration is not None] or specimens
    usages: dict[int, Usage] = {row: usage for specimen in whole for row, usage in specimen.usages.items()}
    return [
        _of_calls(group, recorder, [usages[row] for row in group.rows if row in usages]) for group in job.groups if group.rows
    ]


def _of_calls(group: KnownGroup, recorder: Recorder, usages: Sequence[Usage]) -> Use:
    counts = recorder.calls[group.rows].sum(axis=0)
    called = [usage for usage in usages if usage.times]
    result = Use(group, total=float(counts.sum()) / len(group.rows), known=bool(usages))
    result.ways = frozenset[tuple[int, int, bool]]().union(*(usage.ways for usage in usages))
    if called:
        result.seen = _pooled(called)
        result.functions, result.times = result.seen.functions, float(np.median([usage.times for usage in called]))
        result.mixed = bool(result.functions and result.ways)
    elif not usages:
        often = np.flatnonzero(counts > RARE * counts.sum()).tolist()
        result.functions = frozenset(often) - frozenset(POINT_TO_POINT)
    result.exchanges = not result.functions
    return result


def _pooled(usages: Sequence[Usage]) -> Usage:
    """What most members show."""
    return Usage(
        shape=common([usage.shape for usage in usages]) or Shape.NONE,
        functions=common([usage.functions for usage in usages]) or frozenset(),
        tiny=bool(common([usage.tiny for usage in usages])),
        inside=common([usage.inside for usage in usages]),
        order=common([usage.order for usage in usages]),
        follows=bool(common([usage.follows for usage in usages])),
        gradients=any(usage.gradients for usage in usages),
    )


# --- from counts ---------------------------------------------------------------------------------------------------------------


def uses_of_counts(jobmap: JobMap, job: KnownJob) -> list[Use]:
    """The same from the communicators as they were last read, of groups all of whose ranks are known."""
    found = []
    for group in job.groups:
        known = [(jobmap.row_rank[row], jobmap.communicators[row]) for row in group.rows if row in jobmap.communicators]
        if known and (group.ranks >= 0).all() and (group.ranks < job.world).all():
            found.append(_of_counts(group, known))
    return found


def _of_counts(group: KnownGroup, members: Sequence[tuple[int, Communicator]]) -> Use:
    collectives = exchanges = 0
    functions: Counter[str] = Counter()
    result = Use(group)
    for rank, own in members:
        steps = [(s.peer, s.direction, s.connection_index, s.step) for s in own.net_steps]
        steps += [(h.peer, h.direction, h.connection_index, h.tail or 0) for h in own.host_connections]
        total = own.op_count or 0
        ringed = any(index == 0 and step > 0 for _, _, index, step in steps)
        called = sum(own.sequence_numbers.values()) or own.collective_count or (total if ringed else 0)
        collectives = max(collectives, called)
        functions |= Counter(own.sequence_numbers)
        used = {(rank, peer, way is Direction.SEND) for peer, way, index, step in steps if index == 1 and step > 0}
        result.hidden |= is_hidden(own)
        if not used and not called and (total or result.hidden):  # whom it is joined to is known, and nothing else
            used = {(rank, peer, way == "send") for _, peer, way, _ in own.transports if way in ("send", "recv")}
        result.ways |= used
        # Of Send and Recv through shared memory not every release counts the plans.
        exchanged = max((step for _, _, index, step in steps if index == 1), default=0)
        if not called or exchanged:
            exchanges = max(exchanges, exchanged, 0 if called else total)
    result.functions = frozenset(
        COUNTED[name] for name, count in functions.items() if count > RARE * collectives and name in COUNTED
    )
    result.total = max(collectives, exchanges)
    result.times = float(result.total)
    result.scatters = functions["ReduceScatter"]
    result.exchanges, result.mixed = not collectives, bool(collectives and exchanges)
    return result


# --- kinds ---------------------------------------------------------------------------------------------------------------------


def families(job: KnownJob, uses: Iterable[Use], observed: set[int]) -> list[Family]:
    """Groups of one kind: of one size and one distance of their ranks, called alike and about as often."""
    alike: dict[Hashable, list[Use]] = defaultdict(list)
    for use in uses:
        if not use.mixed:
            ranks = np.sort(use.group.ranks)
            distances = tuple(np.diff(ranks).tolist()) if ranks[0] >= 0 and len(ranks) < job.world else ()
            alike[use.group.nranks, distances, use.exchanges].append(use)
    parts = [part for own in alike.values() for part in _parts(own, observed)]
    return [family for part in parts if (family := _family(job.world, part, observed)) is not None]


def _parts(uses: Sequence[Use], observed: set[int]) -> list[list[Use]]:
    """Uses that may be of one kind, parted by how they are called.

    Stages may call a little more than others do: parts that hold some of the ranks each are one. What nobody was kept in full of
    goes where it fits.
    """
    alike: dict[Hashable, list[Use]] = defaultdict(list)
    for use in sorted(uses, key=lambda use: use.times):
        if use.known:
            alike[(use.functions, use.seen.tiny, use.seen.inside) if use.seen else use.functions].append(use)
    parts: list[tuple[list[Use], set[int]]] = []
    for own in alike.values():
        # Roles may be told apart by counts that are far from each other; those of Send and Recv differ between stages.
        far = [at for at, (one, two) in enumerate(pairwise(own), 1) if two.times > OFTEN * one.times and not one.exchanges]
        parts += [(own[start:end], _ranks(own[start:end])) for start, end in pairwise([0, *far, len(own)])]
    found = [part for part in parts if observed <= part[1]]
    for part, ranks in [part for part in parts if not observed <= part[1]] + [
        ([use], _ranks([use])) for use in uses if not use.known
    ]:
        free = [one for one in found if not one[1] & ranks]
        if free:
            home = min(free, key=lambda one: abs(np.log((1 + part[0].total) / (1 + one[0][0].total))))
            home[0].extend(part)
            home[1].update(ranks)
        elif part[0].known:
            found.append((part, ranks))
    return [part for part, _ in found]


def _ranks(uses: Iterable[Use]) -> set[int]:
    return {rank for use in uses for rank in use.group.ranks.tolist()} - {-1}


def _family(world: int, uses: list[Use], observed: set[int]) -> Family | None:
    lines = list(dict.fromkeys(tuple(use.group.ranks.tolist()) for use in uses))
    ways = frozenset[tuple[int, int, bool]]().union(*(use.ways for use in uses))
    shape = common([use.seen.shape for use in uses if use.seen]) or shape_of(ways, len(lines[0]), None)
    known = [rank for line in lines for rank in line if rank >= 0]
    if len(set(known)) < len(known):
        lines = _joined(lines) if shape in (Shape.CHAIN, Shape.EITHER) else []
        shape = Shape.CHAIN
    if not lines:
        return None
    number = np.full(world, -1, np.int32)
    for at, line in enumerate(lines):
        number[[rank for rank in line if rank >= 0]] = at
    return Family(uses, lines, number, observed <= _ranks(uses), shape)


def _joined(pairs: Sequence[Line]) -> list[Line]:
    """Pipelines made of several communicators, one for each pair of neighbours: paths through shared ranks, lowest end first."""
    if any(len(pair) != 2 or -1 in pair for pair in pairs):
        return []
    graph = nx.Graph(pairs)
    parts = [graph.subgraph(part) for part in nx.connected_components(graph)]
    paths = all(part.size() == len(part) - 1 and max(degree for _, degree in part.degree) <= 2 for part in parts)
    if not paths or len({len(part) for part in parts}) != 1:
        return []
    lowest = (min(rank for rank, degree in part.degree if degree == 1) for part in parts)
    return sorted(tuple(nx.dfs_preorder_nodes(part, end)) for end, part in zip(lowest, parts, strict=True))
