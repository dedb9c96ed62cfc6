"""A network plugin that is none of NCCL's own and uses no verbs: it is named, and its requests are said to be out of sight."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from testbed.job import HERE, Job
from testbed.watcher import pids, run

pytestmark = pytest.mark.attach

NAME = "PlainTCP"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("plugin") / "libplain.so"
    source = HERE / "netplugin" / "plain_tcp.c"
    subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", str(source), "-o", str(built)], check=True)
    return built


@pytest.mark.parametrize("version", ["2.27.5", "2.32.3"])
def test_its_flows_are_named_and_its_requests_said_to_be_unseen(version: str, plugin: Path) -> None:
    environment = {"NCCL_NET_PLUGIN": str(plugin), "NCCL_NET": NAME}
    with Job(version, 2, count=1 << 14, extra=("--verify",), env=environment) as job:
        told = json.loads(run("flows", "--json", *pids(job)).stdout)
        table = run("flows", *pids(job)).stdout
        before = job.progress(0)
        job.wait_progress(3)
        assert job.progress(0) > before
        assert not any(line.startswith("wrong") for rank in range(2) for line in job.lines(rank))
    assert told["flows"], told
    assert {flow["network"] for flow in told["flows"]} == {NAME}
    assert {(flow["rank"], flow["peer"]) for flow in told["flows"]} == {(0, 1), (1, 0)}
    assert not told["planes"]["wire"]["running"]
    assert all(NAME in process["wire_unavailable"] for process in told["processes"]), told["processes"]
    assert NAME in table
