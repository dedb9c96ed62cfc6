"""What a large or busy node costs: many ranks, a process of eight GPUs, five hundred neighbours, 100,000 calls a second.

    python tests/benchmarks/bench_node.py [--only rate,gpus,neighbours,calls] [--pairs N] [--seconds S] [--markdown]

The first three are real NCCL on the CPU testbed with an agent and an engine (root). Within one running job, spans with and
without an agent follow one another; in every second pair the agent comes first. A ratio is that of a pair's iterations a second,
with over without; printed are the median over the pairs and their lowest and highest. The agent's CPU time is that of its spans,
which begin when it has attached: it looks once a second then. `calls` is the stub library, called by one process at a steady
pace, and the code that a record takes to what is sent, in pairs as well. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench_agent import TRAINING, cpu_s, rss_mib
from benchmarks.bench_calls import Route
from benchmarks.pairs import HEAD, Pairs, Span, row, spread
from ncclwatch.collect.node import WAKE_S
from ncclwatch.probes.tracer import CallTracer, TracedFile
from testbed.calls.harness import STUB_OFFSETS, Caller, build_stub, compilation
from testbed.job import Job, die_with_parent
from testbed.multi_gpu import multi_gpu
from testbed.sidecar import Daemon, daemon, free_port
from testbed.watcher import pids
from unit.synthetic import process

CASES = ("rate", "gpus", "neighbours", "calls")
RELEASE = "2.27.5"
SETTLE_S = 1.0
"""Between an agent's coming or going and a span; until then it has told its engine what was lost, too."""
EIGHT = 8
MAX_NEIGHBOURS = 2000
NEIGHBOUR_S = 1800
"""After so long a neighbour ends by itself."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A running job: its ranks, when the first one finished iterations (s, CLOCK_MONOTONIC), how an agent is told to watch it."""

    ranks: int
    ends: Callable[[], Sequence[float]]
    watch: Sequence[str]


def pace_of(subject: Subject, seconds: float) -> float:
    """Iterations a second in the next seconds, between the first and the last that end in them."""
    begin = time.monotonic()
    time.sleep(seconds)
    end = time.monotonic()
    found = [at for at in subject.ends() if begin <= at <= end]
    if len(found) < 3:
        raise SystemExit(f"only {len(found)} iterations ended in {seconds:g} s: give --seconds more")
    return (len(found) - 1) / (found[-1] - found[0])


class Watch:
    """An engine for the length of a case, and agents that come and go."""

    def __init__(self, address: str, engine: Daemon, options: argparse.Namespace) -> None:
        self._address, self._engine, self._seconds = address, engine, options.seconds

    def _lost(self) -> int:
        """Records that the engine has told to be lost."""
        return sum(int(told["lost"]) for told in self._engine.objects("loss"))

    def plain(self, subject: Subject) -> Span:
        """A span without an agent."""
        return Span(pace_of(subject, self._seconds))

    def attached(self, subject: Subject) -> Span:
        """A span with an agent."""
        before = self._lost()
        with tempfile.TemporaryDirectory() as spool:
            with daemon("agent", "--engine", self._address, *subject.watch, "--spool", spool) as agent:
                agent.wait_line("watching ")
                processes = int((re.findall(r"watching (\d+) processes", agent.text) or ["0"])[0])
                time.sleep(SETTLE_S)
                both = agent.child.pid, self._engine.child.pid
                begun, spent = time.monotonic(), [cpu_s(pid) for pid in both]
                rate = pace_of(subject, self._seconds)
                wall = time.monotonic() - begun
                agent_share, engine_share = ((cpu_s(pid) - cpu) / wall for pid, cpu in zip(both, spent, strict=True))
                memory = rss_mib(agent.child.pid)
            time.sleep(SETTLE_S)
        return Span(rate, agent_share, engine_share, memory, processes, self._lost() - before)

    def pair(self, pairs: Pairs, subject: Subject) -> None:
        """One more pair of spans."""
        pairs.add(lambda: self.plain(subject), lambda: self.attached(subject))


