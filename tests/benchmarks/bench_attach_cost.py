"""What ``ncclwatch attach --json`` costs the job: iteration times with and without it, in interleaved pairs, as a ratio.

    python tests/benchmarks/bench_attach_cost.py [--only NAME,…] [--pairs N] [--seconds S] [--settled] [--markdown]

Real NCCL on the CPU testbed (root). Within one running job, spans with and without the agent follow one another; in every second
pair the agent comes first, so that a machine that gets slower or faster favours neither. A ratio is that of the medians of a
pair's two spans; printed are the median over the pairs with its exact 95 % interval, and their lowest and highest. Nothing is
asserted.

``--settled`` measures an agent for which all has long been well: samples are 60 s apart. That takes 60 samples of a healthy job
and ten minutes. Here 10 samples and ten seconds do, in the agent alone that is measured, or a pair would take as long.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_agent import cpu_s
from score.exact import binomial_tail
from testbed.job import Job
from testbed.watcher import pids

NCCLWATCH = [sys.executable, "-m", "ncclwatch"]
EARLY = """\
from ncclwatch.collect import ease
from ncclwatch.engine.slow import watch
watch.SETTLED_SAMPLES, ease.LONG_CALM_S = 10, 10.0
from ncclwatch.cli.main import main
main()
"""
"""The same, for which a job is well after ten samples, and has long been so ten seconds later."""
SOON_WELL_S = 30.0
"""Seconds after which its samples are far apart."""
SIZES = {"4 KiB": 1 << 12, "256 KiB": 1 << 18, "4 MiB": 1 << 22}
COLLECTIVES = {
    "AllReduce": "allreduce",
    "AllGather": "allgather",
    "ReduceScatter": "reducescatter",
    "all-to-all": "alltoall",
    "Send/Recv": "sendrecv",
}
RANKS = 4
COMPUTE_US = 5000
"""Compute before each operation, as a job has it; it sleeps, so that two cores suffice."""
SETTLE_S = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of spans in seconds, one of each a pair; ``spread`` is that of the iterations without the agent, relative."""

    without: NDArray[np.float64]
    attached: NDArray[np.float64]
    spread: float
    share: float
    """Of a core that the agent took, median of its spans."""

    @property
    def ratios(self) -> NDArray[np.float64]:
        """With the agent over without, of each pair."""
        return self.attached / self.without


def iterations(job: Job, begin: float, end: float) -> NDArray[np.float64]:
    """Seconds of the iterations of rank 0 that lie between two times of CLOCK_MONOTONIC."""
    words = [line.split() for line in job.lines(0) if line.startswith("iteration")]
    return np.array([float(w[3]) for w in words if float(w[5]) - float(w[3]) >= begin and float(w[5]) <= end])


def span(job: Job, seconds: float) -> NDArray[np.float64]:
    """The iterations of the next seconds."""
    begin = time.monotonic()
    time.sleep(seconds)
    return iterations(job, begin, begin + seconds)


