"""The one-file tool for machines with nothing but bpftrace counts exactly."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from ncclwatch.probes.program import source_folder
from testbed.calls.harness import Caller, build_stub

pytestmark = [
    pytest.mark.attach,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("bpftrace") is None, reason="needs bpftrace"),
]

SCRIPT = 'mount -t tracefs tracefs /sys/kernel/tracing && exec bpftrace -B none "$@"'
"""bpftrace needs tracefs to detach; a mount namespace of its own spares the machine the mount."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub(tmp_path_factory.mktemp("stub"))


def start_bpftrace(*arguments: str) -> subprocess.Popen[str]:
    command = ["unshare", "--mount", "sh", "-c", SCRIPT, "sh", str(source_folder() / "nccl_calls.bt"), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("Counting calls"):
            return process
    raise AssertionError("bpftrace did not start: " + "".join(lines))


def finish(process: subprocess.Popen[str]) -> dict[tuple[str, int, str], int]:
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    rows = re.findall(r"^@(\w+)\[caller, (\d+), (\w+)\]: (\d+)$", output, re.MULTILINE)
    return {(table, int(pid), name): int(value) for table, pid, name, value in rows}


def test_every_call_of_every_process_is_counted(library: Path) -> None:
    with Caller(library) as first, Caller(library) as second:
        process = start_bpftrace(str(library))
        first.run("allreduce 23")
        second.run("bcast 5")
        second.run("every")
        counted = finish(process)
    assert counted["calls", first.pid, "AllReduce"] == 23
    assert counted["elements", first.pid, "AllReduce"] == sum(range(1000, 1023))
    names = ("AllReduce", "AllGather", "AlltoAll", "Broadcast", "Gather", "Recv", "Reduce", "ReduceScatter", "Scatter", "Send")
    calls = {name: counted["calls", second.pid, name] for name in names}
    # AllReduce with its Config variant; Broadcast, one Bcast of it, and five more.
    assert calls == dict.fromkeys(names, 1) | {"AllReduce": 2, "Broadcast": 7}
    assert counted["elements", second.pid, "Send"] == 111


def test_one_process_on_demand(library: Path) -> None:
    with Caller(library) as ours, Caller(library) as theirs:
        process = start_bpftrace(str(library), str(ours.pid))
        theirs.run("allreduce 5")
        ours.run("allreduce 23")
        counted = finish(process)
    assert {key: value for key, value in counted.items() if key[0] == "calls"} == {("calls", ours.pid, "AllReduce"): 23}
