"""What an iteration would have taken if a culprit had been normal: the share of the loss each one costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import networkx as nx

from ncclwatch.engine.slow.critical_path import Anomaly, Element
from ncclwatch.engine.slow.graph import Structure, Times, Weights, replay


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds an anomaly costs the iteration, and the iteration's duration without it."""

    anomaly: Anomaly
    without: float
    cost: float


def duration_without(structure: Structure, weights: Weights, anomalies: Iterable[Anomaly], start: float | Times) -> float:
    """Duration of the iteration if the anomalies had taken what is expected of them, everything else unchanged."""
    work, transfer = weights.work.copy(), weights.transfer.copy()
    for anomaly in anomalies:
        (work if anomaly.work else transfer)[anomaly.operation] = anomaly.expected
        if not anomaly.work:
            # A collective ends for all its ranks: what delayed it delayed every member.
            same = structure.set_of == structure.set_of[anomaly.operation]
            transfer[same] -= max(0.0, anomaly.excess) * (transfer[same] > anomaly.expected)
            transfer[anomaly.operation] = anomaly.expected
    _, end = replay(structure, work, transfer, start)
    first = start if isinstance(start, float) else float(start.min())
    return float(end.max()) - first


def costs(structure: Structure, weights: Weights, anomalies: Sequence[Anomaly], start: float | Times) -> list[Cost]:
    """What each of several culprits costs by itself, costliest first."""
    first = start if isinstance(start, float) else float(start.min())
    whole = float(weights.end.max()) - first
    result = []
    for anomaly in anomalies:
        without = duration_without(structure, weights, [anomaly], start)
        result.append(Cost(anomaly, without, whole - without))
    return sorted(result, key=lambda cost: -cost.cost)


def explained(structure: Structure, weights: Weights, path: Sequence[Element]) -> nx.DiGraph:
    """The path and what its operations waited for besides, as a graph to show: nodes are operations with rank, begin and end."""
    graph = nx.DiGraph()
    for element in path:
        for at in (element.operation, *structure.depends_on(element.operation).tolist()[:16]):
            graph.add_node(at, rank=int(structure.rank[at]), begin=float(weights.begin[at]), end=float(weights.end[at]))
            if at != element.operation:
                graph.add_edge(at, element.operation, kind="needs")
        before = int(structure.previous[element.operation])
        if before >= 0 and before in graph:
            graph.add_edge(before, element.operation, kind="order", seconds=float(weights.work[element.operation]))
    return graph
