"""Run scenarios and print the scoreboard: ``python -m score [--set ci|full] [--json FILE] [--markdown FILE]`` with ``tests`` on
the path.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from ncclwatch.errors import NcclwatchError
from ncclwatch.simulate.scenario import load_all
from score.baselines import all_baselines
from score.cases import Case
from score.diagnosers import Diagnoser, Ncclwatch
from score.scoring import Result, score_case, summarise, to_json
from score.table import render

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
    options = parser.parse_args(arguments)
    try:
        chosen = load_all(options.scenarios, "ci" if options.set == "ci" else "")
    except NcclwatchError as error:
        print(error, file=sys.stderr)
        return int(error.status)
    chosen = [s for s in chosen if options.only in s.name]
    if not chosen:
        print("no scenario was chosen: look at --set and --only", file=sys.stderr)
        return 1
    diagnosers: list[Diagnoser] = [Ncclwatch(), *([] if options.without_baselines else all_baselines())]
    results: list[Result] = []
    began = time.monotonic()
    for scenario in chosen:
        large = "scale" in scenario.tags
        case_results = score_case(Case(scenario), diagnosers[:1] if large else diagnosers)
        results += case_results
        ours = case_results[0]
        if options.verbose and not ours.right:
            wanted = f"{scenario.expect.score_class} {list(scenario.expect.ranks)}"
            print(f"{scenario.name}: {wanted} | said {ours.said} {ours.named} {ours.summary}")
    lines = {d.name: summarise(results, d) for d in diagnosers}
    print(render(diagnosers, lines))
    print(f"{len(chosen)} scenarios, {time.monotonic() - began:.0f} s")
    if options.json:
        options.json.write_text(json.dumps(to_json(results, lines), indent=1) + "\n", "utf-8")
    if options.markdown:
        options.markdown.write_text(render(diagnosers, lines, markdown=True), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
