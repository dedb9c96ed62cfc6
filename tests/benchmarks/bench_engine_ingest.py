"""How many ranks one engine holds: simulated agents of eight ranks each, over real sockets, ten windows a second a rank.

    python tests/benchmarks/bench_engine_ingest.py [--ranks 4096] [--windows 10] [--seconds 6] [--calls 5] [--keep FOLDER]

Every agent sends, ten times a second, a window and ``--calls`` call records of each rank, and once a second what the memory of
each rank shows (which has changed: the job runs); the lists of peers are those of one communicator of all ranks. The batches are
made beforehand, so that the engine's share of this machine is not the agents' (with ``--keep`` they are kept for the next time).

Prints, a line a size: windows taken a second against those sent, the engine's share of a core for hearing and for judging,
records (windows, calls, looks) a second a core of hearing, how long one judgement takes and how often it comes, bytes an agent
a second, and the engine's memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import numpy as np
import zmq

from ncclwatch.cli.engine_service import EngineService
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.cost import OwnCost
from ncclwatch.collect.windows import CurrentOperation, RankWindow
from ncclwatch.messaging import packing, protocol
from ncclwatch.messaging.hub import _raise_file_limit
from ncclwatch.messaging.protocol import Batch, Hello
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.state import PeerInfo, ProcessSample
from unit.fake_node import calls
from unit.synthetic import Rank, communicator, recv, send

EACH = 8
CALLS_AN_ITERATION = 25


def ranks_of(agent: int, world: int, peers: tuple[PeerInfo, ...]) -> list[ProcessSample]:
    """First looks of an agent's ranks."""
    found = []
    for rank in range(agent * EACH, (agent + 1) * EACH):
        own = replace(communicator(rank, world), peers=peers, sequence_numbers={"AllReduce": 1})
        operations = (
            send((rank + 1) % world, sent=10, done=10, produced=12),
            recv((rank - 1) % world, posted=18, received=12, delivered=11, consumed=10),
        )
        [sample] = Rank(rank, world, (own,), operations, host=f"node{agent}").looks(1)
        found.append(sample)
    return found


def moved(sample: ProcessSample, look: int) -> ProcessSample:
    """The same rank some operations later."""
    own = replace(sample.communicators[0], op_count=look * 50, sequence_numbers={"AllReduce": look * 50})
    operations = tuple(
        replace(o, op_count=o.op_count + look * 100, subs=(replace(o.subs[0], base=o.subs[0].base + look * 960),))
        for o in sample.operations
    )
    return replace(sample, time_ns=time.monotonic_ns() + look * 10**9, wall_ns=time.time_ns() + look * 10**9,
                   communicators=(own,), operations=operations)  # fmt: skip


def window(sample: ProcessSample) -> RankWindow:
    """A window as a running rank has it."""
    own = sample.communicators[0]
    operation = CurrentOperation("AllReduce", "state", own.hash, own.rank, own.nranks, 14, 0.01, False, 1 << 20, 4 << 20,
                                 "Simple", "Ring", 10, 96)  # fmt: skip
    return RankWindow(0, sample.process, own.rank, 0, "S", operation, None, 0, 0, 50.0, "calls", 2e8, 900.0, 0.0)


