"""From the command line alone, on real packets: which source ports share a spine, which flows of real NCCL crowd, a plan.

The kernel's own route (``Spines.route``) arranges collisions and checks what was found; nothing of the product asks it.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from testbed.job import available
from testbed.path_jobs import (
    COUNT,
    ME,
    PORTS,
    RATIO,
    as_flow,
    flow_map_of,
    hop,
    map_to,
    ncclwatch,
    pinned,
    planned,
    seconds_each,
)
from testbed.spines import LEAVES, Spines

pytestmark = [
    pytest.mark.attach,
    pytest.mark.paced,
    pytest.mark.skipif(not available("2.27.5"), reason="NCCL 2.27.5 is not cached"),
]

HEAD = bytes.fromhex("0180c200000e" + "020000000001" + "88cc")
"""Of a frame of LLDP."""


def part(kind: int, value: bytes) -> bytes:
    """One part of a frame of LLDP."""
    return struct.pack("!H", kind << 9 | len(value)) + value


def test_a_plan_from_the_command_line_moves_flows_apart(fabric: Spines, library: str, tmp_path: Path) -> None:
    pins, flows, plan = tmp_path / "old.pins", tmp_path / "flows.json", tmp_path / "new.pins"
    probes = [tmp_path / f"host{leaf}.probe" for leaf in range(LEAVES)]
    pins.write_text(pinned(fabric, 40000, (0, 0)))
    with fabric.job(pins=(library, str(pins)), count=COUNT) as job:
        before = seconds_each(job)
        map_to(flows, job)
        for leaf, probe in enumerate(probes):
            words = ("paths", "probe", fabric.address(1 - leaf), "--ports", PORTS, "--flows", str(flows), "-o", str(probe))
            text = ncclwatch(*words, fabric=fabric, leaf=leaf)
            assert "32 of 32 source ports told, 2 paths" in text and text.count("running flow") == 2, text
            check(json.loads(probe.read_text())["probes"][0], fabric, leaf)
        job.wait_progress(1)
    said = json.loads(ncclwatch("paths", "plan", str(flows), *map(str, probes), "-o", str(plan), "--json"))
    text = ncclwatch("paths", "plan", str(flows), *map(str, probes))
    assert [len(one["flows"]) for one in said["crowded"]] == [2, 2] and text.count("CROWDED") == 2, text
    assert {one["flows"][0]["rank"] for one in said["crowded"]} == {0, 1}
    (gain,) = said["gains"]
    # Of flows that moved unequally while they were looked at, one asks for more than the mean.
    assert gain["before_known"] and gain["after"] >= 1.0
    assert (gain["before"], gain["gain"]) == pytest.approx((2 * gain["after"], 1.0))
    assert gain["confidence"] > 0.7 and said["refused"] is None
    spines = {rank: [hop(one) for one in said["connections"] if one["rank"] == rank] for rank in (0, 1)}
    assert all(len(set(each)) == 2 for each in spines.values()), said["connections"]
    with fabric.job(pins=(library, str(plan)), count=COUNT) as job:
        after = seconds_each(job)
        assert flow_map_of(job) == planned(plan.read_text())
    assert before / after >= RATIO, (before, after)


def check(probe: dict[str, Any], fabric: Spines, leaf: int) -> None:
    """Each path that was told is the one that the kernel takes: of our own attempts and of running flows."""
    for seen in probe["paths"]:
        spine = fabric.route(leaf, fabric.address(1 - leaf), seen["port"], seen["source_port"])
        assert seen["hops"][1] == f"10.80.{leaf * 16 + spine}.2", seen


@pytest.mark.long
@pytest.mark.parametrize("fabric", [{"answers": False}], indirect=True)
def test_where_routers_are_silent_queues_tell(fabric: Spines, library: str, tmp_path: Path) -> None:
    pins, flows, plan = tmp_path / "old.pins", tmp_path / "flows.json", tmp_path / "new.pins"
    probes = [tmp_path / f"host{leaf}.probe" for leaf in range(LEAVES)]
    pins.write_text(pinned(fabric, 40000, (0, 0)))
    with fabric.job(pins=(library, str(pins)), count=COUNT) as job:
        before = seconds_each(job)
        ends = [
            fabric.hosts[leaf].popen(
                [*ME, "paths", "answer", fabric.address(leaf), "--ports", PORTS], stdout=subprocess.PIPE, text=True
            )
            for leaf in range(LEAVES)
        ]
        try:
            assert [end.stdout.readline().strip() for end in ends if end.stdout] == ["ready"] * LEAVES
            words = ["--ports", PORTS, "--sources", "26100-26115", "--queues", "30", "--looks", "1"]
            asked = [
                fabric.hosts[leaf].popen(
                    [*ME, "paths", "probe", fabric.address(1 - leaf), *words, "-o", str(probes[leaf])],
                    stdout=subprocess.PIPE, text=True,
                )
                for leaf in range(LEAVES)
            ]  # fmt: skip
            texts = [one.communicate(timeout=120)[0] for one in asked]
        finally:
            for end in ends:
                end.kill()
                end.communicate()
        map_to(flows, job)
    assert all("queued (confidence" in text and "empty (confidence" in text for text in texts), texts
    said = json.loads(ncclwatch("paths", "plan", str(flows), *map(str, probes), "-o", str(plan), "--json"))
    assert [one["link"][1] for one in said["crowded"]] == ["queued", "queued"], said
    assert said["gains"][0]["gain"] == 1.0 and said["refused"] is None
    with fabric.job(pins=(library, str(plan)), count=COUNT) as job:
        after = seconds_each(job)
    assert before / after >= RATIO, (before, after)


def test_paths_of_roce_are_told_and_nothing_reaches_its_port(fabric: Spines) -> None:
    """Datagrams under the five-tuples of RoCE; who listens on its port hears but the one that is meant to arrive."""
    listen = (
        "import socket; s = socket.socket(2, 2); s.bind(('', 4791)); print('ready', flush=True); print(s.recv(99), flush=True)"
    )
    end = fabric.hosts[1].popen([sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True)
    try:
        assert end.stdout is not None and end.stdout.readline() == "ready\n"
        words = ("paths", "probe", fabric.address(1), "--udp", "--sources", "50000-50015", "--lldp", "20", "--json")
        frame = HEAD + part(1, b"\x07leaf zero") + part(2, b"\x05swp1") + part(5, b"leaf0") + part(0, b"")
        say = f"import socket, time; s = socket.socket(17, 3); s.bind(('hosts0', 0)); f = {frame!r}"
        say += "; [(s.send(f), time.sleep(.2)) for _ in range(200)]"
        switch = fabric.leaves[0].popen([sys.executable, "-c", say])
        try:
            (told,) = json.loads(ncclwatch(*words, fabric=fabric))["probes"]
        finally:
            switch.kill()
            switch.wait()
        assert (told["nic"], told["switch"], told["switch_port"]) == ("nic", "leaf0", "swp1")
        send = f"import socket; socket.socket(2, 2).sendto(b'meant', ('{fabric.address(1)}', 4791))"
        assert fabric.hosts[0].popen([sys.executable, "-c", send]).wait(20) == 0
        assert end.stdout.readline() == "b'meant'\n"
    finally:
        end.kill()
        end.communicate()
    spines = [fabric.route(0, fabric.address(1), 4791, one["source_port"], "udp") for one in told["paths"]]
    assert [one["hops"][1] for one in told["paths"]] == [f"10.80.{spine}.2" for spine in spines] and set(spines) == {0, 1}
    assert all(len(one["hops"]) == 3 and one["arrived"] and one["steady"] for one in told["paths"])


@pytest.mark.parametrize("way", ["down", "swallow"])
@pytest.mark.parametrize("fabric", [{"spines": 3}], indirect=True)
def test_a_spine_dies_and_a_new_plan_is_there_within_two_seconds(fabric: Spines, way: str, tmp_path: Path) -> None:
    """Two channels on two of three spines. One dies: the network moves its flow to another, by chance the taken one; or, where
    links stay up, it notices nothing.
    """
    flows, plan = tmp_path / "flows.json", tmp_path / "live.pins"
    probes = [tmp_path / f"host{leaf}.probe" for leaf in range(LEAVES)]
    for leaf, probe in enumerate(probes):
        ncclwatch("paths", "probe", fabric.address(1 - leaf), "--ports", PORTS, "-o", str(probe), fabric=fabric, leaf=leaf)
    flows.write_text(
        json.dumps({"schema": "ncclwatch.paths/1", "flows": [as_flow(fabric, leaf, n) for leaf in (0, 1) for n in (0, 1)]})
    )
    words = [*ME, "paths", "follow", str(flows), *map(str, probes), "-o", str(plan), "--json"]
    keeper = fabric.hosts[0].popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert keeper.stdout is not None
        first = json.loads(keeper.stdout.readline())
        old = plan.read_text()
        mine = [one for one in first["connections"] if one["rank"] == 0]
        assert len({hop(one) for one in mine}) == 2 and first["fullest_link"] < 1.99
        died = int(hop(mine[0]).split(".")[2])
        began = time.monotonic()
        fabric.down(died) if way == "down" else fabric.swallow(died)
        second = json.loads(keeper.stdout.readline())
        took = time.monotonic() - began
    finally:
        keeper.kill()
        keeper.communicate()
    assert took < 2.0, took
    # Where links go down the network may happen to move flows as a plan would: then the old ports are the plan.
    assert plan.read_text() != old or way == "down"
    now = [one for one in second["connections"] if one["rank"] == 0]
    assert all(f"{one['port']} {one['source_port']}\n" in plan.read_text() for one in now)
    assert len({hop(one) for one in now}) == 2 and f"10.80.{died}.2" not in {hop(one) for one in now}
    # What lay on a living spine stays, unless the network has moved that as well, on top of the other.
    # What lay on the dead one is said to have been rerouted.
    kept = [one["source_port"] == before["source_port"] for one, before in zip(now, mine, strict=True)]
    assert any(kept) if way == "down" else kept[1]
    moved, dead = ({one["source_port"] for one in second[key]} for key in ("rerouted_by_the_network", "dead"))
    assert mine[0]["source_port"] in (moved if way == "down" else dead) and not (dead if way == "down" else moved)
    for one in now:
        assert f"10.80.{fabric.route(0, fabric.address(1), one['port'], one['source_port'])}.2" == hop(one)
