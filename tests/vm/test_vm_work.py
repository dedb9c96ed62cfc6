"""Windows of work requests as ``attach`` has them, beside samples, of real NCCL over its InfiniBand transport: what they say is
what the collective must move, and with the collector every probe goes, however it ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.counting import NO_BUDGET
from ncclwatch.collect.node import NodeCollector
from ncclwatch.model.state import Direction
from ncclwatch.model.work import Counting, Scope, WorkWindow
from ncclwatch.wire.governor import Mode
from ncclwatch.wire.orders import Order
from testbed.job import Job, available
from testbed.work_windows import ORDER, enough, iterations_between, ports_of, watch
from vm.fabric import Fabric

pytestmark = pytest.mark.vm

VERSION = "2.32.3"
COUNT = 1 << 16
"""Floats of one AllReduce: with two ranks each sends as many bytes as the buffer has."""
PAUSE_US = 50_000
"""Between two calls: ranks that wait spin, and leave nothing of an emulated machine to whoever counts."""
BUDGET = 0.2
"""Of an emulated machine, where a trap costs more and nothing is to be learned about its price."""


@pytest.fixture
def job(soft_roce: Fabric) -> Job:
    return job_of(soft_roce)


def job_of(soft_roce: Fabric, **options: Any) -> Job:
    if not available(VERSION):
        pytest.skip(f"NCCL {VERSION} is not in the cache")
    return soft_roce.job(VERSION, 2, count=COUNT, extra=("--time", "--pause-us", str(PAUSE_US)), **options)


def test_exact_windows_are_what_the_collective_must_move(job: Job, soft_roce: Fabric) -> None:
    with job:
        found, batches = watch(job, Mode.EXACT, 5, budget=BUDGET, seconds=150)
        pids = list(job.pids)
        assert enough(found, 5), batches[-1].planes
        job.wait_progress(2)
        for rank, pid in enumerate(job.pids):
            windows = ports_of(found, pid)[1:]
            assert all(window.device == (soft_roce.a, soft_roce.b)[rank].device for window in windows)
            works = [window.work for window in windows]
            assert all(work.counting is Counting.EXACT and work.coverage > 0.999 for work in works)
            assert all(before.end_ns == after.begin_ns for before, after in itertools.pairwise(works))
            sent = sum(work.posted_bytes for work in works)
            must = iterations_between(job, rank, works[0].begin_ns, works[-1].end_ns) * COUNT * 4
            print(f"exact: rank {rank} sent {sent} bytes, must {must:.0f}, {sent / must:.4f}")
            assert sent == pytest.approx(must, rel=0.05)
            assert sum(work.received_bytes for work in works) == pytest.approx(must, rel=0.05)
            assert sum(work.posted or 0 for work in works) - sum(work.completed or 0 for work in works) <= 64
    for window in [window for window in found if window.scope is Scope.FLOW and window.role == "data"]:
        assert window.direction is Direction.SEND and window.peer == 1 - (window.rank or 0) and window.queue_pair
    newest = [window.work for window in next(batch.windows for batch in reversed(batches) if len(batch.windows))]
    assert all(work is not None and work.counting is Counting.EXACT and work.coverage > 0.999 for work in newest), newest
    # What was under way when the probes came has no latency; after the first window nothing was.
    busy = [window.work for pid in pids for window in ports_of(found, pid)[1:] if window.work.completed]
    assert busy and all(work.latency_p50_ns and work.latency_p99_ns and work.throughput for work in busy), busy


@pytest.mark.long
def test_bursts_tell_rates_and_an_order_is_answered(job: Job) -> None:
    with job:
        found, batches = watch(job, Mode.BURSTS, 14, budget=BUDGET, seconds=150, order=True)
        assert enough(found, 14), batches[-1].planes
        job.wait_progress(2)
        ordered = [window.work for window in found if window.order == ORDER and window.scope is Scope.PORT]
        assert len(ordered) == 2 and all(work.counting is Counting.ORDER and work.posted for work in ordered), ordered
        for rank, pid in enumerate(job.pids):
            works = [window.work for window in ports_of(found, pid)]
            seen = sum(work.seen_s for work in works)
            sent = sum(work.posted_bytes for work in works) / seen
            span = works[-1].end_ns - works[0].begin_ns
            must = iterations_between(job, rank, works[0].begin_ns, works[-1].end_ns) * COUNT * 4 / (span / 1e9)
            error = works[-1].uncertainty
            print(
                f"bursts: rank {rank} {sent:.0f} B/s in {len(works)} bursts of {seen:.3f} s, must {must:.0f}, uncertainty {error}"
            )
            assert error is not None and sent == pytest.approx(must, rel=max(0.05, 3 * error))
    (plane,) = [plane for plane in batches[-1].planes if plane.name == "wire"]
    assert plane.running and plane.reason == ""
    spent = [batch.overhead for batch in batches if batch.overhead is not None and batch.overhead.wire_bursts]
    assert spent and spent[-1].wire_budget == BUDGET
    assert spent[-1].wire_share is not None and spent[-1].wire_share <= BUDGET


@pytest.mark.long
def test_a_collector_that_is_killed_leaves_no_probe_behind(job: Job) -> None:
    """SIGKILL while every request is probed: the plane's process ends with the pipe, and its probes with it."""
    with job:
        program = (
            "import sys\nfrom ncclwatch.collect.node import NodeCollector\nfrom ncclwatch.wire.governor import Mode\n"
            "c = NodeCollector(every=False, wire=(Mode.EXACT, 0.2))\nc.start([int(p) for p in sys.argv[1:]], calls=False)\n"
            "while True:\n    b = c.step()\n    print(len(b.work), flush=True)\n"
        )
        agent = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, job.pids)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        try:
            assert agent.stdout is not None
            assert any(int(line) for line in agent.stdout), "windows came"
            (child,) = children_of(agent.pid)
            assert probes_of(child)
        finally:
            agent.send_signal(signal.SIGKILL)
            agent.wait()
        deadline = time.monotonic() + 10
        while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{child}").exists()
        job.wait_progress(3)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def probes_of(pid: int) -> int:
    """How many probes a process holds: links, or events of performance counters."""
    names = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(os.readlink(path))  # noqa: PTH115
    return sum("perf_event" in name or "bpf_link" in name or "bpf-link" in name for name in names)


