"""The main job of ncclwatch, shown: a real NCCL job, one rank frozen, ncclwatch attached from outside, the rank named.

Run by ``make demo``. Starts a job of four processes of the official libnccl on this machine (CUDA is a stand-in), attaches with
``ncclwatch attach``, freezes a rank chosen at random, checks that the verdict names it, lets it go on, and checks that the
recovery is told. Status 0 when all of that happened. With ``--pid`` it attaches to that process instead.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from testbed.job import Job, JobError  # noqa: E402

NCCLWATCH = [sys.executable, "-m", "ncclwatch"]
RANKS = 4
# Generous, for a busy machine; on a quiet one each takes a second or two.
ATTACH_S, VERDICT_S, RECOVERY_S = 20.0, 20.0, 15.0


class DemoError(Exception):
    """The demonstration did not show what it should."""


class Attached:
    """``ncclwatch attach`` as a child; what it prints is passed on, and kept to be looked through."""

    def __init__(self, arguments: list[str]) -> None:
        self.child = subprocess.Popen([*NCCLWATCH, "attach", *arguments], stdout=subprocess.PIPE, text=True, bufsize=1)
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.culprits: list[str] = []
        threading.Thread(target=self._pass_on, daemon=True).start()

    def _pass_on(self) -> None:
        for line in self.child.stdout or ():
            print(f"  | {line.rstrip()}", flush=True)
            if line.lstrip().startswith("culprit "):
                self.culprits.append(line.strip())
            self.lines.put(line)
        self.lines.put(None)

    def wait_for(self, *words: str, timeout: float) -> float:
        """Seconds until a line came that holds all words; raises DemoError."""
        begun = time.monotonic()
        while (left := begun + timeout - time.monotonic()) > 0:
            try:
                line = self.lines.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                raise DemoError(f"ncclwatch ended early with status {self.child.wait()}")
            if all(word in line for word in words):
                return time.monotonic() - begun
        raise DemoError(f"ncclwatch did not say {' '.join(words)!r} within {timeout:.0f} s")

    def end(self) -> int:
        """Interrupt it, as Ctrl-C would, and return its status."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGINT)
        try:
            return self.child.wait(timeout=15)
        except subprocess.TimeoutExpired:
            self.child.kill()
            raise DemoError("ncclwatch did not end when interrupted") from None


@contextmanager
def attached(arguments: list[str]) -> Iterator[Attached]:
    watcher = Attached(arguments)
    try:
        yield watcher
    finally:
        if watcher.child.poll() is None:
            watcher.child.kill()


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def nccl_processes() -> list[dict[str, object]]:
    """What ``ncclwatch ps`` sees on this node."""
    out = subprocess.run([*NCCLWATCH, "ps", "--json"], capture_output=True, text=True, check=True, timeout=60).stdout
    found: list[dict[str, object]] = json.loads(out)
    return found


def demonstrate(nccl: str) -> None:
    say(f"starting {RANKS} processes of the official NCCL {nccl} that loop over AllReduce, each on a made-up host")
    with Job(nccl=nccl, ranks=RANKS, transport="socket", count=1 << 20, extra=["--pause-us", "20000"]) as job:
        processes = nccl_processes()
        ours = [process for process in processes if process["pid"] in job.pids]
        versions = sorted({".".join(map(str, process["version"])) for process in ours})  # type: ignore[call-overload]
        if len(ours) != RANKS or len(versions) != 1:
            raise DemoError(f"'ncclwatch ps' sees {len(ours)} of the {RANKS} processes, NCCL {versions}")
        say(f"they run the real NCCL {versions[0]} ({ours[0]['library']}), unmodified")
        say("CUDA is a stand-in on this machine without a GPU: transports and proxies are NCCL's own, GPU timing means nothing")
        target = ["--all"]
        if len(processes) != RANKS:
            say(f"{len(processes) - RANKS} other NCCL processes run on this node: attaching to ours only, instead of --all")
            target = [word for pid in job.pids for word in ("--pid", str(pid))]
        watch_one_freeze(job, target)


def watch_one_freeze(job: Job, target: list[str]) -> None:
    victim = random.randrange(RANKS)  # noqa: S311 - a choice, no secret
    say(f"ncclwatch attach --plain {' '.join(target)}")
    with attached(["--plain", *target]) as watcher:
        seconds = watcher.wait_for(" attached to ", timeout=ATTACH_S)
        say(f"attached after {seconds:.1f} s; the job runs on")
        time.sleep(random.uniform(3, 5))  # noqa: S311
        job.freeze(victim)
        say(f"froze rank {victim} (pid {job.pid(victim)}) with SIGSTOP; ncclwatch is not told")
        seconds = watcher.wait_for("culprit", f"rank {victim} ", f"pid {job.pid(victim)} ", timeout=VERDICT_S)
        time.sleep(1.5)
        say(f"right: rank {victim} was named {seconds:.1f} s after it froze")
        job.thaw(victim)
        say(f"let rank {victim} go on")
        seconds = watcher.wait_for("RECOVERED", timeout=RECOVERY_S)
        say(f"recovery was told after {seconds:.1f} s")
        job.wait_progress(3, timeout=30)
        status = watcher.end()
        if status != 0:
            raise DemoError(f"ncclwatch ended with status {status}")
    wrong = [line for line in watcher.culprits if f"pid {job.pid(victim)} " not in f"{line} "]
    if wrong:
        raise DemoError(f"others than rank {victim} were accused: {wrong}")
    if not all(job.alive(rank) for rank in range(RANKS)):
        raise DemoError(f"the job did not survive being watched\n{job.logs()}")
    say(f"done: the job still runs, unharmed, and nobody but rank {victim} was accused")


def main() -> int:
    parser = argparse.ArgumentParser(description="Show ncclwatch on a real NCCL job.")
    parser.add_argument("--nccl", default="2.27.5", help="release of NCCL to run")
    parser.add_argument("--pid", help="attach to this process instead")
    arguments = parser.parse_args()
    if arguments.pid:
        os.chdir(ROOT)
        os.execv(sys.executable, [*NCCLWATCH, "attach", "--pid", arguments.pid])  # noqa: S606
    try:
        demonstrate(arguments.nccl)
    except (DemoError, JobError) as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
