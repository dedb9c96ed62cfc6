"""What must hold of windows of work requests, on whatever carries them: SoftRoCE in the guest, stand-ins for adapters here."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.counting import NO_BUDGET
from ncclwatch.collect.node import NodeCollector
from ncclwatch.model.state import Direction
from ncclwatch.model.verdict import Verdict
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow
from ncclwatch.wire.governor import Mode
from ncclwatch.wire.orders import Order
from testbed.job import Job

BUDGET = 0.2
"""Of a thread: nothing is to be learned here about the price, and much is to be seen soon."""
ORDER = 5
WATCH_S = 150.0
TOLERANCE = 0.05
"""Between what windows say and what the collective must move."""


@dataclass(frozen=True, slots=True)
class Moves:
    """A job of two ranks that runs, with ``--time``: each sends and receives so many bytes an iteration."""

    job: Job
    bytes: int

    def between(self, rank: int, works: Sequence[WorkWindow]) -> float:
        """Bytes from the beginning of the first window to the end of the last."""
        return iterations_between(self.job, rank, works[0].begin_ns, works[-1].end_ns) * self.bytes

    def are_all_in(self, rank: int, works: Sequence[WorkWindow]) -> None:
        """These windows hold what the collective must move between their begin and end, and what was posted has completed."""
        must = self.between(rank, works)
        sent, received = (sum(getattr(work, name) for work in works) for name in ("posted_bytes", "received_bytes"))
        print(f"rank {rank} sent {sent} and received {received} bytes, must {must:.0f}, {sent / must:.4f}")
        assert sent == pytest.approx(must, rel=TOLERANCE) and received == pytest.approx(must, rel=TOLERANCE)
        assert sum(work.posted or 0 for work in works) - sum(work.completed or 0 for work in works) <= 64


def exact_windows_are_what_must_move(moves: Moves, devices: Sequence[str]) -> None:
    """With each request counted; ``devices`` are by rank."""
    job = moves.job
    found, batches = watch(job, Mode.EXACT, 5)
    assert enough(found, 5), batches[-1].planes
    job.wait_progress(2)
    for rank, pid in enumerate(job.pids):
        windows = ports_of(found, pid)[1:]
        assert {window.device for window in windows} == {devices[rank]}
        works = [window.work for window in windows]
        assert all(work.counting is Counting.EXACT and work.coverage > 0.999 for work in works)
        assert all(before.end_ns == after.begin_ns for before, after in itertools.pairwise(works))
        moves.are_all_in(rank, works)
        # What was under way when the probes came has no latency; after the first window nothing was.
        busy = [work for work in works if work.completed]
        assert busy and all(work.latency_p50_ns and work.latency_p99_ns and work.throughput for work in busy), busy
    for window in [window for window in found if window.scope is Scope.FLOW and window.role == "data"]:
        assert window.direction is Direction.SEND and window.peer == 1 - (window.rank or 0) and window.queue_pair
    newest = [window.work for window in next(batch.windows for batch in reversed(batches) if len(batch.windows))]
    assert all(work is not None and work.counting is Counting.EXACT and work.coverage > 0.999 for work in newest), newest


def every_request_is_counted_while_that_is_cheap(moves: Moves) -> None:
    """Of an NCCL that shows where it takes completions, bursts go on without an end."""
    found, batches = watch(moves.job, Mode.BURSTS, 6)
    assert enough(found, 6), batches[-1].planes
    moves.job.wait_progress(2)
    for rank, pid in enumerate(moves.job.pids):
        first, *works = [window.work for window in ports_of(found, pid)]
        assert first.counting is Counting.BURSTS and all(work.counting is Counting.EXACT for work in works), works
        assert all(work.coverage > 0.999 and work.polls is None for work in works)
        assert all(before.end_ns == after.begin_ns for before, after in itertools.pairwise([first, *works]))
        moves.are_all_in(rank, works)
        assert all(work.latency_p50_ns and work.throughput for work in works if work.completed), works


def bursts_tell_rates_and_an_order_is_answered(moves: Moves) -> None:
    """With requests counted for some of the time."""
    job = moves.job
    found, batches = watch(job, Mode.BURSTS, 14, order=True)
    assert enough(found, 14), batches[-1].planes
    job.wait_progress(2)
    ordered = [window.work for window in found if window.order == ORDER and window.scope is Scope.PORT]
    assert len(ordered) == 2 and all(work.counting is Counting.ORDER and work.posted for work in ordered), ordered
    for rank, pid in enumerate(job.pids):
        works = [window.work for window in ports_of(found, pid)]
        seen = sum(work.seen_s for work in works)
        sent = sum(work.posted_bytes for work in works) / seen
        must = moves.between(rank, works) / ((works[-1].end_ns - works[0].begin_ns) / 1e9)
        error = works[-1].uncertainty
        print(f"bursts: rank {rank} {sent:.0f} B/s in {len(works)} bursts of {seen:.3f} s, must {must:.0f}, uncertainty {error}")
        assert error is not None and sent == pytest.approx(must, rel=max(TOLERANCE, 3 * error))
    (plane,) = [plane for plane in batches[-1].planes if plane.name == "wire"]
    assert plane.running and plane.reason == ""
    spent = [batch.overhead for batch in batches if batch.overhead is not None and batch.overhead.wire_bursts]
    assert spent and spent[-1].wire_budget == BUDGET
    assert spent[-1].wire_share is not None and spent[-1].wire_share <= BUDGET


def a_killed_collector_leaves_no_probe_behind(job: Job) -> None:
    """SIGKILL while every request is probed: the plane's process ends with the pipe, and its probes with it."""
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
        (child,) = _children_of(agent.pid)
        assert _probes_of(child)
    finally:
        agent.send_signal(signal.SIGKILL)
        agent.wait()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{child}").exists()
    job.wait_progress(3)


