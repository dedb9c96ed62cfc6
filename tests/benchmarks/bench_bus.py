"""What a batch costs an agent and an engine over NATS JetStream, beside ZeroMQ, with the same batches in the same run.

    python tests/benchmarks/bench_bus.py [--agents 32] [--seconds 10] [--rate 3] [--calls 40] [--rounds 3]

Simulated agents of eight ranks in a process of their own (spool and link of the real agent; encoding is not counted), an engine's
hub in another, which decodes and drops; a real nats-server with its store on disk. Transports take turns, so that a machine that
becomes busier is so for both. ``--flat`` sends as fast as the other side takes it, and says how many batches a second that is.

Prints, a line a transport: CPU microseconds a batch of the agents' links, of the engine's hub and of nats-server (user and system
of the whole process), delay from offering a batch to hearing it (median and worst), bytes, and the process's resident memory.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fleet.servers import running
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.cost import OwnCost
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.messaging.hub import Hub
from ncclwatch.messaging.link import AgentLink
from ncclwatch.messaging.nats_hub import NatsHub
from ncclwatch.messaging.nats_link import NatsLink
from ncclwatch.messaging.spool import Spool
from ncclwatch.messaging.transport import AgentTransport, EngineTransport, LinkMaker
from ncclwatch.messaging.writer import BatchWriter
from unit.fake_node import FakeNode, calls
from unit.synthetic import frozen_ring

RANKS = 8


def said_by(host: str, number: int, ncalls: int) -> list[bytes]:
    """Batches of one agent: a look and calls of eight ranks each."""
    node, writer = FakeNode(frozen_ring(2, RANKS), host=host, looks=number), BatchWriter(calls="all", key_every=60, grouped=True)
    samples = [series[0] for series in node.series]
    return [writer.encode(node.batch(events=calls(samples, ncalls, begin_ns=1 + i * 10**9))) for i in range(number)]


def speak(address: str, args: argparse.Namespace, ready: Any, begin: Any, done: Any) -> None:
    """All agents' links, in one process; tells its CPU time."""
    total = args.rate * args.seconds
    folder = Path(tempfile.mkdtemp())
    make: LinkMaker = partial(NatsLink, Access(address)) if address.startswith("nats") else partial(AgentLink, address)
    links: list[tuple[AgentTransport, list[bytes]]] = []
    for agent in range(args.agents):
        host, life = f"node{agent}", os.urandom(8).hex()
        spool = Spool(life, folder / host)
        link = make(spool, host=host, token="", request_key=lambda: None, history=lambda _n: None)
        links.append((link, said_by(host, total, args.calls)))
    for link, _ in links:
        link.start()
    ready.put(sum(len(data) for _, batches in links for data in batches) / (args.agents * total))
    begin.wait()
    started, cpu = time.monotonic(), time.process_time()
    for i in range(total):
        for agent, (link, batches) in enumerate(links):
            ahead = 0.0 if args.flat else started + (i + agent / args.agents) / args.rate - time.monotonic()
            if ahead > 0:
                time.sleep(ahead)
            link.offer(i, batches[i], relevant=False)
            ready.put((agent, i, time.monotonic()))
    while any(link.status.sent_batches < total or link.status.waiting for link, _ in links) and not done.is_set():
        time.sleep(0.05)
    ready.put(("cpu", time.process_time() - cpu, OwnCost.resident_bytes()))
    for link, _ in links:
        link.close(flush_s=1.0)
    shutil.rmtree(folder, ignore_errors=True)


def cpu_of(pid: int) -> float:
    """User and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, args: argparse.Namespace, folder: Path) -> dict[str, float]:
    """One transport once."""
    context = multiprocessing.get_context("spawn")
    ready, begin, done = context.Queue(), context.Event(), context.Event()
    heard: dict[tuple[str, int], float] = {}

    def take(_job: str, _life: str, batch: NodeBatch) -> None:
        heard[batch.host, batch.sequence] = time.monotonic()

    total = args.agents * args.rate * args.seconds
    with running(folder) as server:
        hub: EngineTransport
        hub = Hub("tcp://127.0.0.1:*", take) if name == "zeromq" else NatsHub(Access(server.address), take)
        child = context.Process(target=speak, args=(hub.address, args, ready, begin, done), daemon=True)
        child.start()
        while ready.empty():
            hub.poll(0.1)
        size = ready.get()
        begin.set()
        began, cpu, server_cpu = time.monotonic(), time.process_time(), cpu_of(server.pid)
        while len(heard) < total and time.monotonic() - began < args.seconds * 10 + 60:
            hub.poll(0.1)
        wall, spent, server_spent = time.monotonic() - began, time.process_time() - cpu, cpu_of(server.pid) - server_cpu
        offered: dict[tuple[str, int], float] = {}
        found: Any = None
        limit = time.monotonic() + 60
        while found is None and time.monotonic() < limit:
            # The hub goes on acknowledging meanwhile.
            hub.poll(0.0 if not ready.empty() else 0.05)
            if ready.empty():
                continue
            said = ready.get()
            if said[0] == "cpu":
                found = said
            else:
                offered[f"node{said[0]}", said[1]] = said[2]
        counts = hub.counts
        done.set()
        child.join(30)
        hub.close()
    delays = sorted(heard[key] - offered[key] for key in heard)
    return {
        "heard": len(heard) / total,
        "agent": found[1] / total * 1e6,
        "engine": spent / total * 1e6,
        "server": server_spent / total * 1e6,
        "median": statistics.median(delays),
        "worst": delays[-1],
        "bytes": size,
        "per_s": total / wall,
        "agents_mib": found[2] / 2**20,
        "bad": counts.bad + counts.duplicates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=32)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--rate", type=int, default=3, help="batches a second an agent")
    parser.add_argument("--calls", type=int, default=40, help="calls a rank a batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flat", action="store_true", help="as fast as it goes")
    args = parser.parse_args()
    for number in range(args.rounds):
        for name in ("zeromq", "nats"):
            with tempfile.TemporaryDirectory() as folder:
                found = measure(name, args, Path(folder) / f"server{number}")
            print(line(name, found, args.agents), flush=True)


def line(name: str, found: dict[str, float], agents: int) -> str:
    """What is printed of one transport."""
    cpu = ", ".join(f"{part} {found[part]:5.0f} µs" for part in ("agent", "engine", "server"))
    return (
        f"{name:7s} {found['heard']:7.1%} heard; CPU a batch: {cpu}; delay {found['median'] * 1e3:6.1f} ms "
        f"(worst {found['worst'] * 1e3:6.1f}); {found['bytes']:6.0f} bytes a batch; {found['per_s']:6.0f} batches/s; "
        f"{agents} agents {found['agents_mib']:4.0f} MiB; bad or twice {found['bad']:.0f}"
    )


if __name__ == "__main__":
    main()