def test_what_goes_in_a_burst_leaves_no_probe_behind_and_nothing_unsaid(soft_roce: Fabric) -> None:
    """A long burst is on while a port goes down, and another while a rank is killed: both are answered, also for what has gone,
    their probes go with them, and counting goes on. There are no bursts but those that are ordered here.
    """
    collector = NodeCollector(every=False, wire=(Mode.BURSTS, NO_BUDGET))
    batches: list[NodeBatch] = []
    child = resting = 0

    def in_a_burst(number: int, happens: Callable[[], None]) -> dict[int, WorkWindow]:
        assert collector.order(Order(number, pids, seconds=2.0, share=1.0))
        deadline = time.monotonic() + 60
        while probes_of(child) == resting:  # a step may last longer than the burst
            assert time.monotonic() < deadline, batches[-3:]
            time.sleep(0.02)
        time.sleep(1.0)
        happens()
        ordered = ports_of_order(collector, batches, number)
        assert set(ordered) == set(pids), ordered
        assert all(work.counting is Counting.ORDER and work.seen_s > 1.5 for work in ordered.values()), ordered
        step_until(collector, batches, lambda: probes_of(child) == resting)
        return ordered

    try:
        # A long timeout of the adapter: no error of NCCL's is to end the ranks meanwhile.
        with job_of(soft_roce, env={"NCCL_IB_TIMEOUT": "22"}) as job:
            pids = tuple(job.pids)
            batches.append(collector.start(pids, calls=False))
            step_until(collector, batches, lambda: planes_run(batches[-1]))
            (child,) = [pid for pid in children_of(os.getpid()) if b"ncclwatch.wire.child" in command_line(pid)]
            # Those on libibverbs' control path stay as long as anybody is followed: its functions are called rarely.
            resting = probes_of(child)
            first = in_a_burst(9, lambda: soft_roce.set_down(soft_roce.b))
            assert all(work.posted for work in first.values()), first
            links = [change for batch in batches if batch.network is not None for change in batch.network.changes]
            assert any(change.name == soft_roce.b.netdev and not change.up for change in links), links
            second = in_a_burst(10, lambda: os.kill(pids[1], signal.SIGKILL))
            step_until(collector, batches, lambda: collector.watched[pids[1]].gone is not None)
            assert collector.order(Order(11, pids, seconds=0.2, share=1.0))
            third = ports_of_order(collector, batches, 11)
            assert set(third) == {pids[0]}, third
            spans = [work[pids[0]] for work in (first, second, third)]
            assert all(before.end_ns == after.begin_ns for before, after in itertools.pairwise(spans)), spans
            assert planes_run(batches[-1]) and Path(f"/proc/{child}").exists(), batches[-1].planes
            step_until(collector, batches, lambda: probes_of(child) == resting)
    finally:
        collector.close()
        soft_roce.set_up()
    assert not Path(f"/proc/{child}").exists()


def ports_of_order(collector: NodeCollector, batches: list[NodeBatch], number: int) -> dict[int, WorkWindow]:
    """Wait for the answer to an order: the windows of each process's port."""
    first = len(batches)
    step_until(collector, batches, lambda: any(window.order == number for batch in batches[first:] for window in batch.work))
    found = [window for batch in batches[first:] for window in batch.work]
    return {window.pid: window.work for window in found if window.order == number and window.scope is Scope.PORT}


def planes_run(batch: NodeBatch) -> bool:
    return any(plane.name == "wire" and plane.running for plane in batch.planes)


def step_until(collector: NodeCollector, batches: list[NodeBatch], holds: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, batches[-3:]
        batches.append(collector.step())


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
