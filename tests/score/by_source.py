"""Scenarios judged from other tools' records alone, SIMULATED: ``python -m score.by_source [--set ci|full] [--markdown FILE]``.

Each job is simulated, written as the tool would have written it, and judged from these files. Flight Recorder dumps, RAS and
debug logs tell hangs only, and must not accuse anybody of a slow job; rank logs are to name who is slow. Traces of GPUs and the
Inspector tell who is slow, and no hangs.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ncclwatch.cli.foreign import judge_found
from ncclwatch.errors import NcclwatchError
from ncclwatch.ingest.folders import find
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.simulate.dcgm_text import write_dcgm
from ncclwatch.simulate.flight_recorder import DumpWriter
from ncclwatch.simulate.gpu_traces import write_kineto, write_nsight
from ncclwatch.simulate.inspector import write_inspector
from ncclwatch.simulate.nccl_logs import nccl_logs
from ncclwatch.simulate.observe import HOST_PREFIX
from ncclwatch.simulate.rank_logs import write_rank_logs
from ncclwatch.simulate.ras_answers import ras_answer
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import Scenario, ScoreClass, load_all
from ncclwatch.simulate.straggler_traces import worker_of, write_straggler
from ncclwatch.simulate.timeline import Timeline
from score.cases import effect

SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
SLOW = frozenset({ScoreClass.S1, ScoreClass.S2, ScoreClass.S3})


def write_flight_recorder(timeline: Timeline, folder: Path) -> None:
    """Dumps with timing."""
    DumpWriter(timeline).write(folder)


def write_untimed(timeline: Timeline, folder: Path) -> None:
    """Dumps as PyTorch writes them by default: nothing is ever ``started``."""
    DumpWriter(timeline, timing=False).write(folder)


def write_ras(timeline: Timeline, folder: Path) -> None:
    """Two answers of RAS in JSON, ``ASKED_S`` after a hang shows, else from the middle of the job on."""
    began = effect(timeline) if timeline.hung else (effect(timeline) + timeline.end) / 2 - ASKED_S[0]
    last = math.inf if timeline.hung else timeline.end
    for number, after in enumerate(ASKED_S):
        (folder / f"ras-{number}.json").write_text(ras_answer(timeline, min(began + after, last)), "utf-8")


def write_nccl_logs(timeline: Timeline, folder: Path) -> None:
    """Debug logs of the later of these moments; of a job that does not hang at its end: ranks that run differ by a call."""
    at_s = effect(timeline) + ASKED_S[-1] if timeline.hung else timeline.end
    for rank, log in nccl_logs(timeline, at_s).items():
        (folder / f"nccl-{rank}.log").write_text(log, "utf-8")


def write_metrics(timeline: Timeline, folder: Path) -> None:
    """What DCGM's exporter says when the fault has shown for a while."""
    write_dcgm(timeline, folder, effect(timeline) + ASKED_S[0])


def write_logs(timeline: Timeline, folder: Path) -> None:
    """Rank logs without hashes of groups, with ``config.yaml``, saved to the last line."""
    write_rank_logs(timeline, folder, sensitive_s=0.0)


def write_hashed_logs(timeline: Timeline, folder: Path) -> None:
    """Rank logs of newer versions, with hashes of groups."""
    write_rank_logs(timeline, folder, sensitive_s=0.0, group_hash=True, config=False)


ASKED_S = (10.0, 26.0)
SOURCES: dict[str, Callable[[Timeline, Path], object]] = {
    "Flight Recorder, with timing": write_flight_recorder,
    "Flight Recorder": write_untimed,
    "rank logs": write_logs,
    "rank logs with groupHash": write_hashed_logs,
    "RAS, two answers": write_ras,
    "NCCL debug logs": write_nccl_logs,
    "Kineto": write_kineto,
    "Nsight Systems": write_nsight,
    "Inspector": write_inspector,
    "StragglerAnalysis": write_straggler,
    "DCGM": write_metrics,
}
TELL_NO_HANGS = frozenset({"Kineto", "Nsight Systems", "Inspector", "StragglerAnalysis", "DCGM"})
"""What is not in a trace proves nothing: nobody may be accused of a hang by it."""
TELL_SLOWNESS = (TELL_NO_HANGS - {"DCGM"}) | {"rank logs", "rank logs with groupHash"}
_GPU = re.compile(rf"GPU (\d+) of {HOST_PREFIX}(\d+)")


@dataclass(frozen=True, slots=True)
class Outcome:
    """One scenario by one source. ``place``: exactly those at fault are named; ``right``: and the class fits; ``among``: the
    class fits, and all ranks of the operation are named in which those at fault, or both ends of the link, are. ``beside``:
    nobody is accused, and those at fault are told among others, or by what is odd of their GPUs.
    """

    scenario: Scenario
    source: str
    verdict: Verdict | None
    place: bool
    right: bool
    among: bool = False
    beside: bool = False


