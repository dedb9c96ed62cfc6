"""A /proc tree of files, as far as discovery reads it, that can say what no process on this machine would."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class FakeProcess:
    """One process: ``libraries`` are mapped at ascending addresses, the whole file with execute permission."""

    pid: int
    parent: int = 1
    name: str = "python3"
    command: Sequence[str] = ("python3", "train.py")
    environ: Mapping[str, str] = field(default_factory=dict)
    libraries: Sequence[Path] = ()
    state: str = "S"
    start_time: int = 4711
    pids: Sequence[int] = ()
    uid: int = 1000
    cgroup: str = "0::/user.slice\n"
    mountinfo: str = ""
    kernel_thread: bool = False

    def write(self, proc: Path) -> None:
        """Make its folder."""
        folder = proc / str(self.pid)
        (folder / "map_files").mkdir(parents=True)
        (folder / "root").symlink_to("/")
        flags = 0x00200000 if self.kernel_thread else 0x400000
        fields = ["0"] * 49
        fields[0], fields[1], fields[6], fields[11], fields[12] = self.state, str(self.parent), str(flags), "150", "50"
        fields[17], fields[19] = "12", str(self.start_time)
        (folder / "stat").write_text(f"{self.pid} ({self.name}) {' '.join(fields)}\n")
        pids = "\t".join(map(str, self.pids or (self.pid,)))
        (folder / "status").write_text(f"Name:\tx\nTracerPid:\t0\nUid:\t{self.uid}\t{self.uid}\t0\t0\nNSpid:\t{pids}\n")
        (folder / "environ").write_bytes(b"".join(f"{k}={v}\0".encode() for k, v in self.environ.items()))
        (folder / "cmdline").write_bytes(b"".join(part.encode() + b"\0" for part in self.command))
        (folder / "cgroup").write_text(self.cgroup)
        (folder / "mountinfo").write_text(self.mountinfo)
        lines = []
        address = 0x7F0000000000
        for library in self.libraries:
            status = library.stat()
            end = address + (status.st_size + 0xFFF & ~0xFFF)
            device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
            lines.append(f"{address:x}-{end:x} r-xp 00000000 {device} {status.st_ino}    {library}\n")
            (folder / "map_files" / f"{address:x}-{end:x}").symlink_to(library)
            address = end + 0x200000
        (folder / "maps").write_text("".join(lines))


def write_proc(proc: Path, processes: Sequence[FakeProcess]) -> Path:
    """A tree with these processes and the children that their parents say they have."""
    (proc / "sys/kernel/random").mkdir(parents=True)
    (proc / "sys/kernel/random/boot_id").write_text("6d1b0a0e-0000-4000-8000-123456789abc\n")
    (proc / "uptime").write_text("1.0 1.0\n")
    for process in processes:
        process.write(proc)
    for process in processes:
        tasks = proc / str(process.pid) / "task" / str(process.pid)
        tasks.mkdir(parents=True)
        (tasks / "children").write_text(" ".join(str(one.pid) for one in processes if one.parent == process.pid))
        (tasks / "status").write_text("voluntary_ctxt_switches:\t23\nnonvoluntary_ctxt_switches:\t5\n")
    return proc
