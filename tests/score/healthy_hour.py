"""A healthy job with the wire plane on, watched live: ``python -m score.healthy_hour [--minutes 60]`` (root).

Real NCCL trains over its InfiniBand transport, each rank on a host of its own with a stand-in for an adapter
(testbed/adapters.py). It is watched by the session that ``attach`` runs, orders for counts included. Nobody may be accused: exit
status 1 when somebody was, or when the plane did not run.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from dataclasses import dataclass, field

from ncclwatch.cli.live import LiveSession
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.model.work import Scope
from score.exact import rate_bound
from testbed.adapters import AdapterNetwork, stand_there

TRAINING = ("--forward-us", "100000", "--jitter", "0.03", "--time")
RANKS = 2


@dataclass(slots=True)
class Watched:
    """What was seen: looks that judged, windows of work requests, accusations with their moment (seconds)."""

    looks: int = 0
    windows: int = 0
    bursts: int = 0
    bill: float = 0.0
    accused: list[tuple[float, str]] = field(default_factory=list)


def watch(pids: list[int], seconds: float) -> Watched:
    """Watch live for so long, and note who is accused."""
    session, seen = LiveSession(every=False), Watched()

    def count(batch: NodeBatch) -> None:
        seen.windows += sum(window.scope is Scope.PORT for window in batch.work)
        seen.looks += batch.looked
        if batch.overhead is not None and batch.overhead.wire_share is not None:
            seen.bursts, seen.bill = batch.overhead.wire_bursts, max(seen.bill, batch.overhead.wire_share)

    session.taps.append(count)
    begin = time.monotonic()
    with closing(session):
        session.start(pids)
        while time.monotonic() < begin + seconds:
            for verdict in session.step().verdicts:
                if verdict.verdict_class.accuses and (not seen.accused or seen.accused[-1][1] != verdict.summary):
                    seen.accused.append((time.monotonic() - begin, verdict.summary))
                    print(f"after {seen.accused[-1][0]:.0f} s: {verdict.summary}", flush=True)
    return seen


def main() -> int:
    """Watch, and print what was seen."""
    parser = argparse.ArgumentParser(prog="score.healthy_hour", description="A healthy job with the wire plane on.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--nccl", default="2.27.5")
    options = parser.parse_args()
    stand_there()
    with (
        AdapterNetwork(hosts=RANKS) as network,
        network.job(options.nccl, RANKS, shape="training", extra=TRAINING, start_timeout=300) as job,
    ):
        seen = watch(list(job.pids), 60 * options.minutes)
        iterations = job.progress(0)
    bound = rate_bound(len(seen.accused), options.minutes / 60)
    print(
        f"{options.minutes:g} minutes (SIMULATED adapters), {iterations} iterations, {seen.looks} looks, {seen.windows} windows "
        f"of ports in {seen.bursts} bursts, billed at most {seen.bill:.3%}: {len(seen.accused)} accusations, at most {bound:.2g} "
        "an hour (95 %)"
    )
    return 1 if seen.accused or not seen.windows else 0


if __name__ == "__main__":
    sys.exit(main())
