"""What the simulator costs: 4,096 ranks and 10 iterations of a 3D-parallel job in under 60 s and 8 GB, and one iteration of
100,000 ranks.

Run it by itself: ``python tests/benchmarks/bench_simulate.py``. CPU seconds of this process, since other work on the machine
does not count.
"""

from __future__ import annotations

import resource
import sys
import time

from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.records import call_events
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import Scenario, parse
from ncclwatch.simulate.state_plane import StateReader

CPU_LIMIT_S, MEMORY_LIMIT_GB = 60.0, 8.0


def job(tp: int, pp: int, dp: int, iterations: int, faults: list[dict[str, object]]) -> Scenario:
    """Megatron-like: 16 micro-batches, 4 layers a stage."""
    expect: dict[str, object] = {"score_class": "clean"}
    if faults:
        expect = {"score_class": "H1", "verdicts": ["stopped"], "ranks": [faults[0]["rank"]]}
    return parse(
        {
            "name": "benchmark",
            "title": "benchmark",
            "seed": 1,
            "layout": {"tp": tp, "pp": pp, "dp": dp},
            "workload": {"iterations": iterations, "micro_batches": 16, "layers": 4},
            "faults": faults,
            "expect": expect,
        }
    )


def main() -> int:
    """Print one line a figure; status 1 when the goal for 4,096 ranks is missed."""
    total = 0.0
    lines: list[str] = []

    def timed(what: str, begin: float) -> None:
        spent = time.process_time() - begin
        lines.append(f"{what:68s} {spent:8.1f} s CPU  {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:6.2f} GB peak")
        print(lines[-1], flush=True)

    began = begin = time.process_time()
    timeline = simulate(job(8, 8, 64, 10, []))
    operations = sum(len(b.ranks) for b in timeline.blocks)
    timed(f"simulated 4,096 ranks x 10 iterations, {operations:,} operations", begin)
    begin = time.process_time()
    cast = Cast(timeline.scenario)
    events = sum(len(e) for _, e in call_events(timeline, cast))
    timed(f"  their call events ({events:,})", begin)
    begin = time.process_time()
    StateReader(timeline, cast).sample(5.0)
    timed("  one look at the state of all of them", begin)
    total = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    del timeline, cast
    begin = time.process_time()
    timeline = simulate(job(8, 8, 64, 10, [{"kind": "stop", "rank": 1234, "start_s": 5.0}]))
    timed("simulated 4,096 ranks, one of them stopped", begin)
    begin = time.process_time()
    StateReader(timeline).sample(12.0)
    timed("  one look at the state of all of them, hung", begin)
    del timeline
    begin = time.process_time()
    timeline = simulate(job(8, 16, 782, 1, []))
    timed(f"simulated {timeline.scenario.layout.world:,} ranks x 1 iteration", begin)
    good = total < CPU_LIMIT_S and peak < MEMORY_LIMIT_GB
    print(f"4,096 ranks x 10 iterations with records: {total:.1f} s CPU, {peak:.2f} GB: goal {'met' if good else 'MISSED'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
