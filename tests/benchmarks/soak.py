"""Does anything grow? A job that is restarted, scaled and hung at random, agents and engines killed at random; a day replayed.

    python tests/benchmarks/soak.py --minutes 120 [--seed 1]
    python tests/benchmarks/soak.py --replay-hours 24 [--minutes 30]

Root for the first. An agent and an engine live through all of it and are measured in each round while the same kind of job runs;
a second pair is killed at random. The second form replays kept recordings as one job after another, each under new names,
through the reader and the session of an engine. Memory is a slope with its standard error, corrected for what neighbouring
samples have in common. Exits with 1 when something grows, stays, is lost in silence, or the job is harmed.
"""

from __future__ import annotations

import argparse
import contextlib
import lzma
import math
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec
import numpy as np

from benchmarks.leftovers import Leftovers, bpf_objects, descriptors, held_objects, own_temporary_folder, temporary_files
from ncclwatch.engine.live import LiveDiagnosis
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.messaging import packing
from ncclwatch.messaging.body import Body
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.records import NO_INT, NO_WORD
from ncclwatch.slow_modes import SlowRule
from ncclwatch.store.container import Container, Kind
from testbed.job import Job, Transport
from testbed.sidecar import Daemon, free_port, verdicts

MARK = "19337"
"""An argument of our job and no other: by it an agent tells which processes are its own."""
RANKS = 4
MOST_MIB_AN_HOUR = 8.0
"""What memory may rise by before it counts as growing, once its error is taken off twice: 64 MiB in a working day."""
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "jobs"
RECORDINGS = ("drawn-1101-251-clean-2.32.3-shm-live-0", "drawn-1301-128-stopped-2.29.2-socket-live-0")


