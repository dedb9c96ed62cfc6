"""What does an engine keep of jobs that are gone? Kept recordings one after the other, each time as another job, counted.

    python tests/benchmarks/lives.py [--jobs 300] [--looks 12] [--agents] [--communicators] [--process] [--paths]

Each job has new processes, communicators and times; it runs for some looks, hangs now and then, and ends. What an agent writes,
its stream over all of them, goes through the reader and the session of an engine. Everything that can be reached from these is
counted at a third of the jobs and at the end: what lies between is what a job leaves behind, and ``--paths`` lists where it is.
``--agents`` begins a new life of the agent with each job; with ``--communicators`` the processes stay and make new communicators.
``--process`` has agents send it all to an engine that is a process of its own, of which memory, descriptors and threads are
counted. Exits with 1 when something grows.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import tracemalloc
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.leftovers import descriptors
from benchmarks.soak import HEADER, RECORDINGS, Replayed, Series, rss_mib
from ncclwatch.collect.batch import Change, NodeBatch, ProcessChange
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.messaging.agent import KEY_EVERY, Agent
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.values import Shared
from ncclwatch.messaging.writer import BatchWriter, ledger_calls
from ncclwatch.slow_modes import SlowRule
from testbed.sidecar import Daemon, free_port

SECOND = 10**9
INTERVAL_S = 0.1
"""Between two judgements of an engine that is a process: as often as it can be told to."""


class Lives:
    """Jobs, one after the other, on one node, and the engine that is told of them."""

    def __init__(self, *, looks: int, agents: bool = False, communicators: bool = False) -> None:
        self.recordings = [Replayed(name) for name in RECORDINGS]
        self.looks, self.agents, self.communicators = looks, agents, communicators
        self.session = DiagnosisSession(LiveDiagnosis(slow=SlowRule().watch()))
        self.shared = Shared()
        self.writer = BatchWriter(calls="all", key_every=KEY_EVERY, grouped=True)
        self.reader = BatchReader(self.shared)
        self.now_ns, self.sequence, self.jobs, self.batches = 10**15, 0, 0, 0
        self.told: Counter[str] = Counter()

    def one(self) -> None:
        """One job from its first look to the end of its processes, and a look at a node without any."""
        self.jobs += 1
        if self.agents and self.jobs > 1:
            self._begin_agent()
        last: NodeBatch | None = None
        for batch in self._batches(self.recordings[self._hangs]):
            self._hear(batch)
            last = batch if batch.looked else last
        assert last is not None
        if self.communicators:
            return
        ended = tuple(s.ended(self.now_ns, self.now_ns) for s in last.samples if s.run_state != "X")
        changes = tuple(ProcessChange(Change.EXITED, s.process.pid, s.process, host=s.process.host) for s in ended)
        for samples, said in ((ended, changes), ((), ())):
            self.now_ns += SECOND
            self._hear(NodeBatch(
                host=last.host, boot_id=last.boot_id, sequence=0, time_ns=self.now_ns, wall_ns=self.now_ns, looked=True,
                complete=True, samples=samples, changes=said, planes=last.planes,
            ))  # fmt: skip

    def _begin_agent(self) -> None:
        self.writer, self.sequence = BatchWriter(calls="all", key_every=KEY_EVERY, grouped=True), 0
        self.reader = BatchReader(self.shared)

    @property
    def _hangs(self) -> bool:
        return self.jobs % 4 == 3 and not self.communicators

    def _batches(self, one: Replayed) -> Iterator[NodeBatch]:
        reader, looks = BatchReader(), 0
        for data in one.batches(self.jobs, self.now_ns - one.begin_ns, same_processes=self.communicators):
            batch = reader.decode(data).batch
            self.now_ns = batch.time_ns
            looks += batch.looked
            yield batch
            if looks >= (4 if self._hangs else 1) * self.looks:
                return

    def _hear(self, batch: NodeBatch) -> None:
        self.sequence += 1
        batch.sequence, batch.lost = self.sequence, 0
        batch.events = None if batch.events is None else ledger_calls(batch.events)
        heard = self.reader.decode(self.writer.encode(batch)).batch
        self.batches += 1
        self.session.feed(heard, source="a")
        if heard.looked:
            self.told.update(verdict.verdict_class.value for verdict in self.session.judge(heard.time_ns).told)

    def engine(self) -> dict[str, object]:
        """What an engine keeps."""
        return {"session": self.session, "reader": self.reader, "shared": self.shared}

    def roots(self) -> dict[str, object]:
        """What is looked into: the engine's, and the writer of the agent."""
        return {**self.engine(), "writer": self.writer}


