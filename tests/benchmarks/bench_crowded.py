"""How long ``attach`` leaves somebody in the dark on a crowded node: its first word, attached, and the first verdict.

    python tests/benchmarks/bench_crowded.py [--spinners 50] [--ranks 8]

A job of which one rank is stopped, busy processes of ordinary priority beside it, then ``attach --plain``. The CPU time it took
is printed too: on an idle node that is nearly all there is to wait for. It takes all CPUs of the machine for as long as it runs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.spinners import spinners
from testbed.job import Job

LIMIT_S = 180.0


class Told:
    """Lines of a process with the seconds since it was started."""

    def __init__(self, pids: list[int]) -> None:
        self.lines: list[tuple[float, str]] = []
        command = [sys.executable, "-m", "ncclwatch", "attach", "--plain", "--pid", ",".join(map(str, pids))]
        self.begun = time.monotonic()
        self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.child.stdout or ():
            self.lines.append((time.monotonic() - self.begun, line.rstrip()))

    def wait(self, *words: str) -> float | None:
        """When a line with one of these words came; any line without words."""
        while time.monotonic() - self.begun < LIMIT_S:
            for at, line in list(self.lines):
                if not words or any(word in line for word in words):
                    return at
            time.sleep(0.05)
        return None

    @property
    def cpu_s(self) -> float:
        """CPU time of the process so far, all its threads, without its children."""
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spinners", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=8)
    args = parser.parse_args()
    with Job(ranks=args.ranks, shape="training", extra=("--pp", "2", "--micro-batches", "4", "--layers", "2")) as job:
        job.freeze(1)
        with spinners(args.spinners):
            time.sleep(2.0)
            told = Told(list(job.pids))
            for what, words in (("first word", ()), ("attached", ("attached to",)), ("first verdict", ("hold", "STOPPED"))):
                at = told.wait(*words)
                print(f"{what}: {'never' if at is None else f'{at:.1f} s'}, {told.cpu_s:.2f} s of CPU time", flush=True)
            told.child.terminate()
            told.child.wait(60)


if __name__ == "__main__":
    main()