@contextmanager
def watching(options: argparse.Namespace) -> Iterator[Watch]:
    """An engine for the length of a block."""
    address = f"tcp://127.0.0.1:{free_port()}"
    with daemon("engine", "--bind", address, "--json") as engine:
        engine.wait_line('"listening"')
        yield Watch(address, engine, options)


def said(pairs: Pairs) -> str:
    """Whom the agents watched, and what the engine took meanwhile, on this node too."""
    watched = "/".join(sorted({str(span.processes) for span in pairs.attached}))
    return f"{watched} processes watched; engine {statistics.fmean(span.engine for span in pairs.attached):.2%} of a core"


def of_job(job: Job, watch: Sequence[str] = ()) -> Subject:
    """A job of a process a rank; watched by its pids, if nothing else is said."""

    def ends() -> list[float]:
        return [float(line.split()[5]) for line in job.lines(0) if line.startswith("iteration ")]

    return Subject(job.ranks, ends, watch or tuple(pids(job)))


def rate(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """Many ranks on one node and one on another, small messages, little compute."""
    extra = ("--time", "--compute-us", str(options.compute_us))
    pairs = Pairs()
    with watching(options) as watch, Job(RELEASE, options.ranks, "allreduce", "mixed", count=1024, extra=extra) as job:
        job.wait_progress(20)
        for _ in range(options.pairs):
            watch.pair(pairs, of_job(job))
    yield row("rate", options.ranks, pairs, said(pairs))


def gpus(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """One process that drives several GPUs from one thread."""
    number, pairs = min(EIGHT, options.ranks), Pairs()
    with (
        watching(options) as watch,
        tempfile.TemporaryDirectory() as folder,
        multi_gpu(Path(folder), RELEASE, "group", processes=1, gpus=number) as job,
    ):
        job.wait_for(5)
        subject = Subject(number, lambda: job.ends(0), ("--pid", str(job.pids[0])))
        for _ in range(options.pairs):
            watch.pair(pairs, subject)
    yield row("gpus, 1 process", number, pairs, said(pairs))


@contextmanager
def crowd(number: int) -> Iterator[None]:
    """Processes that sleep, for the length of a block."""
    command = ["sleep", str(NEIGHBOUR_S)]
    children: list[subprocess.Popen[bytes]] = []
    try:
        while len(children) < min(number, MAX_NEIGHBOURS):
            children.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent))  # noqa: PLW1509
        yield
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def neighbours(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """The job of bench_agent.py, with and without other processes on the node, watched by --all."""
    ranks, alone, beside = min(EIGHT, options.ranks), Pairs(), Pairs()
    with watching(options) as watch, Job(RELEASE, ranks, "training", extra=TRAINING) as job:
        job.wait_progress(5)
        # Every rank names the job's folder in its command line.
        subject = of_job(job, ("--match", job.log_path(0).parent.name) if options.not_alone else ("--all",))
        for turn in range(2 * options.pairs):
            # None, many, many, none, and so on.
            if turn % 4 in (0, 3):
                watch.pair(alone, subject)
            else:
                with crowd(options.neighbours):
                    watch.pair(beside, subject)
    yield row("neighbours, 0", ranks, alone, said(alone))
    both = list(zip(alone.attached, beside.attached, strict=True))
    cpu = f"{beside.agent() / max(alone.agent(), 1e-6):.3f}"
    _, between = spread([b.agent / max(a.agent, 1e-6) for a, b in both])
    more = statistics.median(b.memory - a.memory for a, b in both)
    text = f"{said(beside)}; agent against 0 neighbours: {cpu} times the CPU time ({between}), {more:+.1f} MiB"
    yield row(f"neighbours, {options.neighbours}", ranks, beside, text)


@dataclass(slots=True)
class Taken:
    """Totals of the spans of `calls` with a probe: calls made, records taken, CPU time of taking them (s), bytes to send."""

    made: int = 0
    records: int = 0
    cpu_s: float = 0.0
    nbytes: int = 0


def paced(caller: Caller, options: argparse.Namespace) -> tuple[float, float, int]:
    """Have the caller call: calls a second, median ns of one, and how many it was."""
    number = int(options.rate * options.seconds)
    words = caller.run(f"pace {options.rate} {number}")[-1].split()
    return number / float(words[1]), float(words[3]), number


def traced(library: Path, caller: Caller, options: argparse.Namespace, total: Taken) -> tuple[Span, float]:
    """The same with a probe, its records taken as an agent takes them, as often as it does; the span, and median ns of a call."""
    info = process(0, 4, host="node")
    route = Route([replace(info, key=replace(info.key, pid=caller.pid))])
    with (
        CallTracer.start([TracedFile(str(library), STUB_OFFSETS)], watch=[caller.pid], compilation=compilation()) as tracer,
        ThreadPoolExecutor(1) as other,
    ):
        begun, cpu, looked = time.monotonic(), time.thread_time(), time.monotonic()
        answer = other.submit(paced, caller, options)
        over = False
        while not over:
            time.sleep(WAKE_S)
            # Once more when the caller is done: what it left in the ring.
            over, now = answer.done(), time.monotonic()
            look = time.monotonic_ns() if now - looked >= 1.0 else None
            looked = now if look else looked
            route.take(tracer.poll, sum(tracer.losses()), look)
        wall, cpu, lost = time.monotonic() - begun, time.thread_time() - cpu, sum(tracer.losses())
    pace, ns, made = answer.result()
    total.made, total.records, total.cpu_s = total.made + made, total.records + route.records, total.cpu_s + cpu
    total.nbytes += route.nbytes
    return Span(pace, cpu / wall, lost=lost), ns


def calls(options: argparse.Namespace) -> Iterator[tuple[str, ...]]:
    """One process that calls the stub library at a steady pace; its functions begin as NVIDIA's do."""
    pairs, total = Pairs(), Taken()
    bare: list[float] = []
    probed: list[float] = []

    def plain(caller: Caller) -> Span:
        pace, ns, _ = paced(caller, options)
        bare.append(ns)
        return Span(pace)

    def watched(library: Path, caller: Caller) -> Span:
        span, ns = traced(library, caller, options, total)
        probed.append(ns)
        return span

    with tempfile.TemporaryDirectory() as folder:
        library = build_stub(Path(folder), frames=True)
        with Caller(library) as caller:
            for _ in range(options.pairs):
                pairs.add(lambda: plain(caller), lambda: watched(library, caller))
    price, between = spread([(b - a) / 1e3 for a, b in zip(bare, probed, strict=True)])
    missing = total.made - total.records - pairs.lost
    exact = "taken + lost = made" if not missing else f"{missing:+} of them neither taken nor counted as lost"
    each, nbytes = total.cpu_s / max(total.records, 1) * 1e6, total.nbytes / max(total.records, 1)
    text = f"a call {price} us dearer ({between}); {total.made:,} calls, {total.records:,} records taken: {exact}; "
    text += f"{each:.2f} us of CPU time and {nbytes:.1f} B a record"
    yield row(f"calls, {options.rate:,}/s", 1, pairs, text, memory="-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="cases with commas between")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a span")
    parser.add_argument("--ranks", type=int, default=16, help="of `rate`; the others take no more than these, nor than 8")
    parser.add_argument("--compute-us", type=int, default=1000, help="compute of an iteration of `rate`; it sleeps")
    parser.add_argument("--neighbours", type=int, default=500, help=f"at most {MAX_NEIGHBOURS}")
    parser.add_argument("--rate", type=int, default=100_000, help="calls a second of `calls`")
    parser.add_argument(
        "--not-alone", action="store_true", help="other jobs run here: `neighbours` watches by --match, not --all"
    )
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    chosen = [word.strip() for word in options.only.split(",") if word.strip()]
    if unknown := set(chosen) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    line = "|" + " {} |" * len(HEAD) if options.markdown else "{:16} {:>5} {:>10} {:>14} {:>17} {:>8} {:>7} {:>8} {:>8}  {}"
    print(line.format(*HEAD))
    if options.markdown:
        print("|" + " --- |" * len(HEAD))
    for case in (rate, gpus, neighbours, calls):
        if case.__name__ in chosen:
            for found in case(options):
                print(line.format(*found), flush=True)


if __name__ == "__main__":
    main()
