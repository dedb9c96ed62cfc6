"""Judge simulated jobs by what another tool says of them alone: ``python -m score.foreign [--source ras|nccl-log] [--set ci|full]
[--only NAME]`` with ``tests`` on the path.

Each hang is looked at ``ASKED_S`` after it shows, each healthy job in its middle; RAS is asked twice, logs are those of the later
moment (a healthy job's at its end: ranks that run differ by a call). SIMULATED: the jobs, the answers, the logs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from ncclwatch.cli.foreign import judge_ingested
from ncclwatch.ingest.base import Ingested
from ncclwatch.ingest.nccl_log import NcclLog
from ncclwatch.ingest.ras import Ras
from ncclwatch.model.verdict import Verdict
from ncclwatch.simulate.nccl_logs import nccl_logs
from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.ras_answers import ras_answer
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import Scenario, ScoreClass, load_all
from ncclwatch.simulate.timeline import Timeline
from score.cases import effect
from score.diagnosers import HANG_CLASSES
from score.scoring import judge

SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
ASKED_S = (10.0, 26.0)
"""After a hang shows; and how far apart a healthy job is asked, from its middle on."""


Source = Callable[[Timeline, Path], Ingested]


def by_ras(timeline: Timeline, folder: Path) -> Ingested:
    """Two answers."""
    began = effect(timeline)
    if timeline.scenario.expect.score_class is ScoreClass.CLEAN:
        began = (began + timeline.end) / 2 - ASKED_S[0]
    last = timeline.end if not timeline.hung else float("inf")
    files = [folder / f"{number}.json" for number in range(len(ASKED_S))]
    for file, after in zip(files, ASKED_S, strict=True):
        file.write_text(ras_answer(timeline, min(began + after, last)), "utf-8")
    [job] = Ras().read(files)
    return job


def by_logs(timeline: Timeline, folder: Path) -> Ingested:
    """A log a rank."""
    at_s = effect(timeline) + ASKED_S[-1] if timeline.hung else timeline.end
    files = []
    for rank, log in nccl_logs(timeline, at_s).items():
        files.append(folder / f"{rank}.log")
        files[-1].write_text(log, "utf-8")
    [job] = NcclLog().read(files)
    return job


SOURCES: dict[str, Source] = {"ras": by_ras, "nccl-log": by_logs}


def main() -> int:
    """Print a line a scenario and the table."""
    parser = argparse.ArgumentParser(prog="score.foreign", description="Judge simulated jobs by what another tool says of them.")
    parser.add_argument("--source", choices=sorted(SOURCES), default="ras")
    parser.add_argument("--set", choices=("ci", "full"), default="ci")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    chosen = [one for one in load_all(SCENARIOS, "ci" if options.set == "ci" else "") if options.only in one.name]
    chosen = [one for one in chosen if one.expect.score_class in HANG_CLASSES | {ScoreClass.CLEAN} and "scale" not in one.tags]
    table: dict[str, Counter[str]] = {}
    for scenario in chosen:
        verdict, outcome = score(scenario, SOURCES[options.source])
        table.setdefault(scenario.expect.score_class, Counter())[outcome] += 1
        named = sorted(culprit.rank if culprit.rank is not None else -1 for culprit in verdict.culprits)[:8]
        print(f"{scenario.name}: {outcome}: {verdict.verdict_class} {named} (wanted {list(scenario.expect.ranks)})", flush=True)
    print(f"\nSIMULATED jobs, by SIMULATED records of {options.source} alone\n")
    print("| class | right | right rank, other class | nobody named | wrong |\n| --- | --- | --- | --- | --- |")
    for name, counts in sorted(table.items()):
        print(f"| {name} | " + " | ".join(str(counts[key]) for key in ("right", "rank", "nobody", "wrong")) + " |")
    return 0


def score(scenario: Scenario, source: Source) -> tuple[Verdict, str]:
    """What is said of a scenario, and whether it is ``right``, names the right ``rank``, ``nobody``, or is ``wrong``."""
    timeline = simulate(scenario)
    with TemporaryDirectory() as folder:
        job = source(timeline, Path(folder))
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
