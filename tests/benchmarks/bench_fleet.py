"""What a fleet takes by the number of ranks: hearing, judging, and from a fault to its verdict over a real nats-server.

    python tests/benchmarks/bench_fleet.py [--ranks 1024 8192 100352] [--live 1024 8192] [--seconds 20]

SIMULATED agents, eight ranks each, with rank identities, counters that drift by rank, and key batches of their own: a look a
second, a window and a sample of every rank. No NCCL runs. Two jobs have half of the nodes each; then a process of one stops.

The first table is CPU time by the part, each part in a process of its own, without sockets: a worker that checks, decodes and
reduces (windows a second a core), a judge that decodes what it gets, and one judgement of both jobs; with the memory of worker
and judge. The second is live: agents, nats-server, one ``fleet hear`` and one ``fleet judge`` on this machine; from the stop of
the process to the record of the verdict, and bytes that the streams hold for each rank and second.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from fleet.servers import running
from ncclwatch.collect.batch import NodeBatch, PlaneState
from ncclwatch.collect.windows import CurrentOperation, RankWindow
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.fleet import reduced, streams
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.hearing import Hearing
from ncclwatch.fleet.reduced import BundleReader
from ncclwatch.fleet.verdict_log import Record
from ncclwatch.messaging import packing, subjects
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.messaging.values import Shared
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.state import ChannelRing, ProcessSample
from unit.synthetic import Rank, communicator, recv, send

EACH = 8
JOBS = 2
LOOKS = 4
STOPS_AT = 2
"""The look from which on a process is stopped."""
VICTIM = 3
HASH = 0xF1EE7
SECOND = 10**9
CONCURRENT = 256
BEGIN_S = 120.0
"""For worker and judge to begin, on a machine that is busy."""


def look_of(rank: int, world: int, job: int, look: int, host: str, stops_at: int) -> ProcessSample:
    """What one rank of a ring shows. Rank 3 of the first job stops: its successor starves, its predecessor is full."""
    stopped = job == 0 and look >= stops_at
    moved = stops_at if stopped else look
    following, previous = (rank + 1) % world, (rank - 1) % world
    level = 92 if stopped and rank in (VICTIM, (VICTIM + 1) % world) else 94
    full = stopped and following == VICTIM
    heard = 92 if stopped and previous in (VICTIM, (VICTIM + 1) % world) else level
    own = replace(
        communicator(0, 1, comm_hash=HASH + job), rank=rank, nranks=world, rings=(ChannelRing(0, previous, following),), peers=(),
        op_count=moved * (50 + rank % 7), sequence_numbers={"AllReduce": moved * 50},
    )  # fmt: skip
    sent = send(following, sent=96, done=92, produced=96, comm_hash=HASH + job) if full else send(
        following, sent=level, done=level, produced=level, comm_hash=HASH + job
    )  # fmt: skip
    got = recv(previous, posted=96, received=heard, delivered=heard, consumed=heard, comm_hash=HASH + job)
    operations = tuple(replace(o, op_count=o.op_count + 100 * moved) for o in (sent, got))
    state = "T" if stopped and rank == VICTIM else "S"
    [sample] = Rank(rank, world, (own,), operations, state, host=host).looks(1)
    key = replace(sample.process.key, pid=1000 + rank % EACH + 100 * job)
    time_ns, wall_ns = sample.time_ns + look * SECOND, sample.wall_ns + look * SECOND
    return replace(sample, process=replace(sample.process, key=key), time_ns=time_ns, wall_ns=wall_ns)


def window(sample: ProcessSample, look: int, stops_at: int) -> RankWindow:
    """A window as a rank has it."""
    own = sample.communicators[0]
    operation = CurrentOperation("AllReduce", "state", own.hash, own.rank, own.nranks, 14, 0.01, False, 1 << 20, 4 << 20,
                                 "Simple", "Ring", 10, 96)  # fmt: skip
    rate, still = 50.0 + own.rank % 7, max(0.0, float(look - stops_at))
    return RankWindow(sample.time_ns, sample.process, own.rank, 0, sample.run_state, operation, None, 0, look * 50, rate, "state",
                      2e8, 900.0, still)  # fmt: skip


def batches(agent: int, agents: int, looks: int, stops_at: int) -> Iterator[bytes]:
    """What an agent says, look by look; the first is a key batch. Half of its ranks are of each job."""
    writer, host, job = BatchWriter(calls="all", grouped=True), f"node{agent}", agent % JOBS
    first, world = agent // JOBS * EACH, agents // JOBS * EACH
    for look in range(looks):
        samples = tuple(look_of(first + rank, world, job, look, host, stops_at) for rank in range(EACH))
        batch = NodeBatch(
            host=host, boot_id=f"b{agent}", sequence=look, time_ns=samples[0].time_ns, wall_ns=samples[0].wall_ns, looked=True,
            complete=True, samples=samples, windows=[window(s, look, stops_at) for s in samples],
            planes=(PlaneState("state", True),),
        )  # fmt: skip
        yield writer.encode(batch)


def rss_mib() -> float:
    """Memory of this process now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def say(ranks: int, file: Path) -> int:
    """Write what all agents say, by look; how many bytes a look takes after the first."""
    agents = ranks // EACH
    said: list[list[bytes]] = [[] for _ in range(LOOKS)]
    for agent in range(agents):
        for look, data in enumerate(batches(agent, agents, LOOKS, STOPS_AT)):
            said[look].append(data)
    for look, found in enumerate(said):
        file.with_suffix(f".{look}").write_bytes(msgspec.msgpack.encode(found))
    return sum(map(len, said[1]))


