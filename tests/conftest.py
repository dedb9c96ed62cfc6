"""What a whole run consists of, and its order: tests that measure time come late, and the guest, which takes every CPU, last of
all, when nothing runs beside it any more (`make test`). At its end it tells where the time went, by layer.

A test on real NCCL that is written for several releases runs with one of them, which differs from test to test; with
``NCCLWATCH_ALL`` set (`make test-all`) with each.
"""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from ncclwatch.gc_pause import collector_at_rest
from releases import ALL_VARIABLE, other_releases
from testbed.job import Job

LAYERS = {
    "unit": "unprivileged: units and replay",
    "testbed": "privileged: real jobs",
    "fleet": "many jobs: real servers and browsers",
    "vm": "verbs, in the guest",
    "gpu": "GPU",
}
PHASES = ("setup", "call", "teardown")
BESIDE_VARIABLE = "NCCLWATCH_BESIDE"
"""Holds the pid of the tests that `make test` runs beside these."""
PAUSE_US = 5000
"""Pause of a job after each iteration: up to 150 iterations a second are left, and a third of two CPUs is taken."""


def pytest_configure() -> None:
    """Jobs of tests leave CPUs to those of other tests."""
    Job.pause_us = PAUSE_US


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is loaded for all tests stays: the collector of garbage would walk it half of the time that loading takes, and again
    and again in every test.
    """
    with collector_at_rest():
        yield
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """One release a test, but in the unit tests. Behind the others come those marked ``paced``, then ``quiet`` ones, then the
    guest's.
    """
    if not os.environ.get(ALL_VARIABLE):
        left_out = other_releases([item.nodeid for item in items if "unit" not in PurePosixPath(item.nodeid).parts])
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]
    items.sort(key=lambda item: [item.get_closest_marker(name) is not None for name in ("vm", "quiet", "paced")])


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The guest waits for the tests beside it, before its own time counts: they run at idle priority, and would get nothing
    while it emulates.
    """
    beside = os.environ.get(BESIDE_VARIABLE, "")
    while beside and item.get_closest_marker("vm") is not None and _runs(Path("/proc", beside)):
        time.sleep(0.2)
    yield


def _runs(process: Path) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds that each layer of tests took."""
    seconds: defaultdict[str, float] = defaultdict(float)
    tests: defaultdict[str, set[str]] = defaultdict(set)
    for report in (one for reports in terminalreporter.stats.values() for one in reports if getattr(one, "when", "") in PHASES):
        folder = next((part for part in PurePosixPath(report.nodeid).parts if part in LAYERS), "")
        seconds[folder] += report.duration
        tests[folder].add(report.nodeid)
    if len(terminalreporter.stats.get("passed", ())) + len(terminalreporter.stats.get("failed", ())) > 1:
        terminalreporter.section("time by layer")
        for folder, took in sorted(seconds.items()):
            terminalreporter.line(f"{took:7.1f} s  {len(tests[folder]):5d} tests  {LAYERS.get(folder, 'other')}")
