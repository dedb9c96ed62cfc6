"""Record the snapshot fixtures, jobs of every release hung in a known way on the CPU testbed: ``record_fixtures.py [NAME ...]``.

Each becomes ``tests/fixtures/hung-VERSION-SHAPE-rankN.ncclwatch``; the tests diagnose them without privileges and expect rank N.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from ncclwatch.target.image import record_snapshot  # noqa: E402
from testbed.job import Job  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures"
VERSIONS = ("2.21.5", "2.27.5", "2.32.3")
SHAPES: dict[str, tuple[dict[str, object], int]] = {
    "socket": ({"shape": "allreduce", "transport": "socket"}, 2),
    "shm": ({"shape": "allreduce", "transport": "shm"}, 1),
    "hosts-3-1": ({"shape": "allreduce", "transport": "mixed", "hosts": (3, 1)}, 1),
}
"""Shape of the job and the rank to freeze."""


def main() -> int:
    wanted = set(sys.argv[1:])
    FIXTURES.mkdir(exist_ok=True)
    for version in VERSIONS:
        for shape, (options, victim) in SHAPES.items():
            name = f"hung-{version}-{shape}-rank{victim}"
            if wanted and name not in wanted:
                continue
            path = FIXTURES / f"{name}.ncclwatch"
            with Job(nccl=version, ranks=4, count=1 << 16, **options) as job:  # type: ignore[arg-type]
                time.sleep(0.5)
                job.freeze(victim)
                time.sleep(2.0)  # the others run on until they need it
                record_snapshot(job.pids, path, samples=2, interval=1.0)
                job.thaw(victim)
            path.chmod(0o644)
            print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
