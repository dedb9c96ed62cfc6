"""Two spines: flows of real NCCL that crowd on one are found by probes alone, a plan moves them apart, and the job runs faster.

The kernel's own route (``Spines.route``) arranges the collision and checks what was found; nothing of the product asks it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.collect.flows import FlowCollector
from ncclwatch.model.network import FlowRecord
from ncclwatch.model.paths import Load, PathKey, PathLoad
from ncclwatch.model.state import Direction
from ncclwatch.paths.bottlenecks import Crowd, crowd, loads
from ncclwatch.paths.pins import Connect, Listen, plan_text
from ncclwatch.target.session import TargetProcess
from testbed.job import Job, available
from testbed.path_jobs import COUNT, RATIO, flow_map_of, pinned, planned, seconds_each
from testbed.spines import LEAVES, Spines

pytestmark = [
    pytest.mark.attach,
    pytest.mark.skipif(not available("2.27.5"), reason="NCCL 2.27.5 is not cached"),
]

EACH = 6
"""Source ports tried for each of two ports of the next job."""
ROUNDS = 20


def records(job: Job) -> list[FlowRecord]:
    targets = [TargetProcess.open(pid) for pid in job.pids]
    collector = FlowCollector(targets)
    try:
        for _ in range(8):
            collector.step()
            time.sleep(0.25)
        return collector.flows()
    finally:
        collector.close()
        for target in targets:
            target.close()


def waits(found: list[FlowRecord], rank: int) -> dict[object, tuple[float, float]]:
    """(round trip, shortest round trip) in µs of what a rank sends, by channel."""
    sent = [one for one in found if one.direction is Direction.SEND and one.rank == rank and one.socket is not None]
    return {one.channel: (float(one.socket.rtt_us or 0), float(one.socket.min_rtt_us or 0)) for one in sent if one.socket}


def probe(fabric: Spines, base: int, sources: range) -> list[dict[PathKey, PathLoad]]:
    """From each host: the paths to the other one's ports of the next job, by our own sockets on both sides, both ways at once."""
    module = [sys.executable, "-m", "ncclwatch.pathprobe.varied"]
    quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    ports = [base, base + 1]
    ends = [
        fabric.hosts[leaf].popen([*module, "listen", fabric.address(leaf), "120", *map(str, ports)], **quiet)
        for leaf in range(LEAVES)
    ]
    try:
        assert [end.stdout.readline().strip() for end in ends if end.stdout] == ["ready"] * LEAVES
        words = [f"{ports[number % 2]}:{source}" for number, source in enumerate(sources)]
        asked = [
            fabric.hosts[leaf].popen([*module, "probe", fabric.address(1 - leaf), str(ROUNDS), *words], **quiet)
            for leaf in range(LEAVES)
        ]
        said = [json.loads(one.communicate(timeout=120)[0]) for one in asked]
    finally:
        for end in ends:
            end.kill()
            end.communicate()
    return [loads({(port, source): [there for there, _ in trips] for port, source, trips in rows}) for rows in said]


@pytest.mark.paced
def test_flows_that_crowd_on_a_spine_are_found_and_moved_apart(fabric: Spines, library: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.pins"
    plan.write_text(pinned(fabric, 40000, (0, 0)))
    seen: list[dict[PathKey, PathLoad]] = [{} for _ in range(LEAVES)]
    with fabric.job(pins=(library, str(plan)), count=COUNT) as job:
        before = seconds_each(job)
        assert flow_map_of(job) == planned(plan.read_text())
        for start in range(42100, 42400, 2 * EACH):
            for leaf, new in enumerate(probe(fabric, 42000, range(start, start + 2 * EACH))):
                seen[leaf] |= new
            if all(chosen(known) for known in seen):
                break
        found = [crowd(waits(records(job), leaf), seen[leaf]) for leaf in range(LEAVES)]
    for leaf, one in enumerate(found):
        assert isinstance(one, Crowd) and set(one.flows) == {0, 1} and one.confidence > 0.95, seen[leaf]
        right = {path: fabric.route(leaf, fabric.address(1 - leaf), *path) for path in seen[leaf]}
        assert all(
            right[path] == (0 if load.load is Load.QUEUED else 1) for path, load in seen[leaf].items() if load.confidence > 0.95
        )
    moves = [chosen(known) for known in seen]
    connects = [Connect(leaf, fabric.address(1 - leaf), *path) for leaf, paths in enumerate(moves) for path in paths]
    plan.write_text(plan_text([Listen(leaf, fabric.address(leaf), (42000, 42001)) for leaf in range(LEAVES)], connects))
    with fabric.job(pins=(library, str(plan)), count=COUNT) as job:
        after = seconds_each(job)
        shown = flow_map_of(job)
        both = probe(fabric, 44000, range(44100, 44100 + 2 * EACH))
        now = records(job)
        # A spine dies: by its own ECMP the kernel takes the other for the same five-tuples, and they crowd there.
        fabric.down(0)
        job.wait_progress(2)
        rerouted = seconds_each(job)
        still = flow_map_of(job)
    assert shown == planned(plan.read_text()) == still
    assert before / after >= RATIO, (before, after)
    assert rerouted / after >= RATIO, (rerouted, after)
    assert [crowd(waits(now, leaf), both[leaf]) for leaf in range(LEAVES)] == [None, None]


def chosen(known: dict[PathKey, PathLoad]) -> list[PathKey]:
    """A queued path to the first port and an empty one to the second; none while either is missing."""
    for_first = [path for path, one in known.items() if path[0] == 42000 and one.load is Load.QUEUED and one.confidence > 0.95]
    for_second = [path for path, one in known.items() if path[0] == 42001 and one.load is Load.EMPTY]
    return [for_first[0], for_second[0]] if for_first and for_second else []


def test_without_a_plan_or_with_nonsense_nothing_changes(fabric: Spines, library: str, tmp_path: Path) -> None:
    for number, text in enumerate(
        (None, "", "ncclwatch-path-pins 2\nlisten * * 41000\n", "ncclwatch-path-pins 1\nconnect * * x y\n\0")
    ):
        plan = tmp_path / f"{number}.pins"
        if text is not None:
            plan.write_text(text)
        with fabric.job(pins=(library, str(plan)), count=1 << 12, iterations=2, verify=True) as job:
            assert job.wait() == [0, 0]


def test_ports_that_are_taken_are_left_alone(fabric: Spines, library: str, tmp_path: Path) -> None:
    """A job whose planned ports somebody else has runs all the same, by ports of the kernel's choice."""
    plan = tmp_path / "plan.pins"
    plan.write_text(pinned(fabric, 40000, (0, 0)))
    module = [sys.executable, "-m", "ncclwatch.pathprobe.varied", "listen", fabric.address(1), "60", "40000", "40001"]
    taken = fabric.hosts[1].popen(module, stdout=subprocess.PIPE, text=True)
    try:
        assert taken.stdout is not None and taken.stdout.readline().strip() == "ready"
        with fabric.job(pins=(library, str(plan)), count=1 << 14) as job:
            job.wait_progress(2)
            shown = flow_map_of(job)
    finally:
        taken.kill()
        taken.communicate()
    assert all(shown[0, channel][0] not in (40000, 40001) for channel in range(2))
    assert {shown[1, channel] for channel in range(2)} == {
        pins for (rank, _), pins in planned(plan.read_text()).items() if rank == 1
    }