def hear(ranks: int, file: Path) -> tuple[float, float, float, int]:
    """CPU seconds of a look (the median) and of the first, memory in MiB, and bytes of a look sent on."""
    hearing, spent, sent = Hearing(7 << 20), list[float](), 0
    before = rss_mib()
    for look in range(LOOKS):
        said = msgspec.msgpack.decode(file.with_suffix(f".{look}").read_bytes(), type=list[bytes])
        began = time.process_time()
        for agent, data in enumerate(said):
            hearing.take("default", f"node{agent}", f"L{agent}", look, data, time.time_ns())
        messages = hearing.flush()
        spent.append(time.process_time() - began)
        sent = sum(len(data) for _, data in messages)
        file.with_suffix(f".reduced{look}").write_bytes(msgspec.msgpack.encode(messages))
    return statistics.median(spent[1:]), spent[0], rss_mib() - before, sent


def judge(ranks: int, file: Path) -> tuple[float, float, float, str]:
    """CPU seconds of decoding a look, of a judgement of both jobs, memory in MiB, and what was found."""
    sessions: dict[str, DiagnosisSession] = {}
    readers: dict[int, BundleReader] = {}
    shared, decoding, judging = Shared(), list[float](), list[float]()
    before = rss_mib()
    for look in range(LOOKS):
        messages = msgspec.msgpack.decode(file.with_suffix(f".reduced{look}").read_bytes(), type=list[tuple[str, bytes]])
        began = time.process_time()
        for job, data in messages:
            message = reduced.decode(data)
            session = sessions.setdefault(job, DiagnosisSession())
            for heard in readers.setdefault(message.bundle, BundleReader(shared)).decode(message):
                session.feed(heard.batch, (100 + look) * SECOND)
        middle = time.process_time()
        for session in sessions.values():
            session.judge((100 + look) * SECOND)
        decoding.append(middle - began)
        judging.append(time.process_time() - middle)
    found = ", ".join(
        f"{s.verdict.verdict_class} {[c.rank for c in s.verdict.culprits]}" for s in sessions.values() if s.verdict is not None
    )
    return statistics.median(decoding[1:]), statistics.median(judging[1:]), rss_mib() - before, found


T = TypeVar("T")


def alone(work: Callable[[int, Path], T], ranks: int, file: Path) -> T:
    """What a part gives in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, ranks, file).result()


def table(sizes: list[int]) -> None:
    """CPU time and memory by the number of ranks."""
    columns = ("ranks", "hearing a look", "windows/s/core", "worker", "in a look", "sent on", "decoding", "judgement", "judge")
    print("".join(f"{name:>16}" for name in columns))
    for ranks in sizes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "said"
            nbytes = alone(say, ranks, file)
            spent, first, worker_mib, sent = alone(hear, ranks, file)
            decoding, judging, judge_mib, found = alone(judge, ranks, file)
        cells = (
            f"{ranks:,}", f"{spent:.2f} s ({first:.2f})", f"{ranks / spent:,.0f}", f"{worker_mib:,.0f} MiB",
            f"{nbytes / 2**20:.2f} MiB", f"{sent / 2**20:.2f} MiB", f"{decoding:.2f} s", f"{judging:.2f} s",
            f"{judge_mib:,.0f} MiB",
        )  # fmt: skip
        print("".join(f"{cell:>16}" for cell in cells), f"  {found}", flush=True)


def cpu_s(pid: int) -> tuple[float, float]:
    """CPU seconds of a process so far, and its memory in MiB."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), pages * resource.getpagesize() / 2**20


