"""A healthy job with the wire plane on, watched live: ``python -m score.healthy_hour [--minutes 60]`` (root).

Real NCCL trains over its InfiniBand transport, each rank on a host of its own with a stand-in for an adapter
(testbed/adapters.py). It is watched and judged as ``attach`` does it, orders for counts included. Nobody may be accused: exit
status 1 when somebody was, or when the plane did not run.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field

from ncclwatch.collect.node import NodeCollector
from ncclwatch.collect.ordering import OrderDesk
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.model.work import Scope
from ncclwatch.wire.governor import DEFAULT_BUDGET
from score.exact import rate_bound
from testbed.adapters import AdapterNetwork, are_there, stand_there

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
    """Watch live for so long, and judge each look."""
    collector, session, seen = NodeCollector(every=False), DiagnosisSession(), Watched()
    desk = OrderDesk(collector, DEFAULT_BUDGET)
    begin = time.monotonic()
    try:
        session.feed(collector.start(pids))
        while time.monotonic() < begin + seconds:
            batch = collector.step()
            session.feed(batch)
            seen.windows += sum(window.scope is Scope.PORT for window in batch.work)
            if batch.overhead is not None and batch.overhead.wire_share is not None:
                seen.bursts, seen.bill = batch.overhead.wire_bursts, max(seen.bill, batch.overhead.wire_share)
            if not batch.looked:
                continue
            seen.looks += 1
            judged = session.judge(batch.time_ns)
            for order in judged.orders:
                desk.take(order)
            for verdict in judged.verdicts:
                if verdict.verdict_class.accuses and (not seen.accused or seen.accused[-1][1] != verdict.summary):
                    seen.accused.append((time.monotonic() - begin, verdict.summary))
                    print(f"after {seen.accused[-1][0]:.0f} s: {verdict.summary}", flush=True)
    finally:
        collector.close()
    return seen


def main() -> int:
    """Watch, and print what was seen."""
    parser = argparse.ArgumentParser(prog="score.healthy_hour", description="A healthy job with the wire plane on.")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--nccl", default="2.27.5")
    options = parser.parse_args()
    if not are_there():
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