def attached_span(job: Job, seconds: float, arguments: Sequence[str], *, settled: bool) -> tuple[NDArray[np.float64], float]:
    """The same with the agent, from when it has attached; and the share of a core that it took."""
    program = [sys.executable, "-c", EARLY] if settled else NCCLWATCH
    command = [*program, "attach", "--json", *arguments, *pids(job)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        first = agent.stdout.readline()
        if '"attached"' not in first or agent.poll() is not None:
            raise SystemExit(f"the agent did not attach: {first}")
        reader = threading.Thread(target=agent.stdout.read, daemon=True)
        reader.start()
        time.sleep(SOON_WELL_S if settled else SETTLE_S)
        before = cpu_s(agent.pid)
        took = span(job, seconds)
        share = (cpu_s(agent.pid) - before) / seconds
        agent.terminate()
        reader.join()
    time.sleep(SETTLE_S)
    return took, share


def measure(job: Job, pairs: int, seconds: float, arguments: Sequence[str], *, settled: bool) -> Measured:
    """Interleaved pairs on a running job."""
    without, attached, scatter, shares = [], [], [], []
    for number in range(pairs):
        plain = span(job, seconds) if number % 2 == 0 else None
        watched, share = attached_span(job, seconds, arguments, settled=settled)
        plain = span(job, seconds) if plain is None else plain
        without.append(float(np.median(plain)))
        attached.append(float(np.median(watched)))
        scatter.append(float(np.subtract(*np.percentile(plain, [90, 10])) / np.median(plain)))
        shares.append(share)
        print(f"pair {number + 1}: {attached[-1] / without[-1]:.4f}, agent {share:.2%} of a core", file=sys.stderr, flush=True)
    return Measured(np.array(without), np.array(attached), float(np.median(scatter)), float(np.median(shares)))


def median_interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """The exact 95 % interval of a median, by order statistics (all values where there are fewer than six)."""
    ordered, of = np.sort(values), len(values)
    # So many lie below the median with a chance of at most 2.5 %.
    first = max((k for k in range(1, of // 2 + 1) if binomial_tail(of - k + 1, of, 0.5) <= 0.025), default=1) - 1
    return float(ordered[first]), float(ordered[of - 1 - first])


def jobs(only: set[str], training_ranks: Sequence[int]) -> Iterator[tuple[str, str, Job]]:
    """Every job that is measured: name, size of a message, and the job, not yet started."""
    for name, shape in COLLECTIVES.items():
        for size, nbytes in SIZES.items():
            if not only or name.lower() in only:
                # Sizes are of the whole message as the caller states it; AllGather and the like count elements of one rank.
                count = nbytes // 4 // (RANKS if shape in ("allgather", "reducescatter", "alltoall") else 1)
                yield name, size, Job("2.27.5", RANKS, shape, count=count, extra=["--time", "--compute-us", str(COMPUTE_US)])
    training = ["--tp", "2", "--pp", "2", "--layers", "1", "--forward-us", "4000", "--gradients", "65536", "--time"]
    for ranks in training_ranks:
        if not only or "training" in only:
            yield f"training, {ranks} ranks", "16 KiB to 256 KiB", Job("2.27.5", ranks, "training", count=4096, extra=training)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="names with commas between: " + ", ".join([*COLLECTIVES, "training"]))
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=2.5, help="of a span")
    parser.add_argument("--settled", action="store_true", help="measure once all has been well for long; spans of 15 s or more")
    parser.add_argument("--ranks", type=int, nargs="*", default=[8, 16], help="of the training job")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("arguments", nargs="*", help="further arguments of attach, after --, for example -- --no-probes")
    options = parser.parse_args()
    head = (
        "operation", "message",
        "iteration without", "its spread", "with / without", "95 % interval", "lowest to highest", "agent",
    )  # fmt: skip
    line = "| {} | {} | {} | {} | {} | {} | {} | {} |" if options.markdown else "{:20} {:18} {:18} {:11} {:15} {:16} {:18} {}"
    print(line.format(*head))
    if options.markdown:
        print("|" + " --- |" * len(head))
    for name, size, job in jobs({word.strip().lower() for word in options.only.split(",") if word}, options.ranks):
        with job:
            job.wait_progress(10, timeout=120)
            found = measure(job, options.pairs, options.seconds, options.arguments, settled=options.settled)
        ratios = found.ratios
        base = f"{np.median(found.without) * 1e3:.2f} ms"
        spread, ratio = f"±{found.spread / 2:.1%}", f"{np.median(ratios):.4f}"
        low, high = median_interval(ratios)
        interval, extremes = f"{low:.4f} to {high:.4f}", f"{ratios.min():.3f} to {ratios.max():.3f}"
        print(line.format(name, size, base, spread, ratio, interval, extremes, f"{found.share:.2%} of a core"), flush=True)


if __name__ == "__main__":
    main()
