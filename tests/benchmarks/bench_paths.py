"""SIMULATED: what planned paths would gain over hashing in C4's experiments, and how good and fast the planner is.

    python tests/benchmarks/bench_paths.py                    # all tables, some minutes
    python tests/benchmarks/bench_paths.py c4 --seeds 20      # only C4's three experiments
    python tests/benchmarks/bench_paths.py proven large       # the planner against bounds; `proven` needs ncclwatch[paths]

The fabric is C4's: 16 hosts, 128 GPUs, a NIC each of 2 x 200 Gb/s bonded, 8 leaves (evaluation). The paper leaves open how many
spines and uplinks there are, the queue pairs of a connection, where jobs are, and the hashes: all are swept. Nothing is fitted to
the quoted gains. There are no packets: queues, congestion notification and protocol overhead are not in the model.

Times are of CPU; the planner's own limits (1 s, 10 s) are of the clock, so that a busy machine gives it less.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ncclwatch.paths import exact, tomography
from ncclwatch.paths.ecmp import Bond, Hashing, paths_by_hash, source_ports
from ncclwatch.paths.fabric import NO_PATHS, Fabric, Floats, Ints, regular
from ncclwatch.paths.fluid import Tied, demands, flow_rates, throughput, worst
from ncclwatch.paths.placing import bound, place
from ncclwatch.paths.planner import Wishes, draws, greedy, plan, replan
from ncclwatch.paths.traffic import Ring, Traffic, rings
from ncclwatch.text import columns

HOSTS, NICS, LEAVES, PORT_GBPS = 16, 8, 8, 200.0
"""Fact: C4, evaluation: 16 nodes, 8 NICs each of 2 x 200 Gb/s, 8 leaves."""
SPINES = (4, 8, 16)
QUEUE_PAIRS = (1, 2, 4, 8)
LOOKS = 120
"""Of a recording of six minutes."""
WISHES = Wishes(floor=0.0, seconds=2.0)


def c4_fabric(spines: int, oversubscription: float) -> Fabric:
    """C4's fabric: 32 ports a leaf; what they carry, over ``oversubscription``, is spread over its uplinks, one to each spine."""
    below = HOSTS * NICS * 2 / LEAVES * PORT_GBPS
    return regular(
        hosts=HOSTS,
        nics=NICS,
        ports=2,
        port_gbps=PORT_GBPS,
        leaves=LEAVES,
        spines=spines,
        links=1,
        uplink_gbps=below / spines / oversubscription,
        rails=False,
    )


@dataclass(frozen=True)
class Experiment:
    name: str
    quoted: str
    jobs: int
    oversubscription: float = 1.0
    dead: bool = False


EXPERIMENTS = (
    Experiment("one AllReduce, 16 hosts, 1:1", "about +50 % (<240 → ~360 Gb/s)", 1),
    Experiment("8 jobs, 1:1", "+70.3 %", 8),
    Experiment("8 jobs, 2:1", "+65.55 %", 8, 2.0),
    Experiment("8 jobs, 1:1, a dead uplink", "+62.3 % (185.76 → 301.46 Gb/s)", 8, 1.0, True),
)


@dataclass(frozen=True)
class Setting:
    """What the paper leaves open."""

    spines: int
    queue_pairs: int
    bond: Bond
    tied: Tied
    seed: int


def settings(seeds: int) -> Iterator[Setting]:
    for values in itertools.product(SPINES, QUEUE_PAIRS, Bond, (Tied.JOB, Tied.RING), range(seeds)):
        yield Setting(*values)


