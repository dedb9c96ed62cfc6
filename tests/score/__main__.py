"""Run scenarios and print the scoreboard: ``python -m score [--set ci|full] [--json FILE] [--markdown FILE]`` with ``tests`` on
the path. With ``--real``, as root, real NCCL plays them on the CPU testbed (``--nccl``, ``--transport``, ``--attach``,
``--tries``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from ncclwatch.errors import NcclwatchError
from ncclwatch.simulate.scenario import Scenario, ScoreClass, load_all
from score import bounds, matrix
from score.baselines import all_baselines
from score.diagnosers import HANG_CLASSES, Diagnoser, Ncclwatch
from score.drawn import draw
from score.real import Attach, Outcome, Transport
from score.scoring import Result, summarise, to_json
from score.simulated import score_all
from score.table import render
from testbed.adapters import stand_there

KINDS = {"hangs": HANG_CLASSES, "healthy": frozenset({ScoreClass.CLEAN})}
SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when the table was made, 1 when no scenario was chosen, the error's own for a bad file."""
    parser = argparse.ArgumentParser(prog="score", description="Score diagnosers on simulated scenarios.")
    parser.add_argument("--set", choices=("ci", "full"), default="ci", help="ci: the fixed set; full: everything")
    parser.add_argument("--only", default="", help="only scenarios whose name contains this")
    parser.add_argument("--scenarios", type=Path, default=SCENARIOS)
    parser.add_argument("--json", type=Path, help="write all results here")
    parser.add_argument("--markdown", type=Path, help="write the tables here as Markdown")
    parser.add_argument("--verbose", action="store_true", help="print what ours said of each case that it got wrong")
    parser.add_argument("--without-baselines", action="store_true")
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="instead of files, N scenarios drawn from --seed")
    parser.add_argument("--slow", action="store_true", help="with --drawn: slow jobs only, of more kinds")
    parser.add_argument(
        "--shift", type=int, default=0, metavar="N", help="look at other moments: the looks' schedule from its Nth on"
    )
    parser.add_argument("--jobs", type=int, default=0, help="scenarios at a time; default: as many as cores, of real runs one")
    real = parser.add_argument_group("real runs")
    real.add_argument("--real", action="store_true", help="play the scenarios with real NCCL on the CPU testbed (root)")
    real.add_argument("--nccl", default="", help="releases, with commas between; each scenario's own if not given")
    real.add_argument("--in-turn", action="store_true", help="play each scenario in one of the releases, by turns, not in all")
    real.add_argument("--largest", type=int, default=0, metavar="RANKS", help="only jobs of so many ranks at most")
    real.add_argument("--kind", choices=("hangs", "healthy"), help="with --drawn: only those")
    real.add_argument("--unjudged", action="store_true", help="only record, into --save, what is not there yet: --again judges")
    real.add_argument(
        "--transport", default="", help="of socket, shm, p2p and verbs, with commas between; each scenario's own if not given"
    )
    real.add_argument("--attach", choices=("live", "post-hang", "both"), default="both")
    real.add_argument("--tries", type=int, default=1, help="runs of each, at moments drawn from the seed")
    real.add_argument("--first-try", type=int, default=0, help="number of the first of them: many tries can be made in parts")
    real.add_argument("--seed", type=int, default=1)
    real.add_argument("--after", type=float, default=16.0, help="seconds for which a hang is watched")
    real.add_argument("--save", type=Path, help="folder for what was recorded of each run")
    real.add_argument(
        "--again", type=Path, help="play nothing: score what --save recorded in this folder as the engine judges now"
    )
    options = parser.parse_args(arguments)
    try:
        tag = ("quick" if options.real else "ci") if options.set == "ci" else ""
        drawn = [draw(options.seed, number, slow=options.slow) for number in range(options.drawn)]
        chosen = drawn or load_all(options.scenarios, tag)
    except NcclwatchError as error:
        print(error, file=sys.stderr)
        return int(error.status)
    # The quick ones are small enough for CI to play for real; their larger likes are what is simulated.
    chosen = [s for s in chosen if options.only in s.name and (options.real or options.only or "quick" not in s.tags)]
    chosen = [s for s in chosen if not options.largest or s.layout.world <= options.largest]
    chosen = [s for s in chosen if options.kind is None or s.expect.score_class in KINDS[options.kind]]
    if not chosen:
        print("no scenario was chosen: look at --set and --only", file=sys.stderr)
        return 1
    if options.real:
        return play_for_real(options, chosen)
    diagnosers: list[Diagnoser] = [Ncclwatch(), *([] if options.without_baselines else all_baselines())]
    results: list[Result] = []
    began = time.monotonic()
    scored = score_all(chosen, jobs=options.jobs, with_baselines=not options.without_baselines, shift=options.shift)
    for scenario, case_results in zip(chosen, scored, strict=True):
        results += case_results
        ours = case_results[0]
        if options.verbose and not ours.right:
            wanted = f"{scenario.expect.score_class} {list(scenario.expect.ranks)}"
            print(f"{scenario.name}: {wanted} | said {ours.said} {ours.named} {ours.summary}")
    lines = {d.name: summarise(results, d) for d in diagnosers}
    print(render(diagnosers, lines))
    print(bounds.table(results, markdown=False))
    print(f"{len(chosen)} scenarios, {time.monotonic() - began:.0f} s")
    if options.json:
        data = to_json(results, lines) | {"bounds": bounds.as_json(results)}
        options.json.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    if options.markdown:
        text = render(diagnosers, lines, markdown=True) + "\n" + bounds.table(results, markdown=True)
        options.markdown.write_text(text, "utf-8")
    return 0


