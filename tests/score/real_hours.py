"""Hours of real healthy jobs, many beside each other: ``python -m score.real_hours --jobs 10 --minutes 60`` (root).

Drawn healthy jobs of few ranks (:func:`score.drawn.draw_healthy`; every second one with harmless things that resemble
trouble) are played by real NCCL on the CPU testbed. Each is watched live and judged as ``attach`` does it, by a process of its
own. Iterations take seconds and messages are small, so that two cores can play many. ``score.alarms --pool`` adds up what
``--json`` wrote.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import replace
from itertools import count, cycle, islice
from multiprocessing import get_context
from pathlib import Path

from ncclwatch.cli.live import LiveSession
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.ease import WIDEST_S
from ncclwatch.errors import NcclwatchError
from ncclwatch.simulate.scenario import Scenario
from ncclwatch.simulate.testbed import plan
from score.alarms import REAL, Healthy, save, table, told, too_short
from score.drawn import draw_healthy
from score.real import Transport, as_played, obstacle
from testbed.job import JobError
from testbed.play import Play

FEW = 4
"""Ranks of a job at most."""
SIZES = ("tp_bytes", "pp_bytes", "cp_bytes", "ep_bytes", "dp_bytes")
BYTES = 1 << 18
"""Of a message at most: each rank holds some of them in memory."""
JOB_BYTES = 2 << 30
"""Memory that a job takes: nine took 17 GiB, most of it buffers of NCCL."""
APART_S = 3.0
"""Between two jobs' begins: loading NCCL takes the CPUs that the others measure."""
TRANSPORTS = (Transport.SOCKET, Transport.SHM)
Job = tuple[Scenario, str, Transport]


def drawn(seed: int, seconds: float, shortest_s: float, longest_s: float, nccl: Sequence[str]) -> Iterator[Job]:
    """Healthy jobs that fit and can be played, whose iterations take so long by themselves; releases and transports by turns."""
    settings = cycle((release, transport) for transport in TRANSPORTS for release in nccl)
    for number in count():
        scenario = draw_healthy(seed, number, seconds)
        work = scenario.workload
        if scenario.layout.world > FEW or not shortest_s <= seconds / work.iterations <= longest_s:
            continue
        small = {name: min(getattr(work, name), BYTES) for name in SIZES}
        scenario = replace(scenario, workload=replace(work, **small))
        if not obstacle(scenario, nccl[0], TRANSPORTS[0]):
            yield scenario, *next(settings)


def watch(scenario: Scenario, nccl: str, transport: Transport, seconds: float) -> Healthy:
    """Play one job, and watch it until it ends or for so long. Raises JobError and NcclwatchError."""
    looks: list[float] = []
    said: list[str] = []
    alarms, accused = 0, False

    def look(batch: NodeBatch) -> None:
        if batch.looked:
            looks.append(batch.time_ns / 1e9)

    with (
        Play(plan(as_played(scenario, nccl, transport))) as played,
        closing(LiveSession(every=False, widest_s=WIDEST_S)) as session,
    ):
        session.taps.append(look)
        session.start(played.job.pids)
        played.begin()
        until, finished = time.monotonic() + seconds, ""
        while not finished and time.monotonic() < until:
            update = session.step(until=until)
            finished = update.finished
            if update.windows is None:
                continue
            accusing = [verdict.summary for verdict in update.verdicts if verdict.verdict_class.accuses]
            alarms += bool(accusing) and not accused
            accused = bool(accusing)
            said += [text for text in accusing if text not in said]
    hours = (looks[-1] - looks[0]) / 3600 if looks else 0.0
    return Healthy(f"{scenario.name}-{nccl}-{transport}", REAL, round(hours, 5), alarms, tuple(said), 0.0, len(looks))


def main() -> int:
    """Exit status 0 when nobody was accused and every job was played."""
    parser = argparse.ArgumentParser(prog="score.real_hours", description="Hours of real healthy jobs, watched live.")
    parser.add_argument("--jobs", type=int, default=10, help="jobs beside each other")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--nccl", default="2.21.5,2.27.5,2.32.3", help="releases, by turns")
    parser.add_argument("--iteration", type=float, nargs=2, default=(2.0, 30.0), metavar="SECONDS", help="shortest and longest")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seconds = 60 * options.minutes
    shortest_s, longest_s = options.iteration
    if why_not := too_short(options.seed, seconds, shortest_s):
        parser.error(f"--minutes: {why_not}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if options.jobs > (most := memory // JOB_BYTES):
        parser.error(f"--jobs: at most {most}: one takes {JOB_BYTES >> 30} GiB, and this machine has {memory >> 30}")
    every = drawn(options.seed, seconds, shortest_s, longest_s, options.nccl.split(","))
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        playing: list[Future[Healthy]] = []
        for scenario, nccl, transport in islice(every, options.jobs):
            playing.append(pool.submit(watch, scenario, nccl, transport, seconds))
            time.sleep(APART_S)
        made = told(_played(playing))
    print(table(made, markdown=False), end="")
    if options.json:
        save(made, options.json)
    return 1 if len(made) < options.jobs or any(one.alarms for one in made) else 0


def _played(playing: Iterable[Future[Healthy]]) -> Iterator[Healthy]:
    """Those that could be played, as they end; of the others it is said why not."""
    for one in as_completed(playing):
        try:
            yield one.result()
        except (JobError, NcclwatchError, OSError) as error:
            print(f"not played: {str(error).splitlines()[0]}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