def encoded(agent: int, world: int, peers: tuple[PeerInfo, ...], windows_per_s: int, seconds: int, ncalls: int) -> list[bytes]:
    """Everything one agent says."""
    samples = ranks_of(agent, world, peers)
    windows = [window(sample) for sample in samples]
    events = calls(samples, ncalls) if ncalls else None
    writer, said = BatchWriter(), []
    for i in range(windows_per_s * seconds):
        now = i * 10**9 // windows_per_s
        fresh = [
            replace(w, time_ns=now, calls=i * 5 + w.process.pid % 3, operations=i * 5, operations_per_s=50.0 + i % 7)
            for w in windows
        ]
        if events is not None:
            events = events.copy()
            events["time_ns"] += np.uint64(10**9 // windows_per_s)
            events["op_count"] += np.uint64(ncalls)
            events["count"] = (1 << 20) + (events["op_count"] % np.uint64(CALLS_AN_ITERATION))
        batch = NodeBatch(host=f"node{agent}", boot_id=f"b{agent}", sequence=i, time_ns=now, wall_ns=time.time_ns() + now,
                          windows=fresh, events=events)  # fmt: skip
        if i % windows_per_s == 0:
            batch.looked, batch.samples = True, tuple(moved(sample, i // windows_per_s) for sample in samples)
        said.append(writer.encode(batch))
    return said


def prepared(agents: int, args: argparse.Namespace) -> list[list[bytes]]:
    """What all agents say, made now or before."""
    kept = args.keep / f"said-{agents}-{args.windows}-{args.seconds}-{args.calls}.msgpack" if args.keep else None
    if kept is not None and kept.exists():
        return msgspec.msgpack.decode(kept.read_bytes(), type=list[list[bytes]])
    world = agents * EACH
    peers = tuple(
        PeerInfo(rank, host_hash=rank // EACH, pid_hash=rank * 7919, comm_address=0x1000 + rank) for rank in range(world)
    )
    said = [encoded(agent, world, peers, args.windows, args.seconds, args.calls) for agent in range(agents)]
    if kept is not None:
        kept.write_bytes(msgspec.msgpack.encode(said))
    return said


def speak(address: str, agents: int, args: argparse.Namespace, ready: Any, begin: Event, done: Event) -> None:
    """All agents, in a process of their own: makes what they say, then says it in time."""
    _raise_file_limit()
    said = prepared(agents, args)
    context = zmq.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, 65000)
    sockets = []
    for agent in range(agents):
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 10_000)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        socket.send(protocol.encode(Hello("0", packing.VERSION, "agent", f"node{agent}", lives=[f"L{agent}"])))
        sockets.append(socket)
    for socket in sockets:
        socket.poll(60_000)
    ready.put(sum(len(data) for batches in said for data in batches[1:]) / agents / max(1, args.seconds))
    begin.wait()
    started = time.monotonic()
    steps = args.windows * args.seconds
    for i in range(steps):
        for agent, socket in enumerate(sockets):
            socket.send_multipart([protocol.encode(Batch(f"L{agent}", i)), said[agent][i]])
            # Agents are not in step: what a step has to say is spread over its time.
            if agent % 32 == 31:
                ahead = started + (i + agent / agents) / args.windows - time.monotonic()
                if ahead > 0:
                    time.sleep(ahead)
    done.set()
    time.sleep(60)


def measure(ranks: int, args: argparse.Namespace) -> None:
    """One size."""
    agents = ranks // EACH
    service = EngineService("tcp://127.0.0.1:*")
    context = multiprocessing.get_context("spawn")
    ready, begin, done = context.Queue(), context.Event(), context.Event()
    child = context.Process(target=speak, args=(service.hub.address, agents, args, ready, begin, done), daemon=True)
    child.start()
    while ready.empty():
        service.step(lambda *_: None, until=time.monotonic() + 0.1)
    bytes_per_s = ready.get()
    total = agents * args.windows * args.seconds
    judge_s, judged = 0.0, 0
    original = service._judge

    def judge(job: Any, show: Any) -> None:
        nonlocal judge_s, judged
        begun = time.process_time()
        original(job, show)
        judge_s += time.process_time() - begun
        judged += 1

    service._judge = judge  # type: ignore[method-assign]
    begin.set()
    begun, cpu = time.monotonic(), time.process_time()
    while service.hub.counts.batches < total and time.monotonic() - begun < args.seconds * 6:
        service.step(lambda *_: None, until=time.monotonic() + 0.1)
    wall, spent = time.monotonic() - begun, time.process_time() - cpu
    counts = service.hub.counts
    hearing = spent - judge_s
    records = counts.batches * EACH * (1 + args.calls) + agents * args.seconds * EACH
    late = max((job.late_s for job in service.jobs.values()), default=0.0)
    print(
        f"{ranks:6d} ranks: {counts.batches * EACH / wall:7.0f} windows/s taken of {ranks * args.windows} sent"
        f"; hearing {hearing / wall:5.1%} of a core ({records / max(hearing, 1e-9):.0f} records/s a core)"
        f"; judging {judge_s / wall:5.1%}"
        f"; a judgement {judge_s / max(judged, 1):6.3f} s, one every {wall / max(judged, 1):4.1f} s (told as {late:.1f} s late)"
        f"; {bytes_per_s:6.0f} B/s an agent; bad {counts.bad}, {OwnCost.resident_bytes() >> 20} MiB",
        flush=True,
    )
    child.kill()
    child.join()
    service.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--windows", type=int, default=10)
    parser.add_argument("--seconds", type=int, default=6)
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="keep what the agents say in this folder, and use what is there")
    args = parser.parse_args()
    for ranks in args.ranks:
        measure(ranks, args)


if __name__ == "__main__":
    main()
