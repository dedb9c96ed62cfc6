"""What tests of paths on two leaves and spines share: jobs on them, plans that make flows collide, commands, flow maps."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from ncclwatch.paths.pins import Connect, Listen, plan_text
from testbed.job import Job
from testbed.spines import LEAVES, Spines
from testbed.watcher import pids

PORTS = "26000,26001"
ME = [sys.executable, "-m", "ncclwatch"]
COUNT = 1 << 18
ITERATIONS = 8
RATIO = 1.5
"""Two flows on one link of two take twice the time; the rest is what is no transfer."""


def ncclwatch(*words: str, fabric: Spines | None = None, leaf: int = 0) -> str:
    """What a command prints, run on a host of the fabric or here."""
    if fabric is None:
        return subprocess.run([*ME, *words], capture_output=True, text=True, timeout=120, check=True).stdout
    run = fabric.hosts[leaf].popen([*ME, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, said = run.communicate(timeout=120)
    assert run.returncode == 0, (words, out, said)
    return str(out)


def map_to(path: Path, job: Job) -> None:
    path.write_text(ncclwatch("paths", "--json", *pids(job), "--duration", "1"))


def as_flow(fabric: Spines, leaf: int, channel: int) -> dict[str, Any]:
    """A line of a flow map: what the next communicator will be like."""
    five = {
        "protocol": "tcp", "source": fabric.address(leaf), "source_port": 40100 + channel,
        "destination": fabric.address(1 - leaf), "destination_port": 40000 + channel,
    }  # fmt: skip
    return {"job": "j", "comm_hash": "c", "channel": channel, "rank": leaf, "peer": 1 - leaf, "five_tuple": five}


def hop(one: dict[str, Any]) -> str:
    """The spine of a connection."""
    return str(one["hops"][1])


def ask(fabric: Spines, flows: Path, probes: list[Path]) -> None:
    """Probes from each host to the other, running flows followed."""
    for leaf, probe in enumerate(probes):
        words = ("paths", "probe", fabric.address(1 - leaf), "--ports", PORTS, "--flows", str(flows), "-o", str(probe))
        ncclwatch(*words, fabric=fabric, leaf=leaf)


@contextmanager
def followers(fabric: Spines, flows: Path, probes: Sequence[Path], words: Sequence[Sequence[str]]) -> Iterator[list[IO[str]]]:
    """``paths follow`` on each host meanwhile, with these words more: what each says."""
    follow = [*ME, "paths", "follow", str(flows), *map(str, probes)]
    with ExitStack() as stack:
        said = []
        for leaf, more in enumerate(words):
            keeper = fabric.hosts[leaf].popen([*follow, *more], stdout=subprocess.PIPE, text=True)
            stack.callback(keeper.communicate)
            stack.callback(keeper.kill)
            assert keeper.stdout is not None
            said.append(keeper.stdout)
        yield said


@contextmanager
def recorded(file: Path, jobs: Sequence[Job], *words: str) -> Iterator[None]:
    """``record`` of these jobs' processes meanwhile."""
    every = ",".join(str(pid) for job in jobs for pid in job.pids)
    recorder = subprocess.Popen([*ME, "record", "--pid", every, "-o", str(file), *words], stdout=subprocess.PIPE, text=True)
    try:
        assert recorder.stdout is not None and f"recording {2 * len(jobs)} processes" in recorder.stdout.readline()
        yield
    finally:
        recorder.terminate()
        recorder.communicate(timeout=60)


def pinned(fabric: Spines, base: int, spines: tuple[int, int]) -> str:
    """A plan that puts each channel of both ways on its spine."""
    connects: list[Connect] = []
    for leaf in range(LEAVES):
        there = fabric.address(1 - leaf)
        for port, wanted in zip((base, base + 1), spines, strict=True):
            taken = {one.source_port for one in connects}
            found = fabric.ports(leaf, there, port, range(base + 100, base + 200))
            connects.append(Connect(leaf, there, port, next(p for spine, p in found if spine == wanted and p not in taken)))
    return plan_text([Listen(leaf, fabric.address(leaf), (base, base + 1)) for leaf in range(LEAVES)], connects)


def seconds_each(job: Job) -> float:
    """Of an iteration, over several."""
    job.wait_progress(1)
    began = time.monotonic()
    job.wait_progress(ITERATIONS)
    return (time.monotonic() - began) / ITERATIONS


def flow_map_of(job: Job) -> dict[tuple[int, int], tuple[int, int]]:
    """(rank, channel) → (port, source port), as ``ncclwatch paths`` shows them."""
    run = subprocess.run(
        [sys.executable, "-m", "ncclwatch", "paths", "--json", *pids(job), "--duration", "1"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    flows: list[dict[str, Any]] = json.loads(run.stdout)["flows"]
    assert {one["origin"] for one in flows} == {"seen"}
    assert all(one["source"]["nic"].startswith("nic (netns ") and one["source"]["host"] == socket.gethostname() for one in flows)
    assert all(one["bytes_per_s"] > 0 and one["share"] == pytest.approx(0.5, abs=0.1) for one in flows)
    five = [(one["rank"], one["channel"], one["five_tuple"]) for one in flows]
    return {(rank, channel): (five["destination_port"], five["source_port"]) for rank, channel, five in five}


def planned(text: str) -> dict[tuple[int, int], tuple[int, int]]:
    words = [line.split() for line in text.splitlines() if line.startswith("connect")]
    first = min(int(word[3]) for word in words)
    return {(int(rank), int(port) - first): (int(port), int(source)) for _, rank, _, port, source in words}
