"""A fleet of up to 100,352 ranks over a real nats-server: each of 12,544 agents with a connection and an NKEY of its own.

    python tests/benchmarks/bench_fleet_crowd.py [--ranks 100352] [--every 60] [--looks 8] [--workers 2] [--judges 2]

SIMULATED agents, no NCCL runs; nats-server, ``fleet hear`` and ``fleet judge`` are as they are installed. Eight ranks an agent,
with rank identities, counters that drift by rank, and key batches of their own. Three jobs have 32, 8 and 8 of 49 nodes, in the
first of which a process stops during the run; a fourth has the rest but four nodes. Those are of a job of 16 ranks of the
simulator's timeline, at its own pace (a look a second), in which a GPU computes three times as slowly from some moment on.

Looks of the large jobs are ``--every`` seconds apart: what a machine cannot do each second is shown at the rate it can, and CPU
seconds are told by the part. Run it at the lowest priority where others need the machine (``chrt -i 0``): then CPU seconds hold,
and delays say what was left of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import nkeys
import numpy as np

from benchmarks.bench_fleet import EACH, cpu_s, look_of, window
from fleet.servers import NatsServer
from ncclwatch.collect.aggregate import Aggregator
from ncclwatch.collect.batch import NodeBatch, PlaneState
from ncclwatch.errors import NcclwatchError
from ncclwatch.fleet import streams
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.verdict_log import Record
from ncclwatch.messaging import packing, protocol, subjects
from ncclwatch.messaging.bus_keys import access, add_user, write_tenants
from ncclwatch.messaging.limits import FormatError
from ncclwatch.messaging.protocol import NeedKey
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.simulate.observe import HOST_PREFIX
from ncclwatch.simulate.records import Observer
from ncclwatch.simulate.run import simulate
from ncclwatch.simulate.scenario import load

SHARES = (32, 8, 8)
OF = 49
STOPS_AT = 3
"""The look from which on a process of the first job is stopped."""
SLOW = Path(__file__).parent.parent / "scenarios" / "s1-slow-gpu.toml"
SLOW_NODES, SLOW_FROM_S, SLOW_ITERATIONS = 4, 60.0, 260
TENANT = "crowd"
CONCURRENT = 128
"""Agents that connect, or speak, before the server is waited for."""
PATIENCE_S = 1800.0
TOLD_AFTER = 8
"""Intervals that are waited for a verdict after the last look."""


class Speaker(asyncio.Protocol):
    """The connection of one agent: what of NATS's protocol it needs, so that thousands fit into one process."""

    def __init__(self, seed: bytes, node: str) -> None:
        self.node, self.key_wanted = node, False
        self.refused = ""
        self.ready = asyncio.Event()
        self._keys = nkeys.from_seed(bytearray(seed))
        self._rest = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._rest += data
        while (end := self._rest.find(b"\r\n")) >= 0:
            line, rest = self._rest[:end], self._rest[end + 2 :]
            if line.startswith(b"MSG "):
                nbytes = int(line.rsplit(b" ", 1)[1])
                if len(rest) < nbytes + 2:
                    return
                self._asked(rest[:nbytes])
                rest = rest[nbytes + 2 :]
            self._rest = rest
            self._heard(line)

    def _heard(self, line: bytes) -> None:
        if line.startswith(b"INFO ") and not self.ready.is_set():
            nonce = json.loads(line[5:])["nonce"].encode()
            signed = base64.urlsafe_b64encode(self._keys.sign(nonce)).rstrip(b"=").decode()
            about = {"verbose": False, "pedantic": False, "headers": True, "lang": "simulated", "version": "1", "protocol": 1,
                     "nkey": self._keys.public_key.decode(), "sig": signed}  # fmt: skip
            self.write(
                b"CONNECT %s\r\nSUB %s 1\r\nPING\r\n" % (json.dumps(about).encode(), subjects.ask("default", self.node).encode())
            )
        elif line == b"PING":
            self.write(b"PONG\r\n")
        elif line == b"PONG":
            self.ready.set()
        elif line.startswith(b"-ERR"):
            self.refused = line.decode()
            self.ready.set()

    def _asked(self, data: bytes) -> None:
        try:
            self.key_wanted |= isinstance(protocol.decode(data), NeedKey)
        except FormatError as error:
            self.refused = str(error)

    def write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def say(self, life: str, n: int, data: bytes) -> None:
        """Publish a batch with an agent's headers."""
        names = {subjects.LIFE: life, subjects.NUMBER: n, subjects.FORMAT: packing.VERSION, subjects.MESSAGE_ID: f"{life}:{n}"}
        head = b"NATS/1.0\r\n" + b"".join(f"{name}: {value}\r\n".encode() for name, value in names.items()) + b"\r\n"
        subject = subjects.batch("default", self.node).encode()
        self.write(b"HPUB %s %d %d\r\n%s%s\r\n" % (subject, len(head), len(head) + len(data), head, data))