def play_for_real(options: argparse.Namespace, chosen: list[Scenario]) -> int:
    """The matrix of real runs. Exit status 0 when every run was played, 1 when one was not."""
    if os.geteuid() != 0 and not options.again:
        print("real runs need root: memory of other processes is read, and probes are attached", file=sys.stderr)
        return 1
    if options.unjudged and not options.save:
        print("--unjudged without --save would leave nothing", file=sys.stderr)
        return 1
    diagnosers: list[Diagnoser] = [Ncclwatch(), *([] if options.without_baselines else all_baselines())]
    began = time.monotonic()
    if options.again:
        outcomes = matrix.score_again(
            options.again,
            chosen,
            jobs=options.jobs or 1,
            with_baselines=not options.without_baselines,
            tell=matrix.tell_progress,
        )
        return _tell(options, outcomes, {}, diagnosers)
    if options.save:
        options.save.mkdir(parents=True, exist_ok=True)
    attaches = tuple(Attach) if options.attach == "both" else (Attach(options.attach),)
    transports = [Transport(t) for t in options.transport.split(",") if t]
    if Transport.VERBS in transports:
        stand_there()
    runs, left_out = matrix.choose(
        chosen,
        versions=[v for v in options.nccl.split(",") if v],
        transports=transports,
        attaches=attaches,
        tries=options.tries,
        first_try=options.first_try,
        seed=options.seed,
        after_s=options.after,
        save_to=str(options.save.resolve()) if options.save else "",
        in_turn=options.in_turn,
        judged=not options.unjudged,
    )
    if options.unjudged:
        runs = [run for run in runs if not run.recorded]
    outcomes = matrix.run_all(
        runs, jobs=options.jobs or 1, with_baselines=not options.without_baselines, tell=matrix.tell_progress
    )
    print(f"{len(runs)} runs, {time.monotonic() - began:.0f} s, seed {options.seed}")
    if options.unjudged:
        return 0
    return _tell(options, outcomes, left_out, diagnosers)


def _tell(
    options: argparse.Namespace, outcomes: list[Outcome], left_out: matrix.NotPlayed, diagnosers: list[Diagnoser]
) -> int:  # fmt: skip
    print(matrix.report(outcomes, left_out, diagnosers))
    if options.json:
        options.json.write_text(json.dumps(matrix.as_json(outcomes, left_out, diagnosers), indent=1) + "\n", "utf-8")
    if options.markdown:
        options.markdown.write_text(matrix.report(outcomes, left_out, diagnosers, markdown=True), "utf-8")
    return 0 if all(o.results for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
