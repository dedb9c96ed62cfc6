"""SIMULATED in packets: rates of flows by ns-3 beside those of the fluid model, for one small fabric, hashed and planned.

    apt-get install g++ libns3-dev           # ns-3 3.37 in Debian 12; not needed for anything else
    python tests/benchmarks/check_packets.py [SECONDS]

4 hosts, 2 bonded ports each, 4 leaves, 2 spines; Gb/s of the model are Mb/s of the packets. TCP with fair queues stands for
congestion control: what is compared is who shares which link, and how. Headers take 4 % of every link (1448 of 1502 bytes are
counted), so the rates of packets are divided by that; what is left of the difference is the control loop's.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from ncclwatch.paths.ecmp import Hashing, paths_by_hash
from ncclwatch.paths.fabric import NO_PATHS, Fabric, Floats, Ints, regular
from ncclwatch.paths.fluid import Tied, demands, flow_rates
from ncclwatch.paths.placing import place
from ncclwatch.paths.traffic import Ring, rings
from ncclwatch.text import columns

SOURCE = Path(__file__).with_name("fabric_packets.cc")
MODULES = ("core", "network", "internet", "point-to-point", "applications", "traffic-control")
SECONDS = 3.0
"""Unit: seconds of simulated time that are counted. Chosen: some hundred windows of TCP."""
PAYLOAD = 1448 / 1502
"""Fact: bytes of a segment that are counted, of those on the wire: TCP with time stamps, IPv4 and PPP headers (52 + 2)."""


def compiled(folder: Path) -> Path:
    program = folder / "packets"
    libraries = [f"-lns3-{module}" for module in MODULES]
    done = subprocess.run(
        ["g++", "-O1", "-std=c++17", "-Wl,--allow-shlib-undefined", "-o", str(program), str(SOURCE), *libraries],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{SOURCE.name} cannot be compiled; is libns3-dev installed?\n{done.stderr[-400:]}")
    return program


def by_packets(program: Path, fabric: Fabric, paths: Ints, seconds: float) -> Floats:
    """(F): Mb/s of each flow, headers included."""
    nics, leaves = len(fabric.nics), len(fabric.leaves)
    at_port = [(int(fabric.port_nic[port]), nics + int(fabric.port_leaf[port])) for port in range(fabric.ports)]
    at_uplink = [
        (nics + int(leaf), nics + leaves + int(spine))
        for leaf, spine in zip(fabric.uplink_leaf, fabric.uplink_spine, strict=True)
    ]
    ends = [*at_port, *((b, a) for a, b in at_port), *at_uplink, *((b, a) for a, b in at_uplink)]
    lines = [f"{nics + leaves + len(fabric.spines)} {len(ends)} {len(paths)}"]
    lines += [f"{a} {b} {mbps}" for (a, b), mbps in zip(ends, fabric.capacity, strict=True)]
    ways = [[link for link in path if link >= 0] for path in paths.tolist()]
    lines += [" ".join(map(str, (len(way), *way))) for way in ways]
    run = [str(program), str(seconds)]
    done = subprocess.run(run, input="\n".join(lines) + "\n", capture_output=True, text=True, check=True)
    return np.array(done.stdout.split(), np.float64) * 8 / 1e6 / PAYLOAD


def main() -> None:
    fabric = regular(hosts=4, nics=1, ports=2, port_gbps=20, leaves=4, spines=2, links=1, uplink_gbps=20, rails=False)
    fabric = fabric.with_uplinks([3], 10.0)
    jobs = [Ring("a", [0, 2], queue_pairs=4), Ring("b", [1, 3], queue_pairs=2)]
    traffic = rings(fabric, jobs, 1, 4)
    placings = {
        "hashed": paths_by_hash(fabric, traffic, Hashing(4)),
        "planned": place(fabric, traffic, demands(fabric, traffic), NO_PATHS, 2.0),
    }
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    rows, largest = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        program = compiled(Path(folder))
        for name, paths in placings.items():
            fluid, packets = flow_rates(fabric, traffic, paths, Tied.FLOW), by_packets(program, fabric, paths, seconds)
            for flow, (ours, theirs) in enumerate(zip(fluid, packets, strict=True)):
                job = traffic.jobs[int(traffic.job[flow])]
                rows.append((name, job, str(flow), f"{ours:.2f}", f"{theirs:.2f}", f"{theirs / ours - 1:+.1%}"))
            largest = max(largest, float(np.abs(packets / fluid - 1).max()))
    print("SIMULATED. Rates of flows by the fluid model and in packets by ns-3, Mb/s; a degraded uplink of half the rate")
    print("\n".join(columns(("paths", "job", "flow", "fluid", "packets", "difference"), rows, right=(2, 3, 4, 5))))
    print(f"largest relative difference: {largest:.1%}, over {seconds:g} s")


if __name__ == "__main__":
    main()
