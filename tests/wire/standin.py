"""Building and running the stand-in provider's load."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncclwatch.wire.contexts import VerbsFile

SOURCE = Path(__file__).resolve().parent


def build(folder: Path) -> Path:
    """Compile the load program and return its path."""
    program = folder / "load"
    sources = [SOURCE / "load.c", SOURCE / "provider.c"]
    subprocess.run(["gcc", "-O2", "-Wall", "-o", program, *sources], check=True, timeout=120)
    return program


@dataclass
class Load:
    """A running load that waits for :meth:`begin`; ``files`` stand for the RDMA devices it has open."""

    process: subprocess.Popen[str]
    files: list[VerbsFile]
    addresses: list[int]
    pid: int

    def begin(self) -> None:
        """Let it work."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Wait until its work is done and return what it counted; the process stays until :meth:`end`."""
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def end(self) -> None:
        """Let it exit."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=10)


@contextmanager
def load(program: Path, **options: int) -> Iterator[Load]:
    """A load with these options (see load.c)."""
    with load_under((), program, **options) as job:
        yield job


@contextmanager
def load_under(wrap: Sequence[str], program: Path, **options: int) -> Iterator[Load]:
    """A load as the only child of the command ``wrap``, where that is one."""
    words = [f"{name}={value}" for name, value in options.items()]
    command = [*wrap, str(program), "wait=1", *words]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        contexts = ready["contexts"]
        files = [VerbsFile(context["fd"], f"uverbs{number}", context["device"]) for number, context in enumerate(contexts)]
        pid = process.pid
        if wrap:
            (pid,) = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        yield Load(process, files, [context["address"] for context in contexts], pid)
    finally:
        process.kill()
        process.communicate()
