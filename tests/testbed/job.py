"""Start a job of real NCCL processes on the CPU testbed, from tests or from the shell.

    with Job(nccl="2.27.5", ranks=4, shape="allreduce", transport="mixed") as job:
        job.freeze(2)
        ...

or `python -m testbed.job --nccl 2.27.5 --ranks 4 --shape allreduce`, which runs until it is interrupted.

The ranks are ordinary processes that link the official libnccl.so.2; only their CUDA runtime is a stand-in (see README.md).
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Literal, Self

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
VERSIONS = ("2.21.5", "2.27.5", "2.32.3")
"""Releases the tests cover; 2.19.3 runs too, for reading communicators that have no magics."""

LIBRARY = "libtestjob.so"
"""The job as a library, beside its program."""

Transport = Literal["socket", "shm", "p2p", "mixed", "ib"]
WaitFor = Literal["running", "ready", "nothing"]

_PR_SET_PDEATHSIG = 1
_MEMFD_SECRET = 447
_LINE = re.compile(rb"^testjob rank \d+ (.*)$", re.MULTILINE)
_TAIL_BYTES = 4096
_PACE = {"--pause-us", "--compute-us", "--time"}
"""Options by which a job sets or tells its own pace."""


class JobError(Exception):
    """The job could not be built or started, or did not do what was waited for. The text holds the end of every rank's log."""


def cache_folder() -> Path:
    """Folder with VERSION/{include,lib} of NCCL: $NCCL_CACHE, else .cache/nccl of the project."""
    return Path(os.environ.get("NCCL_CACHE", ROOT / ".cache" / "nccl"))


def build_folder() -> Path:
    """Where the testbed is built: $TESTBED_BUILD, else build/testbed of the project."""
    return Path(os.environ.get("TESTBED_BUILD", ROOT / "build" / "testbed"))


def available(version: str) -> bool:
    """Whether that release of NCCL is in the cache."""
    return (cache_folder() / version / "lib" / "libnccl.so.2").exists()


def has_secret_memory() -> bool:
    """Whether this kernel has memory that nobody outside a process can read, in which transport "p2p" keeps what GPUs share."""
    fd = int(ctypes.CDLL(None).syscall(_MEMFD_SECRET, 0))
    if fd >= 0:
        os.close(fd)
    return fd >= 0


def library(version: str) -> Path:
    """The libnccl that jobs of this version map."""
    return cache_folder().resolve() / version / "lib" / "libnccl.so.2"


def build(version: str, *targets: str) -> Path:
    """Build the testbed for one release, if anything changed, and return the program. Raises JobError.

    ``targets`` are files of its folder that are made besides.
    """
    if not available(version):
        raise JobError(f"NCCL {version} is not in {cache_folder()}; run `make nccl`, or set NCCL_CACHE")
    folder = build_folder()
    program = folder / version / "ncclwatch-testjob"
    if shutil.which("make") is None and program.exists():
        return program  # built elsewhere, for a guest that has no compiler
    folder.mkdir(parents=True, exist_ok=True)
    command = ["make", "-s", "-C", str(HERE), f"NCCL_CACHE={cache_folder().resolve()}", f"BUILD={folder.resolve()}"]
    command += [f"VERSIONS={version}", f"PYTHON={sys.executable}"]
    command += ["all", *(str(folder.resolve() / version / target) for target in targets)] if targets else []
    with (folder / ".lock").open("w") as lock:  # tests may run side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise JobError(f"building the testbed for NCCL {version} failed:\n{done.stdout}{done.stderr}")
    return program


