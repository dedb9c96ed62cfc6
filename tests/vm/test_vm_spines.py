"""RoCE over two spines that hash: which flow takes which, flows that crowd found and moved apart by flow labels, and queues that
queue pairs of our own see by source port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median

import pytest

from ncclwatch.cli import main
from ncclwatch.model.paths import Load
from ncclwatch.pathprobe import varied_rdma
from ncclwatch.pathprobe.listener import Listener
from ncclwatch.paths.bottlenecks import LEAST_PROBES, loads
from ncclwatch.paths.flow_map import flow_map
from ncclwatch.paths.pins import Roce, plan_text
from ncclwatch.paths.ports import ROCE_PORT
from testbed.job import Job, available, build_folder
from testbed.path_jobs import RATIO, hop, seconds_each
from testbed.spines import LEAVES
from testbed.watcher import pids
from vm.fabric import Fabric
from vm.pairs import look, remote_pairs, view_of
from vm.spines import RoceSpines

VERSION = "2.27.5"
pytestmark = [
    pytest.mark.vm,
    pytest.mark.long,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(not available(VERSION), reason=f"NCCL {VERSION} is not cached"),
]

RATE = 400_000
"""Bytes a second of an uplink."""
TRIED = range(50000, 50064)
MOST_S = 90.0


@pytest.fixture(scope="module")
def spines(soft_roce: Fabric) -> Iterator[RoceSpines]:
    assert soft_roce.a.address, "policy routing is in place"
    with RoceSpines(RATE) as made:
        yield made


def job_on(spines: RoceSpines, plan: Path | None = None, **environment: str) -> Job:
    """Two ranks, two channels, and flow labels by a plan."""
    if plan is not None:
        environment |= {"LD_PRELOAD": str(build_folder() / "libncclwatch_pins.so"), "NCCLWATCH_PATH_PINS": str(plan)}
    environment |= {"NCCL_MIN_NCHANNELS": "2", "NCCL_MAX_NCHANNELS": "2", "NCCL_IB_TIMEOUT": "22"}
    # NCCL's threads poll without a rest: who looks at the job must not wait for them.
    return spines.roce.job(VERSION, 2, count=1 << 17, env=environment, wrap=("nice", "-n", "10"))


def on_spine(spines: RoceSpines, leaf: int, spine: int, number: int) -> list[int]:
    """So many source ports that the kernel of a leaf sends over a spine."""
    found = spines.ports(leaf, spines.address(1 - leaf), ROCE_PORT, TRIED, "udp")
    return list(islice((port for at, port in found if at == spine), number))


def test_each_flow_is_on_the_spine_of_its_predicted_port(spines: RoceSpines) -> None:
    with job_on(spines, NCCL_IB_QPS_PER_CONNECTION="2", NCCL_IB_SPLIT_DATA_ON_QPS="1") as job:
        records = look(job.pids)
        pairs = remote_pairs(records)
        seen = spines.seen({(source, there) for (source, _), there in pairs.items()}, MOST_S)
    mapped = flow_map([view_of(records)])
    assert len(mapped) == len(pairs) >= 8
    for one in mapped:
        five, pair = one.flow.tuple, one.flow.queue_pair
        assert five is not None and pair is not None, one
        spine = spines.route(one.flow.rank or 0, five.destination, ROCE_PORT, five.source_port, "udp")
        place = five.source, pairs[five.source, pair]
        assert [each.get(place, set()) for each in seen] == [{five.source_port} if at == spine else set() for at in range(2)]


def test_flows_that_crowd_are_found_and_moved_apart(
    spines: RoceSpines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, flows = tmp_path / "new.pins", tmp_path / "flows.json"
    probes = [tmp_path / f"{leaf}.probe" for leaf in range(LEAVES)]
    with job_on(spines, crowd(spines, tmp_path)) as job:
        before = seconds_each(job)
        flows.write_text(said(capsys, "paths", "--json", *pids(job), "--budget", "0", "--duration", "1", "--capture", "60"))
        for leaf, probe in enumerate(probes):
            words = ("--udp", "--sources", f"{TRIED[0]}-{TRIED[15]}", "--flows", str(flows), "-o", str(probe))
            said(capsys, "paths", "probe", spines.address(1 - leaf), *words)
    planned = json.loads(said(capsys, "paths", "plan", str(flows), *map(str, probes), "-o", str(new), "--json"))
    seen = [one for probe in probes for one in json.loads(probe.read_text())["probes"]]
    assert [len(one["flows"]) for one in planned["crowded"]] == [2, 2] and planned["refused"] is None, (planned, seen)
    for leaf in range(LEAVES):
        assert len({hop(one) for one in planned["connections"] if one["rank"] == leaf}) == 2, planned["connections"]
    with job_on(spines, new) as job:
        after = seconds_each(job)
        pairs = remote_pairs(look(job.pids))
        at = spines.seen({(source, there) for (source, _), there in pairs.items()}, MOST_S)
    for leaf in range(LEAVES):
        mine = [{place for place in each if place in pairs_of(pairs, spines.address(leaf))} for each in at]
        assert [len(each) for each in mine] == [1, 1], at
    print(f"\nan iteration took {before:.2f} s while flows crowded, {after:.2f} s apart: {before / after:.2f} times (emulated)")
    assert before / after >= RATIO, (before, after)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints, run in this process: to start another one takes the emulated machine half a minute."""
    capsys.readouterr()
    status = main.run(words)
    printed = capsys.readouterr()
    assert status == 0, (words, printed)
    return printed.out


def pairs_of(pairs: dict[tuple[str, int], int], source: str) -> set[tuple[str, int]]:
    """(sender, queue pair that it sends to) of what leaves by an address."""
    return {(address, there) for (address, _), there in pairs.items() if address == source}


def test_queue_pairs_of_ours_wait_where_flows_crowd(spines: RoceSpines, tmp_path: Path) -> None:
    """By the source ports of the spine that is full, and not by those of the other one. All are answered by way of the latter."""
    waits, free = (on_spine(spines, 0, spine, 2) for spine in range(2))
    back = on_spine(spines, 1, 1, 1)
    here, there = spines.roce.a, spines.roce.b
    with (
        job_on(spines, crowd(spines, tmp_path)) as job,
        Listener("127.0.0.1", 0, device=there.device, gid_index=there.gid_index) as listener,
    ):
        job.wait_progress(1)
        trips = varied_rdma.probe((here.device, 1), ("127.0.0.1", listener.port), [*waits, *free], 20, back=back)
    shown = {port: [round(trip / 1e6) for trip in each] for port, each in trips.items()}
    found = {path[1]: str(one.load) for path, one in loads({(ROCE_PORT, port): each for port, each in trips.items()}).items()}
    text = f"round trips in ms, by source port: {shown}; {waits} go by the spine that is full; told by queues: {found}"
    print(f"\n{text}")
    assert all(len(each) >= LEAST_PROBES for each in trips.values()), text
    assert min(median(trips[port]) for port in waits) > 2 * max(median(trips[port]) for port in free), text
    # Of the others nothing is asked: what an emulated machine holds up for tens of milliseconds is taken for queued, too.
    assert all(found[port] == Load.QUEUED for port in waits), text


def crowd(spines: RoceSpines, folder: Path) -> Path:
    """A plan that has both flows of either way on spine 0."""
    plan = folder / "crowd.pins"
    ports = [Roce(leaf, spines.address(1 - leaf), tuple(on_spine(spines, leaf, 0, 2))) for leaf in range(LEAVES)]
    plan.write_text(plan_text([], [], ports))
    return plan
