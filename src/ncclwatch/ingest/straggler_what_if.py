"""StragglerAnalysis's what-if: how long steps would take if no operation were slower than its like.

Slowdown S (paper, equation 1) is the mean step time as it was (without delays of launches) over that in which every operation
takes what its kind takes: computation the mean, transfers the median, over steps, stages and replicas. S of an operation type,
a stage or a replica (equations 2 to 4) is the same with only that one as it was. Of a worker it is the smaller one of its
stage's and its replica's (their ``heatmap.py``). M_W and M_S (equation 5; ``compute_mw.py``, ``compute_ms.py``) are which part
of the loss goes away when the slowest 3 % of workers, or the last stage, are put right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ncclwatch.ingest.straggler_model import (
    CLIP,
    EMBEDDING,
    GATHER,
    LAYERNORM,
    MESSAGES,
    OPTIMIZER,
    SCATTER,
    SEPARATE,
    Model,
    ModelError,
    Op,
)  # fmt: skip

TRANSFERS = (*MESSAGES, GATHER, SCATTER, SEPARATE, LAYERNORM, EMBEDDING, CLIP)
SLOWEST_SHARE = 3
"""Fact: per cent of workers that M_W puts right (``RATIO``)."""
LATE_S = 0.01
"""Fact: transfers that are shorter than minus so much are taken for none (clocks; ``EPS``)."""
Times = NDArray[np.float64]


@dataclass(slots=True)
class Measured:
    """Begins and ends of every operation (s), each of shape (steps, replicas)."""

    begin: dict[Op, Times]
    end: dict[Op, Times]


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """What the analysis says. ``by_kind`` has messages of a direction together; ``worker`` is by (replica, stage)."""

    total: float
    by_kind: Mapping[str, float]
    by_replica: Mapping[int, float]
    by_stage: Mapping[int, float]
    worker: Mapping[tuple[int, int], float]
    by_few_workers: float
    few_workers: tuple[tuple[int, int], ...]
    by_last_stage: float
    step_s: float
    ideal_s: float
    by_step: Mapping[int, float]


class WhatIf:
    """The steps of a job played again with other durations."""

    def __init__(self, model: Model, measured: Measured) -> None:
        self.model = model
        self._group_of = {one: tuple(group) for group in model.groups for one in group}
        self._order = _order(model, self._group_of)
        self.taken = {one: self._taken(one, measured) for one in model.needs}
        """What each operation takes by itself: of one that ends with others, from the last one's begin on."""
        self.shape = next(iter(measured.begin.values())).shape
        pools: dict[str, list[Times]] = {}
        for one, values in self.taken.items():
            pools.setdefault(one.kind, []).append(values.ravel())
        usual = {
            kind: float((np.median if kind in TRANSFERS else np.mean)(np.concatenate(values))) for kind, values in pools.items()
        }  # fmt: skip
        self.ideal = {one: np.full(self.shape, usual[one.kind]) for one in self.taken}

    def _taken(self, one: Op, measured: Measured) -> Times:
        group = self._group_of.get(one)
        if group is None:
            return measured.end[one] - measured.begin[one]
        begun = np.maximum.reduce([measured.begin[other] for other in group])
        if one in self.model.joined:
            begun = np.broadcast_to(begun.max(axis=1, keepdims=True), begun.shape)
        found = measured.end[one] - begun
        return np.where(found <= -LATE_S, 0.0, found)

    def steps(self, durations: Mapping[Op, Times]) -> Times:
        """How long each step takes with these durations. O(operations)."""
        begins: dict[Op, Times] = {}
        ends: dict[Op, Times] = {}
        zero = np.zeros(self.shape)
        last = np.zeros(self.shape[0])
        for group in self._order:
            for one in group:
                needs = self.model.needs[one]
                begins[one] = np.maximum.reduce([ends[need] for need in needs]) if needs else zero
            begun = np.maximum.reduce([begins[one] for one in group]) if len(group) > 1 else begins[group[0]]
            if group[0] in self.model.joined:
                begun = np.broadcast_to(begun.max(axis=1, keepdims=True), begun.shape)
            for one in group:
                ends[one] = begun + durations[one]
                if one.kind == OPTIMIZER:
                    last = np.maximum(last, ends[one].max(axis=1))
        return last

    def mixed(self, slow: Callable[[Op], NDArray[np.bool_] | bool], *, outside: bool = False) -> Times:
        """Steps in which the chosen operations (or all others: ``outside``) take as long as they did, the rest what is
        usual.
        """
        made = {}
        for one, values in self.taken.items():
            chosen = np.asarray(slow(one)) != outside
            made[one] = np.where(chosen, values, self.ideal[one])
        return self.steps(made)

    def slowdowns(self, steps: tuple[int, ...]) -> Slowdowns:
        """The whole analysis. ``steps`` are their numbers."""
        base, ideal = self.steps(self.taken), self.steps(self.ideal)
        least = float(ideal.mean())
        replicas, stages = range(self.shape[1]), sorted({one.stage for one in self.taken})
        columns = np.arange(self.shape[1])[None, :]
        kinds = sorted({_together(one.kind) for one in self.taken})
        by_kind = {kind: float(self.mixed(partial(_is_of, kind)).mean()) / least for kind in kinds}
        by_replica = {at: float(self.mixed(partial(_one_column, columns == at)).mean()) / least for at in replicas}
        by_stage = {at: float(self.mixed(partial(_is_on, at)).mean()) / least for at in stages}
        worker = {(at, stage): min(by_replica[at], by_stage[stage]) for at in replicas for stage in stages}
        few = sorted(worker, key=lambda place: (-worker[place], place[1], place[0]))[: -(-len(worker) * SLOWEST_SHARE // 100)]

        def of_few(one: Op) -> NDArray[np.bool_]:
            return np.isin(columns, [replica for replica, stage in few if stage == one.stage])

        lost = float(base.mean()) - least
        fixed = float(self.mixed(of_few, outside=True).mean())
        last = float(self.mixed(partial(_is_on, stages[-1]), outside=True).mean())
        took = float(base.mean())
        by_few, by_last = ((took - without) / lost if lost > 0 else 0.0 for without in (fixed, last))
        by_step = dict(zip(steps, (base / ideal).tolist(), strict=True))
        return Slowdowns(
            took / least, by_kind, by_replica, by_stage, worker, by_few, tuple(few), by_last, took, least, by_step
        )  # fmt: skip


def _is_of(kind: str, one: Op) -> bool:
    return _together(one.kind) == kind


def _is_on(stage: int, one: Op) -> bool:
    return one.stage == stage


def _one_column(chosen: NDArray[np.bool_], one: Op) -> NDArray[np.bool_]:
    return chosen


def _together(kind: str) -> str:
    """Sends and receives of one direction are one type of communication."""
    return f"{kind.split('-', 1)[0]}-pp-comm" if kind in MESSAGES else kind


def _order(model: Model, group_of: Mapping[Op, tuple[Op, ...]]) -> list[tuple[Op, ...]]:
    """The operations in an order in which everything that one needs comes before it; what ends together stands together.

    Raises :class:`ModelError` where there is none.
    """
    units = {one: group_of.get(one, (one,)) for one in model.needs}
    waiting: dict[tuple[Op, ...], int] = dict.fromkeys(units.values(), 0)
    after: dict[Op, list[tuple[Op, ...]]] = {}
    for one, needs in model.needs.items():
        waiting[units[one]] += len(needs)
        for need in needs:
            after.setdefault(need, []).append(units[one])
    ready = deque(unit for unit, left in waiting.items() if left == 0)
    made: list[tuple[Op, ...]] = []
    while ready:
        unit = ready.popleft()
        made.append(unit)
        for one in unit:
            for follower in after.get(one, ()):
                waiting[follower] -= 1
                if waiting[follower] == 0:
                    ready.append(follower)
    if len(made) < len(waiting):
        raise ModelError("operations of a step wait for each other in a circle")
    return made
