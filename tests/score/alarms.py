"""False alarms: hours of healthy jobs, what was said in them, and the exact upper bound of alarms an hour.

``python -m score.alarms --hours 2 --seed 5 --json simulated.json`` simulates healthy jobs (drawn; SIMULATED) until they have run
for so long and judges every look of them. ``--recordings FOLDER...`` judges recordings of real healthy jobs instead (the
archive's, or what ``score --real --save`` wrote). ``--pool FILE...`` adds up what such commands wrote. An alarm is a stretch of
looks that accuse, however long.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import count, islice, repeat, takewhile
from multiprocessing import get_context
from pathlib import Path

from ncclwatch.collect.look_times import look_time
from ncclwatch.simulate.records import Observer
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import Scenario, load_all
from score.__main__ import SCENARIOS
from score.archive import Accusation, Kept, Stretch, Timeline, batches_of, beside, name_of, recordings_in, timeline_of
from score.diagnosers import Ncclwatch
from score.drawn import draw_healthy
from score.exact import rate_bound
from score.keep import scenario_of
from score.table import grid

SIMULATED, REAL = "simulated", "real"
HOSTS_AHEAD = (4, 64, 1024)
"""Operations by which hosts are ahead of their GPUs, one job after another. From: CUDA's queue of launches holds 1,024."""
JOB_S = 600.0
"""Seconds for which a simulated job runs."""


@dataclass(frozen=True, slots=True)
class Healthy:
    """One healthy job: for how long it was watched, how often somebody was accused, and what was said."""

    name: str
    source: str
    """``simulated`` or ``real``."""
    hours: float
    alarms: int
    said: tuple[str, ...]
    cpu_s: float = 0.0
    """Seconds of CPU that its simulation and judgement took."""
    looks: int = 0
    """Those that were judged."""


def simulated(seed: int, number: int, seconds: float = JOB_S, period_s: float = 1.0) -> Healthy:
    """Simulate one drawn healthy job and judge every look of it."""
    job = draw_healthy(seed, number, seconds, period_s)
    ahead = HOSTS_AHEAD[number % len(HOSTS_AHEAD)]
    return played(replace(job, workload=replace(job.workload, host_ahead=ahead)), period_s)


def played(scenario: Scenario, period_s: float = 1.0) -> Healthy:
    """Simulate a job, look at it so often (seconds), and judge every look."""
    began = time.process_time()
    timeline = simulate(scenario)
    first, last = 0.5 * scenario.network.init_s, timeline.end - 0.1
    times = [t for t in takewhile(lambda t: t < last, (look_time(n, period_s) for n in count())) if t > first]
    records = Observer(timeline, times).until(math.inf)
    stretches: list[Stretch] = []
    looks = 0
    for at, verdict in Ncclwatch().said(records):
        looks += 1
        ranks = tuple(sorted({-1 if c.rank is None else c.rank for c in verdict.culprits}))
        accused = (Accusation(str(verdict.verdict_class), ranks),) if verdict.verdict_class.accuses else ()
        if stretches and stretches[-1].accused == accused:
            stretches[-1] = Stretch(stretches[-1].first_s, at, accused, "-")
        else:
            stretches.append(Stretch(at, at, accused, "-"))
    hours = (times[-1] - times[0]) / 3600 if times else 0.0
    return _healthy(scenario.name, SIMULATED, hours, Timeline(looks, tuple(stretches)), time.process_time() - began)


def recorded(path: Path) -> Healthy:
    """Judge the recording of one real healthy job."""
    batches = batches_of(path)
    first, last = batches[0].time_ns / 1e9, batches[-1].time_ns / 1e9
    return _healthy(name_of(path), REAL, (last - first) / 3600, timeline_of(batches, first), 0.0)


def _healthy(name: str, source: str, hours: float, timeline: Timeline, cpu_s: float) -> Healthy:
    alarms = 0
    accused = False
    for stretch in timeline.stretches:
        alarms += bool(stretch.accused) and not accused
        accused = bool(stretch.accused)
    said = tuple(text.strip() for text, s in zip(timeline.text, timeline.stretches, strict=True) if s.accused)
    return Healthy(name, source, round(hours, 5), alarms, said, round(cpu_s, 2), timeline.looks)


def healthy_in(folder: Path) -> Iterator[Path]:
    """Recordings of healthy jobs in a folder, of the archive or as they were saved."""
    catalogue = {scenario.name: scenario for scenario in load_all(SCENARIOS)}
    for path in recordings_in(folder):
        note = json.loads(beside(path, ".json").read_text("utf-8"))
        if "verdicts" in note:
            quiet = not Kept.load(path).verdicts
        else:
            scenario = scenario_of(note["scenario"], catalogue)
            quiet = scenario is not None and not scenario.faults
        if quiet:
            yield path


