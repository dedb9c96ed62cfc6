"""SIMULATED twice: the rates of the fluid model beside those of SimGrid, for the same flows on the same links.

    apt-get install python3-simgrid          # 3.32 in Debian 12; not needed for anything else
    python tests/benchmarks/check_fluid.py

SimGrid's network model is CM02 without latency, cross traffic and correction factors: max-min fairness by a solver of its own.
Each flow sends without end; its rate is what has gone after one second. Ends with status 1 where a rate differs by more than
10^-6.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.bench_paths import EXPERIMENTS, Setting, case
from ncclwatch.paths.ecmp import Bond, Hashing, paths_by_hash
from ncclwatch.paths.fabric import NO_PATHS, Fabric, Floats, Ints, regular
from ncclwatch.paths.fluid import Tied, demands, flow_rates
from ncclwatch.paths.placing import place
from ncclwatch.paths.traffic import Ring, Traffic, rings
from ncclwatch.text import columns

MOST = 1e-6
"""Unit: relative difference. Chosen: far above rounding, far below what any conclusion turns on."""
ENDLESS = 10**15
"""Bound: bytes of a flow; none ends within a second."""
OPTIONS = ("model:CM02", "weight-S:0", "crosstraffic:0", "TCP-gamma:0", "latency-factor:1", "bandwidth-factor:1")

Case = tuple[Fabric, Traffic, Ints]


def _c4(experiment: int, spines: int, queue_pairs: int, bond: Bond) -> Case:
    return case(EXPERIMENTS[experiment], Setting(spines, queue_pairs, bond, Tied.FLOW, 3))


def _degraded() -> Case:
    fabric, traffic, _ = _c4(1, 8, 4, Bond.HASH)
    fabric = fabric.with_uplinks([1, 20], 130.0).with_ports([5], 50.0)
    return fabric, traffic, paths_by_hash(fabric, traffic, Hashing(3))


def _planned() -> Case:
    fabric, traffic, _ = _c4(3, 6, 3, Bond.HASH)
    return fabric, traffic, place(fabric, traffic, demands(fabric, traffic), NO_PATHS, 2.0)


def _rails() -> Case:
    fabric = regular(hosts=12, nics=4, ports=1, port_gbps=400, leaves=3, spines=2, links=2, uplink_gbps=300, rails=False)
    traffic = rings(fabric, [Ring("a", [0, 5, 9, 2, 7]), Ring("b", [1, 6, 11], queue_pairs=2)], 4, 3)
    return fabric, traffic, paths_by_hash(fabric, traffic, Hashing(3, alike=True))


CASES: dict[str, Callable[[], Case]] = {
    "one AllReduce, hashed": lambda: _c4(0, 8, 2, Bond.HASH),
    "8 jobs, hashed": lambda: _c4(1, 8, 4, Bond.HASH),
    "8 jobs, 2:1, bond in turns": lambda: _c4(2, 16, 2, Bond.TURNS),
    "8 jobs, a dead uplink": lambda: _c4(3, 4, 1, Bond.HASH),
    "degraded links": _degraded,
    "planned, a dead uplink": _planned,
    "no bond, parallel uplinks": _rails,
}


def by_simgrid(fabric: Fabric, paths: Ints) -> Floats:
    """(F): Gb/s of each flow. SimGrid runs once a process."""
    simgrid: Any = import_module("simgrid")
    engine = simgrid.Engine(["check", "--log=root.thresh:error", *(f"--cfg=network/{option}" for option in OPTIONS)])
    zone = simgrid.NetZone.create_full_zone("fabric")
    links = {}
    for link in np.unique(paths[paths >= 0]).tolist():
        links[link] = zone.create_link(f"link{link}", f"{fabric.capacity[link] * 1e9 / 8:.0f}Bps").set_latency("0s").seal()
    ends = []
    for flow, path in enumerate(paths.tolist()):
        a, b = (zone.create_host(f"{side}{flow}", "1Gf").seal() for side in ("from", "to"))
        route = [simgrid.LinkInRoute(links[link]) for link in path if link >= 0]
        zone.add_route(a.netpoint, b.netpoint, None, None, route, False)
        ends.append((a, b))
    zone.seal()
    gone: list[float] = []

    def send() -> None:
        flows = [simgrid.Comm.sendto_async(a, b, ENDLESS) for a, b in ends]
        simgrid.this_actor.sleep_for(1.0)
        gone.extend(ENDLESS - flow.remaining for flow in flows)
        for flow in flows:
            flow.cancel()

    simgrid.Actor.create("sender", ends[0][0], send)
    engine.run()
    return np.array(gone) * 8 / 1e9


def check(name: str) -> None:
    fabric, traffic, paths = CASES[name]()
    traffic = replace(traffic, weight=np.ones(len(traffic)))
    ours, theirs = flow_rates(fabric, traffic, paths, Tied.FLOW), by_simgrid(fabric, paths)
    print(len(traffic), len(np.unique(ours.round(6))), ours.min(), ours.max(), np.max(np.abs(ours / theirs - 1)), sep="\t")


def main() -> None:
    if len(sys.argv) > 1:
        check(sys.argv[1])
        return
    rows, largest = [], 0.0
    for name in CASES:
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name}: {done.stderr.strip().splitlines()[-1]}")
        flows, rates, low, high, difference = done.stdout.split("\t")
        largest = max(largest, float(difference))
        rows.append((name, flows, rates, f"{float(low):.2f} to {float(high):.2f}", f"{float(difference):.1e}"))
    print("SIMULATED. Rates of flows by the fluid model and by SimGrid, Gb/s")
    print(
        "\n".join(columns(("case", "flows", "rates that differ", "rates", "largest relative difference"), rows, right=(1, 2, 4)))
    )
    sys.exit(largest > MOST)


if __name__ == "__main__":
    main()