@dataclass
class Series:
    """Values over hours."""

    name: str
    limit: float
    """Of the slope, an hour."""
    unit: str = ""
    hours: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, hours: float, value: float) -> None:
        """One more."""
        self.hours.append(hours)
        self.values.append(value)

    def slope(self) -> tuple[float, float]:
        """(slope an hour, its standard error) of the last three quarters; the first is where caches fill."""
        x, y = (np.array(part[len(part) // 4 :]) for part in (self.hours, self.values))
        if len(x) < 4 or np.ptp(x) == 0:
            return 0.0, math.inf
        slope, offset = np.polyfit(x, y, 1)
        rest = y - slope * x - offset
        spread = float(rest.std())
        alike = (
            float(np.corrcoef(rest[1:], rest[:-1])[0, 1]) if spread > 0 and rest[1:].std() > 0 and rest[:-1].std() > 0 else 0.0
        )
        count = max(len(x) * (1 - max(alike, 0.0)) / (1 + max(alike, 0.0)), 3.0)
        return float(slope), spread / (float(x.std()) * math.sqrt(max(count - 2, 1.0)))

    @property
    def grows(self) -> bool:
        """Whether it rises by more than it may, whatever chance has to do with it."""
        slope, error = self.slope()
        return slope - 2 * error > self.limit

    def row(self) -> str:
        """A line of the table."""
        slope, error = self.slope()
        first, last = (self.values[0], self.values[-1]) if self.values else (math.nan, math.nan)
        at = f"{first:.1f} | {last:.1f} | {max(self.values, default=math.nan):.1f}"
        word = "GROWS" if self.grows else "no"
        return f"| {self.name} | {len(self.values)} | {at} | {slope:+.2f} ± {error:.2f} {self.unit} | {word} |"


HEADER = "| what | samples | first | last | most | slope an hour (± standard error) | grows |\n" + "| --- " * 7 + "|"


def rss_mib(pid: int | str = "self") -> float:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) * 4096 / (1 << 20)


# --- live --------------------------------------------------------------------------------------------------------------


class Pair:
    """An engine and an agent that takes up every process of our jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.engine = self._engine()
        self.agent = self._agent()
        self.kills: Counter[str] = Counter()
        self.gaps = 0

    def _engine(self) -> Daemon:
        engine = Daemon("engine", "--bind", self.address, "--json")
        engine.wait_line("listening")
        return engine

    def _agent(self) -> Daemon:
        agent = Daemon("agent", "--engine", self.address, "--match", MARK, "--spool", str(self.folder))
        agent.wait_line("connected to engine")
        return agent

    def kill(self, what: str) -> None:
        """SIGKILL, and another in its place."""
        self.kills[what] += 1
        if what == "engine":
            self.engine.end(signal.SIGKILL)
            self.engine = self._engine()
            return
        self.agent.end(signal.SIGKILL)
        self.agent = self._agent()
        self.agent.wait_line("no agent ran here for")
        self.gaps += 1

    def knows(self, ranks: int) -> bool:
        """Whether the engine's newest word is of so many ranks."""
        found = self.engine.objects("summary")
        return bool(found) and found[-1]["ranks"] == ranks

    def end(self) -> None:
        """End both."""
        self.agent.end()
        self.engine.end()


class Live:
    """The rounds, what was done in them and what was measured."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.source = random.Random(seed)
        self.folder = folder
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        mib, count = MOST_MIB_AN_HOUR, 3.0
        self.series = {
            "agent": Series("memory of the agent", mib, "MiB"), "engine": Series("memory of the engine", mib, "MiB"),
            "agent fds": Series("descriptors of the agent", count), "engine fds": Series("descriptors of the engine", count),
            "bpf": Series("BPF programs, maps and links of the agent", count),
            "files": Series("temporary files", count),
        }  # fmt: skip
        self.began = time.monotonic()
        self.named = 0

    def run(self, minutes: float) -> None:
        """As many rounds as there is time for."""
        steady, shaken = Pair(self.folder / "steady"), Pair(self.folder / "shaken")
        left = Leftovers(())
        try:
            while time.monotonic() - self.began < minutes * 60 and not self.wrong:
                self._round(steady, shaken, left)
            self.done["losses told"] = len(steady.engine.objects("loss"))
            self.done["records lost"] = sum(
                int(line.get("lost", line.get("records", 0))) for line in steady.engine.objects("loss")
            )
        finally:
            steady.end()
            shaken.end()
        self.done |= {f"{what}s killed": count for what, count in shaken.kills.items()}
        if shaken.kills["agent"] != shaken.gaps:
            self.wrong.append("an agent that was killed left a gap that nobody told of")
        self.wrong += left.found(own=False)

    def _round(self, steady: Pair, shaken: Pair, left: Leftovers) -> None:
        """The same job as ever, measured; then another, to which things happen."""
        with self._job(RANKS) as job:
            steady.engine.wait(lambda: steady.knows(RANKS), "the steady engine knows the job")
            job.wait_progress(20)
            time.sleep(2.0)
            self._measure(steady)
            left.note(steady.agent.child.pid)
            left.note(shaken.agent.child.pid)
            self._check(job)
        with self._job(self.source.randint(2, 6)) as job:
            for _ in range(self.source.randint(1, 3)):
                self._happen(job, steady, shaken)
            self._check(job)
        self.done["rounds"] += 1

    def _job(self, ranks: int) -> Job:
        self.done["jobs"] += 1
        transports: tuple[Transport, ...] = ("socket", "mixed", "shm")
        transport = self.source.choice(transports)
        return Job(ranks=ranks, transport=transport, count=1 << 12, verify=True, extra=("--pause-us", MARK))

    def _happen(self, job: Job, steady: Pair, shaken: Pair) -> None:
        what = self.source.choice(("freeze", "freeze", "kill agent", "kill engine", "kill both", "wait"))
        if what == "freeze":
            self._freeze(job, steady)
        elif what == "wait":
            time.sleep(self.source.uniform(0.5, 3.0))
        else:
            for name in ("agent", "engine") if what == "kill both" else (what.removeprefix("kill "),):
                shaken.kill(name)

    def _freeze(self, job: Job, steady: Pair) -> None:
        """Hang it for some seconds; whether the rank was named meanwhile is counted, for short hangs need not be."""
        rank, told = self.source.randrange(job.ranks), len(verdicts(steady.engine))
        self.done["hangs"] += 1
        job.freeze(rank)
        time.sleep(self.source.uniform(3.0, 9.0))
        job.thaw(rank)
        self.done["hangs named right"] += ("stopped", [rank]) in verdicts(steady.engine)[told:]
        job.wait_progress(5)

    def _measure(self, pair: Pair) -> None:
        hours, agent, engine = (time.monotonic() - self.began) / 3600, pair.agent.child.pid, pair.engine.child.pid
        values = {
            "agent": rss_mib(agent), "engine": rss_mib(engine), "agent fds": sum(descriptors(agent).values()),
            "engine fds": sum(descriptors(engine).values()), "bpf": sum(map(len, held_objects(agent).values())),
            "files": len(temporary_files()),
        }  # fmt: skip
        for name, value in values.items():
            self.series[name].add(hours, float(value))

    def _check(self, job: Job) -> None:
        for rank in range(job.ranks):
            if not job.alive(rank):
                self.wrong.append(f"rank {rank} has ended: {job.log(rank)[-300:]}")
            self.wrong += [f"rank {rank}: {line}" for line in job.lines(rank) if line.startswith("wrong")]

    def table(self) -> str:
        """What was measured."""
        return "\n".join([HEADER, *(series.row() for series in self.series.values())])


# --- replayed ----------------------------------------------------------------------------------------------------------

_TIMES = re.compile(r"(^|\.)(time_ns|wall_ns|enter_time_ns)$")
_HASHES = re.compile(r"hash$")
_PIDS = re.compile(r"(^|_)[pt]id$")
_ADDRESSES = re.compile(r"(^|_)(address|comm)$")
PIDS_A_JOB, MOST_PID = 64, 1 << 21
"""By how much process ids are moved from one job to the next, and where they begin again."""


class Replayed:
    """The batches of a kept recording, again and again, each time as another job later on."""

    def __init__(self, name: str) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(lzma.decompress((FIXTURES / f"{name}.ncclwatch.xz").read_bytes()))
            file.flush()
            with Container(Path(file.name)) as container:
                frames = [packing.unframe(container.payload(frame)) for frame in container.frames() if frame.kind == Kind.BATCH]
        decoder = msgspec.msgpack.Decoder(Body)
        self.bodies = [(decoder.decode(raw), key) for raw, key in frames]
        self.begin_ns, self.end_ns = self.bodies[0][0].time_ns, self.bodies[-1][0].time_ns

    def batches(self, number: int, later_ns: int, *, same_processes: bool = False) -> Iterator[bytes]:
        """All of them under new names (ids and start times of processes, hashes and addresses of communicators), ``later_ns``
        later; with ``same_processes`` these stay and make new communicators.
        """
        names = _Names(number, 0 if same_processes else number, later_ns)
        layouts: dict[str, np.dtype[Any]] = {}
        for body, key in self.bodies:
            if key:
                layouts = {name: packing.dtype_of(layout) for name, layout in body.layouts.items()}
            yield packing.frame(msgspec.msgpack.encode(_renamed(body, layouts, names)), key=key)


@dataclass(frozen=True, slots=True)
class _Names:
    """What a job is called: the number of its communicators and of its processes, and how much later it is."""

    number: int
    processes: int
    later_ns: int

    @property
    def salt(self) -> int:
        """For hashes."""
        return (self.number * 0x9E3779B97F4A7C15) & (1 << 64) - 1

    @property
    def pids_by(self) -> int:
        """By how much its process ids are moved."""
        return self.processes * PIDS_A_JOB % MOST_PID

    @property
    def addresses_by(self) -> int:
        """By how much its communicators are."""
        return (self.number << 12) % (1 << 40)


def _renamed(body: Body, layouts: dict[str, np.dtype[Any]], names: _Names) -> Body:
    tables, salt, later_ns = [], names.salt, names.later_ns
    for table in body.tables:
        rows = packing.unpack(table, layouts[table.layout]).copy()
        for name in rows.dtype.names or ():
            if _TIMES.search(name):
                real = rows[name].astype(np.int64) > 0
                rows[name][real] = (rows[name][real].astype(np.int64) + later_ns).astype(rows[name].dtype)
            elif _HASHES.search(name):
                words = rows[name].astype(np.uint64)
                real = (words != 0) & (words != NO_WORD) & (rows[name].astype(np.int64) != NO_INT)
                rows[name][real] = (words ^ np.uint64(salt))[real].astype(rows[name].dtype)
            elif _PIDS.search(name):
                real = (rows[name].astype(np.int64) > 0) & (rows[name].astype(np.int64) != NO_INT)
                rows[name][real] += np.asarray(names.pids_by, rows[name].dtype)
            elif _ADDRESSES.search(name) and rows[name].dtype == np.uint64:
                real = (rows[name] != 0) & (rows[name] != NO_WORD)
                rows[name][real] += np.uint64(names.addresses_by)
        tables.append(packing.pack(table.layout, rows))
    more = {name: msgspec.Raw(_rewritten(bytes(raw), names)) for name, raw in body.more.items()}
    changed = {
        "stream": body.stream + names.number, "tables": tables, "more": more,
        "time_ns": body.time_ns + later_ns, "wall_ns": body.wall_ns + later_ns,
        "values": [_rewritten(value, names) for value in body.values],
    }  # fmt: skip
    return msgspec.structs.replace(body, **changed)


def _rewritten(data: bytes, names: _Names) -> bytes:
    """A value in which processes and communicators have other names."""

    def walk(tree: Any) -> Any:
        if isinstance(tree, list):
            return [walk(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        found = {}
        for name, value in tree.items():
            if name == "start_time" and isinstance(value, int):
                found[name] = value + names.processes
            elif name in ("pid", "tid") and isinstance(value, int) and value > 0:
                found[name] = value + names.pids_by
            elif isinstance(name, str) and name.endswith("hash") and isinstance(value, int) and value:
                found[name] = value ^ names.salt
            elif name == "comm_address" and isinstance(value, int) and value:
                found[name] = value + names.addresses_by
            elif name in ("time_ns", "wall_ns") and isinstance(value, int) and value > 0:
                found[name] = value + names.later_ns
            else:
                found[name] = walk(value)
        return found

    if not any(word in data for word in (b"start_time", b"hash", b"time_ns", b"pid")):
        return data
    return msgspec.msgpack.encode(walk(msgspec.msgpack.decode(data)))


def replay(hours: float, minutes: float) -> tuple[list[Series], str, list[str]]:
    """Feed a session for so many hours of job time, or so many minutes here; what was measured, told and wrong."""
    recordings = [Replayed(name) for name in RECORDINGS]
    session, reader = DiagnosisSession(LiveDiagnosis(slow=SlowRule().watch())), BatchReader()
    series = [Series("memory of an engine's session", MOST_MIB_AN_HOUR / 8, "MiB")]
    begun, now_ns, passes, looks, told = time.monotonic(), 0, 0, 0, Counter[str]()
    start_ns = recordings[0].begin_ns
    now_ns = start_ns
    while now_ns - start_ns < hours * 3.6e12 and time.monotonic() - begun < minutes * 60:
        # Mostly the healthy job; every eighth hangs.
        one = recordings[1 if passes % 8 == 7 else 0]
        passes += 1
        for data in one.batches(passes, now_ns - one.begin_ns):
            batch = reader.decode(data).batch
            session.feed(batch, source="a")
            if batch.looked:
                looks += 1
                told.update(verdict.verdict_class.value for verdict in session.judge(batch.time_ns).told)
        now_ns += one.end_ns - one.begin_ns + 5 * 10**9
        if passes % 4 == 0:
            series[0].add((now_ns - start_ns) / 3.6e12, rss_mib())
    taken = (now_ns - start_ns) / 3.6e12
    spent = (time.monotonic() - begun) / 60
    said = f"{taken:.1f} hours of job time in {spent:.1f} min: {passes} jobs, {looks:,} looks; told: {dict(told)}"
    wrong = [] if told["stopped"] >= passes // 8 else [f"of {passes // 8} jobs with a stopped rank {told['stopped']} were told"]
    return series, said, wrong


def main() -> int:
    """Print a table; 1 when something grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replay-hours", type=float, default=None)
    options = parser.parse_args()
    if options.replay_hours is not None:
        series, said, wrong = replay(options.replay_hours, options.minutes)
        print("\n".join([HEADER, *(one.row() for one in series)]))
    else:
        with own_temporary_folder() as folder, tempfile.TemporaryDirectory(prefix="spools-", dir=folder.parent) as spools:
            live = Live(options.seed, Path(spools))
            with contextlib.suppress(KeyboardInterrupt):
                live.run(options.minutes)
        series, wrong = list(live.series.values()), live.wrong
        said = ", ".join(f"{name} {count}" for name, count in live.done.items()) + f"; BPF objects of this machine now: {sizes()}"
        print(live.table())
    print(said)
    for line in wrong[:20]:
        print(f"LEFT OR HARMED: {line}")
    return 1 if wrong or any(one.grows for one in series) else 0


def sizes() -> str:
    """How many BPF objects there are."""
    return ", ".join(f"{len(numbers)} {kind}s" for kind, numbers in bpf_objects().items())


if __name__ == "__main__":
    sys.exit(main())