class Live:
    """One live run: everything on this machine."""

    def __init__(self, ranks: int, seconds: int) -> None:
        self.agents, self.seconds = ranks // EACH, seconds
        self.late_s = 0.0
        self.stopped_at = 0.0

    def say(self, connection: Connection, said: list[tuple[bytes, ...]]) -> None:
        """Every agent's look, a second apart; a process stops half-way."""
        began = time.monotonic()
        for second, look in enumerate(said):
            if second == self.seconds // 2:
                self.stopped_at = time.time()
            for start in range(0, self.agents, CONCURRENT):
                connection.call(self._send(connection, look, start, second), 60.0)
            ahead = began + second + 1 - time.monotonic()
            self.late_s = max(self.late_s, -ahead)
            time.sleep(max(0.0, ahead))

    async def _send(self, connection: Connection, said: tuple[bytes, ...], start: int, n: int) -> None:
        for agent in range(start, min(self.agents, start + CONCURRENT)):
            headers = {subjects.LIFE: f"L{agent}", subjects.NUMBER: str(n), subjects.FORMAT: str(packing.VERSION)}
            await connection.client.publish(subjects.batch("default", f"node{agent}"), said[agent], headers=headers)
        await connection.client.flush()


def live(ranks: int, seconds: int) -> None:
    """One line of the second table."""
    one = Live(ranks, seconds)
    said = list(zip(*(batches(agent, one.agents, seconds, seconds // 2) for agent in range(one.agents)), strict=True))
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder) / "nats") as server,
        Connection(Access(server.address)) as bus,
        (Path(folder) / "log").open("wb") as log,
    ):
        names = (subjects.BATCHES, subjects.REDUCED, subjects.VERDICTS)
        bus.call(streams.ensure(bus.jetstream, *names))
        command = [sys.executable, "-m", "ncclwatch", "fleet"]
        processes = [subprocess.Popen([*command, what, "--bus", server.address], stdout=log) for what in ("hear", "judge")]
        pids = [*(process.pid for process in processes), server.pid]
        try:
            wait_for(Path(folder) / "log", "hears 32 parts", "looks for jobs")
            before = [cpu_s(pid) for pid in pids]
            one.say(bus, said)
            after = [cpu_s(pid) for pid in pids]
            told, held = bus.call(told_at(bus), 60.0), bus.call(stored(bus), 30.0)
        finally:
            for process in processes:
                process.kill()
                process.wait(30)
    shares = [(then[0] - now[0]) / seconds for now, then in zip(before, after, strict=True)]
    cells = (
        f"{ranks:,}", f"{one.late_s:.1f} s", *(f"{share:.0%}" for share in shares), f"{after[0][1]:,.0f} MiB",
        f"{after[1][1]:,.0f} MiB", f"{told - one.stopped_at:.1f} s" if told else "not told",
        *(f"{nbytes / seconds / ranks:.0f} B" for nbytes in held),
    )  # fmt: skip
    print("".join(f"{cell:>16}" for cell in cells), flush=True)


def wait_for(log: Path, *texts: str) -> None:
    """Wait until these were written."""
    until = time.monotonic() + BEGIN_S
    while not all(text in log.read_text() for text in texts):
        if time.monotonic() > until:
            raise RuntimeError(f"worker and judge have not begun after {BEGIN_S:.0f} s:\n{log.read_text()}")
        time.sleep(0.1)


async def told_at(bus: Connection) -> float:
    """When the first verdict was told, 0 for never."""
    info = await bus.jetstream.stream_info(subjects.VERDICTS)
    for number in range(1, info.state.last_seq + 1):
        message = await bus.jetstream.get_msg(subjects.VERDICTS, seq=number)
        record = msgspec.json.decode(message.data or b"", type=Record)
        if record.type == "verdict":
            return record.at_ns / 1e9
    return 0.0


async def stored(bus: Connection) -> list[int]:
    """Bytes in the streams of batches and of what was reduced."""
    return [(await bus.jetstream.stream_info(name)).state.bytes for name in (subjects.BATCHES, subjects.REDUCED)]


def main() -> int:
    parser = argparse.ArgumentParser(description="What a fleet takes by the number of ranks (simulated agents).")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1024, 8192, 100_352])
    parser.add_argument("--live", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--seconds", type=int, default=20)
    args = parser.parse_args()
    table(args.ranks)
    if args.live:
        columns = ("ranks", "agents late", "fleet hear", "fleet judge", "nats-server", "worker", "judge", "told after",
                   "batches/rank/s", "reduced/rank/s")  # fmt: skip
        print("".join(f"{name:>16}" for name in columns))
    for ranks in args.live:
        live(ranks, args.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