def what_goes_in_a_burst_is_answered_for(job: Job, interface: str, take_down: Callable[[], None]) -> None:
    """A long burst is on while a port goes down, and another while a rank is killed: both are answered, also for what has gone,
    their probes go with them, and counting goes on. There are no bursts but those that are ordered here.
    """
    with Ordered(tuple(job.pids)) as ordered:
        first = ordered.in_a_burst(9, take_down)
        assert all(work.posted for work in first.values()), first
        links = [change for batch in ordered.batches if batch.network is not None for change in batch.network.changes]
        assert any(change.name == interface and not change.up for change in links), links
        second = ordered.in_a_burst(10, lambda: os.kill(job.pids[1], signal.SIGKILL))
        ordered.until(lambda: ordered.collector.watched[job.pids[1]].gone is not None)
        assert ordered.collector.order(Order(11, ordered.pids, seconds=0.2, share=1.0))
        third = ordered.answer(11)
        assert set(third) == {job.pids[0]}, third
        spans = [work[job.pids[0]] for work in (first, second, third)]
        assert all(before.end_ns == after.begin_ns for before, after in itertools.pairwise(spans)), spans
        assert _plane_runs(ordered.batches[-1]) and Path(f"/proc/{ordered.child}").exists(), ordered.batches[-1].planes
        ordered.until(lambda: _probes_of(ordered.child) == ordered.resting)
    assert not Path(f"/proc/{ordered.child}").exists()