class Job:
    """A running job, one process per rank; a context manager that always ends its processes.

    `hosts` gives the number of ranks on each made-up host: within a host NCCL uses shared memory, between hosts the network.
    Without it, `transport` decides: "socket" puts every rank on its own host, "shm" all on one, "p2p" too, with direct access
    between their GPUs, "mixed" all but the last on one; "ib" is "socket" with NCCL's InfiniBand transport allowed.
    `iterations` None runs until stopped. `extra` are further options of the program (program/options.h). `env` adds to or, with
    None as a value, removes from the environment of all ranks. `wrap` is a command each rank runs under. `python` makes
    each rank a Python process, with the fault and the file that python_rank.py takes. `enter` gives the
    command (nsenter and its options) that starts the ranks of one host in namespaces of their own (netns.py).
    `algorithm` and `protocol` become NCCL_ALGO (Tree and PAT for the collectives that have them, else Ring) and NCCL_PROTO; with
    another protocol than Simple, NCCL decides by itself which Send/Recv go by LL. `as_nccl_likes` leaves all of that to NCCL.
    `nvlinks`: so many join every GPU to an NVSwitch of its host; transport is then "p2p", and NCCL itself says how far it goes.
    `wait_for` says what starting waits for: "running" (all ranks have finished an iteration), "ready" (all have their
    communicators) or "nothing".
    """

    pause_us = 0
    """Microseconds that a job which runs until it is stopped pauses after each iteration, where no option sets its pace. At full
    speed four ranks keep two CPUs busy, and the tests of other jobs lack them. tests/conftest.py sets it, benchmarks do not.
    """

    def __init__(
        self,
        nccl: str = "2.27.5",
        ranks: int = 4,
        shape: str = "allreduce",
        transport: Transport = "socket",
        *,
        hosts: Sequence[int] | None = None,
        count: int = 65536,
        iterations: int | None = None,
        hold: bool = False,
        verify: bool = False,
        extra: Sequence[str] = (),
        env: Mapping[str, str | None] | None = None,
        wrap: Sequence[str] = (),
        python: Sequence[str] = (),
        enter: Callable[[int], Sequence[str]] | None = None,
        algorithm: str = "Ring",
        protocol: str = "Simple",
        as_nccl_likes: bool = False,
        nvlinks: int = 0,
        wait_for: WaitFor = "running",
        start_timeout: float = 120,
    ) -> None:
        self.nccl = nccl
        self.ranks = ranks
        self.shape = shape
        self._transport = transport if not nvlinks else "p2p"
        self._nvlinks = nvlinks
        self.hosts = _hosts(ranks, self._transport, hosts)
        self.library = library(nccl)
        self._env = ({} if as_nccl_likes else _tuned(nccl, algorithm, protocol)) | dict(env or {})
        self._wrap = list(wrap)
        self._python = list(python)
        self._enter = enter
        self._wait_for = wait_for
        self._start_timeout = start_timeout
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pids: list[int] = []
        self._logs: list[IO[bytes]] = []
        self._arguments = ["--shape", shape, "--count", str(count)]
        self._arguments += ["--iterations", str(iterations)] if iterations is not None else []
        self._arguments += ["--hold"] * hold + ["--verify"] * verify + list(extra)
        if self.pause_us and iterations is None and shape != "training" and not _PACE & set(extra):
            self._arguments += ["--pause-us", str(self.pause_us)]
        self._folder: Path | None = None

    def start(self) -> Self:
        """Start all ranks and wait as asked for. Raises JobError, with nothing left running."""
        program = build(self.nccl, *[LIBRARY] * bool(self._python))
        self._folder = Path(tempfile.mkdtemp(prefix="ncclwatch-job-"))
        try:
            for rank in range(self.ranks):
                log = self.log_path(rank).open("wb")
                self._logs.append(log)
                command = [*self._wrap, *self._rank(program), "--run-dir", str(self._folder), *self._arguments]
                enter = list(self._enter(_place(self.hosts, rank)[0])) if self._enter is not None else []
                self._processes.append(
                    subprocess.Popen(
                        [*enter, *command],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=self._environment(rank),
                        preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl, safe after fork
                    )
                )
                # Into another PID namespace nsenter forks: the rank is its child.
                pid = self._processes[-1].pid
                self._pids.append(only_child(pid) if "--pid" in enter else pid)
            self._await_start()
        except BaseException:
            self.close()
            raise
        return self

    def _rank(self, program: Path) -> list[str]:
        if not self._python:
            return [str(program)]
        return [sys.executable, str(HERE / "python_rank.py"), str(program.with_name(LIBRARY)), *self._python]

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank (of the wrapping command, if there is one)."""
        return list(self._pids)

    def pid(self, rank: int) -> int:
        """Process id of a rank."""
        return self._pids[rank]

    def host(self, rank: int) -> int:
        """Index of the made-up host a rank is on."""
        return _place(self.hosts, rank)[0]

    def freeze(self, rank: int) -> None:
        """SIGSTOP a rank; returns when all its threads stand: one that waits for a processor stops only when it gets it."""
        self._signal(rank, signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not _stands(self._pids[rank]) and time.monotonic() < deadline:
            time.sleep(0.001)

    def thaw(self, rank: int) -> None:
        """SIGCONT a rank."""
        self._signal(rank, signal.SIGCONT)
        self._processes[rank].send_signal(signal.SIGCONT)  # nsenter stops along with the process it waits for

    def kill(self, rank: int) -> None:
        """SIGKILL a rank and reap it."""
        self._signal(rank, signal.SIGKILL)
        self._processes[rank].send_signal(signal.SIGCONT)
        self._processes[rank].wait()

    def alive(self, rank: int) -> bool:
        """Whether the rank's process has not ended."""
        return self._processes[rank].poll() is None

    def stop(self) -> None:
        """Ask all ranks to end after their current iteration (SIGTERM)."""
        for rank in range(len(self._processes)):
            self._signal(rank, signal.SIGTERM)

    def lines(self, rank: int) -> list[str]:
        """All progress lines of a rank so far, without the prefix `testjob rank R `."""
        return [match.decode() for match in _LINE.findall(self.log_path(rank).read_bytes())]

    def progress(self, rank: int) -> int:
        """Iterations the rank has finished."""
        with self.log_path(rank).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = log.read()
        found = re.findall(rb"^testjob rank \d+ iteration (\d+)\b.*$", tail, re.MULTILINE)
        return int(found[-1]) if found else 0

    def log(self, rank: int) -> str:
        """Everything the rank wrote."""
        return self.log_path(rank).read_text(errors="replace")

    def log_path(self, rank: int) -> Path:
        """File that gets the rank's output."""
        assert self._folder is not None, "the job was not started"
        return self._folder / f"rank{rank}.log"

    def wait(self, timeout: float = 60) -> list[int]:
        """Wait until all ranks have ended; their exit statuses. Raises JobError when they have not ended in time (s)."""
        deadline = time.monotonic() + timeout
        codes = []
        for process in self._processes:
            try:
                codes.append(process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise JobError(f"the job did not end within {timeout:g} s\n{self.logs()}") from None
        return codes

    def wait_line(self, rank: int, text: str, timeout: float = 60) -> str:
        """Wait for a progress line that starts with `text` and return it. Raises JobError if it does not come."""
        deadline = time.monotonic() + timeout
        while True:
            ended = not self.alive(rank)  # looked at first: its last lines still count
            for line in self.lines(rank):
                if line.startswith(text):
                    return line
            if ended or time.monotonic() > deadline:
                raise JobError(f"rank {rank} did not say {text!r}\n{self.logs()}")
            time.sleep(0.05)

    def wait_gate(self, timeout: float = 60) -> None:
        """Wait until every rank of a job started with ``--gate`` stands there: before its first call of NCCL."""
        for rank in range(self.ranks):
            self.wait_line(rank, "waits at the gate", timeout)

    def open_gate(self) -> None:
        self.log_path(0).with_name("gate").touch()

    def wait_progress(self, iterations: int, ranks: Sequence[int] | None = None, timeout: float = 60) -> None:
        """Wait until these ranks (all, if not given) have finished that many more iterations. Raises JobError."""
        wanted = {rank: self.progress(rank) + iterations for rank in (ranks if ranks is not None else range(self.ranks))}
        deadline = time.monotonic() + timeout
        while any(self.progress(rank) < goal for rank, goal in wanted.items()):
            if time.monotonic() > deadline:
                raise JobError(f"the job did not get {iterations} iterations further in {timeout:g} s\n{self.logs()}")
            time.sleep(0.05)

    def logs(self, lines: int = 15) -> str:
        """The end of every rank's log."""
        parts = []
        for rank, process in enumerate(self._processes):
            state = "running" if process.poll() is None else f"ended with status {process.returncode}"
            tail = "\n".join("  " + line for line in self.log(rank).splitlines()[-lines:])
            parts.append(f"--- rank {rank} (pid {process.pid}, {state})\n{tail}")
        return "\n".join(parts)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        if self._processes[rank].poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], number)

    def close(self) -> None:
        """End all processes, frozen ones too, and remove the job's files."""
        segments = {segment for pid in self._pids for segment in _shared_memory(pid)}
        for rank in range(len(self._pids)):
            self._signal(rank, signal.SIGKILL)  # reaches stopped processes as well
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            process.wait()
        for segment in segments:  # NCCL removes them itself only on an orderly end
            segment.unlink(missing_ok=True)
        for log in self._logs:
            log.close()
        self._processes.clear()
        self._pids.clear()
        self._logs.clear()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _environment(self, rank: int) -> dict[str, str]:
        host, local = _place(self.hosts, rank)
        env = {name: value for name, value in os.environ.items() if not name.startswith("NCCL_")}
        env |= {
            "RANK": str(rank),  # the four as torchrun sets them
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.hosts[host]),
            "NCCL_HOSTID": f"testbed-host{host}-{os.getpid()}",
            "TESTBED_BUS": str(local),
            "NCCL_SOCKET_IFNAME": "lo",
        }
        if self._transport != "ib":
            env["NCCL_NET"] = "Socket"
        if self._transport == "p2p":
            env["TESTBED_P2P"] = "1"
            # Without NVLinks the made-up GPUs hang at no common switch.
            env |= {"TESTBED_NVLINK": str(self._nvlinks)} if self._nvlinks else {"NCCL_P2P_LEVEL": "SYS"}
        for name, value in self._env.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        return env

    def _await_start(self) -> None:
        if self._wait_for == "nothing":
            return
        wanted = "iteration" if self._wait_for == "running" else "ready"
        deadline = time.monotonic() + self._start_timeout
        waiting = set(range(self.ranks))
        while waiting:
            ended = [rank for rank in waiting if not self.alive(rank)]
            waiting -= {rank for rank in waiting if any(wanted in line for line in self.lines(rank)[:50])}
            if any(rank in waiting for rank in ended):
                raise JobError(f"ranks {sorted(ended)} ended before the job ran\n{self.logs()}")
            if time.monotonic() > deadline:
                raise JobError(
                    f"ranks {sorted(waiting)} were not {self._wait_for} within {self._start_timeout:g} s\n{self.logs()}"
                )
            if waiting:
                time.sleep(0.05)


