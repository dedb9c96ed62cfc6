"""Attaching and detaching again and again leaves nothing behind and touches no result (a thousand times: the benchmark)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.attach_detach import run
from benchmarks.leftovers import Leftovers, breakpoints, held_objects, own_library, own_temporary_folder
from ncclwatch.collect.node import NodeCollector
from testbed.job import Job, library
from testbed.watcher import pids

pytestmark = pytest.mark.attach


def test_nothing_stays_and_no_result_is_wrong() -> None:
    outcome = run(times=5, commands=1)
    assert outcome.wrong == []
    assert (outcome.attached, outcome.commands, outcome.with_probes) == (5, 1, 5)
    assert outcome.iterations > 5
    assert not outcome.objects.startswith("0 progs"), "there was something that could have stayed"


def test_what_stays_is_noticed(tmp_path: Path) -> None:
    """While attached everything that is looked for is there."""
    env = own_library(library("2.27.5"), tmp_path)
    with own_temporary_folder(), Job(ranks=2, count=1 << 10, extra=("--pause-us", "2000"), env=env) as job:
        left = Leftovers(job.pids)
        collector = NodeCollector(every=False)
        try:
            collector.start(job.pids)
            left.note()
            found = " ".join(left._left(own=True))
            assert all(word in found for word in ("prog ", "map ", "descriptors of", "breakpoint in"))
        finally:
            collector.close()


def test_a_command_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """The kernel takes everything back with the descriptors: SIGKILL runs no code of ours."""
    env = own_library(library("2.27.5"), tmp_path)
    with own_temporary_folder(), Job(ranks=2, count=1 << 10, verify=True, extra=("--pause-us", "2000"), env=env) as job:
        left = Leftovers(job.pids)
        words = ["attach", "--json", *pids(job)]
        with subprocess.Popen([sys.executable, "-m", "ncclwatch", *words], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            while not breakpoints(job.pids[0]):
                assert child.stdout.readline()
            left.note(child.pid)
            assert held_objects(child.pid)["prog"]
            os.kill(child.pid, signal.SIGKILL)
        assert left.found(own=False) == []
        job.wait_progress(3)
        assert not [line for rank in range(2) for line in job.lines(rank) if line.startswith("wrong")]
