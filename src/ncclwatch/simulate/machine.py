"""What both executors share: normal durations of operations, jitter, and which groups a fault touches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ncclwatch.simulate.disturbance import Disturbance
from ncclwatch.simulate.geometry import Paths, cut
from ncclwatch.simulate.layout import groups
from ncclwatch.simulate.scenario import Scenario
from ncclwatch.simulate.steps import End, StepNetwork, Trace, run_group
from ncclwatch.simulate.timeline import Times


class Machine:
    """The cluster a scenario runs on. Durations of undisturbed operations are those of one run step by step, kept by pattern of
    paths.
    """

    def __init__(self, scenario: Scenario, disturbance: Disturbance) -> None:
        self.scenario, self.disturbance = scenario, disturbance
        self.paths = Paths(scenario.layout, scenario.network)
        self.step_cost = scenario.network.step_us / 1e6
        self._calm = Disturbance()
        self._offsets: dict[tuple[object, ...], Times] = {}
        self._patterns: dict[str, tuple[list[int], np.ndarray]] = {}
        self._messages: dict[tuple[object, ...], tuple[float, float]] = {}

    def network(self, *, calm: bool = False) -> StepNetwork:
        """A fresh step network, with or without the faults."""
        return StepNetwork(self.paths, self._calm if calm else self.disturbance, self.scenario.seed, self.step_cost)

    def patterns(self, role: str) -> tuple[list[int], np.ndarray]:
        """Groups of a role that differ in the paths between their members: one representative group each, and each group's
        pattern.
        """
        if role not in self._patterns:
            nodes = groups(self.scenario.layout, role) // self.scenario.layout.ranks_per_node
            _, first, inverse = np.unique(nodes - nodes[:, :1], axis=0, return_index=True, return_inverse=True)
            self._patterns[role] = ([int(f) for f in first], inverse.reshape(-1))
        return self._patterns[role]

    def offsets(self, role: str, function: str, nbytes: int) -> Times:
        """Seconds from the last member's start to each member's end, shape (patterns, members), when nothing is wrong."""
        key = (role, function, nbytes)
        if key not in self._offsets:
            table = groups(self.scenario.layout, role)
            rows = []
            for representative in self.patterns(role)[0]:
                members = [int(r) for r in table[representative]]
                zero = [0.0] * len(members)
                trace = run_group(
                    self.network(calm=True),
                    function,
                    members,
                    cut(self.scenario.network, function, len(members), nbytes),
                    zero,
                    zero,
                )
                rows.append(trace.finished)
            self._offsets[key] = np.array(rows)
        return self._offsets[key]

    def run(
        self, role: str, group: int, function: str, nbytes: int, started: Sequence[float], launched: Sequence[float]
    ) -> Trace:
        """One group's operation step by step, faults included."""
        members = [int(r) for r in groups(self.scenario.layout, role)[group]]
        pieces = cut(self.scenario.network, function, len(members), nbytes)
        return run_group(self.network(), function, members, pieces, started, launched)

    def message_offsets(self, source: int, destination: int, nbytes: int) -> tuple[float, float]:
        """Seconds for sender and receiver of one message when both start together and nothing is wrong."""
        path = self.paths(source, destination)
        key = (path, nbytes)
        if key not in self._messages:
            trace = self._message(self.network(calm=True), source, destination, nbytes, (0.0, 0.0), (0.0, 0.0))
            self._messages[key] = (trace.finished[0], trace.finished[1])
        return self._messages[key]

    def message(
        self, source: int, destination: int, nbytes: int, started: tuple[float, float], launched: tuple[float, float]
    ) -> Trace:
        """One message step by step, faults included; members are (sender, receiver)."""
        return self._message(self.network(), source, destination, nbytes, started, launched)

    def _message(
        self,
        network: StepNetwork,
        source: int,
        destination: int,
        nbytes: int,
        started: tuple[float, float],
        launched: tuple[float, float],
    ) -> Trace:
        pieces = cut(self.scenario.network, "SendRecv", 2, nbytes)
        link = network.connect(source, destination, pieces.slots)
        finished = [math.inf, math.inf]
        tasks = [
            network.task(source, [((), (link,))] * pieces.steps, pieces.slice_bytes),
            network.task(destination, [((link,), ())] * pieces.steps, pieces.slice_bytes),
        ]
        if math.isfinite(launched[1]):
            network.open(link, pieces.steps, launched[1])
        for i, task in enumerate(tasks):
            task.on_done = lambda time, i=i: finished.__setitem__(i, time)
            network.start(task, started[i])
        network.run()
        return Trace(pieces, finished, [[End(link, True, 0, pieces.steps)], [End(link, False, 0, pieces.steps)]])

    def buffered(self, nbytes: int) -> bool:
        """Whether a message fits into the slots of its connection, so that its sender need not wait for the receiver's kernel."""
        pieces = cut(self.scenario.network, "SendRecv", 2, nbytes)
        return pieces.steps <= pieces.slots

    def jitter(self, iteration: int, stage: int, count: int) -> Times:
        """Factors on ``count`` pieces of compute of every rank of a stage, shape (count, ranks of the stage); about 1, at least
        0.5.
        """
        layout, work = self.scenario.layout, self.scenario.workload
        ranks = layout.world // layout.pp
        rng = np.random.default_rng([self.scenario.seed, iteration, stage])
        noise: Times = 1.0 + work.jitter * rng.standard_normal((count, ranks))
        return np.maximum(noise, 0.5)

    def touched(self, ranks: set[int], members: Sequence[int], start: float, end: float) -> bool:
        """Whether a fault can change an operation of these members that is under way between two times."""
        for rank in members:
            if rank in ranks:
                for begin, until in self.disturbance.window_of_rank(rank):
                    if begin <= end and until > start:
                        return True
        return False
