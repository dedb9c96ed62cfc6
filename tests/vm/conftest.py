"""Tests marked ``vm`` run inside one boot of the guest; here, on the host, each is reported as if it had run in place.

On the host, the first such test boots the guest, which runs pytest on all selected ones and appends every report to a file in
the share; each item then only waits for its own reports. Inside the guest (NCCLWATCH_GUEST is set) tests run as usual.
Where the guest cannot run, its tests are skipped with the reason, or fail if NCCLWATCH_REQUIRE_VM is set (as in CI).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.probes.program import Compilation, Image
from ncclwatch.wire.kernel import SOURCE as WIRE_PROGRAM
from ncclwatch.wire.kernel import WireKernel
from testbed.job import VERSIONS, available, build
from vm.errors import GuestError, GuestUnavailableError
from vm.fabric import Fabric
from vm.guest import FULL_VARIABLE, GUEST_VARIABLE, Guest
from vm.initramfs import SHARE

LAYER_TIMEOUT_S = 540.0
"""For the whole layer: boot, every test, power off. It takes a minute on an idle machine; emulation suffers from every
neighbour."""

FULL_TIMEOUT_S = 5400.0
"""The same with every release of NCCL, every kind of hang and the training job: half an hour on an idle machine."""

REPORTS = "reports.jsonl"


def layer_timeout_s() -> float:
    """Seconds for the whole layer."""
    return FULL_TIMEOUT_S if os.environ.get(FULL_VARIABLE) else LAYER_TIMEOUT_S


class _Layer:
    """The one boot of this pytest run, and the reports that came out of it so far."""

    def __init__(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        self._config = config
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._offset = 0
        self._deadline = time.monotonic() + layer_timeout_s()
        self.failure = ""
        pytest_command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=long", "--color=no"]
        for version in VERSIONS:  # inside, a compiler takes minutes
            if available(version):
                build(version)
        self._guest = Guest(
            [*pytest_command, *(item.nodeid for item in items)],
            cwd=config.rootpath,
            environment={name: os.environ[name] for name in (FULL_VARIABLE, "PYTHONPATH") if name in os.environ},
        )
        self._guest.__enter__()
        self._compile_programs()

    def _compile_programs(self) -> None:
        """Compile what tests need in the kernel while the guest boots, and hand it over complete or not at all."""
        folder = self._config.rootpath / "bpftrace_probes"
        command = [sys.executable, "-m", "ncclwatch.probes.compile_child", str(folder / WIRE_PROGRAM), str(folder)]
        result = subprocess.run(command, capture_output=True, timeout=120, check=False)
        if result.returncode == 0:
            part = self._guest.share / f"{WIRE_PROGRAM}.part"
            part.write_bytes(result.stdout)
            part.rename(self._guest.share / f"{WIRE_PROGRAM}.json")

    def close(self) -> None:
        self._guest.__exit__()

    def wait_for(self, item: pytest.Item) -> list[pytest.TestReport]:
        """The reports of setup, call and teardown of one test; raises GuestError if they never come."""
        while True:
            running = self._guest.running
            self._read()
            done = self._reports.get(item.nodeid, [])
            if done and done[-1].when == "teardown":
                return done
            if not running:
                raise GuestError(f"the guest ended without running this test; its console ends with:\n{self._guest.tail()}")
            if time.monotonic() > self._deadline:
                raise GuestError(f"the guest's {layer_timeout_s():.0f} s are over; its console ends with:\n{self._guest.tail()}")
            time.sleep(0.1)

    def _read(self) -> None:
        path = self._guest.share / REPORTS
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            report = self._config.hook.pytest_report_from_serializable(config=self._config, data=json.loads(line))
            if isinstance(report.longrepr, list):  # JSON has no tuples, and pytest insists on one for a skip
                report.longrepr = tuple(report.longrepr)
            self._reports.setdefault(report.nodeid, []).append(report)


_layer: _Layer | None = None
_config: pytest.Config | None = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the host, waiting for the guest counts against a test's time: allow as much as the guest is allowed. An emulated machine
    is slow enough by itself: nothing is to run beside it.
    """
    if not _inside():
        for item in items:
            if item.get_closest_marker("vm") is not None:
                item.add_marker(pytest.mark.timeout(layer_timeout_s() + 60))
                item.add_marker(pytest.mark.quiet)


def _inside() -> bool:
    return GUEST_VARIABLE in os.environ


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """On the host, take a ``vm`` test's reports from the guest instead of running it."""
    if _inside() or item.get_closest_marker("vm") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports_of(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports_of(item: pytest.Item) -> list[pytest.TestReport]:
    global _layer  # noqa: PLW0603 - one boot for a whole run of pytest
    try:
        if _layer is None:
            selected = [other for other in item.session.items if other.get_closest_marker("vm") is not None]
            _layer = _Layer(item.config, selected)
        return _layer.wait_for(item)
    except GuestUnavailableError as error:
        required = bool(os.environ.get("NCCLWATCH_REQUIRE_VM"))
        return [_own_report(item, "failed" if required else "skipped", str(error))]
    except GuestError as error:
        return [_own_report(item, "failed", str(error))]


def _own_report(item: pytest.Item, outcome: Any, text: str) -> pytest.TestReport:
    longrepr: Any = (str(item.path), item.location[1] or 0, f"Skipped: {text}") if outcome == "skipped" else text
    return pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, longrepr, "setup")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Inside the guest, hand each report to the host."""
    if not _inside() or _config is None:
        return
    data = _config.hook.pytest_report_to_serializable(config=_config, report=report)
    with Path(SHARE, REPORTS).open("a") as file:
        file.write(json.dumps(data) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember the configuration that serialises reports."""
    global _config  # noqa: PLW0603 - the hook above gets none
    _config = session.config


def pytest_sessionfinish() -> None:
    """End the guest with the run."""
    if _layer is not None:
        _layer.close()


@pytest.fixture(scope="session")
def soft_roce() -> Iterator[Fabric]:
    """Two RDMA devices on the two ends of a virtual cable, in the guest."""
    fabric = Fabric.create()
    yield fabric
    fabric.close()


@pytest.fixture(scope="session")
def verbs_kernel() -> Iterator[WireKernel]:
    """The wire plane's programs, compiled by the host while the guest booted: emulated, clang takes ten times as long."""
    image = Path(SHARE, f"{WIRE_PROGRAM}.json")
    program = Image.from_json(json.loads(image.read_text())) if image.exists() else Compilation(WIRE_PROGRAM).result()
    with WireKernel(program) as wire:
        yield wire
