"""The wire plane's own process on a load of known size: started, told, heard, and gone with every probe when nobody listens."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.model.state import Direction
from ncclwatch.model.work import Counting, FlowWindow, Scope
from ncclwatch.wire.governor import Mode
from ncclwatch.wire.kernel import WireKernel
from ncclwatch.wire.orders import Order, Owner, User
from ncclwatch.wire.process import WireProcess
from wire.standin import Load, load

pytestmark = [pytest.mark.attach, pytest.mark.quiet]

PROGRAM = """
from ncclwatch.wire import child, session
from ncclwatch.wire.contexts import VerbsFile
session.verbs_files = lambda pid: [{files}]
child.main()
"""


@pytest.fixture
def stand_in(wire_kernel: WireKernel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Load], None]:
    """The process with the load's files in place of open RDMA devices, which nobody has here."""
    assert wire_kernel is not None, "the programs are compiled, and the machine can probe"
    real = subprocess.Popen

    def prepare(job: Load) -> None:
        program = tmp_path / "child.py"
        program.write_text(PROGRAM.format(files=", ".join(map(repr, job.files))))

        def start(command: list[str], **options: Any) -> Any:
            return real([sys.executable, str(program), *command[4:]], **options)

        monkeypatch.setattr(subprocess, "Popen", start)

    return prepare


def windows(wire: WireProcess, wanted: Callable[[FlowWindow], bool], seconds: float = 60) -> list[FlowWindow]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = [window for report in wire.reports() for window in report.windows if wanted(window)]
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"no such window: {wire.running} {wire.reason} {wire.reasons}")


def test_bursts_and_orders_of_a_process_of_its_own(stand_in: Callable[[Load], None], load_program: Path) -> None:
    with load(load_program, posts=100_000_000, rate=2_000, bytes=4096) as job:
        stand_in(job)
        wire = WireProcess(Mode.BURSTS, 0.05)
        try:
            wire.follow([User(job.pid, ("IB",))])
            job.begin()
            found = windows(wire, lambda window: window.scope is Scope.FLOW and bool(window.work.posted))
            assert wire.running and wire.reason == "" and wire.reasons == {job.pid: ""}
            (flow,) = found[:1]
            assert (flow.device, flow.comm_hash, flow.work.counting) == ("standin0", None, Counting.BURSTS)
            wire.own([Owner(job.pid, job.addresses[0], flow.queue_pair, 1, 0, 0, 1, Direction.SEND, 5)])
            began = time.monotonic()
            assert wire.order(Order(3, (job.pid,), seconds=0.05, share=0.9))
            ordered = windows(wire, lambda window: window.order == 3)
            assert time.monotonic() - began < 5
            assert {window.work.counting for window in ordered} == {Counting.ORDER}
            assert wire.bill is not None and wire.bill.budget == 0.05 and wire.bill.rss_bytes > 1 << 20
        finally:
            wire.close()


def test_who_is_killed_leaves_no_probe_behind(stand_in: Callable[[Load], None], load_program: Path) -> None:
    """Its end of the pipe is closed with it: the process of the plane ends at once, also while every request is probed."""
    with load(load_program, posts=100_000_000, rate=2_000) as job:
        stand_in(job)
        wire = WireProcess(Mode.EXACT)
        wire.follow([User(job.pid)])
        job.begin()
        windows(wire, lambda window: window.work.counting is Counting.EXACT and bool(window.work.posted))
        child = wire._child
        assert child is not None and child.stdin is not None
        held = [os.readlink(f"/proc/{child.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{child.pid}/fd")]  # noqa: PTH115, PTH208
        assert any("perf_event" in name or "bpf" in name for name in held)
        began = time.monotonic()
        child.stdin.close()
        assert child.wait(10) == 0 and time.monotonic() - began < 5
        assert Path(f"/proc/{job.pid}").exists()
        wire.close()


def test_a_process_that_ends_in_the_middle_is_dropped_and_the_plane_goes_on(
    stand_in: Callable[[Load], None], load_program: Path
) -> None:
    with load(load_program, posts=100_000_000, rate=2_000) as first:
        stand_in(first)
        wire = WireProcess(Mode.BURSTS, 0.5)
        try:
            wire.follow([User(first.pid)])
            first.begin()
            windows(wire, lambda window: window.pid == first.pid)
            first.process.kill()
            first.process.wait()
            time.sleep(1.5)
            wire.follow([])
            deadline = time.monotonic() + 10
            while wire.reasons and time.monotonic() < deadline:
                wire.reports()
                time.sleep(0.05)
            assert wire.running and wire.reasons == {} and wire._starts == 1
        finally:
            wire.close()


def test_a_load_that_comes_to_stand_in_a_burst_is_counted_to_its_end_and_no_probe_stays(
    stand_in: Callable[[Load], None], load_program: Path
) -> None:
    """As where its NIC is unplugged: nothing completes any more, from the middle of a burst on."""
    with load(load_program, posts=100_000_000, rate=2_000, bytes=4096) as job:
        stand_in(job)
        wire = WireProcess(Mode.BURSTS, 0.05)
        try:
            wire.follow([User(job.pid, ("IB",))])
            job.begin()
            windows(wire, lambda window: bool(window.work.posted))
            child = wire._child
            assert child is not None
            assert wire.order(Order(4, (job.pid,), seconds=2.0, share=0.9))
            until(lambda: probes_of(child.pid) > 0)
            time.sleep(0.3)
            os.kill(job.pid, signal.SIGSTOP)
            (flow,) = [window for window in windows(wire, lambda window: window.order == 4) if window.scope is Scope.FLOW]
            assert flow.work.posted and flow.work.seen_s == pytest.approx(2.0, abs=0.5)
            assert flow.work.posted < 1.5 * 2_000, "what came before it stood is counted, and nothing is made up"
            until(lambda: probes_of(child.pid) == 0)
            os.kill(job.pid, signal.SIGCONT)
            later = windows(wire, lambda window: not window.order and window.work.begin_ns >= flow.work.end_ns)
            assert later and wire.running and wire.reason == "", "it goes on with it"
        finally:
            os.kill(job.pid, signal.SIGCONT)
            wire.close()


def probes_of(pid: int) -> int:
    """How many probes on the data path a process holds: those of libibverbs' control path are of other programs' functions."""
    names = []
    for fd in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - they come and go
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/{pid}/fd/{fd}"))  # noqa: PTH115
    return sum("perf_event" in name or "bpf_link" in name or "bpf-link" in name for name in names)


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)
