"""Starts jobs on a real GPU. With NCCLWATCH_GPU_STANDIN=1 the CPU testbed plays the GPU, to try the tests themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from testbed.job import ROOT, build_folder, cache_folder
from testbed.watcher import NCCLWATCH, HasPids, Live, live, pids
from unit.shim_harness import build_driver, build_shim

HERE = Path(__file__).resolve().parent
STANDIN = os.environ.get("NCCLWATCH_GPU_STANDIN") == "1"
VERSION = os.environ.get("NCCLWATCH_GPU_NCCL", "2.27.5")
CUDART_PACKAGE = "nvidia-cuda-runtime-cu12"


class GpuJobError(Exception):
    """The job did not do what was waited for; holds the ends of all logs."""


def missing() -> str:
    """Why no job can be run on a GPU here; empty when one can."""
    if STANDIN:
        return "" if (build_folder() / VERSION / "libcudart_standin.so").exists() else f"the testbed is not built for {VERSION}"
    if not Path("/dev/nvidia0").exists():
        return "no NVIDIA GPU on this machine (/dev/nvidia0)"
    if not (cache_folder() / VERSION / "lib" / "libnccl.so.2").exists():
        return f"NCCL {VERSION} is not in {cache_folder()} (make setup)"
    return "" if cudart() else f"no CUDA runtime (pip install {CUDART_PACKAGE}, or CUDART_LIBRARY=...)"


def cudart(version: str = VERSION) -> Path | None:
    """The CUDA runtime: named by the environment, in a Python package, or in a toolkit."""
    if STANDIN:
        return (build_folder() / version / "libcudart_standin.so").resolve()
    if os.environ.get("CUDART_LIBRARY"):
        return Path(os.environ["CUDART_LIBRARY"])
    folders = [Path(folder) / "nvidia" / "cuda_runtime" / "lib" for folder in sys.path if folder]
    folders += [ROOT / ".cache/cuda/nvidia/cuda_runtime/lib", Path("/usr/local/cuda/lib64"), Path("/usr/lib/x86_64-linux-gnu")]
    found = (path for folder in folders for path in sorted(folder.glob("libcudart.so.1[2-9]*")))
    return next(found, None)


@contextmanager
def watched(job: HasPids, name: str) -> Iterator[Live]:
    """``attach`` beside a job; where ``$OUT`` is a folder a recording of it is kept there."""
    with ExitStack() as stack:
        if folder := os.environ.get("OUT"):
            command = [*NCCLWATCH, "record", *pids(job), "--output", str(Path(folder) / f"{name}.recording")]
            recorder = stack.enter_context(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            stack.callback(recorder.send_signal, signal.SIGINT)
        yield stack.enter_context(live(*pids(job)))


class Ranks:
    """The processes of a job and the folder of their logs; a context manager that ends them all."""

    def __init__(self, ranks: int, prefix: str) -> None:
        self.ranks = ranks
        self.folder = Path(tempfile.mkdtemp(prefix=prefix))
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, rank: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        """What it says goes into its log."""
        with self.log_path(rank).open("wb") as log:
            self.processes.append(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=dict(env), cwd=ROOT)
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()

    def log_path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def lines(self, rank: int) -> list[str]:
        return self.log_path(rank).read_text(errors="replace").splitlines()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]


class GpuJob(Ranks):
    """Ranks that share one GPU; a context manager that ends them all.

    ``same_host`` puts them on one host where NCCL allows several ranks on a GPU (2.30 and later): then P2P joins them, else
    sockets.
    """

    def __init__(
        self,
        ranks: int = 2,
        arguments: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        shim: bool = True,
        same_host: bool = False,
        late: Mapping[int, Sequence[str]] | None = None,
        nccl: str = VERSION,
        preload: bool = False,
    ) -> None:
        super().__init__(ranks, "ncclwatch-gpu-")
        self.arguments, self.late = list(arguments), dict(late or {})
        self.same_host, self.nccl, self.preload = same_host, nccl, preload
        self.env = {"NCCL_PROFILER_PLUGIN": str(build_shim())} if shim else {}
        self.env |= env or {}

    def environment(self, rank: int) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
        library = cudart(self.nccl)
        assert library is not None
        env |= {
            "RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": "0", "GPU": "0",
            "NCCL_LIBRARY": str((cache_folder() / self.nccl / "lib" / "libnccl.so.2").resolve()),
            "CUDART_LIBRARY": str(library), "NCCL_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        if self.same_host:
            env |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        else:
            # Before 2.30 ranks may share a GPU only as different hosts.
            env |= {"NCCL_HOSTID": f"gpu-host{rank}", "NCCL_NET": "Socket"}
        preloads = [str(build_shim())] if self.preload else []
        if self.preload:
            env |= {"NCCL_BY_PRELOAD": "1"}
        if STANDIN:
            preloads += [str(library), str(build_driver())]
            env |= {"STANDIN_CUDA_ALL": "1", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
        return env | ({"LD_PRELOAD": ":".join(preloads)} if preloads else {}) | self.env

    def __enter__(self) -> Self:
        for rank in range(self.ranks):
            command = [sys.executable, str(HERE / "rank.py"), str(self.folder), *self.arguments, *self.late.get(rank, ())]
            self.start(rank, command, self.environment(rank))
        return self

    def pid(self, rank: int) -> int:
        return self.processes[rank].pid

    def iterations(self, rank: int) -> int:
        return sum(line.startswith("iteration ") for line in self.lines(rank))

    def open_gate(self) -> None:
        """Let ranks begin that were started with ``--gate``."""
        (self.folder / "open").touch()

    def wait_line(self, rank: int, start: str, timeout: float = 90) -> None:
        self._wait(lambda: any(line.startswith(start) for line in self.lines(rank)), f"rank {rank} says {start!r}", timeout)

    def wait_iterations(self, more: int, timeout: float = 90) -> None:
        wanted = [self.iterations(rank) + more for rank in range(self.ranks)]
        self._wait(lambda: all(self.iterations(r) >= n for r, n in enumerate(wanted)), f"{more} more iterations", timeout)

    def wait(self, timeout: float = 120) -> list[int]:
        deadline = time.monotonic() + timeout
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in self.processes]
        except subprocess.TimeoutExpired:
            raise GpuJobError(f"the job did not end\n{self.logs()}") from None

    def _wait(self, condition: object, what: str, timeout: float) -> None:
        assert callable(condition)
        deadline = time.monotonic() + timeout
        while not condition():
            ended = [rank for rank, process in enumerate(self.processes) if process.poll() not in (None, 0)]
            if ended or time.monotonic() > deadline:
                raise GpuJobError(f"waited for: {what}\n{self.logs()}")
            time.sleep(0.02)

    def logs(self) -> str:
        return "\n".join(f"--- rank {rank}\n" + "\n".join(self.lines(rank)[-12:]) for rank in range(self.ranks))