COLLECTIVES = {"Tree": ("allreduce",), "PAT": ("allgather", "reducescatter")}
"""Algorithms that not every collective has, and those that have them."""


def _tuned(nccl: str, algorithm: str, protocol: str) -> dict[str, str | None]:
    """NCCL_ALGO and NCCL_PROTO that leave one choice. Since 2.24 an algorithm that a collective lacks is an error."""
    per_collective = [int(part) for part in nccl.split(".")[:2]] >= [2, 24]
    having = COLLECTIVES.get(algorithm, ()) if per_collective else ()
    tuned: dict[str, str | None] = {
        "NCCL_ALGO": ";".join(["Ring", *(f"{collective}:{algorithm}" for collective in having)]) if having else algorithm,
        "NCCL_PROTO": protocol,
    }
    if protocol == "Simple":
        tuned["NCCL_P2P_LL_THRESHOLD"] = "0"
    return tuned


def _hosts(ranks: int, transport: Transport, hosts: Sequence[int] | None) -> tuple[int, ...]:
    if hosts is not None:
        if sum(hosts) != ranks or min(hosts) < 1:
            raise JobError(f"hosts {tuple(hosts)} do not add up to {ranks} ranks")
        return tuple(hosts)
    if transport in ("shm", "p2p"):
        return (ranks,)
    if transport == "mixed" and ranks > 1:
        return (ranks - 1, 1)
    return (1,) * ranks


