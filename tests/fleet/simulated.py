"""Simulated agents (no NCCL runs here): nodes of a ring AllReduce that say what a collector would, over a real nats-server."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from nats.errors import Error as NatsError

from ncclwatch.collect.aggregate import Aggregator
from ncclwatch.collect.batch import NodeBatch, PlaneState
from ncclwatch.errors import NcclwatchError
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.directory import DEFAULT
from ncclwatch.messaging import packing, protocol, subjects
from ncclwatch.messaging.protocol import NeedKey
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.state import ProcessSample
from unit.synthetic import frozen_ring

if TYPE_CHECKING:
    from nats.aio.msg import Msg

EVERY_S = 0.25
OF_JOB = 5000
"""Between the pids of two jobs."""


class Node:
    """The agent of one node; ``restart`` is a new life of it."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.restart()

    def restart(self) -> None:
        self.life, self.n = os.urandom(8).hex(), 0
        self.writer = BatchWriter(calls="all", key_every=60, grouped=True)
        self.aggregator = Aggregator(calls_plane=False)

    def batch(self, samples: list[ProcessSample]) -> NodeBatch:
        for sample in samples:
            self.aggregator.add_process(sample.process, sample.time_ns)
            self.aggregator.feed_sample(sample)
        now, wall = time.monotonic_ns(), time.time_ns()
        return NodeBatch(
            host=self.host, boot_id="boot-" + self.host, sequence=self.n, time_ns=now, wall_ns=wall, interval_s=EVERY_S,
            looked=True, complete=True, samples=tuple(samples), windows=self.aggregator.windows(now),
            planes=(PlaneState("state", True),), clock_offset_ns=0, clock_error_ns=1000,
        )  # fmt: skip


class Agents:
    """Nodes ``node0``, ``node1``, … that have a rank of each job; ``stuck`` holds, by job, the rank whose process is stopped."""

    def __init__(self, connection: Connection, *, world: int, jobs: int = 1) -> None:
        self.world, self.jobs, self.token = world, jobs, DEFAULT
        self.failures = 0
        self.stuck: dict[int, int] = {}
        self.nodes = [Node(f"node{rank}") for rank in range(world)]
        self.sent = 0
        self._connection = connection
        self._steps = [0] * jobs
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        connection.call(self._listen())

    def hash_of(self, job: int) -> int:
        return 0xA1 + job

    def name_of(self, job: int) -> str:
        return f"{self.hash_of(job):016x}"

    async def _listen(self) -> None:
        async def asked(message: Msg) -> None:
            if isinstance(protocol.decode(message.data), NeedKey):
                for node in self.nodes:
                    if subjects.ask(self.token, node.host) == message.subject:
                        node.writer.request_key()

        await self._connection.client.subscribe(f"ncw.ask.{self.token}.*", cb=asked)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ending.set()
        self._thread.join(60)

    def restart(self, rank: int) -> None:
        """The agent of a node is killed, and another begins."""
        with self._lock:
            self.nodes[rank].restart()

    def _run(self) -> None:
        waiting: list[tuple[str, bytes, dict[str, str]]] = []
        while not self._ending.wait(EVERY_S):
            with self._lock:
                waiting += self._look()
            # As an agent's spool: what could not be sent is sent first when the server is back.
            try:
                while waiting:
                    self._connection.call(self._send(waiting[:64]), 10.0)
                    del waiting[:64]
            except (NcclwatchError, NatsError, OSError):
                self.failures += 1

    async def _send(self, words: list[tuple[str, bytes, dict[str, str]]]) -> None:
        publish = self._connection.jetstream.publish
        await asyncio.gather(*(publish(to, data, headers=headers) for to, data, headers in words))

    def _look(self) -> list[tuple[str, bytes, dict[str, str]]]:
        shown: list[list[ProcessSample]] = [[] for _ in self.nodes]
        now, wall = time.monotonic_ns(), time.time_ns()
        for job in range(self.jobs):
            victim = self.stuck.get(job)
            self._steps[job] += victim is None
            step = self._steps[job]
            ring = frozen_ring(victim or 0, self.world, run_state="S" if victim is None else "T")
            for at, rank in enumerate(ring):
                [sample] = rank.looks(1)
                key = replace(sample.process.key, pid=sample.process.pid + OF_JOB * job)
                own = tuple(replace(c, hash=self.hash_of(job), op_count=step) for c in sample.communicators)
                # While all is well it is between two operations: who waits at every look is in a slow job.
                operations = tuple(
                    replace(o, comm_hash=self.hash_of(job), op_count=o.op_count + 2 * step)
                    for o in (sample.operations if victim is not None else ())
                )
                shown[at].append(
                    replace(sample, process=replace(sample.process, key=key), communicators=own, operations=operations,
                            time_ns=now, wall_ns=wall)
                )  # fmt: skip
        found = []
        for node, samples in zip(self.nodes, shown, strict=True):
            data = node.writer.encode(node.batch(samples))
            headers = {
                subjects.LIFE: node.life, subjects.NUMBER: str(node.n), subjects.FORMAT: str(packing.VERSION),
                subjects.MESSAGE_ID: f"{node.life}:{node.n}",
            }  # fmt: skip
            found.append((subjects.batch(self.token, node.host), data, headers))
            node.n += 1
            self.sent += 1
        return found