@dataclass
class Ordered:
    """A collector that counts by order alone; a context manager. ``child`` is the process of its wire plane."""

    pids: tuple[int, ...]
    collector: NodeCollector = field(init=False)
    batches: list[NodeBatch] = field(default_factory=list)
    child: int = 0
    resting: int = 0
    """Probes while nothing is counted: libibverbs' control path, whose functions are called rarely."""

    def __enter__(self) -> Ordered:
        self.collector = NodeCollector(every=False, wire=(Mode.BURSTS, NO_BUDGET))
        self.batches.append(self.collector.start(self.pids, calls=False))
        self.until(lambda: _plane_runs(self.batches[-1]))
        (self.child,) = [pid for pid in _children_of(os.getpid()) if b"ncclwatch.wire.child" in _command_line(pid)]
        self.resting = _probes_of(self.child)
        return self

    def __exit__(self, *_: object) -> None:
        self.collector.close()

    def in_a_burst(self, number: int, happens: Callable[[], object]) -> dict[int, WorkWindow]:
        """Order one, and have something happen in it; the windows of each process's port."""
        assert self.collector.order(Order(number, self.pids, seconds=2.0, share=1.0))
        deadline = time.monotonic() + 60
        while _probes_of(self.child) == self.resting:  # a step may last longer than the burst
            assert time.monotonic() < deadline, self.batches[-3:]
            time.sleep(0.02)
        time.sleep(1.0)
        happens()
        answered = self.answer(number)
        assert set(answered) == set(self.pids), answered
        assert all(work.counting is Counting.ORDER and work.seen_s > 1.5 for work in answered.values()), answered
        self.until(lambda: _probes_of(self.child) == self.resting)
        return answered

    def answer(self, number: int) -> dict[int, WorkWindow]:
        """Wait for the answer to an order: the windows of each process's port."""
        first = len(self.batches)
        self.until(lambda: any(window.order == number for batch in self.batches[first:] for window in batch.work))
        found = [window for batch in self.batches[first:] for window in batch.work]
        return {window.pid: window.work for window in found if window.order == number and window.scope is Scope.PORT}

    def until(self, holds: Callable[[], bool], seconds: float = 120) -> None:
        """Collect until something holds."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < deadline, self.batches[-3:]
            self.batches.append(self.collector.step())


def until_still(job: Job, still_s: float = 3.0) -> None:
    """Wait until no rank gets any further."""
    deadline = time.monotonic() + 120
    reached, since = [-1], time.monotonic()
    while time.monotonic() < min(deadline, since + still_s):
        if (now := [job.progress(rank) for rank in range(2)]) != reached:
            reached, since = now, time.monotonic()
        time.sleep(0.1)


def lines_of(verdict: Verdict) -> list[str]:
    """What requests showed that were counted by order."""
    return [line for line in verdict.evidence if "while the job stands" in line]


def watch(job: Job, mode: Mode, windows: int, *, order: bool = False) -> tuple[list[FlowWindow], list[NodeBatch]]:
    """Collect until each rank has so many windows of its port; with ``order`` until an order for a burst, given as soon as there
    are windows, is answered as well.
    """
    collector = NodeCollector(every=False, wire=(mode, BUDGET))
    found: list[FlowWindow] = []
    batches = []
    ordered = not order
    try:
        batches.append(collector.start(job.pids, calls=False))
        deadline = time.monotonic() + WATCH_S
        while time.monotonic() < deadline:
            batches.append(collector.step())
            found += batches[-1].work
            if not ordered and found:
                ordered = collector.order(Order(ORDER, tuple(job.pids), seconds=0.2, share=0.5))
            if enough(found, windows) and (not order or any(window.order == ORDER for window in found)):
                break
    finally:
        collector.close()
    return found, batches


def enough(found: Sequence[FlowWindow], windows: int) -> bool:
    """Whether each of two ranks has so many windows of its port."""
    ports = [window.pid for window in found if window.scope is Scope.PORT]
    return len(set(ports)) == 2 and all(ports.count(pid) >= windows for pid in set(ports))


def ports_of(found: Sequence[FlowWindow], pid: int) -> list[FlowWindow]:
    """The windows of a process's port that nobody ordered."""
    return [window for window in found if window.scope is Scope.PORT and window.pid == pid and not window.order]


def iterations_between(job: Job, rank: int, begin_ns: int, end_ns: int) -> float:
    """Iterations of a rank in a span of CLOCK_MONOTONIC, with the parts at its ends."""
    text = job.log_path(rank).read_text(errors="replace")
    times = [float(at) for at in re.findall(r"iteration \d+ took [\d.e-]+ at ([\d.]+)", text)]
    assert len(times) > 2 and times[0] * 1e9 < begin_ns and times[-1] * 1e9 > end_ns, (times[:2], times[-2:], begin_ns, end_ns)
    return _place_of(times, end_ns / 1e9) - _place_of(times, begin_ns / 1e9)


def _place_of(times: Sequence[float], at: float) -> float:
    after = next(i for i, time in enumerate(times) if time >= at)
    return after - (times[after] - at) / (times[after] - times[after - 1])


def _children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _probes_of(pid: int) -> int:
    """How many probes a process holds: links, or events of performance counters."""
    names = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            names.append(os.readlink(path))  # noqa: PTH115
    return sum("perf_event" in name or "bpf_link" in name or "bpf-link" in name for name in names)


def _plane_runs(batch: NodeBatch) -> bool:
    return any(plane.name == "wire" and plane.running for plane in batch.planes)


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
