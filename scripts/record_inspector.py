"""Record what NCCL's Inspector writes of a job that slows down: ``record_inspector.py PLUGIN``, on the CPU testbed.

PLUGIN is the Inspector built from NCCL's sources of the same tag: ``make -C ext-profiler/inspector`` of v2.29.2-1 (it needs no
CUDA). Becomes ``tests/fixtures/nccl/inspector-2.29.2-slow.xz``: the files of four ranks, one after the other. From iteration 100
of 200 on compute kernels of rank 1 take three times as long. Names of this machine are taken out.
"""

from __future__ import annotations

import lzma
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from testbed.job import Job  # noqa: E402
from testbed.ras import environment, free_address  # noqa: E402

VERSION, RANKS, VICTIM = "2.29.2", 4, 1
ITERATIONS, SLOW_FROM = 200, 100
FIXTURE = ROOT / "tests" / "fixtures" / "nccl" / f"inspector-{VERSION}-slow.xz"


def main() -> int:
    [plugin] = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        env = {
            **environment(free_address()),
            "NCCL_PROFILER_PLUGIN": str(Path(plugin).resolve()),
            "NCCL_INSPECTOR_ENABLE": "1",
            "NCCL_INSPECTOR_DUMP_VERBOSE": "1",
            "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "200000",
            "NCCL_INSPECTOR_DUMP_DIR": folder,
        }
        extra = ["--iterations", str(ITERATIONS), "--compute-us", "30000"]
        extra += ["--fault", f"slow_gpu:rank={VICTIM},at={SLOW_FROM},factor=3"]
        with Job(VERSION, RANKS, "allreduce", "socket", count=1 << 16, env=env, extra=extra) as job:
            job.wait(120)
        found = b"".join(path.read_bytes() for path in sorted(Path(folder).iterdir()))
    found = re.sub(rb"\b" + re.escape(os.uname().nodename.encode()) + rb"\b", b"node", found)
    FIXTURE.write_bytes(lzma.compress(found, preset=9))
    print(f"{FIXTURE.name}: {FIXTURE.stat().st_size} bytes of {len(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
