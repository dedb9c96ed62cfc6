"""Windows of work requests as ``attach`` has them, beside samples, of real NCCL over its InfiniBand transport: what they say is
what the collective must move, and with the collector every probe goes, however it ends."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.node import NodeCollector
from ncclwatch.model.state import Direction
from ncclwatch.model.work import Counting, FlowWindow, Scope
from ncclwatch.probes.image_cache import ImageCache, digest
from ncclwatch.probes.program import source_folder
from ncclwatch.wire.governor import Mode
from ncclwatch.wire.kernel import SOURCE
from ncclwatch.wire.orders import Order
from testbed.job import Job, available
from vm.fabric import Fabric
from vm.guest import FULL_VARIABLE
from vm.initramfs import SHARE

pytestmark = pytest.mark.vm

VERSION = "2.32.3"
COUNT = 1 << 16
"""Floats of one AllReduce: with two ranks each sends as many bytes as the buffer has."""
BUDGET = 0.2
"""Of an emulated machine, where a trap costs more and nothing is to be learned about its price."""


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The programs as the host compiled them, where the plane's process looks for what was compiled before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    image, folder = Path(SHARE, f"{SOURCE}.json"), source_folder()
    if image.exists():
        ImageCache(tmp_path / "ncclwatch" / "programs").save(digest(folder / SOURCE, folder), json.loads(image.read_text()))


@pytest.fixture
def job(soft_roce: Fabric) -> Job:
    if not available(VERSION):
        pytest.skip(f"NCCL {VERSION} is not in the cache")
    return soft_roce.job(VERSION, 2, count=COUNT, extra=("--time",))


def watch(
    job: Job, mode: Mode, windows: int, seconds: float = 150, *, order: bool = False
) -> tuple[list[FlowWindow], list[NodeBatch]]:
    """Collect until each rank has so many windows of its port."""
    collector = NodeCollector(every=False, wire=(mode, BUDGET))
    found: list[FlowWindow] = []
    batches = []
    ordered = not order
    try:
        batches.append(collector.start(job.pids, calls=False))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            batches.append(collector.step())
            found += batches[-1].work
            if not ordered and found:
                ordered = collector.order(Order(5, tuple(job.pids), seconds=0.2, share=0.5))
            if enough(found, windows) and (not order or any(window.order == 5 for window in found)):
                break
    finally:
        collector.close()
    return found, batches


def enough(found: list[FlowWindow], windows: int) -> bool:
    ports = [window.pid for window in found if window.scope is Scope.PORT]
    return len(set(ports)) == 2 and all(ports.count(pid) >= windows for pid in set(ports))


def iterations_between(job: Job, rank: int, begin_ns: int, end_ns: int) -> float:
    """Iterations of a rank in a span of CLOCK_MONOTONIC, with the parts at its ends."""
    text = job.log_path(rank).read_text(errors="replace")
    times = [float(at) for at in re.findall(r"iteration \d+ took [\d.e-]+ at ([\d.]+)", text)]
    assert len(times) > 2 and times[0] * 1e9 < begin_ns and times[-1] * 1e9 > end_ns, (times[:2], times[-2:], begin_ns, end_ns)
    return place_of(times, end_ns / 1e9) - place_of(times, begin_ns / 1e9)


def place_of(times: list[float], at: float) -> float:
    after = next(i for i, time in enumerate(times) if time >= at)
    return after - (times[after] - at) / (times[after] - times[after - 1])


def ports_of(found: list[FlowWindow], pid: int) -> list[FlowWindow]:
    return [window for window in found if window.scope is Scope.PORT and window.pid == pid and not window.order]


@pytest.mark.usefixtures("programs")
def test_exact_windows_are_what_the_collective_must_move(job: Job, soft_roce: Fabric) -> None:
    with job:
        found, batches = watch(job, Mode.EXACT, 5)
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


@pytest.mark.usefixtures("programs")
def test_bursts_tell_rates_and_an_order_is_answered(job: Job) -> None:
    with job:
        found, batches = watch(job, Mode.BURSTS, 14, order=True)
        assert enough(found, 14), batches[-1].planes
        job.wait_progress(2)
        ordered = [window.work for window in found if window.order == 5 and window.scope is Scope.PORT]
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


@pytest.mark.usefixtures("programs")
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
            assert probed(child)
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


def probed(pid: int) -> bool:
    """Whether a process holds probes: links, or events of performance counters."""
    names = [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]  # noqa: PTH115
    return any("perf_event" in name or "bpf_link" in name or "bpf-link" in name for name in names)


@pytest.mark.skipif(FULL_VARIABLE not in os.environ, reason=f"part of the full matrix: set {FULL_VARIABLE}")
@pytest.mark.usefixtures("programs")
def test_a_nic_that_is_unplugged_in_a_burst_leaves_no_probe_behind_and_nothing_unsaid(job: Job, soft_roce: Fabric) -> None:
    """A long burst is on while the port goes down: it is answered all the same, its probes go with it, and counting goes on."""
    collector = NodeCollector(every=False, wire=(Mode.BURSTS, BUDGET))
    batches: list[NodeBatch] = []
    try:
        with job:
            batches.append(collector.start(job.pids, calls=False))
            step_until(collector, batches, lambda: bool(batches[-1].work))
            (child,) = [pid for pid in children_of(os.getpid()) if b"ncclwatch.wire.child" in command_line(pid)]
            assert collector.order(Order(9, tuple(job.pids), seconds=2.0, share=1.0))
            step_until(collector, batches, lambda: probed(child))
            soft_roce.set_down(soft_roce.b)
            step_until(collector, batches, lambda: any(window.order == 9 for window in batches[-1].work))
            answered = [window.work for window in batches[-1].work if window.order == 9 and window.scope is Scope.PORT]
            assert {work.counting for work in answered} == {Counting.ORDER} and all(work.seen_s > 0 for work in answered), (
                answered
            )
            step_until(collector, batches, lambda: not probed(child))
            # Its ranks end, or wait for completions: of neither is anything lost in silence.
            last = batches[-1].time_ns
            step_until(
                collector, batches, lambda: any(w.work.begin_ns > last for w in batches[-1].work) or not planes_run(batches[-1])
            )
            (plane,) = [plane for plane in batches[-1].planes if plane.name == "wire"]
            assert plane.running or plane.reason, plane
            assert Path(f"/proc/{child}").exists(), "the plane's process does not mind"
            links = [change for batch in batches if batch.network is not None for change in batch.network.changes]
            assert any(change.name == soft_roce.b.netdev and not change.up for change in links), links
    finally:
        collector.close()
        soft_roce.set_up()
    assert not Path(f"/proc/{child}").exists()


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