def judge_by(scenario: Scenario, source: str, timeline: Timeline) -> Outcome:
    """Write, read, judge, compare."""
    with tempfile.TemporaryDirectory() as name:
        SOURCES[source](timeline, Path(name))
        try:
            jobs, _ = judge_found(find([Path(name)]))
        except NcclwatchError:
            jobs = []
    verdict = jobs[0].verdicts[0] if jobs else None
    named = {culprit.rank for culprit in verdict.culprits} if verdict is not None else set()
    expect = scenario.expect
    if _is_quiet(expect.score_class, source):
        quiet = verdict is None or not verdict.verdict_class.accuses
        return Outcome(scenario, source, verdict, quiet, quiet, beside=_gpus_told(scenario, verdict) == {*expect.ranks} != set())
    wanted, also = (_as_told(scenario, source, ranks) for ranks in (expect.ranks, expect.also))
    place = bool(named) and named >= wanted and named <= wanted | also
    said = verdict.verdict_class if verdict is not None else None
    fits, inside = said in expect.verdicts, wanted | set(expect.link)
    among = fits and not place and said is VerdictClass.HARDWARE and bool(inside) and inside <= named
    beside = said is VerdictClass.UNKNOWN and not place and bool(wanted) and wanted <= named
    return Outcome(scenario, source, verdict, place, place and fits, among, beside)


def _as_told(scenario: Scenario, source: str, ranks: Sequence[int]) -> set[int]:
    """These ranks as a source has them: StragglerAnalysis has workers."""
    return {worker_of(scenario.layout, rank) if source == "StragglerAnalysis" else rank for rank in ranks}


def _gpus_told(scenario: Scenario, verdict: Verdict | None) -> set[int]:
    """Ranks whose GPUs are told to be out of the ordinary."""
    lines = "\n".join(verdict.evidence) if verdict is not None else ""
    return {int(node) * scenario.layout.ranks_per_node + int(gpu) for gpu, node in _GPU.findall(lines)}


def _is_quiet(fault: ScoreClass, source: str) -> bool:
    """Whether nobody may be accused."""
    return fault.quiet or (source not in TELL_SLOWNESS if fault in SLOW else source in TELL_NO_HANGS)


def _others(outcome: Outcome) -> bool:
    """Whether anybody is named who is not at fault; of a job in which nobody is, anybody."""
    expect = outcome.scenario.expect
    named = {culprit.rank for culprit in outcome.verdict.culprits} if outcome.verdict is not None else set()
    return not outcome.place and not named <= _as_told(outcome.scenario, outcome.source, (*expect.ranks, *expect.also))


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """Markdown: a row a class of fault and source."""
    rows: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for one in outcomes:
        rows[str(one.scenario.expect.score_class), one.source].append(one)
    lines = [
        "| SIMULATED: class of the fault | source | scenarios | right ranks | right ranks and class | right class, all ranks "
        "of its operation | ranks told, class unknown | ranks told among others, class unknown | somebody else accused |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (fault, source), found in sorted(rows.items()):
        accused = [one for one in found if one.verdict is not None and one.verdict.verdict_class.accuses]
        unknown = [one for one in found if one.place and one.verdict and one.verdict.verdict_class is VerdictClass.UNKNOWN]
        quiet = _is_quiet(ScoreClass(fault), source)
        wrong = [one for one in accused if not one.among and _others(one)]
        lines.append(
            f"| {fault} | {source} | {len(found)} | {sum(one.place for one in found)} | {sum(one.right for one in found)} | "
            f"{sum(one.among for one in found)} | {'–' if quiet else len(unknown)} | "
            f"{sum(one.beside for one in found)} | {len(wrong)} |"
        )
    return lines


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="score.by_source", description=__doc__)
    parser.add_argument("--set", choices=("ci", "full"), default="ci")
    parser.add_argument("--only", default="", help="only scenarios in whose name this regular expression is found")
    parser.add_argument("--largest", type=int, default=64, metavar="RANKS")
    parser.add_argument("--source", choices=sorted(SOURCES), action="append", help="only this one; may be repeated")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print what was said of each that was not right")
    options = parser.parse_args()
    chosen = [s for s in load_all(SCENARIOS, "ci" if options.set == "ci" else "") if re.search(options.only, s.name)]
    outcomes = []
    for scenario in (s for s in chosen if s.layout.world <= options.largest):
        timeline = simulate(scenario)
        for source in options.source or SOURCES:
            outcomes.append(outcome := judge_by(scenario, source, timeline))
            if options.verbose and not outcome.right:
                print(f"{scenario.name} ({source}): {outcome.verdict.summary if outcome.verdict else 'nothing'}", file=sys.stderr)
    lines = table(outcomes)
    print("\n".join(lines))
    if options.markdown is not None:
        options.markdown.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