def jobs_of(experiment: Experiment, setting: Setting) -> list[Ring]:
    """Hosts of each job, drawn: the single job's order of hosts; pairs of hosts that are not on the same leaves, as C4's must be
    to load the spines."""
    rng = np.random.default_rng(setting.seed)
    if experiment.jobs == 1:
        return [Ring("all", rng.permutation(HOSTS).tolist(), queue_pairs=setting.queue_pairs)]
    per = HOSTS // (LEAVES // 2)
    while True:
        order = rng.permutation(HOSTS).reshape(-1, 2)
        if (order[:, 0] // per != order[:, 1] // per).all():
            return [Ring(f"job{k}", pair.tolist(), queue_pairs=setting.queue_pairs) for k, pair in enumerate(order)]


def case(experiment: Experiment, setting: Setting) -> tuple[Fabric, Traffic, Ints]:
    """The fabric, the flows, and where hashing sends them."""
    fabric = c4_fabric(setting.spines, experiment.oversubscription)
    if experiment.dead:
        fabric = fabric.with_uplinks([int(np.random.default_rng(setting.seed).integers(fabric.uplinks))])
    traffic = rings(fabric, jobs_of(experiment, setting), NICS, setting.seed)
    return fabric, traffic, paths_by_hash(fabric, traffic, Hashing(setting.seed, setting.bond))


Row = tuple[Setting, Floats]
"""A setting, and of it: Gb/s a NIC hashed and planned, with all paths known, and with 20 % of them wrong."""


def run(experiment: Experiment, seeds: int) -> list[Row]:
    rows: list[Row] = []
    placed: dict[tuple[int, int, int], Ints] = {}
    for setting in settings(seeds):
        fabric, traffic, hashed = case(experiment, setting)
        key = (setting.spines, setting.queue_pairs, setting.seed)
        if key not in placed:
            placed[key] = place(fabric, traffic, demands(fabric, traffic), NO_PATHS, WISHES.seconds)
        before = throughput(fabric, traffic, hashed, setting.tied).mean()
        after = throughput(fabric, traffic, placed[key], setting.tied).mean()
        wrong = draws(fabric, traffic, placed[key], np.full(len(traffic), 0.2), setting.tied, setting.seed).mean()
        rows.append((setting, np.array([before, after, wrong])))
    return rows


def spread(values: Floats, form: str) -> str:
    """Median, and 10th to 90th percentile."""
    low, middle, high = (format(value, form) for value in np.percentile(values, (10, 50, 90)))
    return f"{middle} ({low} to {high})"


def line(name: str, rows: Sequence[Row], quoted: str = "") -> tuple[str, ...]:
    table = np.array([row for _, row in rows])
    gain, wrong = table[:, 1] / table[:, 0] - 1, table[:, 2] / table[:, 0] - 1
    return (
        name,
        str(len(rows)),
        *(spread(table[:, k], ".0f") for k in (0, 1)),
        spread(gain, "+.0%"),
        spread(wrong, "+.0%"),
        quoted,
    )


def c4(seeds: int) -> None:
    heads = ("", "runs", "hashed Gb/s", "planned Gb/s", "gain", "gain, 20 % of paths wrong", "C4 quotes")
    summary, parts = [], []
    for experiment in EXPERIMENTS:
        rows = run(experiment, seeds)
        summary.append(line(experiment.name, rows, experiment.quoted))
        parts.append(line(experiment.name, rows))
        groups: list[tuple[str, Callable[[Setting], object], Sequence[object]]] = [
            ("queue pairs", lambda s: s.queue_pairs, QUEUE_PAIRS),
            ("spines", lambda s: s.spines, SPINES),
            ("bond by", lambda s: s.bond, tuple(Bond)),
            ("rates tied by", lambda s: s.tied, (Tied.JOB, Tied.RING)),
        ]
        for word, of, values in groups:
            parts += [line(f"  {word} {value}", [row for row in rows if of(row[0]) == value]) for value in values]
    print("\nSIMULATED. Gb/s a NIC (of 400), mean over jobs; median of all settings and seeds (10th to 90th percentile)")
    print("\n".join(columns(heads, summary, right=(1,))))
    print("\nSIMULATED. The same by what was swept")
    print("\n".join(columns(heads, parts, right=(1,))))


def of_512_ports(seed: int) -> Iterator[tuple[str, Fabric, Traffic, Ints]]:
    """Fabrics of 256 NICs with 512 ports: name, fabric, flows, where those that may not be moved are."""
    rng = np.random.default_rng(seed)
    for name, spines, queue_pairs, dead, fixed, gbps in (
        ("sound", 8, 2, 0, 0.0, 800.0),
        ("one queue pair", 16, 1, 0, 0.0, 400.0),
        ("6 spines", 6, 2, 0, 0.0, 1066.0),
        ("a dead uplink", 8, 2, 1, 0.0, 800.0),
        ("4 dead uplinks", 8, 4, 4, 0.0, 800.0),
        ("2:1, a dead uplink", 8, 4, 1, 0.0, 400.0),
        ("a tenth may not move", 8, 4, 1, 0.1, 800.0),
        ("jobs differ", 8, 0, 0, 0.0, 800.0),
        ("jobs differ, 3 dead uplinks", 8, 0, 3, 0.0, 800.0),
    ):
        fabric = regular(
            hosts=32, nics=8, ports=2, port_gbps=200, leaves=16, spines=spines, links=1, uplink_gbps=gbps, rails=False
        )
        fabric = fabric.with_uplinks(rng.choice(fabric.uplinks, dead, replace=False).tolist())
        hosts = rng.permutation(32).tolist()
        jobs = [
            Ring(f"job{first}", hosts[first : first + size], queue_pairs=queue_pairs or differs)
            for first, size, differs in ((0, 2, 8), (2, 2, 3), (4, 4, 4), (8, 8, 2), (16, 16, 5))
        ]
        traffic = rings(fabric, jobs, 8, seed)
        traffic = replace(traffic, movable=rng.random(len(traffic)) >= fixed)
        yield name, fabric, traffic, paths_by_hash(fabric, traffic, Hashing(seed))


def proven(seed: int, seconds: float) -> None:
    rows = []
    for name, fabric, traffic, now in of_512_ports(seed):
        demand = demands(fabric, traffic)
        began = time.process_time()
        paths = place(fabric, traffic, demand, now, 1.0)
        took = time.process_time() - began
        solved = exact.solve(fabric, traffic, demand, now, None, seconds) if exact.available() else None
        least = solved.bound if solved else float("nan")
        ours = worst(fabric, paths, demand)
        one_by_one = worst(fabric, greedy(fabric, traffic, demand), demand) if traffic.movable.all() else float("nan")
        rows.append(
            (
                name,
                str(len(traffic)),
                *(f"{value:.4f}" for value in (worst(fabric, now, demand), one_by_one, ours, least)),
                f"{least / ours:.1%}",
                "optimal" if solved and solved.proven else "time was up",
                f"{took:.2f}",
            )
        )
    print("\nSIMULATED. 512 ports: largest load over capacity of a link, and CP-SAT's proven bound for the same flows, unsplit")
    heads = ("case", "flows", "hashed", "greedy alone", "planned", "bound", "bound / planned", "CP-SAT", "CPU s of the plan")
    print("\n".join(columns(heads, rows, right=range(1, 9))))


def large(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hosts = 1536
    rows = []
    for name, dead in (("sound", 0), ("12 dead uplinks", 12)):
        fabric = regular(
            hosts=hosts, nics=8, ports=2, port_gbps=200, leaves=192, spines=64, links=1, uplink_gbps=400, rails=False
        ).with_uplinks(rng.choice(192 * 64, dead, replace=False).tolist())
        order, jobs, first = rng.permutation(hosts).tolist(), [], 0
        while hosts - first >= 2:
            size = min(int(rng.choice([2, 4, 8, 16, 32, 64])), hosts - first)
            jobs.append(Ring(f"job{first}", order[first : first + size], channels=2, queue_pairs=4))
            first += size
        traffic = rings(fabric, jobs, 8, seed)
        demand = demands(fabric, traffic)
        now = paths_by_hash(fabric, traffic, Hashing(seed))
        began = time.process_time()
        paths = place(fabric, traffic, demand, NO_PATHS, 10.0)
        took = time.process_time() - began
        began = time.process_time()
        flow_rates(fabric, traffic, now, Tied.FLOW)
        fluid = time.process_time() - began
        least, ours = bound(fabric, traffic, demand), worst(fabric, paths, demand)
        part = traffic.part(np.arange(200))
        found = (source_ports(fabric, part, paths[:200], Hashing(seed), 4096) >= 0).mean()
        rates = [throughput(fabric, traffic, each, Tied.JOB).mean() for each in (now, paths)]
        rows.append(
            (
                name,
                f"{len(traffic):,}",
                f"{worst(fabric, now, demand):.3f}",
                f"{ours:.4f}",
                f"{least:.4f}",
                f"{least / ours:.1%}",
                f"{took:.1f}",
                f"{fluid:.1f}",
                f"{rates[0]:.0f} → {rates[1]:.0f}",
                f"{found:.0%}",
            )
        )
    print("\nSIMULATED. 24,576 ports, 192 leaves, 64 spines: largest load over capacity, and its bound by cuts (NICs, leaves)")
    heads = (
        "case",
        "flows",
        "hashed",
        "planned",
        "bound",
        "bound / planned",
        "CPU s of the plan",
        "of the rates",
        "Gb/s a NIC",
        "with a port",
    )
    print("\n".join(columns(heads, rows, right=range(1, 10))))


def changes(seeds: int) -> None:
    """What an incremental plan moves."""
    rows = []
    for name in ("a link dies", "a job starts"):
        moved, needed, load, fresh, took = [], [], [], [], []
        for seed in range(seeds):
            setting = Setting(8, 4, Bond.HASH, Tied.JOB, seed)
            fabric, traffic, hashed = case(EXPERIMENTS[1], setting)
            zero = np.zeros(len(traffic))
            now = plan(fabric, traffic, hashed, zero, WISHES).paths.copy()
            if name == "a link dies":
                fabric = fabric.with_uplinks([seed % fabric.uplinks])
            else:
                now[traffic.job == 0] = -1
            needed.append((~fabric.is_path(now)).sum())
            began = time.process_time()
            again = replan(fabric, traffic, now, zero, WISHES)
            took.append(time.process_time() - began)
            moved.append(len(again.moved))
            load.append(again.load_after)
            demand = demands(fabric, traffic)
            fresh.append(worst(fabric, place(fabric, traffic, demand, NO_PATHS, 2.0), demand))
        rows.append(
            (
                name,
                str(len(traffic)),
                spread(np.array(needed), ".0f"),
                spread(np.array(moved), ".0f"),
                spread(np.array(load), ".3f"),
                spread(np.array(fresh), ".3f"),
                f"{max(took):.2f}",
            )
        )
    print("\nSIMULATED. Incremental plans, C4's fabric, 8 jobs, 8 spines, 4 queue pairs; load over capacity after")
    heads = ("change", "flows", "without a path", "moved", "load, incremental", "load, planned afresh", "CPU s at most")
    print("\n".join(columns(heads, rows, right=(1,))))


def rates_over_time(seed: int, noise: float) -> tuple[Floats, Ints]:
    """(looks, flows) rates of 16 jobs of two hosts over four spines of two leaves, each in spells of sending and rest, and the
    uplink of each flow. Two of three jobs rest now and then; hashing places the flows."""
    rng = np.random.default_rng(seed)
    fabric = regular(hosts=32, nics=1, ports=1, port_gbps=100, leaves=2, spines=4, links=1, uplink_gbps=100, rails=False)
    traffic = rings(fabric, [Ring(f"job{k}", [k, 16 + k]) for k in range(16)], 1, seed)
    paths = paths_by_hash(fabric, traffic, Hashing(seed))
    on = np.stack([np.repeat(rng.random(LOOKS) < 0.5, rng.integers(3, 9, LOOKS))[:LOOKS] for _ in range(16)], axis=1)
    on[:, ::3] = True
    rates = np.zeros((LOOKS, len(traffic)))
    for look in range(LOOKS):
        active = np.flatnonzero(on[look, traffic.job])
        rates[look, active] = flow_rates(fabric, traffic.part(active), paths[active], Tied.FLOW)
    return rates * rng.normal(1, noise, rates.shape), paths[:, 1]


def together(seeds: int) -> None:
    """Flows that share an uplink, found by their rates alone."""
    rows = []
    for noise in (0.02, 0.05, 0.1):
        right, told, there = 0, 0, 0
        for seed in range(seeds):
            rates, uplink = rates_over_time(seed, noise)
            pairs = {pair for group in tomography.shared(rates) for pair in itertools.combinations(group.flows, 2)}
            told += len(pairs)
            right += sum(uplink[a] == uplink[b] for a, b in pairs)
            there += sum(uplink[a] == uplink[b] for a, b in itertools.combinations(range(len(uplink)), 2))
        rows.append((f"{noise:.0%}", str(there), str(told), f"{right / max(told, 1):.1%}", f"{right / there:.1%}"))
    print(f"\nSIMULATED. Flows that share an uplink, by rates alone: 32 flows, 4 spines, {LOOKS} looks, {seeds} seeds")
    heads = ("noise of rates", "pairs that share", "pairs told", "of these share", "of those found")
    print("\n".join(columns(heads, rows, right=range(5))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", metavar="c4|proven|large|changes|shared")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=240.0, help="for CP-SAT, each case")
    args = parser.parse_args()
    tables: dict[str, Callable[[], None]] = {
        "c4": lambda: c4(args.seeds),
        "proven": lambda: proven(1, args.seconds),
        "large": lambda: large(1),
        "changes": lambda: changes(args.seeds),
        "shared": lambda: together(args.seeds),
    }
    if unknown := set(args.tables) - set(tables):
        sys.exit(f"no such table: {', '.join(sorted(unknown))}; there are {', '.join(tables)}")
    for name in args.tables or tables:
        tables[name]()


if __name__ == "__main__":
    main()