def chosen(seed: int, first: int, seconds: float, least_iteration_s: float) -> Iterator[int]:
    """Numbers of the drawn healthy jobs whose iterations take so long at least."""
    return (n for n in count(first) if seconds >= least_iteration_s * draw_healthy(seed, n, seconds).workload.iterations)


def too_short(seed: int, seconds: float, least_iteration_s: float) -> str:
    """Why no drawn job of so many seconds has iterations that take so long at least; empty where there are some."""
    fewest = draw_healthy(seed, 0, 0.0).workload.iterations
    least_s = fewest * least_iteration_s
    if seconds >= least_s:
        return ""
    return f"{fewest} iterations of {least_iteration_s:g} s, the fewest of a job, take {least_s / 60:.1f} minutes"


def simulate_hours(
    hours: float, seed: int, jobs: int, seconds: float, first: int = 0, period_s: float = 1.0, least_iteration_s: float = 0.0
) -> Iterator[Healthy]:
    """Drawn healthy jobs, one after another, until they have run for so long together; those with shorter iterations left out."""
    done = 0.0
    every = chosen(seed, first, seconds, least_iteration_s)
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        while True:
            numbers = list(islice(every, 4 * jobs))
            for one in pool.map(simulated, repeat(seed), numbers, repeat(seconds), repeat(period_s)):
                done += one.hours
                yield one
            if done >= hours:
                return


def table(results: Iterable[Healthy], *, markdown: bool) -> str:
    """Hours, alarms and exact bounds, simulated and real apart."""
    rows = []
    for source in (SIMULATED, REAL):
        part = [one for one in results if one.source == source]
        if part:
            hours, alarms = sum(one.hours for one in part), sum(one.alarms for one in part)
            with_alarm = sum(one.alarms > 0 for one in part)
            rows.append([
                source, str(len(part)), f"{hours:.2f}", str(sum(one.looks for one in part)), str(alarms), str(with_alarm),
                f"{rate_bound(alarms, hours):.4f}",
            ])  # fmt: skip
    head = ("healthy jobs", "jobs", "hours", "looks", "alarms", "jobs with one", "alarms an hour, exact 95 % upper bound")
    return "\n".join(grid(head, rows, markdown=markdown)) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when nobody was accused."""
    parser = argparse.ArgumentParser(prog="score.alarms", description="Count false alarms in healthy jobs.")
    parser.add_argument("--hours", type=float, default=0.0, help="simulate healthy jobs for so many hours of theirs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first drawn job: many hours can be made in parts")
    parser.add_argument("--period", type=float, default=1.0, help="seconds between two looks; fewer looks are more hours")
    parser.add_argument(
        "--iteration", type=float, default=0.0, metavar="SECONDS",
        help="only jobs whose iterations take so long at least, as those of large models do; more hours, fewer calls",
    )  # fmt: skip
    parser.add_argument("--job-seconds", type=float, default=JOB_S)
    parser.add_argument("--recordings", type=Path, nargs="*", default=[], help="folders with recordings of real healthy jobs")
    parser.add_argument("--pool", type=Path, nargs="*", default=[], help="what --json of other commands wrote")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args(arguments)
    if why_not := too_short(options.seed, options.job_seconds, options.iteration):
        parser.error(f"--job-seconds: {why_not}")
    results = [Healthy(**entry) for path in options.pool for entry in json.loads(path.read_text("utf-8"))["jobs"]]
    made: list[Healthy] = []
    if options.hours > 0:
        made += told(
            simulate_hours(
                options.hours, options.seed, options.jobs, options.job_seconds, options.first, options.period, options.iteration
            )
        )
    paths = [path for folder in options.recordings for path in healthy_in(folder)]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        made += told(pool.map(recorded, paths))
    results += made
    print(table(results, markdown=options.markdown), end="")
    cpu_s, hours = sum(one.cpu_s for one in made), sum(one.hours for one in made if one.source == SIMULATED)
    if cpu_s:
        print(f"simulated: {60 * hours / cpu_s:.2f} job-hours a minute of CPU")
    if options.json:
        save(results, options.json)
    return 1 if any(one.alarms for one in results) else 0


def save(results: Sequence[Healthy], path: Path) -> None:
    """Write them for ``--pool``."""
    data = {"schema": "ncclwatch.alarms/1", "jobs": [asdict(one) for one in results]}
    path.write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def told(results: Iterable[Healthy]) -> list[Healthy]:
    """All of them; alarms are told as they come."""
    kept = []
    for one in results:
        kept.append(one)
        print(f"{one.name}: {60 * one.hours:.1f} min, {one.alarms} alarms, {one.cpu_s:.0f} s of CPU", file=sys.stderr, flush=True)
        for line in one.said:
            print(f"ALARM {one.name}: {line}", file=sys.stderr, flush=True)
    return kept


if __name__ == "__main__":
    sys.exit(main())
