"""Recording a real job as a user does: what a report of it says, what it costs in bytes, and the dashboard in a real terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import pytest

from testbed.job import Job
from unit.traces import ReadTrace

pytestmark = pytest.mark.attach

NCCLWATCH = [sys.executable, "-m", "ncclwatch"]
PAUSE = ("--pause-us", "20000")
MYCROFT_BYTES = 46_800
"""What Mycroft (section 7.3) records for an iteration of one machine."""


def run(*arguments: str, timeout: float = 120, status: int = 0) -> str:
    done = subprocess.run([*NCCLWATCH, *arguments], capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == status, done.stderr
    return done.stdout


def pids(job: Job) -> str:
    return ",".join(map(str, job.pids))


def test_a_hang_is_recorded_and_told_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "job.recording"
    with Job(ranks=4, count=1 << 14, extra=PAUSE) as job:
        recorder = subprocess.Popen(
            [*NCCLWATCH, "record", "--pid", pids(job), "-o", str(path)], stdout=subprocess.PIPE, text=True
        )
        assert recorder.stdout is not None
        assert "recording 4 processes" in recorder.stdout.readline()
        job.freeze(1)
        assert "STOPPED  rank 1" in recorder.stdout.readline()
        job.thaw(1)
        assert "RECOVERED" in recorder.stdout.readline()
        before, at = path.stat().st_size, job.progress(0)
        time.sleep(5)
        grown, iterations = path.stat().st_size - before, job.progress(0) - at
        recorder.send_signal(signal.SIGINT)
        assert recorder.wait(30) == 0
    # A real iteration of training takes seconds and holds hundreds of operations; this one is a single AllReduce.
    assert grown / max(iterations, 1) < MYCROFT_BYTES
    assert "STOPPED  rank 1" in run("diagnose", str(path))
    data = json.loads(run("report", str(path), "--json"))
    assert [[c["rank"] for c in i["verdict"]["culprits"]] for i in data["incidents"]] == [[1]]
    run("report", str(path), "--perfetto", "-o", str(tmp_path / "trace"))
    assert not ReadTrace((tmp_path / "trace").read_bytes()).problems


class Terminal:
    """A command on a terminal of its own; everything it wrote is kept."""

    def __init__(self, *arguments: str, folder: Path, size: tuple[int, int] = (100, 30)) -> None:
        self.pid, self._master = pty.fork()
        if self.pid == 0:  # the child
            os.chdir(folder)
            os.environ.update(TERM="xterm-256color", LANG="C.UTF-8", PYTHONUTF8="1")
            os.execv(sys.executable, [*NCCLWATCH, *arguments])  # noqa: S606
        ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.seen = ""

    def read(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._master], [], [], left)[0]:
                try:
                    self.seen += os.read(self._master, 65536).decode("utf-8", "replace")
                except OSError:
                    return

    def wait_for(self, text: str, timeout: float = 60) -> None:
        until = time.monotonic() + timeout
        while text not in self.seen:
            assert time.monotonic() < until, f"{text!r} did not come: …{self.seen[-3000:]!r}"
            self.read(0.2)

    def press(self, keys: str) -> None:
        self.seen = ""
        os.write(self._master, keys.encode())

    def end(self) -> int:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            self.read(0.2)
        raise AssertionError("it did not end")

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._master)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[list[Terminal]]:
    opened: list[Terminal] = []
    yield opened
    for each in opened:
        each.close()


def test_the_dashboard_on_a_real_terminal_and_a_real_job(tmp_path: Path, terminal: list[Terminal]) -> None:
    with Job(ranks=4, count=1 << 14, extra=PAUSE) as job:
        screen = Terminal("attach", "--exit-code", "--pid", pids(job), folder=tmp_path)
        terminal.append(screen)
        screen.wait_for("RUNNING")
        screen.press("R")
        screen.wait_for("recording into")
        job.freeze(2)
        screen.wait_for("STOPPED")
        screen.press("\r")
        screen.wait_for("communicator")
        screen.press("k")
        screen.wait_for("SLEEPS IN")
        screen.press("q")
        assert screen.end() == 10
        screen.read(0.5)
        assert "kill -CONT" in screen.seen
        [recording] = tmp_path.glob("ncclwatch-*.recording")
        assert "STOPPED  rank 2" in run("diagnose", str(recording))
        assert all(job.alive(rank) for rank in range(4))
        job.thaw(2)
        job.wait_progress(3)
