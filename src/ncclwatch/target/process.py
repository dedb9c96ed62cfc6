"""What ``/proc`` says about a process: identity, run state, ranks from its environment, names, CPU time.

The target may exit at any moment: then :class:`TargetGoneError` is raised, or the documented neutral value is returned. What
the kernel refuses is :class:`PrivilegeError`. Field numbers are those of proc(5).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ncclwatch.errors import NcclwatchError, TargetGoneError
from ncclwatch.target.maps import PROC, read_bounded, read_small, target_errors

_PF_KTHREAD = 0x00200000
_CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
_MAX_ENVIRON = 8 << 20
_MAX_COMMAND = 1 << 16
_MAX_TASKS = 8192
GONE = "X"
"""The run state of a process that no longer exists."""


@dataclass(frozen=True, slots=True)
class Stat:
    """``/proc/PID/stat``: ``state`` is its letter, ``start_time`` in clock ticks since boot, ``cpu_time_ns`` user plus system
    time.
    """

    pid: int
    name: str
    state: str
    parent: int
    is_kernel_thread: bool
    cpu_time_ns: int
    threads: int
    start_time: int


@dataclass(frozen=True, slots=True)
class Status:
    """``/proc/PID/status``: effective user id and the pids the process has, from the agent's pid namespace to its own."""

    uid: int
    pids: tuple[int, ...]
    tracer: int


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that an environment or a title claims; ``source``: the variable that named the rank (``RANK``), or ``title``; ``job``
    tells jobs apart.
    """

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    source: str = ""
    job: str = ""

    @property
    def claim(self) -> tuple[str, str, int | None, int | None]:
        """What no two ranks of a job have in common."""
        return self.source, self.job, self.rank, self.world_size


# (rank, local rank, world size), in order of precedence: what starts the ranks themselves comes before what started their starter
# (torchrun under srun has one SLURM_PROCID a node).
_RANK_VARIABLES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("RANK", ("LOCAL_RANK",), ("WORLD_SIZE",)),  # torchrun, DeepSpeed, Lightning, Accelerate
    ("HOROVOD_RANK", ("HOROVOD_LOCAL_RANK",), ("HOROVOD_SIZE",)),
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_LOCAL_RANK",), ("OMPI_COMM_WORLD_SIZE",)),
    ("MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_LOCAL_RANK",), ("MV2_COMM_WORLD_SIZE",)),
    ("MVP_COMM_WORLD_RANK", ("MVP_COMM_WORLD_LOCAL_RANK",), ("MVP_COMM_WORLD_SIZE",)),
    ("PMI_RANK", ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("PMI_SIZE",)),  # MPICH, Intel MPI, Cray
    ("PMIX_RANK", ("SLURM_LOCALID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
    ("JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_LOCAL_RANK",), ("JSM_NAMESPACE_SIZE",)),
    ("PALS_RANKID", ("PALS_LOCAL_RANKID",), ()),
    ("FLUX_TASK_RANK", ("FLUX_TASK_LOCAL_ID",), ("FLUX_JOB_SIZE",)),
    ("SLURM_PROCID", ("SLURM_LOCALID",), ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")),
)
OF_THE_RANK = frozenset({"RANK", "HOROVOD_RANK"})
"""Set for each rank by what starts it; the others may be those of a node or a service that starts several."""
_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID")
_MAX_RANK = 1 << 30


def ranks_from_environ(environ: Mapping[str, str]) -> Ranks:
    """The ranks that an environment claims; nothing is normal: Ray and ``mp.spawn`` set RANK after exec, where no one sees it.

    A rank outside its own world is not believed.
    """
    job = "\0".join(environ.get(name, "") for name in _JOB_VARIABLES)
    for name, local_names, world_names in _RANK_VARIABLES:
        rank = _number(environ, name)
        if rank is None:
            continue
        local, world = _first(environ, local_names), _first(environ, world_names)
        if world is not None and rank >= world:
            continue
        return Ranks(rank, local, world or None, name, job)
    local = _number(environ, "LOCAL_RANK")
    return Ranks(None, local, None, "", job)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    return next((number for name in names if (number := _number(environ, name)) is not None), None)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        return None
    return int(text) if int(text) < _MAX_RANK else None


_INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""``PROC_PID_INIT_INO`` (include/linux/proc_ns.h)"""


@lru_cache(maxsize=4)
def boot_id(proc: Path = PROC) -> str:
    """This boot of this machine, and where pids are not those of the machine, the pid namespace they are of: two agents in two
    containers of one machine see different processes under equal pids. ``""`` where the kernel does not say.
    """
    try:
        boot = (proc / "sys/kernel/random/boot_id").read_text("ascii").strip()[:64]
    except (OSError, ValueError):
        return ""
    try:
        namespace = (proc / "self/ns/pid").stat().st_ino
    except OSError:
        return boot
    return boot if namespace == _INITIAL_PID_NAMESPACE else f"{boot}:{namespace}"


