"""What an agent can leave behind: BPF objects, breakpoints in a library, descriptors, threads, temporary files."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ncclwatch.probes.site_cache import sites_of
from ncclwatch.target.discover import examine
from ncclwatch.target.memory import LiveReader

_SYS_BPF = 321
_NEXT_ID = {"prog": 11, "map": 12, "link": 31}
"""``BPF_PROG_GET_NEXT_ID``, ``BPF_MAP_GET_NEXT_ID``, ``BPF_LINK_GET_NEXT_ID`` (include/uapi/linux/bpf.h)."""
_GONE_S = 30.0
"""The kernel frees BPF objects after a grace period; a busy machine takes its time."""

_libc = ctypes.CDLL(None, use_errno=True)


def bpf_objects() -> dict[str, set[int]]:
    """Numbers of all BPF programs, maps and links of this machine; empty where that may not be asked (root only)."""
    found: dict[str, set[int]] = {}
    for kind, command in _NEXT_ID.items():
        number, numbers = 0, set[int]()
        while True:
            attribute = (ctypes.c_uint32 * 4)(number, 0, 0, 0)
            if _libc.syscall(_SYS_BPF, command, ctypes.byref(attribute), ctypes.sizeof(attribute)):
                break
            number = attribute[1]
            numbers.add(number)
        found[kind] = numbers
    return found


def held_objects(pid: int | str = "self") -> dict[str, set[int]]:
    """Numbers of the BPF programs, maps and links that a process holds, by its descriptors."""
    found: dict[str, set[int]] = {kind: set() for kind in _NEXT_ID}
    for file in _entries(Path(f"/proc/{pid}/fdinfo")):
        with contextlib.suppress(OSError):
            for kind, number in re.findall(r"^(prog|map|link)_id:\s*(\d+)$", file.read_text("ascii", "replace"), re.MULTILINE):
                found[kind].add(int(number))
    return found


def descriptors(pid: int | str = "self") -> Counter[str]:
    """How many descriptors of each kind a process has open; of files by the path without numbers."""
    kinds: Counter[str] = Counter()
    for link in _entries(Path(f"/proc/{pid}/fd")):
        with contextlib.suppress(OSError):
            kinds[re.sub(r"\d+", "N", str(link.readlink()))] += 1
    # The folder that is being listed.
    kinds -= Counter({"/proc/N/fd": kinds["/proc/N/fd"]})
    return kinds


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """A folder for temporary files of this process and those it starts: beside other work nobody knows whose is whose."""
    with tempfile.TemporaryDirectory(prefix="left-") as folder, _temporary_folder(folder):
        yield Path(folder)


@contextlib.contextmanager
def _temporary_folder(folder: str) -> Iterator[None]:
    """``TMPDIR`` for a while."""
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"], tempfile.tempdir = folder, None
    try:
        yield
    finally:
        tempfile.tempdir = None
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def temporary_files() -> set[str]:
    """What lies in the folder for temporary files, but for what belongs to the job."""
    return {path.name for path in _entries(Path(tempfile.gettempdir())) if not path.name.startswith("ncclwatch-job-")}


def own_library(original: Path, folder: Path) -> dict[str, str]:
    """An environment in which a job loads a copy of a library: probes of others, which are placed in a file, are not in it."""
    copy = folder / original.name
    shutil.copyfile(original, copy)
    return {"LD_PRELOAD": str(copy)}


def traced_events() -> set[str]:
    """Uprobes that were made by name, where tracefs is mounted; those by perf events and links have none."""
    file = Path("/sys/kernel/tracing/uprobe_events")
    with contextlib.suppress(OSError):
        return set(file.read_text("ascii", "replace").splitlines())
    return set()


def breakpoints(pid: int) -> list[str]:
    """Places of NCCL's functions in the memory of a process at which not its own instruction stands."""
    process = examine(pid)
    with process.binary.open() as elf:
        sites = [(site, process.binary.bias) for found in sites_of(elf) for site in (found.entry, *found.returns)]
    reader = LiveReader(pid)
    try:
        parts = reader.read_many([(bias + site.address, len(site.code)) for site, bias in sites], again=True)
    finally:
        reader.close()
    return [
        f"{site.symbol}+{site.address:#x}" for (site, _), part in zip(sites, parts, strict=True) if part not in (None, site.code)
    ]


def _entries(folder: Path) -> Iterable[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


@dataclass
class Leftovers:
    """Compares what there is with what there was; BPF objects are told by having been held, for others may use BPF, too."""

    pids: Iterable[int]
    before: Counter[str] = field(default_factory=descriptors)
    files: set[str] = field(default_factory=temporary_files)
    events: set[str] = field(default_factory=traced_events)
    threads: int = field(default_factory=threading.active_count)
    held: dict[str, set[int]] = field(default_factory=lambda: {kind: set() for kind in _NEXT_ID})
    others: dict[str, set[int]] = field(default_factory=held_objects)
    """What this process holds already, for somebody else."""

    def note(self, pid: int | str = "self") -> None:
        """To be called while attached."""
        for kind, numbers in held_objects(pid).items():
            self.held[kind] |= numbers - self.others[kind]

    def seen(self) -> str:
        """How many BPF objects there were in all."""
        return ", ".join(f"{len(numbers)} {kind}s" for kind, numbers in self.held.items())

    def found(self, *, own: bool = True) -> list[str]:
        """What is still there, in words; waits a moment for the kernel's grace period. ``own``: of this process as well."""
        until = time.monotonic() + _GONE_S
        while (left := self._left(own=own)) and time.monotonic() < until:
            time.sleep(0.1)
        return left

    def _left(self, *, own: bool) -> list[str]:
        now = bpf_objects()
        left = [f"{kind} {number}" for kind, numbers in self.held.items() for number in sorted(numbers & now[kind])]
        held = {kind: sorted(numbers - self.others[kind]) for kind, numbers in held_objects().items()}
        left += [f"{kind} {numbers} held" for kind, numbers in held.items() if numbers and own]
        if own:
            left += [f"{count} descriptors of {kind}" for kind, count in (descriptors() - self.before).items()]
            left += [f"{threading.active_count() - self.threads} threads"] * (threading.active_count() > self.threads)
        left += [f"uprobe {line}" for line in sorted(traced_events() - self.events) if str(os.getpid()) in line]
        left += [f"file {name}" for name in sorted(temporary_files() - self.files)]
        left += [f"breakpoint in {pid}: {place}" for pid in self.pids for place in breakpoints(pid)]
        return left


def text_of(counts: Mapping[str, int]) -> str:
    """Counts in a line."""
    return ", ".join(f"{name} {count}" for name, count in counts.items())
