"""Slow jobs of real NCCL over InfiniBand verbs, judged live: the guest's part of the slow scenarios.

``python -m vm.slow`` boots the guest, plays the quick slow scenarios (and a healthy job) in it, watched by the collector from
before the first communicator, and judges the recordings on this machine. With ``--inside FOLDER`` (used by itself) it plays in
this machine, which has to be the guest.

Four ranks on two ports: the rank that the fault strikes is alone on port ``b``. The scenarios' own times are stretched and their
messages shrunk, so that iterations are made of what they wait for and not of emulation; what is expected stays what it is.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ncclwatch.errors import NcclwatchError
from ncclwatch.probes.image_cache import cache_folder
from ncclwatch.probes.program import Compilation
from ncclwatch.simulate.scenario import Fault, FaultKind, Scenario, load_all
from ncclwatch.simulate.testbed import TestbedPlan, plan
from score.__main__ import SCENARIOS
from score.matrix import score_again, tell_progress
from score.real import Attach, Outcome, Run, Transport, as_played, record, vary
from testbed.job import ROOT, JobError
from vm.errors import GuestError
from vm.fabric import Fabric, TwoSides, command
from vm.guest import Guest
from vm.initramfs import SHARE

TAG = "quick-slow"
CLEAN = "quick-clean"
SLOWER = 4.0
"""By which the scenarios' own times are stretched: the emulated machine takes about a tenth of a second for what costs a real one
milliseconds."""
LARGER_SHARE = 8.0
LATEST = 20
"""Iterations before the fault at most."""
ACTIVATIONS, GRADIENTS = 1 << 14, 1 << 17
"""Bytes of a message; the emulated adapter moves about a megabyte a second."""
RATE = 2e6
"""Bytes a second that stand for a healthy link: a fault's share of it is what an end of the cable sends."""
PRIORITY = 15
AFTER_S = 30.0
"""A slow job is watched half as long again: ten slow iterations."""
IN_SECONDS = frozenset({FaultKind.SLOW_LOADER, FaultKind.GC_PAUSE, FaultKind.PROXY_SLEEP, FaultKind.SLOW_COPY})
"""Faults whose strength is a time."""


def scenarios() -> dict[str, Scenario]:
    """What is played by name: every quick slow scenario between hosts, and a healthy job of their shape."""
    known = {scenario.name: scenario for scenario in load_all(SCENARIOS)}
    return {
        name: scenario
        for name, scenario in known.items()
        if name == CLEAN or (TAG in scenario.tags and scenario.network.intra_node == "net")
    }


def stretched(scenario: Scenario) -> Scenario:
    """The scenario as the emulated machine plays it."""
    work = scenario.workload
    sized = replace(
        work,
        forward_ms=work.forward_ms * SLOWER,
        backward_ms=work.backward_ms * SLOWER,
        optimizer_ms=work.optimizer_ms * SLOWER,
        loader_ms=work.loader_ms * SLOWER,
        tp_bytes=ACTIVATIONS,
        pp_bytes=ACTIVATIONS,
        cp_bytes=ACTIVATIONS,
        dp_bytes=GRADIENTS,
    )
    return replace(scenario, workload=sized, faults=tuple(_stretched(fault) for fault in scenario.faults))


def _stretched(fault: Fault) -> Fault:
    strength = fault.strength * SLOWER if fault.kind in IN_SECONDS else fault.strength
    iteration = None if fault.iteration is None else min(fault.iteration, LATEST)
    start_s = None if fault.start_s is None else fault.start_s * SLOWER
    return replace(fault, strength=strength, period_s=fault.period_s * SLOWER, iteration=iteration, start_s=start_s)


