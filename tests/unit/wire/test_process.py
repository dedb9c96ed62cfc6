"""The wire plane's process as who collects sees it: never waited for, started again, and said to be gone when it is."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.errors import NcclwatchError
from ncclwatch.model.state import Direction
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow
from ncclwatch.wire import process as module
from ncclwatch.wire.governor import Mode
from ncclwatch.wire.orders import Bill, Follow, Order, Owner, Owners, Report, User, framed, orders, reports
from ncclwatch.wire.process import WireProcess

WINDOW = FlowWindow(7, Scope.FLOW, WorkWindow(Counting.BURSTS, 1, 2, 0.5, posted=3, send_rate=0.5), direction=Direction.SEND)
OWNER = Owner(7, 1 << 63, 5, (1 << 64) - 1, 0, 1, 2, Direction.RECV, 3)

CHILD = """
import os, sys
from ncclwatch.wire.orders import Bill, Follow, Order, Report, framed, orders
frames = orders()
while data := os.read(0, 65536):
    for message in frames.feed(data):
        print(message, file=sys.stderr)
        if isinstance(message, Follow):
            reply = Report(running=True, reasons={user.pid: "" for user in message.users}, bill=Bill(0.001, bursts=2))
            os.write(1, framed(reply))
        if isinstance(message, Order):
            os.write(1, b"\\xff\\xff\\xff\\xff") if message.number == 13 else os._exit(3)
"""


def test_messages_come_back_whole_from_bytes_in_pieces() -> None:
    told = (Follow((User(1, ("IB",)),)), Owners((OWNER,)), Order(4, (1, 2), 0.5, 0.02))
    data = b"".join(framed(message) for message in told)
    frames = orders()
    found: list[object] = []
    for at in range(0, len(data), 7):
        found += frames.feed(data[at : at + 7])
    assert tuple(found) == told
    report = Report((WINDOW,), True, "", {1: "gone"}, Bill(0.001, 5, 0.0007, words="5 bursts"))
    assert list(reports().feed(framed(report))) == [report]


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x03\0\0\0abc", framed(Order(1))])
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(NcclwatchError):
        list(reports().feed(data))


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A child that answers orders without looking at anything."""
    program = tmp_path / "child.py"
    program.write_text(CHILD)
    real = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        assert command[1:4] == ["-P", "-m", "ncclwatch.wire.child"]
        return real([sys.executable, str(program)], **options)

    monkeypatch.setattr(subprocess, "Popen", start)


def heard(wire: WireProcess, seconds: float = 120) -> list[Report]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        child = wire._child
        found = wire.reports()
        if found or (child is not None and wire._child is None):
            return found
        time.sleep(0.01)
    raise AssertionError("it said nothing")


@pytest.mark.usefixtures("spawned")
def test_it_is_started_with_the_first_process_and_ended_with_its_input() -> None:
    wire = WireProcess(Mode.BURSTS, 0.001)
    wire.follow([])
    wire.own([OWNER])
    assert wire._child is None and not wire.running and "no process uses RDMA" in wire.reason
    assert wire.order(Order(1)) is False
    wire.follow([User(7)])
    (report,) = heard(wire)
    assert report.reasons == {7: ""}
    assert (wire.running, wire.reason, wire.bill) == (True, "", Bill(0.001, bursts=2))
    child = wire._child
    assert child is not None
    wire.close()
    assert child.returncode == 0 and not wire.running


@pytest.mark.usefixtures("spawned")
@pytest.mark.parametrize(("number", "said"), [(1, "it ended (status 3)"), (13, "is more than the")])
def test_one_that_fails_is_said_to_be_gone_and_started_again_a_few_times(
    number: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    wire = WireProcess()
    wire.follow([User(7)])
    try:
        for start in range(module.MOST_STARTS):
            assert heard(wire) and wire.running
            assert wire.order(Order(number))
            heard(wire)
            assert not wire.running and said in wire.reason
            assert ("it is started again" in wire.reason) == (start < module.MOST_STARTS - 1)
        assert wire.reports() == [] and wire._child is None
    finally:
        wire.close()


@pytest.mark.usefixtures("spawned")
def test_one_that_does_not_listen_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped before anybody goes on: whoever waited for it would wait for ever."""
    monkeypatch.setattr(module, "MOST_WAITING", 1 << 18)
    start = subprocess.Popen

    def stopped(command: list[str], **options: Any) -> Any:
        child = start(command, **options)
        child.send_signal(signal.SIGSTOP)
        return child

    monkeypatch.setattr(subprocess, "Popen", stopped)
    wire = WireProcess()
    wire.follow([User(7)])
    child = wire._child
    assert child is not None
    for number in range(40):
        wire.own([Owner(7, number, index, 1, 0, 0, 1, Direction.SEND) for index in range(2000)])
    assert "it does not listen" in wire.reason and not wire.running
    wire.close()
    assert child.returncode is not None


def test_switched_off_nothing_is_started() -> None:
    wire = WireProcess(Mode.STATE)
    wire.follow([User(7)])
    assert wire._child is None and wire.reason == "switched off"
