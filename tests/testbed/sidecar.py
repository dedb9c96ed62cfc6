"""An engine, agents and viewers as a user runs them, each a process of its own, some in namespaces of their own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from testbed.job import die_with_parent, only_child

NCCLWATCH = [sys.executable, "-m", "ncclwatch"]
Entry = Sequence[str]


class Daemon:
    """One command whose lines are read as they come; ``enter`` is a namespace's command prefix."""

    def __init__(self, *arguments: str, enter: Entry = ()) -> None:
        self._inside = bool(enter) and "--pid" in " ".join(enter)
        self.lines: list[str] = []
        self.child = subprocess.Popen(
            [*enter, *NCCLWATCH, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, preexec_fn=die_with_parent,  # noqa: PLW1509
        )  # fmt: skip
        self._grown = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.child.stdout or ():
            with self._grown:
                self.lines.append(line.rstrip("\n"))
                self._grown.notify_all()

    @property
    def text(self) -> str:
        """Everything it said."""
        with self._grown:
            return "\n".join(self.lines)

    def objects(self, kind: str) -> list[dict[str, Any]]:
        """Its JSON objects of a type."""
        with self._grown:
            lines = [line for line in self.lines if line.startswith("{")]
        return [data for line in lines if (data := json.loads(line))["type"] == kind]

    def wait(self, holds: Callable[[], object], what: str, timeout: float = 90) -> None:
        """Wait until something holds of what it said."""
        deadline = time.monotonic() + timeout
        while not holds():
            with self._grown:
                self._grown.wait(0.2)
            assert time.monotonic() < deadline, f"{what} did not come:\n{self.text[-4000:]}"

    def wait_line(self, words: str, timeout: float = 90) -> None:
        """Wait for a line with these words."""
        self.wait(lambda: words in self.text, f"'{words}'", timeout)

    def ask(self, bell: Path) -> list[dict[str, Any]]:
        """Have it judge now, by its ``--ask-file``; the verdicts that it has answered with so far."""
        bell.write_text("now\n")
        return [data["verdict"] for data in self.objects("answer")]

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the program itself."""
        pid = self.child.pid
        if self._inside:
            with contextlib.suppress(Exception):
                pid = only_child(pid, timeout=1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End it and wait."""
        if self.child.poll() is None:
            self.send(number)
            try:
                self.child.wait(15)
            except subprocess.TimeoutExpired:
                self.child.kill()
                self.child.wait()


def free_port() -> int:
    """A port of loopback nobody has, below those the kernel hands out: a job's own sockets, or an agent that reaches itself while
    it waits for an engine, take one of those before the engine listens."""
    first_handed_out = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(15000, min(30000, first_handed_out)), 100):
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port of loopback is free")


@contextlib.contextmanager
def daemon(*arguments: str, enter: Entry = ()) -> Iterator[Daemon]:
    """A command for the length of a block."""
    running = Daemon(*arguments, enter=enter)
    try:
        yield running
    finally:
        running.end()


def make_keys(folder: Path) -> Path:
    """Keys of an engine, its agents and its viewers."""
    subprocess.run([*NCCLWATCH, "keys", "make", str(folder)], check=True, capture_output=True, timeout=60)
    return folder


def verdicts(engine: Daemon) -> list[tuple[str, list[int | None]]]:
    """Class and culprits' ranks of every verdict an engine told."""
    found = [data["verdict"] for data in engine.objects("verdict")]
    return [(verdict["class"], [culprit["rank"] for culprit in verdict["culprits"]]) for verdict in found]
