"""A fleet on one machine, shown: a real NCCL job, all that watches many jobs, a frozen rank, and the page that names it.

Run by ``make fleet``, as root. Starts nats-server, two hearing workers, two judges and the page; then a job of six processes of
the official libnccl on three hosts (network namespaces; CUDA is a stand-in), with an agent on each. It freezes a rank chosen at
random and waits until the page names it. The page stays until Ctrl-C. With ``--once`` the rank is let go on, the recovery is
waited for, and it ends. Status 0 when all of that happened.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from fleet.servers import running  # noqa: E402
from testbed.doors import door  # noqa: E402
from testbed.job import Job, JobError  # noqa: E402
from testbed.netns import Network  # noqa: E402
from testbed.sidecar import NCCLWATCH, Daemon, daemon, free_port  # noqa: E402

HOSTS, EACH = 3, 2
WORKERS, JUDGES = 2, 2
PATIENCE_S = 120.0
"""Generous, for a busy machine; on a quiet one each step takes a few seconds."""


class FleetError(Exception):
    """The fleet did not show what it should."""


def say(text: str) -> None:
    print(f"==> {text}", flush=True)


def wait(holds: Callable[[], Any], what: str, daemons: list[Daemon]) -> float:
    """Seconds until something holds; raises FleetError with what the programs said last."""
    begun = time.monotonic()
    while not holds():
        ended = [one for one in daemons if one.child.poll() is not None]
        if ended or time.monotonic() - begun > PATIENCE_S:
            said = "\n".join(one.text[-1500:] for one in ended or daemons)
            raise FleetError(f"{what}: {'a program has ended' if ended else f'not within {PATIENCE_S:.0f} s'}\n{said}")
        time.sleep(0.1)
    return time.monotonic() - begun


class Fleet:
    """All of it, for the length of a block."""

    def __init__(self, nccl: str, page_port: int) -> None:
        self.nccl = nccl
        self.page = f"http://127.0.0.1:{page_port}"
        self._page_port = page_port
        self._stack = ExitStack()
        self.daemons: list[Daemon] = []
        self.judges: list[Daemon] = []
        self.job: Job

    def __enter__(self) -> Fleet:
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ncclwatch-fleet-")))
        server = self._stack.enter_context(running(folder / "nats"))
        bus = server.address
        say(f"nats-server at {bus}")
        for _ in range(WORKERS):
            self._daemon("fleet", "hear", "--bus", bus)
        self.history = folder / "history"
        judge = ("fleet", "judge", "--bus", bus, "--history", str(self.history))
        self.judges = [self._daemon(*judge) for _ in range(JUDGES)]
        say(f"{WORKERS} hearing workers, {JUDGES} judges that keep a history in {self.history}")
        self._daemon("serve", "--fleet", bus, "--bind", f":{self._page_port}", "--history", str(self.history))
        network = self._stack.enter_context(Network(hosts=HOSTS, containers=True))
        self.job = self._stack.enter_context(
            network.job(self.nccl, HOSTS * EACH, hosts=(EACH,) * HOSTS, count=1 << 16, extra=("--pause-us", "20000"))
        )
        say(f"a job of {HOSTS * EACH} processes of the official NCCL {self.nccl} on {HOSTS} hosts (CUDA is a stand-in)")
        for host in network.hosts:
            port = free_port()
            self._stack.enter_context(door(host.network_path, port, server.port))
            spool = str(folder / f"spool{host.index}")
            self._daemon("agent", "--engine", f"nats://127.0.0.1:{port}", "--all", "--spool", spool, enter=host.enter)
        say("an agent on each host")

    def _daemon(self, *arguments: str, enter: list[str] | None = None) -> Daemon:
        started = self._stack.enter_context(daemon(*arguments, enter=enter or ()))
        self.daemons.append(started)
        return started

    def kept(self) -> list[dict[str, Any]]:
        """The verdicts of the history."""
        command = [*NCCLWATCH, "history", "verdicts", "--history", str(self.history), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        found: list[dict[str, Any]] = json.loads(done.stdout) if done.returncode == 0 and done.stdout else []
        return found

    def jobs(self) -> list[dict[str, Any]]:
        """The jobs as the page lists them; none while it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.page}/api/jobs", timeout=10) as answer:  # noqa: S310 - loopback
                found: list[dict[str, Any]] = json.load(answer)["jobs"]
                return found
        except OSError:
            return []


def show(fleet: Fleet, *, once: bool) -> None:
    ranks = HOSTS * EACH
    seconds = wait(lambda: any(one.get("ranks") == ranks for one in fleet.jobs()), "the job on the page", fleet.daemons)
    say(f"the page lists the job with its {ranks} ranks, {seconds:.1f} s later: {fleet.page}/")
    time.sleep(random.uniform(2, 4))  # noqa: S311 - a choice, no secret
    victim = random.randrange(ranks)  # noqa: S311
    fleet.job.freeze(victim)
    say(f"froze rank {victim} with SIGSTOP; nobody is told")
    named = f"rank {victim} "
    seconds = wait(lambda: any(named in str(one.get("summary")) for one in fleet.jobs()), "the verdict", fleet.daemons)
    say(f"right: the page names rank {victim} {seconds:.1f} s after it froze: {fleet.page}/")
    if not once:
        say(f"look at it, and at `ncclwatch history verdicts --history {fleet.history}`; Ctrl-C ends everything")
        signal.pause()
    fleet.job.thaw(victim)
    seconds = wait(lambda: any("RECOVERED" in one.text for one in fleet.judges), "the recovery", fleet.daemons)
    say(f"let rank {victim} go on: the recovery was told after {seconds:.1f} s")
    wait(lambda: any(named in str(one) for one in fleet.kept()), "the verdict in the history", fleet.daemons)
    say(f"`ncclwatch history verdicts --history {fleet.history}` has it too")
    fleet.job.wait_progress(3, timeout=PATIENCE_S)
    say("done: the job runs on, unharmed")


def main() -> int:
    parser = argparse.ArgumentParser(description="Show ncclwatch for many jobs, on one machine.")
    parser.add_argument("--nccl", default="2.27.5", help="release of NCCL to run")
    parser.add_argument("--port", type=int, default=8711, help="port of the page, on loopback")
    parser.add_argument("--once", action="store_true", help="end by itself")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        print("fleet: needs root, for namespaces and probes", file=sys.stderr)
        return 4
    try:
        with Fleet(arguments.nccl, arguments.port) as fleet:
            show(fleet, once=arguments.once)
    except (FleetError, JobError) as error:
        print(f"fleet: failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        say("ended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
