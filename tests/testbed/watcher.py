"""The commands as a user runs them, beside a job of the testbed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

NCCLWATCH = [sys.executable, "-m", "ncclwatch"]


class HasPids(Protocol):
    """A job of any kind."""

    @property
    def pids(self) -> list[int]:
        """Those of its ranks."""


def pids(job: HasPids) -> list[str]:
    return ["--pid", ",".join(map(str, job.pids))]


def run(*arguments: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*NCCLWATCH, *arguments], capture_output=True, text=True, check=False, timeout=timeout)
    assert "Traceback" not in done.stderr, done.stderr
    return done


class Live:
    """``ncclwatch attach --json`` as a child, its objects as they come."""

    def __init__(self, *arguments: str) -> None:
        self.child = subprocess.Popen(
            [*NCCLWATCH, "attach", "--json", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.objects: list[dict[str, Any]] = []
        self._grown = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.child.stdout or ():
            with self._grown:
                self.objects.append(json.loads(line))
                self._grown.notify_all()
        with self._grown:
            self._grown.notify_all()

    def of(self, kind: str) -> list[dict[str, Any]]:
        with self._grown:
            return [data for data in self.objects if data["type"] == kind]

    def wait_for(self, kind: str, count: int = 1, timeout: float = 60, **fields: Any) -> dict[str, Any]:
        """The ``count``-th object of that type whose fields are these."""
        deadline = time.monotonic() + timeout
        with self._grown:
            while True:
                found = [o for o in self.objects if o["type"] == kind and all(o[name] == v for name, v in fields.items())]
                if len(found) >= count:
                    return found[count - 1]
                assert self._reader.is_alive(), f"ended without {kind}: {self._said()} {self.objects[-3:]}"
                assert self._grown.wait(deadline - time.monotonic()), f"no {kind} {fields} came: {self.objects[-3:]}"

    def _said(self) -> str:
        return f"status {self.child.wait(10)}: {self.child.stderr.read() if self.child.stderr else ''}"

    def end(self, number: signal.Signals = signal.SIGINT) -> int:
        self.child.send_signal(number)
        status = self.child.wait(60)
        self._reader.join(10)
        assert self.child.stderr is not None
        assert self.child.stderr.read() == ""
        return status


@contextmanager
def live(*arguments: str) -> Iterator[Live]:
    watcher = Live(*arguments)
    try:
        yield watcher
    finally:
        if watcher.child.poll() is None:
            watcher.child.kill()
        watcher.child.wait()
