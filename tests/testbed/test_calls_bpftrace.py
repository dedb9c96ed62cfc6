"""The one-file tool for machines with nothing but bpftrace counts exactly."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from ncclwatch.probes.program import source_folder
from ncclwatch.target.elf import ElfFile
from testbed.calls.harness import BREAKPOINT, PATIENCE_S, Caller, build_stub

pytestmark = [
    pytest.mark.attach,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("bpftrace") is None, reason="needs bpftrace"),
]

SCRIPT = '{ [ -e /sys/kernel/tracing/trace ] || mount -t tracefs tracefs /sys/kernel/tracing; } && exec bpftrace -B none "$@"'
"""bpftrace needs tracefs to detach; a mount namespace of its own spares the machine the mount."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_stub(tmp_path_factory.mktemp("stub"))


NAMES = ("AllReduce", "AllGather", "AlltoAll", "Broadcast", "Gather", "Recv", "Reduce", "ReduceScatter", "Scatter", "Send")


def start_bpftrace(caller: Caller, library: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start it, and wait until every breakpoint is in the caller's memory: BEGIN speaks before the other probes are placed."""
    command = ["unshare", "--mount", "sh", "-c", SCRIPT, "sh", str(source_folder() / "nccl_calls.bt"), str(library), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with ElfFile.open(library) as elf:
        symbols = [elf.exports(f"p?nccl{name}")[f"pnccl{name}"] for name in NAMES]
    deadline = time.monotonic() + PATIENCE_S
    while any(caller.byte_at(library, symbol.address) != BREAKPOINT for symbol in symbols):
        assert process.poll() is None, f"bpftrace ended: {process.communicate()[0]}"
        assert time.monotonic() < deadline, "bpftrace placed no probes"
        time.sleep(0.05)
    return process


def finish(process: subprocess.Popen[str]) -> dict[tuple[str, int, str], int]:
    output = ""
    deadline = time.monotonic() + 3 * PATIENCE_S
    while process.returncode is None:
        # bpftrace 0.17 ends only when a signal interrupts its epoll_wait; one in between is forgotten. Say it again, as
        # a user would; seldom, because detaching waits for the kernel and must not be interrupted.
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            if time.monotonic() > deadline:
                process.kill()
                raise
    assert process.returncode == 0, output
    rows = re.findall(r"^@(\w+)\[caller, (\d+), (\w+)\]: (\d+)$", output, re.MULTILINE)
    return {(table, int(pid), name): int(value) for table, pid, name, value in rows}


def test_every_call_of_every_process_is_counted(library: Path) -> None:
    with Caller(library) as first, Caller(library) as second:
        process = start_bpftrace(first, library)
        first.run("allreduce 23")
        second.run("bcast 5")
        second.run("every")
        counted = finish(process)
    assert counted["calls", first.pid, "AllReduce"] == 23
    assert counted["elements", first.pid, "AllReduce"] == sum(range(1000, 1023))
    calls = {name: counted["calls", second.pid, name] for name in NAMES}
    # AllReduce with its Config variant; Broadcast, one Bcast of it, and five more.
    assert calls == dict.fromkeys(NAMES, 1) | {"AllReduce": 2, "Broadcast": 7}
    assert counted["elements", second.pid, "Send"] == 111


def test_one_process_on_demand(library: Path) -> None:
    with Caller(library) as ours, Caller(library) as theirs:
        process = start_bpftrace(ours, library, str(ours.pid))
        theirs.run("allreduce 5")
        ours.run("allreduce 23")
        counted = finish(process)
    assert {key: value for key, value in counted.items() if key[0] == "calls"} == {("calls", ours.pid, "AllReduce"): 23}
