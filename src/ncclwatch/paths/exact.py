"""The best placing, proven: integer programming by OR-tools' CP-SAT, for small fabrics. Needs the extra ``ncclwatch[paths]``.

Flows between the same NICs that ask for the same are counted, not told apart: a variable says how many of them take a path.
What is minimised is the largest load over capacity. Only OR-tools' own module is imported, as its wrapper wants pandas.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np

from ncclwatch.errors import NcclwatchError
from ncclwatch.paths.fabric import Fabric, Floats, Ints
from ncclwatch.paths.fluid import loads
from ncclwatch.paths.traffic import Traffic

SCALE = 10_000_000
"""Loads over capacity are whole numbers of this part: the error is below 10^-6 where a link has ten flows."""
MAX_VARIABLES = 60_000
"""Bound: variables of a model that is tried."""
OPTIMAL, FEASIBLE = 4, 2
"""Fact: ``CpSolverStatus`` of OR-tools' ``cp_model.proto``."""


@dataclass(frozen=True)
class Exact:
    """What the solver found: no placing has a largest load over capacity below ``bound``."""

    paths: Ints | None
    bound: float
    proven: bool
    """Whether the placing reaches the bound."""


def available() -> bool:
    """Whether OR-tools can be imported."""
    try:
        import_module("ortools.sat.python.cp_model_helper")
    except ImportError:
        return False
    return True


class _Model:
    """The text of a ``CpModelProto``; variable 0 is the largest load."""

    def __init__(self, top: int) -> None:
        self.lines = [f"variables {{ domain: [0, {top}] }}", "objective { vars: [0] coeffs: [1] }"]
        self.count = 1

    def variable(self, most: int) -> int:
        self.lines.append(f"variables {{ domain: [0, {most}] }}")
        self.count += 1
        return self.count - 1

    def linear(self, terms: dict[int, int], low: int, high: int) -> None:
        names, factors = ", ".join(map(str, terms)), ", ".join(map(str, terms.values()))
        self.lines.append(f"constraints {{ linear {{ vars: [{names}] coeffs: [{factors}] domain: [{low}, {high}] }} }}")


def solve(fabric: Fabric, traffic: Traffic, demand: Floats, now: Ints, hint: Ints | None, seconds: float) -> Exact | None:
    """The best placing that is found within ``seconds``; None where the model is too large.

    Flows that may not be moved stay ``now``. ``hint`` is a placing to start from. Raises :class:`NcclwatchError` without
    OR-tools.
    """
    if not available():
        raise NcclwatchError("OR-tools is not installed", "pip install 'ncclwatch[paths]'")
    helper = import_module("ortools.sat.python.cp_model_helper")
    classes: dict[tuple[int, int, float], list[int]] = defaultdict(list)
    for flow in np.flatnonzero(traffic.movable).tolist():
        classes[int(traffic.source[flow]), int(traffic.destination[flow]), float(demand[flow])].append(flow)
    if sum(len(fabric.alternatives(a, b)) for a, b, _ in classes) > MAX_VARIABLES:
        return None
    fixed = loads(fabric, now[~traffic.movable], demand[~traffic.movable]) if len(now) else np.zeros(len(fabric.capacity))
    costs = [round(ask * SCALE / gbps) for _, _, ask in classes for gbps in set(fabric.capacity[fabric.capacity > 0].tolist())]
    still = [round(float(load) * SCALE / float(gbps)) for load, gbps in zip(fixed, fabric.capacity, strict=True) if load and gbps]
    unit = gcd(*costs, *still) or 1
    model, owners, guess = _Model(8 * sum(costs) // unit * len(traffic) + 8 * SCALE), [], {}
    on: dict[int, dict[int, int]] = defaultdict(dict)
    for (a, b, ask), flows in classes.items():
        paths = fabric.alternatives(a, b)
        if not len(paths):
            return Exact(None, float("inf"), True)
        names = [model.variable(len(flows)) for _ in paths]
        owners.append((flows, paths, names))
        model.linear(dict.fromkeys(names, 1), len(flows), len(flows))
        for name, path in zip(names, paths.tolist(), strict=True):
            for link in path:
                if link >= 0:
                    on[link][name] = round(ask * SCALE / float(fabric.capacity[link])) // unit
            if hint is not None:
                guess[name] = int((hint[flows] == path).all(axis=1).sum())
    for link in {*on, *np.flatnonzero(fixed).tolist()}:
        there = round(float(fixed[link]) * SCALE / float(fabric.capacity[link])) // unit if fabric.capacity[link] else 0
        model.linear({0: 1, **{name: -cost for name, cost in on[link].items()}}, there, 1 << 60)
    if guess:
        model.lines.append(f"solution_hint {{ vars: {list(guess)} values: {list(guess.values())} }}")
    return _run(helper, model, owners, now, len(traffic), seconds, unit)


Owners = list[tuple[list[int], Ints, list[int]]]
"""Of each class: its flows, the paths they may take, and the variables that say how many do."""


def _run(helper: Any, model: _Model, owners: Owners, now: Ints, flows: int, seconds: float, unit: int) -> Exact:
    proto, parameters, solver = helper.CpModelProto(), helper.SatParameters(), helper.SolveWrapper()
    if not proto.parse_text_format("\n".join(model.lines)):
        raise NcclwatchError("OR-tools does not take the model", "install the release of OR-tools that pyproject.toml names")
    parameters.parse_text_format(f"max_time_in_seconds: {seconds} num_workers: 2")
    solver.set_parameters(parameters)
    response = solver.solve(proto)
    status = int(response.status)
    floor = float(response.best_objective_bound) * unit / SCALE
    if status not in (OPTIMAL, FEASIBLE):
        return Exact(None, floor, False)
    paths = now.copy() if len(now) else np.full((flows, 4), -1, np.int64)
    solution = np.array(response.solution, np.int64)
    for members, choices, names in owners:
        taken = np.repeat(np.arange(len(choices)), solution[names])
        ends = np.r_[0, np.cumsum(np.bincount(taken, minlength=len(choices)))]
        left = set(members)
        # Who is on a path already stays there: fewer moves.
        for row, (first, last) in enumerate(pairwise(ends.tolist())):
            stay = [flow for flow in sorted(left) if (paths[flow] == choices[row]).all()][: last - first]
            left.difference_update(stay)
            ends[row] = last - first - len(stay)
        for row, path in enumerate(choices):
            for _ in range(int(ends[row])):
                paths[left.pop()] = path
    return Exact(paths, floor, status == OPTIMAL)
