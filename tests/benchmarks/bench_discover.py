"""How long it takes to find NCCL processes and to know their layout.

    python tests/benchmarks/bench_discover.py [LIBNCCL]

Prints the survey of this node, of a made-up node with 500 processes (50 of them ranks with 1,600 mappings each, 300 more with the
libraries of a Python service), and the time to a layout: first extraction, cache, manifest. Nothing is asserted.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ncclwatch.target import manifest
from ncclwatch.target.discover import survey
from ncclwatch.target.elf import ElfFile
from ncclwatch.target.resolve import LayoutCache, resolve_layout
from unit.fake_proc import FakeProcess, write_proc

PROCESSES = 500


def timed(what: str, action: Callable[[], object], repeat: int = 3) -> None:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    print(f"{what}: first {times[0] * 1e3:.1f} ms, best of {repeat - 1} more {min(times[1:]) * 1e3:.1f} ms")


def crowd(proc: Path, library: Path) -> Path:
    """A node full of processes."""
    shell, python = Path("/bin/sh").resolve(), Path("/usr/bin/python3").resolve()
    libraries = [p for p in sorted(Path("/usr/lib/x86_64-linux-gnu").glob("*.so*")) if p.is_file() and not p.is_symlink()][:120]
    processes = []
    for number in range(PROCESSES):
        mapped = [python, *libraries, library] if number % 10 == 0 else [shell] if number % 3 == 0 else [python, *libraries]
        processes.append(FakeProcess(1000 + number, libraries=mapped, environ={"RANK": str(number // 10)}))
    write_proc(proc, processes)
    heap = "".join(f"{0x10000000 + k * 0x2000:x}-{0x10001000 + k * 0x2000:x} rw-p 00000000 00:00 0 \n" for k in range(1500))
    for number in range(0, PROCESSES, 10):
        maps = proc / str(1000 + number) / "maps"
        maps.write_text(heap + maps.read_text())
    return proc


def main() -> None:
    default = Path(__file__).resolve().parents[2] / ".cache" / "nccl" / "2.27.5" / "lib" / "libnccl.so.2"
    library = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    timed("survey of this node", survey)
    with tempfile.TemporaryDirectory() as folder, ElfFile.open(library) as elf:
        proc = crowd(Path(folder) / "proc", library)
        timed(f"survey of {PROCESSES} processes, {PROCESSES // 10} of them NCCL", lambda: survey(proc))
        caches = iter([LayoutCache(Path(folder) / name) for name in "abc"])
        timed("layout from debug information", lambda: resolve_layout(elf, cache=next(caches)))
        warm = LayoutCache(Path(folder) / "a")
        timed("layout from the cache", lambda: resolve_layout(elf, cache=warm))
        manifest.load.cache_clear()
        timed("layout from the manifest", lambda: manifest.load().by_build_id(elf.build_id))
    print(f"peak resident memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    main()
