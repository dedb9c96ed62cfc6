"""Judge simulated jobs by answers of RAS alone: ``python -m score.ras [--set ci|full] [--only NAME]`` with ``tests`` on the path.

Each hang is asked twice, ``ASKED_S`` after it shows, each healthy job twice in its middle. SIMULATED: the jobs and the answers.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from ncclwatch.cli.foreign import judge_ingested
from ncclwatch.ingest.ras import Ras
from ncclwatch.model.verdict import Verdict
from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.ras_answers import ras_answer
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import Scenario, ScoreClass, load_all
from score.cases import effect
from score.diagnosers import HANG_CLASSES
from score.scoring import judge

SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
ASKED_S = (10.0, 26.0)
"""After a hang shows; and how far apart a healthy job is asked, from its middle on."""


def main() -> int:
    """Print a line a scenario and the table."""
    parser = argparse.ArgumentParser(prog="score.ras", description="Judge simulated jobs by answers of RAS alone.")
    parser.add_argument("--set", choices=("ci", "full"), default="ci")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    chosen = [one for one in load_all(SCENARIOS, "ci" if options.set == "ci" else "") if options.only in one.name]
    chosen = [one for one in chosen if one.expect.score_class in HANG_CLASSES | {ScoreClass.CLEAN} and "scale" not in one.tags]
    table: dict[str, Counter[str]] = {}
    for scenario in chosen:
        verdict, outcome = score(scenario)
        table.setdefault(scenario.expect.score_class, Counter())[outcome] += 1
        named = sorted(culprit.rank if culprit.rank is not None else -1 for culprit in verdict.culprits)[:8]
        print(f"{scenario.name}: {outcome}: {verdict.verdict_class} {named} (wanted {list(scenario.expect.ranks)})", flush=True)
    print("\nSIMULATED jobs, by two SIMULATED answers of RAS each\n")
    print("| class | right | right rank, other class | nobody named | wrong |\n| --- | --- | --- | --- | --- |")
    for name, counts in sorted(table.items()):
        print(f"| {name} | " + " | ".join(str(counts[key]) for key in ("right", "rank", "nobody", "wrong")) + " |")
    return 0


def score(scenario: Scenario) -> tuple[Verdict, str]:
    """What is said of a scenario, and whether it is ``right``, names the right ``rank``, ``nobody``, or is ``wrong``."""
    timeline = simulate(scenario)
    began = effect(timeline)
    if scenario.expect.score_class is ScoreClass.CLEAN:
        began = (began + timeline.end) / 2 - ASKED_S[0]
    with TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(len(ASKED_S))]
        last = timeline.end if not timeline.hung else float("inf")
        for file, after in zip(files, ASKED_S, strict=True):
            file.write_text(ras_answer(timeline, min(began + after, last)), "utf-8")
        [job] = Ras().read(files)
    verdict = judge_ingested(job)[0]
    told = judge(scenario, Cast(scenario), verdict)
    if scenario.expect.score_class is ScoreClass.CLEAN:
        return verdict, "wrong" if verdict.verdict_class.accuses else "right"
    if not verdict.verdict_class.accuses:
        return verdict, "nobody"
    if told.right_rank is False:
        return verdict, "wrong"
    return verdict, "right" if told.right_class else "rank"


if __name__ == "__main__":
    sys.exit(main())