def read_stat(pid: int, proc: Path = PROC) -> Stat:
    """Parse ``/proc/PID/stat``; raises :class:`TargetGoneError`."""
    with target_errors(pid, "stat"):
        text = read_small(f"{proc}/{pid}/stat", 4096)
    # The name is in parentheses and may hold anything, parentheses included.
    start, end = text.find(b"("), text.rfind(b")")
    fields = text[end + 2 :].split()
    try:
        user, system, start_time = int(fields[11]), int(fields[12]), int(fields[19])  # fields 14, 15 and 22
        return Stat(
            pid=pid,
            name=text[start + 1 : end].decode("utf-8", "replace"),
            state=fields[0].decode("ascii", "replace"),
            parent=int(fields[1]),
            is_kernel_thread=bool(int(fields[6]) & _PF_KTHREAD),
            cpu_time_ns=(user + system) * 1_000_000_000 // _CLOCK_TICKS,
            threads=int(fields[17]),
            start_time=start_time,
        )
    except (IndexError, ValueError):
        raise TargetGoneError(f"process {pid} is gone", "list the NCCL processes with 'ncclwatch ps'") from None


def run_state(pid: int, proc: Path = PROC) -> str:
    """The letter of ``/proc/PID/stat``: ``R S D`` alive, ``T t`` stopped, ``Z`` zombie; :data:`GONE` when there is no such
    process.
    """
    try:
        return read_stat(pid, proc).state
    except TargetGoneError:
        return GONE


def read_status(pid: int, proc: Path = PROC) -> Status:
    """Parse ``/proc/PID/status``; raises :class:`TargetGoneError`."""
    fields: dict[bytes, bytes] = {}
    for line in read_bounded(proc / str(pid) / "status", pid, 1 << 16).splitlines():
        key, _, value = line.partition(b":")
        fields[key] = value
    try:
        uids = fields[b"Uid"].split()
        pids = tuple(int(number) for number in fields.get(b"NSpid", str(pid).encode()).split())
        return Status(int(uids[1]), pids or (pid,), int(fields.get(b"TracerPid", b"0")))
    except (KeyError, IndexError, ValueError):
        raise TargetGoneError(f"process {pid} is gone", "list the NCCL processes with 'ncclwatch ps'") from None


def read_environ(pid: int, proc: Path = PROC) -> dict[str, str]:
    """The environment at exec; raises :class:`TargetGoneError` and :class:`PrivilegeError`."""
    text = read_bounded(proc / str(pid) / "environ", pid, _MAX_ENVIRON)
    pairs = (entry.partition(b"=") for entry in text.split(b"\0"))
    return {os.fsdecode(name): os.fsdecode(value) for name, equals, value in pairs if equals}


def read_command(pid: int, proc: Path = PROC) -> tuple[str, ...]:
    """The command line, at most 64 KiB of it; empty when it is gone or cannot be read."""
    try:
        text = read_bounded(proc / str(pid) / "cmdline", pid, _MAX_COMMAND)
    except NcclwatchError:
        return ()
    return tuple(part.decode("utf-8", "replace") for part in text.removesuffix(b"\0").split(b"\0")) if text else ()


def context_switches(pid: int, proc: Path = PROC) -> int | None:
    """Voluntary plus involuntary context switches over all threads now alive; ``None`` when none could be read."""
    counts = [
        int(word)
        for text in _of_threads(pid, "status", proc)
        for _, found, rest in (text.rpartition(b"\nvoluntary_ctxt_switches:"),)
        if found
        for word in rest.replace(b"nonvoluntary_ctxt_switches:", b"").split()
        if word.isdigit()
    ]
    return sum(counts) if counts else None


def run_queue_wait_ns(pid: int, proc: Path = PROC) -> int | None:
    """Nanoseconds that the threads alive now have spent runnable without a CPU (second number of ``schedstat``).

    ``None`` where the kernel does not keep it (no CONFIG_SCHED_INFO) or the process is gone.
    """
    threads = (text.split() for text in _of_threads(pid, "schedstat", proc))
    waits = [
        int(words[1]) for words in threads if len(words) >= 2 and words[0].isdigit() and words[1].isdigit() and int(words[0])
    ]
    return sum(waits) if waits else None


def _of_threads(pid: int, name: str, proc: Path) -> Iterator[bytes]:
    """A file of every thread that is alive."""
    folder = f"{proc}/{pid}/task"
    try:
        threads = os.listdir(folder)  # noqa: PTH208 - names only, of every thread at every look
    except OSError:
        return
    for thread in threads[:_MAX_TASKS]:
        try:
            yield read_small(f"{folder}/{thread}/{name}")
        except OSError:
            continue


def children(pid: int, proc: Path = PROC) -> tuple[int, ...]:
    """Pids of the children that the main thread started; empty where the kernel does not say (CONFIG_PROC_CHILDREN)."""
    try:
        text = read_bounded(proc / str(pid) / "task" / str(pid) / "children", pid, 1 << 16)
    except NcclwatchError:
        return ()
    return tuple(int(number) for number in text.split() if number.isdigit())
