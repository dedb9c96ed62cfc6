"""Which rank belongs to which group: Megatron-LM's order ``tp-cp-ep-dp-pp``, tensor parallel fastest, pipeline slowest.

Source: Megatron-LM ``megatron/core/parallel_state.py`` (``RankGenerator``; expert ranks come from a generator of their own in
which ``ep`` takes the place of ``cp`` and lies inside data parallelism). Arrays are int64 of shape (groups, ranks in a group);
groups of one pipeline stage are contiguous, in order of the stage, because the pipeline is the slowest dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ncclwatch.simulate.scenario import Layout

Ranks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank sits in each dimension."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int


def coordinates(layout: Layout, rank: int) -> Coordinates:
    """Position of a global rank; raises ``ValueError`` outside the world."""
    if not 0 <= rank < layout.world:
        raise ValueError(f"rank {rank} is not in a world of {layout.world}")
    tp = rank % layout.tp
    cp = rank // layout.tp % layout.cp
    dp = rank // (layout.tp * layout.cp) % layout.dp
    pp = rank // (layout.tp * layout.cp * layout.dp)
    ep = (rank // layout.tp) % layout.ep
    return Coordinates(tp, cp, dp, pp, ep)


@lru_cache(maxsize=256)
def groups(layout: Layout, role: str) -> Ranks:
    """Members of every group of a role, shape (groups, size).

    Roles: ``tp``, ``cp``, ``ep``, ``pp``; ``dp`` is the group over which gradients are reduced (data × context parallel);
    ``world``.
    """
    grid = np.arange(layout.world, dtype=np.int64).reshape(layout.pp, layout.dp, layout.cp, layout.tp)
    if role == "tp":
        table = grid.reshape(-1, layout.tp)
    elif role == "cp":
        table = grid.transpose(0, 1, 3, 2).reshape(-1, layout.cp)
    elif role in ("dp", "gather"):
        table = grid.transpose(0, 3, 1, 2).reshape(-1, layout.dp * layout.cp)
    elif role == "ep":
        shape = (layout.pp, layout.dp * layout.cp // layout.ep, layout.ep, layout.tp)
        table = grid.reshape(shape).transpose(0, 1, 3, 2).reshape(-1, layout.ep)
    elif role == "pp":
        table = grid.reshape(layout.pp, -1).T.copy()
    elif role == "mp":
        table = grid.transpose(1, 2, 0, 3).reshape(layout.dp * layout.cp, -1)
    elif role == "world":
        table = grid.reshape(1, -1)
    else:
        raise ValueError(f"no role {role!r}")
    table.setflags(write=False)
    return table


@lru_cache(maxsize=256)
def membership(layout: Layout, role: str) -> tuple[Ranks, Ranks]:
    """For every global rank: the index of its group of a role, and its rank in it; both of shape (world,)."""
    table = groups(layout, role)
    group = np.empty(layout.world, np.int64)
    index = np.empty(layout.world, np.int64)
    group[table] = np.arange(len(table))[:, None]
    index[table] = np.arange(table.shape[1])[None, :]
    return group, index


ACROSS_STAGES = ("mp", "world")
"""Roles whose groups have members on several pipeline stages and that still have collectives."""


def stage_of(layout: Layout, rank: int) -> int:
    """Pipeline stage of a rank."""
    return coordinates(layout, rank).pp


def ranks_of_stage(layout: Layout, stage: int) -> range:
    """Ranks of a pipeline stage: contiguous."""
    size = layout.tp * layout.cp * layout.dp
    return range(stage * size, (stage + 1) * size)


def node_of(layout: Layout, rank: int) -> int:
    """Index of the host of a rank."""
    return rank // layout.ranks_per_node


def ranks_of_node(layout: Layout, node: int) -> range:
    """Ranks of a host."""
    first = node * layout.ranks_per_node
    return range(first, min(first + layout.ranks_per_node, layout.world))
