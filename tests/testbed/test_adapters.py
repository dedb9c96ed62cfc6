"""The stand-in for RDMA adapters (adapters.py): real NCCL's InfiniBand transport gives right results on it, and it does what an
adapter does when a process stops, when a cable is pulled and when a receive is missing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.adapters import ADAPTERS, AdapterNetwork, name_of, standing
from testbed.job import VERSIONS, Job, JobError, available
from testbed.netns import wait_until
from testbed.path_jobs import ncclwatch
from testbed.watcher import pids

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")

VERSION = "2.27.5"
IMPATIENT = {"NCCL_IB_TIMEOUT": "17", "NCCL_IB_RETRY_CNT": "1"}
"""A request is an error after a second without an answer."""


@pytest.fixture(scope="module")
def network() -> Iterator[AdapterNetwork]:
    with standing(), AdapterNetwork(hosts=3) as made:
        yield made


@pytest.fixture(autouse=True)
def healthy(network: AdapterNetwork) -> Iterator[None]:
    yield
    for host in range(len(network.hosts)):
        network.link(host).clear()


@pytest.mark.parametrize("version", VERSIONS)
def test_results_are_right(network: AdapterNetwork, version: str) -> None:
    """Element by element, from less than a step of a buffer to many."""
    if not available(version):
        pytest.skip(f"NCCL {version} is not in the cache")
    for shape, count in (("allreduce", 1 << 18), ("mix", 1000)):
        job = network.job(
            version, 3, shape=shape, count=count, iterations=8, verify=True, env={"NCCL_DEBUG": "INFO"}, wait_for="nothing"
        )
        with job:
            assert job.wait(120) == [0, 0, 0], job.logs()
            assert "via NET/IB/0" in job.log(0) and "Using [0]sim0:1/RoCE" in job.log(0)


def test_several_queue_pairs_carry_a_connection(network: AdapterNetwork) -> None:
    env = {"NCCL_IB_QPS_PER_CONNECTION": "4", "NCCL_IB_SPLIT_DATA_ON_QPS": "1"}
    with network.job(VERSION, 2, hosts=(1, 1), count=1 << 20, iterations=4, verify=True, env=env, wait_for="nothing") as job:
        assert job.wait(120) == [0, 0], job.logs()


@pytest.mark.parametrize("adaptive", ["1", "0"])
def test_a_job_that_is_set_up_for_adaptive_routing_is_told(network: AdapterNetwork, adaptive: str) -> None:
    """By its environment; NCCL's own word is in its log."""
    env = {"NCCL_IB_ADAPTIVE_ROUTING": adaptive, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "ENV"}
    with network.job(VERSION, 2, hosts=(1, 1), env=env) as job:
        flows = json.loads(ncclwatch("paths", "--json", *pids(job), "--duration", "0.5"))["flows"]
        assert flows and {one["adaptive_routing"] for one in flows} == {adaptive == "1"}, flows
        assert f"IB_ADAPTIVE_ROUTING set by environment to {adaptive}" in job.log(0)


def test_an_adapter_ends_with_its_process(network: AdapterNetwork) -> None:
    with network.job(VERSION, 2, hosts=(1, 1)) as job:
        adapters = adapters_of(job)
        assert len(adapters) == 2
        job.freeze(0)
        job.kill(0)
        _until_gone(adapters[0])
    for pid in adapters:
        _until_gone(pid)


def test_a_pulled_cable_takes_the_port_down_and_a_plugged_one_goes_on(network: AdapterNetwork) -> None:
    state = ADAPTERS / name_of(1) / "ports/1/state"
    with network.job(VERSION, 2, hosts=(1, 1), env={"NCCL_IB_TIMEOUT": "22"}) as job:
        network.link(1).down()
        wait_until("the port is down", lambda: "DOWN" in state.read_text(), 20)
        time.sleep(0.5)
        before = job.progress(0)
        time.sleep(1.0)
        assert job.progress(0) == before
        network.link(1).up()
        job.wait_progress(3)
        wait_until("the port is up", lambda: "ACTIVE" in state.read_text(), 20)


def test_a_far_end_that_stays_silent_is_an_error_of_the_request(network: AdapterNetwork, tmp_path: Path) -> None:
    """After the queue pair's timeout and tries, as the specification has it: NCCL tells the completion's status."""
    with network.job(VERSION, 2, hosts=(1, 1), env=IMPATIENT | told_in(tmp_path)) as job:
        network.link(1).down()
        wait_until("the error is told", lambda: "status=12" in all_told(tmp_path), 60)
        assert all(job.alive(rank) for rank in range(2))
        network.link(1).up()  # what was sent before arrives after all, and is of no matter any more
        time.sleep(2.0)
        adapters = adapters_of(job)
    for pid in adapters:
        _until_gone(pid)


def test_an_adapter_takes_what_comes_while_its_process_is_stopped(network: AdapterNetwork, tmp_path: Path) -> None:
    """What the other rank has posted completes, as with hardware: it is the stopped rank that posts no more."""
    with network.job(VERSION, 2, hosts=(1, 1), env=IMPATIENT | told_in(tmp_path)) as job:
        job.freeze(1)
        time.sleep(4.0)
        assert "status=" not in all_told(tmp_path)
        job.thaw(1)
        job.wait_progress(3)


def test_without_the_stand_ins_there_are_no_hosts_of_theirs() -> None:
    with pytest.raises(JobError, match="stand-ins for RDMA devices"):
        AdapterNetwork(hosts=99)


def told_in(folder: Path) -> dict[str, str]:
    """Settings by which NCCL tells its warnings at once, in files of a folder."""
    return {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": f"{folder}/%p"}


def all_told(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in folder.iterdir())


def adapters_of(job: Job) -> list[int]:
    """The processes that stand for the ranks' adapters."""
    folders = [folder for pid in job.pids for folder in Path(f"/proc/{pid}/task").iterdir()]
    children = [int(child) for folder in folders for child in (folder / "children").read_text().split()]
    return [child for child in children if b"testbed-adapter" in Path(f"/proc/{child}/cmdline").read_bytes()]


def _until_gone(pid: int) -> None:
    status = Path(f"/proc/{pid}/status")
    wait_until(f"process {pid} is gone", lambda: not status.exists() or "Z (zombie)" in status.read_text(), 20)
