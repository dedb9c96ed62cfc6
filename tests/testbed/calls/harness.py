"""The stub library and processes that call it on command."""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ncclwatch.model.events import Function, Kind
from ncclwatch.probes.program import Compilation
from ncclwatch.probes.tracer import CallTracer, CommunicatorOffsets

HERE = Path(__file__).resolve().parent
STUB_OFFSETS = CommunicatorOffsets(comm_hash=8, rank=16, nranks=20, op_count=24, magic=0)
"""``struct comm`` of stub_nccl.c."""
PATIENCE_S = 60.0
BREAKPOINT = 0xCC
"""The byte that a uprobe puts in place of the first one of an instruction on x86-64."""

Events = npt.NDArray[Any]


@lru_cache(maxsize=1)
def compilation() -> Compilation:
    """One compilation for all tests of a run."""
    return Compilation()


def build_stub(folder: Path, name: str = "libnccl.so.2", *, frames: bool = False) -> Path:
    """Compile the stub library and the caller beside it; returns the library. With ``frames`` its functions begin with a push."""
    library = folder / name
    flags = [
        "-O2",
        "-Wall",
        "-Wno-unused-parameter",
        "-fno-omit-frame-pointer",
        "-mno-omit-leaf-frame-pointer",
        "-fno-schedule-insns2",
        "-fno-shrink-wrap",
    ]
    subprocess.run(
        [
            "gcc",
            *flags,
            *["-DFRAMES"] * frames,
            "-fPIC",
            "-shared",
            "-Wl,--build-id",
            "-Wl,-soname," + name,
            "-o",
            library,
            HERE / "stub_nccl.c",
        ],
        check=True,
        timeout=60,
    )
    subprocess.run(
        ["gcc", *flags, "-pthread", "-o", folder / "caller", HERE / "caller.c", library, "-Wl,-rpath,$ORIGIN"],
        check=True,
        timeout=60,
    )
    return library


class Caller:
    """A running caller; commands are carried out when :meth:`run` returns."""

    def __init__(self, library: Path, *, rank: int = 0, prefix: Sequence[str] = ()) -> None:
        command = [*prefix, str(library.parent / "caller"), str(rank)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._buffer = b""
        self.pid_in_namespace = int(self._line().split()[1])
        self.pid = self.process.pid if not prefix else self._descendant()

    def _line(self) -> str:
        stream = self.process.stdout
        assert stream is not None
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the caller does not answer"
            data = os.read(stream.fileno(), 4096)
            assert data, f"the caller ended with status {self.process.wait()}"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def _descendant(self) -> int:
        """The caller itself below wrappers such as unshare(1): the one with the caller's number in its own namespace."""
        pending = [self.process.pid]
        while pending:
            pid = pending.pop()
            if Path(f"/proc/{pid}/comm").read_text().strip() == "caller":
                return pid
            pending += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        raise AssertionError("no caller below the wrapper")

    def send(self, command: str) -> None:
        """Give a command without waiting for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()

    def run(self, command: str) -> list[str]:
        """Carry a command out; returns what it printed."""
        self.send(command)
        return self.finish()

    def finish(self) -> list[str]:
        """Wait for the command that was sent."""
        lines: list[str] = []
        while (line := self._line()) != "done":
            lines.append(line)
        return lines

    def byte_at(self, library: Path, address: int) -> int:
        """The byte of the library at an address as linked, as it is in this process's memory now."""
        maps = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        base = next(int(line.split("-")[0], 16) for line in maps if line.endswith(str(library)))
        with Path(f"/proc/{self.pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(base + address)
            return memory.read(1)[0]

    def wait_ready(self) -> None:
        """After exec: the new program has initialised."""
        assert self._line().startswith("ready")

    def close(self) -> int:
        """End it and return its status."""
        if self.process.stdin and not self.process.stdin.closed:
            self.process.stdin.close()
        try:
            status = self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
        if self.process.stdout:
            self.process.stdout.close()
        return status

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def collect(tracer: CallTracer, until: Callable[[Events], bool]) -> Events:
    """Poll until a condition holds for all records so far; a test fails when it never does."""
    batches = [tracer.poll()]
    deadline = time.monotonic() + PATIENCE_S
    while not until(np.concatenate(batches)):
        assert time.monotonic() < deadline, f"never happened; records so far: {summary(np.concatenate(batches))}"
        batches.append(tracer.poll(0.2))
    return np.concatenate(batches)


def calls(events: Events, function: Function, kind: Kind = Kind.ENTER) -> Events:
    """The records of one function."""
    chosen: Events = events[(events["function"] == function) & (events["kind"] == kind)]
    return chosen


def summary(events: Events) -> dict[str, int]:
    """How many records of each function and kind, for messages and comparison."""
    found: dict[str, int] = {}
    for event in events:
        name = f"{Function(int(event['function'])).name} {Kind(int(event['kind'])).name}"
        found[name] = found.get(name, 0) + 1
    return found