@dataclass
class Agent:
    """One node of a large job."""

    speaker: Speaker
    job: int
    first: int
    world: int
    writer: BatchWriter
    n: int = 0

    def say(self, look: int, time_ns: int, wall_ns: int, every_s: float) -> int:
        """Say what a look shows; returns how many bytes."""
        host = self.speaker.node
        samples = tuple(
            replace(look_of(self.first + rank, self.world, self.job, look, host, STOPS_AT), time_ns=time_ns, wall_ns=wall_ns)
            for rank in range(EACH)
        )
        if self.speaker.key_wanted:
            self.speaker.key_wanted = False
            self.writer.request_key()
        data = self.writer.encode(
            NodeBatch(
                host=host, boot_id=f"b{host}", sequence=self.n, time_ns=time_ns, wall_ns=wall_ns, interval_s=every_s, looked=True,
                complete=True, samples=samples, windows=[window(sample, look, STOPS_AT) for sample in samples],
                planes=(PlaneState("state", True),), clock_offset_ns=0, clock_error_ns=1000,
            )
        )  # fmt: skip
        self.speaker.say(f"L{host}", self.n, data)
        self.n += 1
        return len(data)


class SlowJob:
    """The nodes of a job of the simulator, whose records are said as its time goes by."""

    def __init__(self, speakers: list[Speaker]) -> None:
        scenario = load(SLOW)
        fault = replace(scenario.faults[0], start_s=SLOW_FROM_S)
        workload = replace(scenario.workload, iterations=SLOW_ITERATIONS)
        self.timeline = simulate(replace(scenario, workload=workload, faults=(fault,)))
        end = self.timeline.first_iteration_s + float(np.nansum(self.timeline.durations()))
        self.times = [2.0 + look for look in range(int(end) - 2)]
        self._observer = Observer(self.timeline, self.times)
        hosts = sorted({self._observer.cast.info(rank).host for rank in range(scenario.layout.world)})
        self.speakers = dict(zip(hosts, speakers, strict=True))
        self._writers = {host: BatchWriter(calls="all", grouped=True) for host in hosts}
        self._aggregators = {host: Aggregator(calls_plane=True) for host in hosts}
        self._told = dict.fromkeys(hosts, 0)
        self.n = 0

    def say(self, time_s: float, began: float) -> None:
        """Say what had been seen by a moment of the simulator, whose time began at ``began`` of this machine's clock."""
        shift_ns = int((began + time_s) * 1e9) - self._observer.cast.clock(0).wall_ns(time_s)
        found = self._observer.until(time_s, history_s=1.5)
        newest = [series[-1] for series in found.samples if series]
        for host, speaker in self.speakers.items():
            samples = tuple(replace(s, wall_ns=s.wall_ns + shift_ns) for s in newest if s.process.host == host)
            events = found.calls[host][self._told[host] :]
            self._told[host] += len(events)
            aggregator = self._aggregators[host]
            for sample in samples:
                aggregator.add_process(sample.process, sample.time_ns)
            aggregator.feed_events(events)
            for sample in samples:
                aggregator.feed_sample(sample)
            if speaker.key_wanted:
                speaker.key_wanted = False
                self._writers[host].request_key()
            batch = NodeBatch(
                host=host, boot_id=samples[0].process.key.boot_id, sequence=self.n, time_ns=samples[0].time_ns,
                wall_ns=samples[0].wall_ns, looked=True, complete=True, samples=samples, events=events,
                windows=aggregator.windows(samples[0].time_ns), planes=(PlaneState("state", True), PlaneState("calls", True)),
                clock_offset_ns=0, clock_error_ns=1000,
            )  # fmt: skip
            speaker.say(f"L{host}", self.n, self._writers[host].encode(batch))
        self.n += 1


