"""How each group of a job is used, in one form for calls that were seen and for what NCCL has counted; and groups of one kind.

Memory keeps how often each communicator was used (``opCount`` and ``collOpCount`` of ``ncclComm``; by function, ``seqNumber``,
from 2.26 on) and how far every connection was, those of Send and Recv (index 1) apart from those of collectives (0).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.ledger import POINT_TO_POINT
from ncclwatch.collect.specimens import Recorder
from ncclwatch.engine.topology.iteration import ENOUGH, OFTEN, Shape, Specimen, Usage, shape_of
from ncclwatch.engine.topology.job_map import JobMap, KnownGroup, KnownJob
from ncclwatch.model.joined import is_hidden
from ncclwatch.model.state import Communicator, Direction
from ncclwatch.model.topology import FUNCTION_NAMES

LARGE_GROUP = 8
"""Unit: ranks. From: GPUs of one host joined by NVLink, as tensor groups are (Megatron-LM's advice, and every job of
``score.topology``). A single group of more, over several hosts, is data parallel.
"""

T = TypeVar("T", bound=Hashable)
Line = tuple[int, ...]
"""Ranks of a group in order, −1 where unknown."""


@dataclass(slots=True, kw_only=True)
class Use(Usage):
    """How a group was used by its observed members; ``times`` is of an iteration where one is known, else of all."""

    group: KnownGroup
    total: float = 0.0
    """Operations in all, the most of any member."""
    exchanges: bool = False
    """Whether Send and Recv alone are called on it, or nothing; ``mixed``: these and collectives, of which no role is known."""
    mixed: bool = False
    scatters: int = 0
    hidden: bool = False
    """Whether ranks are joined by NVLink and the like, where Send and Recv are not counted."""
    known: bool = True
    """Whether ``times`` is of a member that was kept in full, where any was."""


@dataclass(slots=True, kw_only=True)
class Family(Usage):
    """Groups of one kind, which divide ranks among them."""

    uses: list[Use]
    lines: list[Line]
    """Their ranks, each set once; of a pipeline the stages in order. ``size``: ranks of each."""
    size: int
    number: NDArray[np.int32]
    """rank → number of its line, −1 where that is not known. Shape (world,)."""
    whole: bool
    """Whether every rank that was observed is in one of them."""
    wide: bool
    """Whether they are too large for a tensor group and lie across hosts."""
    exchanges: bool
    uncounted: bool
    """Whether nothing was counted, though Send and Recv may have been called."""


def common(values: Iterable[T | None]) -> T | None:
    """What most of those say that say anything."""
    known = Counter(value for value in values if value is not None)
    return known.most_common(1)[0][0] if known else None


def _pooled(usages: Sequence[Usage]) -> dict[str, Any]:
    """What most of them show that were used, as fields of a ``Usage``; of ``ways`` all."""
    seen = [usage for usage in usages if usage.times]
    return {
        "ways": frozenset(way for usage in usages for way in usage.ways),
        "shape": common([usage.shape for usage in seen]),
        "times": float(np.median([usage.times for usage in seen])) if seen else 0.0,
        "functions": common([usage.functions for usage in seen]) or frozenset(),
        "tiny": bool(common([usage.tiny for usage in seen])),
        "inside": common([usage.inside for usage in seen]),
        "order": common([usage.order for usage in seen]),
        "follows": bool(common([usage.follows for usage in seen])),
        "gradients": any(usage.gradients for usage in seen),
    }


def uses_of_calls(job: KnownJob, recorder: Recorder, specimens: Sequence[Specimen]) -> list[Use]:
    """One for each group with an observed member."""
    whole = [specimen for specimen in specimens if specimen.iteration is not None] or specimens
    of_row: dict[int, Usage] = {row: usage for specimen in whole for row, usage in specimen.usages.items()}
    found = []
    for group in (group for group in job.groups if group.rows):
        counts = recorder.calls[group.rows].sum(axis=0)
        usages = [of_row[row] for row in group.rows if row in of_row]
        use = Use(**_pooled(usages), group=group, total=float(counts.sum()) / len(group.rows), known=bool(usages))
        if not usages:
            often = np.flatnonzero(ENOUGH * counts > counts.sum()).tolist()
            use.functions = frozenset(often) - frozenset(POINT_TO_POINT)
        use.exchanges, use.mixed = not use.functions, bool(use.functions and use.ways)
        found.append(use)
    return found


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
    result = Use(group=group)
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
    often = {name for name, count in functions.items() if ENOUGH * count > collectives}
    result.functions = frozenset(function for function, name in FUNCTION_NAMES.items() if name in often)
    result.total = result.times = float(max(collectives, exchanges))
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
    """Uses that may be of one kind, parted by how they are called; parts with some of the ranks each are one."""
    alike: dict[Hashable, list[Use]] = defaultdict(list)
    for use in sorted(uses, key=lambda use: use.times):
        if use.known:
            alike[use.functions, use.tiny, use.inside].append(use)
    parts: list[list[Use]] = []
    for own in alike.values():
        # Roles may be told apart by counts that are far from each other; those of Send and Recv differ between stages.
        far = [at for at, (one, two) in enumerate(pairwise(own), 1) if two.times > OFTEN * one.times and not one.exchanges]
        parts += [own[start:end] for start, end in pairwise([0, *far, len(own)])]
    parts.sort(key=lambda part: not observed <= _ranks(part))
    found: list[tuple[list[Use], set[int]]] = []
    for part in [*parts, *([use] for use in uses if not use.known)]:
        ranks, known = _ranks(part), part[0].known
        free = [one for one in found if not one[1] & ranks] if not (known and observed <= ranks) else []
        if free:
            home = min(free, key=lambda one: abs(np.log((1 + part[0].total) / (1 + one[0][0].total))))
            home[0].extend(part)
            home[1].update(ranks)
        elif known:
            found.append((part, ranks))
    return [part for part, _ in found]


def _ranks(uses: Iterable[Use]) -> set[int]:
    return {rank for use in uses for rank in use.group.ranks.tolist()} - {-1}


def _family(world: int, uses: list[Use], observed: set[int]) -> Family | None:
    lines = list(dict.fromkeys(tuple(use.group.ranks.tolist()) for use in uses))
    seen = _pooled(uses)
    shape = seen["shape"] or shape_of(seen["ways"], len(lines[0]), None)
    known = [rank for line in lines for rank in line if rank >= 0]
    if len(set(known)) < len(known):
        lines = _joined(lines) if shape in (Shape.CHAIN, Shape.EITHER) else []
        shape = Shape.CHAIN
    if not lines:
        return None
    number = np.full(world, -1, np.int32)
    for at, line in enumerate(lines):
        number[[rank for rank in line if rank >= 0]] = at
    seen |= {"shape": shape, "times": float(np.median([use.times for use in uses]))}
    seen["functions"] = frozenset(function for use in uses for function in use.functions)
    return Family(
        **seen,
        uses=uses,
        lines=lines,
        number=number,
        whole=observed <= _ranks(uses),
        size=len(lines[0]),
        wide=len(lines[0]) > LARGE_GROUP and any(use.group.hosts > 1 for use in uses),
        exchanges=uses[0].exchanges,
        uncounted=not any(use.total for use in uses),
    )


def _joined(pairs: Sequence[Line]) -> list[Line]:
    """Pipelines made of several communicators, one for each pair of neighbours: paths through shared ranks, lowest end first."""
    if any(len(pair) != 2 or -1 in pair for pair in pairs):
        return []
    import networkx as nx  # It takes a tenth of a second to load: who names a stopped rank need not wait for it.

    graph = nx.Graph(pairs)
    parts = [graph.subgraph(part) for part in nx.connected_components(graph)]
    paths = all(part.size() == len(part) - 1 and max(degree for _, degree in part.degree) <= 2 for part in parts)
    if not paths or len({len(part) for part in parts}) != 1:
        return []
    lowest = (min(rank for rank, degree in part.degree if degree == 1) for part in parts)
    return sorted(tuple(nx.dfs_preorder_nodes(part, end)) for end, part in zip(lowest, parts, strict=True))
