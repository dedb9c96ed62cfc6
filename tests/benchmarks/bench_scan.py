"""How long finding the communicators takes in a process with gigabytes of writable resident memory.

    python tests/benchmarks/bench_scan.py [--gib 8] [--nccl 2.21.5 ...] [--huge]

A rank of a real NCCL job also touches that much memory, as a training process with its pinned buffers and tensors would: half of
it in one mapping, the rest in blocks of 24 MiB from malloc, so that the heap is large too. Prints one line a case; the first
opening of a build (reading its debug information) is done before and not part of the figure.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from ncclwatch.target import communicators
from ncclwatch.target.session import TargetProcess
from testbed.job import VERSIONS, Job

BALLAST = r"""
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static void touch(char* p, size_t n) { for (size_t i = 0; i < n; i += 4096) p[i + 64] = (char)(i >> 12) | 1; }

__attribute__((constructor)) static void ballast(void) {
  const char* text = getenv("BALLAST_MIB");
  if (!text) return;
  unsetenv("BALLAST_MIB");
  size_t total = strtoull(text, NULL, 10) << 20, block = (size_t)24 << 20;
  char* area = mmap(NULL, total / 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (area == MAP_FAILED) abort();
  madvise(area, total / 2, getenv("BALLAST_HUGE") ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  touch(area, total / 2);
  /* Freeing one raises malloc's threshold: the blocks then come from the heap, as in a torch process. */
  void* first = malloc(block);
  free(first);
  for (size_t done = total / 2; done < total; done += block) {
    char* p = malloc(block);
    if (!p) abort();
    touch(p, block);
  }
}
"""


def resident_gib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 30)


def measure(version: str, library: Path, mib: int, huge: bool, ras: bool, repeats: int) -> None:
    """One case: print how long the search takes until it is consistent, and how long looking at everything would."""
    env: dict[str, str | None] = {"NCCL_RAS_ENABLE": "1" if ras else "0"}
    if huge:
        env["BALLAST_HUGE"] = "1"
    wrap = ["sh", "-c", f'if [ "$RANK" = 0 ]; then export LD_PRELOAD={library} BALLAST_MIB={mib}; fi; exec "$@"', "sh"]
    with Job(version, 2, "allreduce", "socket", env=env, wrap=wrap, start_timeout=180) as job:
        job.freeze(1)
        seconds, opening = [], []
        report = None
        for _ in range(repeats):
            begin = time.monotonic()
            with TargetProcess.open(job.pid(0)) as target:
                opening.append(time.monotonic() - begin)
                report = target.search_report
                seconds.append(report.seconds)
                found = len(target.sample().communicators)
        with TargetProcess.open(job.pid(0)) as target:
            begin = time.monotonic()
            finished = target.search(120.0, everything=True)
            everything = time.monotonic() - begin
        assert report is not None
        assert found == 1, found
        print(
            f"NCCL {version} ras={int(ras)} huge pages={int(huge)}: {resident_gib(job.pid(0)):.1f} GiB resident, "
            f"found in {1e3 * statistics.median(seconds):.1f} ms (slowest {1e3 * max(seconds):.1f}), "
            f"{report.bytes_scanned >> 20} MiB scanned, open {1e3 * statistics.median(opening):.0f} ms; "
            f"everything looked at in {everything:.2f} s{'' if finished else ' (not finished)'}",
            flush=True,
        )


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description="Time of finding communicators in a large process.")
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--nccl", nargs="*", default=list(VERSIONS))
    parser.add_argument("--huge", action="store_true", help="the large mapping uses transparent huge pages")
    parser.add_argument("--ras", action="store_true", help="with NCCL's RAS subsystem, as by default; off measures the search")
    parser.add_argument("--no-stack-pointers", action="store_true", help="as if no stack held a pointer to the communicator")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.no_stack_pointers:
        setattr(communicators, "pointers", lambda *_: np.empty(0, dtype=np.uint64))  # noqa: B010
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "ballast.c", Path(folder) / "libballast.so"
        source.write_text(BALLAST)
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
        for version in arguments.nccl:
            measure(version, library, int(arguments.gib * 1024), arguments.huge, arguments.ras, arguments.repeats)


if __name__ == "__main__":
    main()