class Crowd:
    """All agents, in a thread with a loop of its own."""

    def __init__(self, ranks: int, port: int, seeds: dict[str, bytes], slow: list[str]) -> None:
        self.speakers = {node: Speaker(seed, node) for node, seed in seeds.items()}
        plain = [node for node in seeds if node not in slow]
        self.agents: list[Agent] = []
        nodes = ranks // EACH
        for job, share in enumerate((*SHARES, OF)):
            mine = [plain.pop() for _ in range(min(len(plain), nodes * share // OF))]
            for at, node in enumerate(mine):
                writer = BatchWriter(calls="all", key_every=60, grouped=True)
                self.agents.append(Agent(self.speakers[node], job, at * EACH, len(mine) * EACH, writer))
        self.slow = SlowJob([self.speakers[node] for node in slow])
        self._port = port
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="agents", daemon=True).start()

    def call(self, work: Callable[[], object]) -> None:
        """Do something in the loop's thread, and wait for it."""

        async def doing() -> None:
            work()

        asyncio.run_coroutine_threadsafe(doing(), self.loop).result(PATIENCE_S)

    def connect(self) -> None:
        """All connections, each with its key."""

        async def one(speaker: Speaker) -> None:
            await self.loop.create_connection(lambda: speaker, "127.0.0.1", self._port)
            await speaker.ready.wait()
            assert not speaker.refused, speaker.refused

        async def several() -> None:
            speakers = list(self.speakers.values())
            for start in range(0, len(speakers), CONCURRENT):
                await asyncio.gather(*map(one, speakers[start : start + CONCURRENT]))

        asyncio.run_coroutine_threadsafe(several(), self.loop).result(PATIENCE_S)

    def look(self, look: int, time_ns: int, wall_ns: int, every_s: float) -> int:
        """One look of every agent of the large jobs; returns the bytes that were said."""
        said = 0
        for start in range(0, len(self.agents), CONCURRENT):

            def some(agents: list[Agent] = self.agents[start : start + CONCURRENT]) -> None:
                nonlocal said
                said += sum(agent.say(look, time_ns, wall_ns, every_s) for agent in agents)

            self.call(some)
        return said


def tenant(folder: Path, nodes: list[str]) -> tuple[NatsServer, dict[str, bytes]]:
    """A server with an account of agents, each of which has a key that is bound to its node; and the seeds."""
    add_user(folder / "tenants", TENANT, "engine", "engine")
    seeds = {}
    for node in nodes:
        secret, _ = add_user(folder / "tenants", TENANT, node, "agent", node=node)
        seeds[node] = secret.read_bytes().strip()
    write_tenants(folder / "tenants")
    limits = 'max_payload: 8MB\nmax_pending: 256MB\nwrite_deadline: "60s"\n'
    return NatsServer(folder, f'{limits}include "tenants/tenants.conf"', mapped=False), seeds


def records(bus: Connection) -> list[Record]:
    """The log of verdicts."""

    async def read() -> list[Record]:
        state = (await bus.jetstream.stream_info(subjects.VERDICTS)).state
        messages = [await bus.jetstream.get_msg(subjects.VERDICTS, seq=number + 1) for number in range(state.last_seq)]
        return [msgspec.json.decode(message.data or b"", type=Record) for message in messages]

    return bus.call(read(), 120.0)


def stored(bus: Connection) -> list[tuple[int, int]]:
    """Messages and bytes in the streams of batches and of what was reduced."""

    async def read() -> list[tuple[int, int]]:
        states = [(await bus.jetstream.stream_info(name)).state for name in (subjects.BATCHES, subjects.REDUCED)]
        return [(state.messages, state.bytes) for state in states]

    return bus.call(read(), 60.0)


def told(bus: Connection, class_prefix: str) -> float | None:
    """When the first verdict of such a class was told, seconds since the epoch."""
    for record in records(bus):
        if record.type == "verdict" and str((record.verdict or {})["class"]).startswith(class_prefix):
            return record.at_ns / 1e9
    return None


class Run:
    """One run: what is started, played and told."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder
        self.nodes = args.ranks // EACH
        # Nodes of the simulator's job are called as the simulator calls them.
        slow = [f"{HOST_PREFIX}{number}" for number in range(SLOW_NODES)]
        self.server, seeds = tenant(folder, slow + [f"agent{number}" for number in range(self.nodes - SLOW_NODES)])
        self.server.start()
        self.crowd = Crowd(args.ranks, self.server.port, seeds, slow)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped_at = self.slow_at = 0.0
        self._before: dict[str, float] = {}

    def begin(self, bus: Connection) -> None:
        bus.call(streams.ensure(bus.jetstream, subjects.BATCHES, subjects.REDUCED, subjects.VERDICTS), 60.0)
        keys, every = self.folder / "tenants" / TENANT, str(min(60.0, self.args.interval))
        wanted = [f"worker{n}" for n in range(self.args.workers)] + [f"judge{n}" for n in range(self.args.judges)]
        for name in wanted:
            kind = "hear" if name.startswith("worker") else "judge"
            command = [sys.executable, "-m", "ncclwatch", "fleet", kind, "--bus", self.server.address, "--keys", str(keys),
                       "--interval", every, "--lease", "60", "--json", "--traffic-every", "30"]  # fmt: skip
            with (self.folder / f"{name}.log").open("wb") as log:
                self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)
        until = time.monotonic() + PATIENCE_S
        while not all(b"listening" in (self.folder / f"{name}.log").read_bytes() for name in wanted):
            assert time.monotonic() < until, "workers and judges have not begun"
            time.sleep(0.2)

    def play(self, bus: Connection) -> None:
        """All looks of the large jobs, and beside them those of the slow one; then wait for what was not told yet."""
        ending = threading.Event()
        beside = threading.Thread(target=self._slow, args=(ending,), name="slow", daemon=True)
        beside.start()
        for look in range(self.args.looks):
            wall = time.time()
            if look == STOPS_AT:
                self.stopped_at = wall
            before = self._cpu()
            nbytes = self.crowd.look(look, time.monotonic_ns(), int(wall * 1e9), self.args.every)
            took_s = time.time() - wall
            time.sleep(max(0.0, wall + self.args.every - time.time()))
            self._tell(look, nbytes, took_s, before)
        until, beyond = time.monotonic() + PATIENCE_S, time.monotonic() + TOLD_AFTER * self.args.interval
        while time.monotonic() < until and (beside.is_alive() or time.monotonic() < beyond):
            time.sleep(5.0)
            # A server on a machine that is busy may have to be asked again.
            with contextlib.suppress(NcclwatchError):
                if told(bus, "stopped") and told(bus, "slow"):
                    break
        ending.set()
        beside.join(60.0)

    def _slow(self, ending: threading.Event) -> None:
        slow, began = self.crowd.slow, time.time()
        for time_s in slow.times:
            if ending.wait(max(0.0, began + time_s - time.time())):
                return
            if time_s >= SLOW_FROM_S and not self.slow_at:
                self.slow_at = began + SLOW_FROM_S
            self.crowd.call(partial(slow.say, time_s, began))

    def _cpu(self) -> dict[str, tuple[float, float]]:
        """CPU seconds so far and memory in MiB, by the part."""
        pids = {name: process.pid for name, process in self.processes.items()} | {"nats-server": self.server.pid}
        return {name: cpu_s(pid) for name, pid in (pids | {"agents": os.getpid()}).items()}

    def _tell(self, look: int, nbytes: int, took_s: float, before: dict[str, tuple[float, float]]) -> None:
        now = self._cpu()
        spent = {name: cpu - before[name][0] for name, (cpu, _) in now.items()}
        memory = ", ".join(f"{name} {mib:,.0f}" for name, (_, mib) in now.items())
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items())
        print(f"look {look}: said in {took_s:.0f} s, {nbytes / 2**20:.1f} MiB; CPU s: {parts}; MiB: {memory}", flush=True)

    def end(self, bus: Connection) -> None:
        """What was seen."""
        for name in self.processes:
            lines = (self.folder / f"{name}.log").read_bytes().splitlines()
            heard = [json.loads(line) for line in lines if b'"traffic"' in line and line.endswith(b"}")]
            print(name, heard[-1].get("counts", heard[-1]) if heard else "said nothing of what it heard")
        for record in records(bus):
            verdict = record.verdict or {}
            print(f"{record.at_ns / 1e9:.1f} {record.job} {record.type} {verdict.get('class', '')} {verdict.get('summary', '')}")
        for what, since, prefix in (("stop", self.stopped_at, "stopped"), ("slower GPU", self.slow_at, "slow")):
            at = told(bus, prefix)
            print(f"from the {what} to its verdict: {at - since:.1f} s" if at else f"of the {what} nothing was told")
        said = len(self.crowd.agents) * self.args.looks
        for name, (messages, nbytes) in zip(("batches", "reduced"), stored(bus), strict=True):
            of_rank = nbytes / max(said, 1) / EACH
            day = of_rank * 86_400 / 15 * self.args.ranks / 2**30
            print(f"stream of {name}: {messages} messages, {of_rank:.0f} bytes a rank and look, {day:.1f} GiB in 5,760 looks")

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(60)
        self.server.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description="A fleet of many ranks (simulated agents), live.")
    parser.add_argument("--ranks", type=int, default=100_352)
    parser.add_argument("--every", type=float, default=60.0, help="Seconds between two looks of the large jobs.")
    parser.add_argument("--interval", type=float, default=15.0, help="Of workers and judges.")
    parser.add_argument("--looks", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--judges", type=int, default=2)
    args = parser.parse_args()
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        run = Run(args, Path(folder))
        try:
            with Connection(access(run.server.address, run.folder / "tenants" / TENANT, "engine")) as bus:
                run.begin(bus)
                began = time.monotonic()
                run.crowd.connect()
                print(
                    f"{run.nodes:,} agents have connected with keys of their own in {time.monotonic() - began:.0f} s", flush=True
                )
                run.play(bus)
                run.end(bus)
        except (NcclwatchError, AssertionError):
            for log in Path(folder).glob("*.log"):
                print(log.name, log.read_text()[-2000:])
            raise
        finally:
            run.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
