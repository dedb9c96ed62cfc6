"""Builds the counter shim and runs processes that play NCCL to it, from tests."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ncclwatch.collect.device import decode
from ncclwatch.model.device import DeviceSample
from ncclwatch.target.frame import FrameFile

ROOT = Path(__file__).resolve().parents[2]
CAN_BUILD = shutil.which("gcc") is not None and shutil.which("make") is not None


@functools.cache
def build_shim() -> Path:
    """The shim, built if anything changed."""
    folder = ROOT / "build" / "shim"
    subprocess.run(["make", "-s", "-C", ROOT / "kernel_counters", f"OUT={folder}"], check=True, timeout=120)
    return folder / "libncclwatch_counters.so"


@functools.cache
def build_driver() -> Path:
    """The stand-in for the CUDA driver."""
    target = ROOT / "build" / "testbed" / "libcuda.so.1"
    source = ROOT / "tests" / "testbed" / "standin" / "libcuda.c"
    if not target.exists() or target.stat().st_mtime < source.stat().st_mtime:
        target.parent.mkdir(parents=True, exist_ok=True)
        new = target.with_name(f"libcuda.{os.getpid()}")
        command = ["gcc", "-O2", "-fPIC", "-shared", str(source), "-o", str(new), "-Wl,-soname,libcuda.so.1", "-lpthread", "-ldl"]
        subprocess.run(command, check=True, timeout=120)
        new.replace(target)
    return target


class FakeNccl:
    """A child that has loaded the shim; ``do`` sends it one line of Python and returns the answer. A context manager."""

    def __init__(self, *, driver: bool = False, env: Mapping[str, str] | None = None) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NCCL")}
        environment |= {"LD_PRELOAD": str(build_driver())} if driver else {"NCCLWATCH_SAMPLER": "0"}
        environment |= env or {}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("shim_child.py")), str(build_shim())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self._frame: FrameFile | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def do(self, line: str) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, f"the process ended at {line!r} with {self.process.wait(10)}"
        return json.loads(answer)

    @property
    def frame(self) -> FrameFile:
        """Its frame, found as the agent finds it."""
        if self._frame is None:
            self._frame = FrameFile.find(self.pid)
            assert self._frame is not None, "no frame"
        return self._frame

    def header(self) -> dict[str, int]:
        header = self.frame.header()
        return {name: int(header[name]) for name in header.dtype.names or () if name != "reserved"}

    def raw(self) -> NDArray[Any]:
        return self.frame.read().frame

    def device(self) -> DeviceSample:
        return decode(self.frame.read())

    def until(self, condition: Callable[[dict[str, int]], bool], what: str, timeout: float = 120) -> dict[str, int]:
        """Wait until the header says so."""
        deadline = time.monotonic() + timeout
        while not condition(header := self.header()):
            assert time.monotonic() < deadline, f"{what}: {header}"
            time.sleep(0.005)
        return header

    def close(self) -> None:
        if self._frame is not None:
            self._frame.close()
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def words_of(frame: NDArray[Any], count: int) -> list[tuple[int, int]]:
    """(status, value) of the first words."""
    return [(int(word["status"]), int(word["value"])) for word in np.atleast_1d(frame["words"])[:count]]