def _place(hosts: Sequence[int], rank: int) -> tuple[int, int]:
    """Host and local rank."""
    for host, size in enumerate(hosts):
        if rank < size:
            return host, rank
        rank -= size
    raise IndexError(rank)


def _stands(pid: int) -> bool:
    """Whether every thread of a process is stopped, or the process is gone."""
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return not Path(f"/proc/{pid}").exists()
    return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)


def _shared_memory(pid: int) -> set[Path]:
    """Files under /dev/shm that NCCL made and this process maps."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {Path(path) for path in re.findall(r"(/dev/shm/nccl-\w+)$", maps, re.MULTILINE)}


def only_child(pid: int, timeout: float = 10) -> int:
    """The process that a launcher has forked, once it has. Raises JobError when it ends, or time (s) runs out, before that."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not Path(f"/proc/{pid}").exists():
            break
        for entry in Path("/proc").iterdir():  # task/PID/children is not in every kernel
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                    return int(entry.name)
        time.sleep(0.01)
    raise JobError(f"the launcher with pid {pid} started nothing")


def die_with_parent() -> None:
    """Between fork and exec: be killed when the thread that starts this ends, whatever ends it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _until_interrupted(job: Job) -> Iterator[None]:
    while any(job.alive(rank) for rank in range(job.ranks)):
        time.sleep(0.2)
        yield


def main() -> int:
    """Run a job from the shell until it ends or is interrupted."""
    parser = argparse.ArgumentParser(description="Start a job of real NCCL processes on the CPU testbed.")
    parser.add_argument("--nccl", default="2.27.5", help="release of NCCL")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shape", default="allreduce")
    parser.add_argument("--transport", choices=("socket", "shm", "p2p", "mixed", "ib"), default="socket")
    parser.add_argument("--hosts", help="ranks per host, for example 3,1")
    parser.add_argument("--count", type=int, default=65536, help="elements per operation")
    parser.add_argument("--iterations", type=int)
    parser.add_argument("--hold", action="store_true", help="stay alive after the last iteration")
    parser.add_argument("--verify", action="store_true", help="check every element")
    parser.add_argument("--algorithm", choices=("Ring", "Tree", "PAT"), default="Ring")
    parser.add_argument("--protocol", choices=("LL", "LL128", "Simple"), default="Simple")
    parser.add_argument("--as-nccl-likes", action="store_true", help="set no algorithm and no protocol: NCCL chooses by itself")
    parser.add_argument("--nvlinks", type=int, default=0, help="NVLinks of each GPU to an NVSwitch of its host")
    parser.add_argument("extra", nargs="*", help="further options of the program, after --")
    arguments = parser.parse_args()

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # SIGINT too: a shell that starts us in the background has it ignored, and Python then leaves it so.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    hosts = [int(part) for part in arguments.hosts.split(",")] if arguments.hosts else None
    job = Job(
        arguments.nccl,
        arguments.ranks,
        arguments.shape,
        arguments.transport,
        hosts=hosts,
        count=arguments.count,
        iterations=arguments.iterations,
        hold=arguments.hold,
        verify=arguments.verify,
        extra=arguments.extra,
        algorithm=arguments.algorithm,
        protocol=arguments.protocol,
        as_nccl_likes=arguments.as_nccl_likes,
        nvlinks=arguments.nvlinks,
        wait_for="ready",
    )
    try:
        with job:
            for rank in range(job.ranks):
                print(f"rank {rank} pid {job.pid(rank)} host {job.host(rank)}", flush=True)
            for _ in _until_interrupted(job):
                pass
            codes = job.wait()
            if any(codes):
                print(job.logs(), file=sys.stderr)
            return int(any(codes))
    except KeyboardInterrupt:
        return 0
    except JobError as error:
        print(f"testbed: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