class Sent(Lives):
    """The same, sent by agents to an engine that is a process; its memory, descriptors and threads by job."""

    def __init__(self, *, looks: int, agents: bool = False, communicators: bool = False) -> None:
        super().__init__(looks=looks, agents=agents, communicators=communicators)
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.process = Daemon("engine", "--bind", self.address, "--json", "--interval", f"{INTERVAL_S}")
        self.process.wait_line("listening")
        self.agent = self._agent()
        self.series = [Series("memory", 1.0, "KiB"), Series("descriptors", 0.05), Series("threads", 0.05)]

    def _agent(self) -> Agent:
        agent = Agent(self.address, host="node")
        agent.start()
        return agent

    def _begin_agent(self) -> None:
        self.agent.close()
        self.agent, self.sequence = self._agent(), 0

    def _hear(self, batch: NodeBatch) -> None:
        self.sequence += 1
        self.batches += 1
        batch.sequence, batch.lost, batch.wall_ns = self.sequence, 0, time.time_ns()
        looked = batch.looked
        self.agent.take(batch)
        # One look a judgement.
        time.sleep(INTERVAL_S if looked else 0.0)

    def one(self) -> None:
        """One job, and what the engine takes after it."""
        super().one()
        pid = self.process.child.pid
        threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
        for series, value in zip(self.series, (rss_mib(pid) * 1024, sum(descriptors(pid).values()), threads), strict=True):
            series.add(self.jobs, value)
        if self.jobs % 25 == 0:
            print(self.jobs, *(one.values[-1] for one in self.series), flush=True)

    def run(self, jobs: int) -> int:
        """So many jobs, and a table; 1 when something grows."""
        began = time.monotonic()
        try:
            for _ in range(jobs):
                self.one()
            told = Counter(data["verdict"]["class"] for data in self.process.objects("verdict"))
        finally:
            self.agent.close()
            self.process.end()
        print(HEADER.replace("an hour", "a job"), *(one.row() for one in self.series), sep="\n")
        print(f"{self.jobs} jobs, {self.batches} batches in {time.monotonic() - began:.0f} s; told {dict(told)}")
        return 1 if any(one.grows for one in self.series) else 0


LEAVES = (str, int, float, complex, bool, type(None), type, np.generic, np.dtype)
KNOWN = ("ncclwatch", "benchmarks", "unit")


def reached(roots: dict[str, object]) -> Counter[str]:
    """How much is held, by the way to it: elements of containers, and bytes of arrays and byte strings by 64."""
    held: Counter[str] = Counter()
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = list(roots.items())
    while waiting:
        way, found = waiting.pop()
        if isinstance(found, LEAVES) or id(found) in seen:
            continue
        seen.add(id(found))
        if isinstance(found, (bytes, bytearray)):
            held[way] += 1 + len(found) // 64
        elif isinstance(found, np.ndarray):
            held[way] += 1 + found.nbytes // 64
            waiting.append((way + ".base", found.base))
        elif isinstance(found, dict):
            held[way] += len(found)
            waiting += [(way + "[]", value) for value in found.values()]
            waiting += [(way + "{}", key) for key in found]
        elif isinstance(found, (list, tuple, set, frozenset, deque)):
            held[way] += len(found)
            waiting += [(way + "[]", value) for value in found]
        elif type(found).__module__.startswith(KNOWN):
            waiting += [(f"{way}.{name}", value) for name, value in _fields(found)]
    return held


def _fields(found: object) -> Iterator[tuple[str, object]]:
    yield from getattr(found, "__dict__", {}).items()
    for kind in type(found).__mro__:
        slots = kind.__dict__.get("__slots__", getattr(kind, "__struct_fields__", ()))
        for name in (slots,) if isinstance(slots, str) else slots if isinstance(slots, tuple) else ():
            if name not in ("__dict__", "__weakref__") and hasattr(found, name):
                yield name, getattr(found, name)


def objects() -> Counter[str]:
    """Objects of this process by their type."""
    gc.collect()
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


def main() -> int:
    """Print what grew; 1 when something did."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300)
    parser.add_argument("--looks", type=int, default=12)
    parser.add_argument("--agents", action="store_true")
    parser.add_argument("--communicators", action="store_true")
    parser.add_argument("--paths", action="store_true")
    parser.add_argument("--trace", action="store_true", help="Lines of code whose memory grew, by tracemalloc (slow).")
    parser.add_argument("--process", action="store_true")
    options = parser.parse_args()
    if options.process:
        return Sent(looks=options.looks, agents=options.agents, communicators=options.communicators).run(options.jobs)
    lives, memory, began = (
        Lives(looks=options.looks, agents=options.agents, communicators=options.communicators),
        Series("memory", 0.0),
        time.monotonic(),
    )
    before, kinds, snapshot = Counter[str](), Counter[str](), None
    first = max(1, options.jobs // 3)
    for number in range(1, options.jobs + 1):
        lives.one()
        memory.add(number, rss_mib() * 1024)
        if number == first:
            before, kinds = reached(lives.roots()), objects()
            if options.trace:
                tracemalloc.start(1)
                snapshot = tracemalloc.take_snapshot()
    held, now = reached(lives.roots()), objects()
    slope, error = memory.slope()
    jobs = options.jobs - first
    print(f"{lives.jobs} jobs, {lives.batches} batches in {time.monotonic() - began:.0f} s; told {dict(lives.told)}")
    print(f"resident: {memory.values[0] / 1024:.1f} to {memory.values[-1] / 1024:.1f} MiB, {slope:+.2f} ± {error:.2f} KiB a job")
    grown = {way: held[way] - before[way] for way in held if held[way] - before[way] > jobs // 10}
    print(f"held: {before.total():,} to {held.total():,}, {(held.total() - before.total()) / jobs:+.1f} a job")
    for way, more in sorted(grown.items(), key=lambda pair: -pair[1])[: 60 if options.paths else 12]:
        print(f"  {more / jobs:+10.2f} a job  {held[way]:10,}  {way}")
    print("objects that came and stayed, by type:")
    for kind, more in (now - kinds).most_common(12):
        print(f"  {more / jobs:+10.2f} a job  {now[kind]:10,}  {kind}")
    if snapshot is not None:
        for line in tracemalloc.take_snapshot().compare_to(snapshot, "lineno")[:15]:
            print(" ", line)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