def play(fabric: Fabric, scenario: Scenario, nccl: str, seed: int, number: int, folder: Path) -> Outcome:
    """Play one try in the guest, and leave its recording in a folder. What went wrong is in the outcome's note."""
    run = Run(scenario, nccl, Transport.VERBS, (Attach.LIVE,), seed, number, AFTER_S, str(folder))
    outcome = Outcome(run)
    played = stretched(as_played(vary(scenario, seed, number), nccl, Transport.VERBS))
    struck = [fault.rank for fault in played.faults]
    try:
        network = TwoSides(fabric, alone=struck[0] if struck else 1, rate=RATE, nice=PRIORITY)
        record(run, played, _planned(played), outcome, network)
    except (JobError, NcclwatchError, OSError, RuntimeError) as error:
        outcome.note = f"not played: {error}"
    finally:
        fabric.unlimited()
    return outcome


def _planned(scenario: Scenario) -> TestbedPlan:
    """The plan, with larger shares of a processor that calculates so much more slowly."""
    made = plan(scenario, links=True)
    limited = [
        replace(action, share=action.share * LARGER_SHARE) if action.what == "limit" else action for action in made.actions
    ]
    return replace(made, actions=tuple(limited))


def inside(names: Sequence[str], nccl: str, tries: range, seed: int, folder: Path) -> int:
    """Play everything, one try of each after another; exit status 0 when all of it could be played."""
    os.nice(-PRIORITY)  # the collector would get no processor beside ranks that poll
    command("mount -t cgroup2 none /sys/fs/cgroup")
    fabric = Fabric.create()
    missing, known = 0, scenarios()
    for number in tries:
        for name in names:
            outcome = play(fabric, known[name], nccl, seed, number, folder)
            missing += bool(outcome.note)
            print(f"played {name} try {number}: {outcome.pace} {outcome.note}", flush=True)
    return 1 if missing else 0


def recordings(names: Sequence[str], nccl: str, tries: range, seed: int, folder: Path, timeout: float) -> int:
    """Boot the guest, play in it, and bring its recordings to a folder; its exit status. Raises GuestError."""
    Compilation().result()  # emulated, clang takes ten times as long: the guest finds it in this machine's cache
    words = [sys.executable, "-m", "vm.slow", "--inside", SHARE, "--nccl", nccl, "--seed", str(seed)]
    words += ["--first-try", str(tries.start), "--tries", str(len(tries))]
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}", "XDG_CACHE_HOME": str(cache_folder().parent.parent)}
    words += ["--scenarios", *names]
    tell = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    with Guest(words, cwd=ROOT, environment=environment, on_line=tell) as guest:
        try:
            return guest.wait(timeout)
        finally:
            for path in sorted([*guest.share.glob("*.ncclwatch"), *guest.share.glob("*.json")]):
                shutil.copy(path, folder / path.name)


def main() -> int:
    """Exit status 0 when everything was played and judged right."""
    known = scenarios()
    parser = argparse.ArgumentParser(prog="vm.slow", description="Slow jobs over InfiniBand verbs, in the guest.")
    parser.add_argument("--inside", type=Path, metavar="FOLDER", help="this machine is the guest; recordings go there")
    parser.add_argument("--scenarios", nargs="*", default=list(known), choices=list(known))
    parser.add_argument("--nccl", default="2.27.5")
    parser.add_argument("--tries", type=int, default=1)
    parser.add_argument("--first-try", type=int, default=0, help="number of the first of them: many tries can be made in parts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=7200.0, help="seconds, boot included")
    parser.add_argument("--save", type=Path, default=Path("build/guest-slow"), help="folder for the recordings")
    options = parser.parse_args()
    tries = range(options.first_try, options.first_try + options.tries)
    if options.inside:
        return inside(options.scenarios, options.nccl, tries, options.seed, options.inside)
    options.save.mkdir(parents=True, exist_ok=True)
    try:
        status = recordings(options.scenarios, options.nccl, tries, options.seed, options.save, options.timeout)
    except GuestError as error:
        print(f"vm.slow: {error}", file=sys.stderr)
        status = 1
    chosen = [known[name] for name in options.scenarios]
    outcomes = score_again(options.save, chosen, with_baselines=False, tell=tell_progress)
    return 0 if status == 0 and all(result.right for outcome in outcomes for result in outcome.results) else 1


if __name__ == "__main__":
    sys.exit(main())
