"""Scenarios judged from other tools' records alone: ``python -m score.sources --source rank-log [--set ci|full] [--only NAME]``.

Every scenario is SIMULATED; the simulator writes the records of the tool as they would be some time after the fault, and
``ncclwatch`` reads them as any user's. A row a source: how many of each class were told with the right ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.ingest.base import Format, Ingested, IngestError
from ncclwatch.ingest.rank_log import RankLogs
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.simulate.rank_logs import write_rank_logs
from ncclwatch.simulate.scenario import Scenario, ScoreClass, load_all
from ncclwatch.simulate.timeline import Timeline
from score.cases import Case
from score.scoring import SCORE_OF, judge

SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
AFTER_HANG_S = 20.0
"""Seconds after the effect of a fault that hangs the job at which the records are taken; of others, at the end of the job."""


class Source(NamedTuple):
    """What a tool would have recorded of a simulated job by a moment, and what reads it."""

    format: Format
    write: Callable[[Timeline, Path, float], list[Path]]


def _rank_logs(**options: bool) -> Callable[[Timeline, Path, float], list[Path]]:
    # A job that goes on never pauses; who wants its logs sets the pause after which they are saved to nothing.
    return lambda timeline, folder, until: write_rank_logs(timeline, folder, until_s=until, sensitive_s=0.0, **options)


SOURCES = {
    "rank-log": Source(RankLogs(), _rank_logs(config=True)),
    "rank-log-hash": Source(RankLogs(), _rank_logs(config=False, group_hash=True)),
    "rank-log-alone": Source(RankLogs(), _rank_logs(config=False)),
}


class Row(NamedTuple):
    """One scenario from one source."""

    scenario: str
    wanted: str
    said: str
    named: tuple[int, ...]
    right_class: bool
    right_rank: bool | None
    seconds: float


def judged(job: Ingested) -> Iterator[Verdict]:
    """What stands after every look at a job's records, and last what is said to who asks."""
    session = DiagnosisSession()
    now = 0
    for now, batches in groupby(job.batches, key=lambda batch: batch.time_ns):
        for batch in batches:
            session.feed(batch, now, source=batch.host)
        session.judge(now)
        if session.verdict is not None:
            yield job.amend(session.verdict)
    session.ask()
    answers = session.judge(now).answers
    if answers:
        yield job.amend(answers[0])


def score(scenario: Scenario, name: str) -> Row:
    """Judge a scenario from one source: what accuses last counts; of a healthy job anything that accuses is a false alarm."""
    source, case = SOURCES[name], Case(scenario)
    hangs = case.timeline.hung
    until = case.effect_s + AFTER_HANG_S if hangs else case.timeline.end
    began = time.monotonic()
    with TemporaryDirectory() as folder:
        files = source.write(case.timeline, Path(folder), until)
        try:
            jobs = source.format.read([file for file in files if file.stat().st_size])
        except (IngestError, IndexError):
            jobs = []
        verdicts = [verdict for job in jobs[:1] for verdict in judged(job)]
    accusing = [verdict for verdict in verdicts if verdict.verdict_class.accuses]
    final = verdicts[-1] if verdicts else Verdict(VerdictClass.UNKNOWN, "nothing was recorded")
    if not hangs and accusing and not final.verdict_class.accuses:
        final = accusing[-1]
    found = judge(case.scenario, case.cast, final)
    said = str(SCORE_OF.get(final.verdict_class, final.verdict_class))
    right = not accusing if case.scenario.expect.score_class.quiet else found.right_class
    wanted = str(case.scenario.expect.score_class)
    return Row(scenario.name, wanted, said, found.named, right, found.right_rank, time.monotonic() - began)


def table(rows: dict[str, list[Row]]) -> str:
    """Markdown: a row a source, a column a class: right class and ranks / scenarios."""
    classes = [one for one in ScoreClass if any(row.wanted == str(one) for found in rows.values() for row in found)]
    lines = [f"| source (SIMULATED jobs) | {' | '.join(map(str, classes))} |", "|" + " --- |" * (len(classes) + 1)]
    for name, found in rows.items():
        by_class = defaultdict(list)
        for row in found:
            by_class[row.wanted].append(row.right_class and row.right_rank is not False)
        cells = (f"{sum(by_class[str(one)])} / {len(by_class[str(one)])}" if by_class[str(one)] else "" for one in classes)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when the table was made, 1 when no scenario was chosen."""
    parser = argparse.ArgumentParser(prog="score.sources", description="Score diagnosis from other tools' records (SIMULATED).")
    parser.add_argument("--source", choices=sorted(SOURCES), action="append")
    parser.add_argument("--set", choices=("ci", "full"), default="ci")
    parser.add_argument("--only", default="")
    parser.add_argument("--largest", type=int, default=64, metavar="RANKS", help="only jobs of so many ranks at most")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    chosen = [s for s in load_all(SCENARIOS, "ci" if options.set == "ci" else "") if options.only in s.name]
    chosen = [s for s in chosen if s.layout.world <= options.largest and (options.only or "quick" not in s.tags)]
    if not chosen:
        print("no scenario was chosen: look at --set and --only", file=sys.stderr)
        return 1
    rows: dict[str, list[Row]] = defaultdict(list)
    for name in options.source or sorted(SOURCES):
        for scenario in chosen:
            row = score(scenario, name)
            rows[name].append(row)
            mark = "ok " if row.right_class and row.right_rank is not False else "NOT"
            print(f"{mark} {name} {row.scenario}: {row.wanted} {list(scenario.expect.ranks)} | {row.said} {list(row.named)} "
                  f"{row.seconds:.1f} s", flush=True)  # fmt: skip
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps({name: [row._asdict() for row in found] for name, found in rows.items()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
