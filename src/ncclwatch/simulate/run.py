"""Run a scenario: vectorised while all ranks of a stage run the same program, exact from the iteration on in which one does
not.
"""

from __future__ import annotations

from ncclwatch.simulate.disturbance import Disturbance
from ncclwatch.simulate.exact import ExactExecutor
from ncclwatch.simulate.scenario import PROGRAM_FAULTS, FaultKind, Scenario
from ncclwatch.simulate.timeline import Timeline
from ncclwatch.simulate.vector import VectorExecutor


def simulate(scenario: Scenario, *, exact_from: int | None = None) -> Timeline:
    """Simulate a scenario. Deterministic: the same scenario gives the same times.

    ``exact_from`` forces the exact executor from that iteration on (both give the same times where no program differs). Raises
    ``ValueError`` when a fault names an operation that the program does not have.
    """
    missing = [f for f in scenario.faults if f.kind is FaultKind.INIT_MISSING]
    if missing:
        disturbance = Disturbance()
        timeline = Timeline(scenario, disturbance, never_initialised=tuple(sorted(f.rank for f in missing)))
        disturbance.onsets += [(f, 0.1 * scenario.network.init_s) for f in missing]
        return timeline
    vector = VectorExecutor(scenario)
    changed = [f.iteration for f in scenario.faults if f.kind in PROGRAM_FAULTS and f.iteration is not None]
    if exact_from is not None:
        changed.append(exact_from)
    vector.pending = [f for f in vector.pending if f.kind not in PROGRAM_FAULTS]
    first = min(changed, default=scenario.workload.iterations)
    vector.run(range(first))
    if first < scenario.workload.iterations:
        ExactExecutor(vector, first).run()
    return vector.timeline
